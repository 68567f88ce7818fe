"""Ranks that end as programs do: ``PYTHON ending_ranks.py PROGRAM WORLD FOLDER``. Each is a fork of this interpreter,
which has loaded torch once for them all and nothing of gradbus; its arguments are FOLDER and its rank. What it writes
is in ``FOLDER/RANK.out`` and ``RANK.err``; the exit codes of all are printed."""

import json
import os
import sys

import torch.distributed  # noqa: F401 - that of the ranks

PROGRAM, WORLD, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
RANKS = []
for RANK in range(WORLD):
    PID = os.fork()
    if not PID:
        for NUMBER, KIND in enumerate(("out", "err"), start=1):
            os.dup2(os.open(f"{FOLDER}/{RANK}.{KIND}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), NUMBER)
        sys.argv = [PROGRAM, FOLDER, str(RANK)]
        with open(PROGRAM, encoding="utf-8") as FILE:
            TEXT = FILE.read()
        exec(compile(TEXT, PROGRAM, "exec"), globals())  # noqa: S102 - as the main program, whose end is its own
        break
    RANKS.append(PID)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(PID, 0)[1]) for PID in RANKS]))
