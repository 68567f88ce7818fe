"""Ranks that end as programs do: ``PYTHON ending_ranks.py``. Each is a fork of this interpreter, which has loaded torch
once for them all and nothing of gradbus.

A line of its input is a JSON object of what one start needs: ``folder`` and ``program``, a file in it; ``world``; and
``environment`` of the ranks. Their arguments are the folder and the rank. What a rank writes is in ``RANK.out`` and
``RANK.err`` there; the exit codes of all are printed, in a line. The end of the input ends it.
"""

import json
import os
import sys

import torch.distributed  # noqa: F401 - that of the ranks

for LINE in sys.stdin:
    STARTED = json.loads(LINE)
    RANKS = []
    for RANK in range(STARTED["world"]):  # noqa: B007 - the fork's, which leaves the loop with it
        PID = os.fork()
        if not PID:
            break
        RANKS.append(PID)
    else:
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(PID, 0)[1]) for PID in RANKS]), flush=True)
        continue
    FOLDER, PROGRAM = STARTED["folder"], STARTED["program"]
    for NUMBER, KIND in enumerate(("out", "err"), start=1):
        os.dup2(os.open(f"{FOLDER}/{RANK}.{KIND}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), NUMBER)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(FOLDER)
    os.environ.clear()
    os.environ.update(STARTED["environment"])
    sys.argv = [PROGRAM, FOLDER, str(RANK)]
    with open(PROGRAM, encoding="utf-8") as FILE:
        TEXT = FILE.read()
    exec(compile(TEXT, PROGRAM, "exec"), globals())  # noqa: S102 - as the main program, whose end is its own
    break
