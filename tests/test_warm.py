"""The server that tests fork their processes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import warm
from forked_commands import Forked

import gradbus


@pytest.mark.slow
def test_a_forked_process_has_loaded_everything_and_runs_nothing(root: Path) -> None:
    actors = {getattr(gradbus.actors, name).__module__ for name in gradbus.actors.__all__}
    opened = {"gradbus.runtime.transport.dds.participant", "gradbus.runtime.algorithms.dgc"}  # by each that opens a bus
    modules = {"warm_modules", "federation_node", "torch_node", "torch._dynamo", "_pytest.config", *actors, *opened}
    process, _, events = warm.fork_that_tells(warm.look, {"modules": modules})
    (told,) = events
    process.join(10.0)
    assert told["has"] == sorted(modules)  # a module that cannot be imported is passed over without a word
    assert (told["server_threads"], told["threads"]) == (1, 1)  # a lock that another one held would never be free again
    assert str(root / "tests") not in told["path"]  # else commands that are started would find helpers there


ENDING = """
import atexit, sys, threading

def at_the_end(kind, error, traceback):
    print("hook", kind.__name__, flush=True)

sys.excepthook = at_the_end
atexit.register(print, "atexit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread", flush=True))).start()
END
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "lines"),
    [
        ("1 / 0", 1, ["hook ZeroDivisionError", "thread", "atexit"]),
        ("sys.exit('no data')", 1, ["no data", "thread", "atexit"]),
        ("print(*sys.argv[1:], __name__)", 0, ["--lr 0.1 __main__", "thread", "atexit"]),
    ],
    ids=["error", "exit", "end"],
)
def test_a_forked_script_ends_as_an_interpreter_does(end: str, code: int, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING.replace("END", end))
    launcher = Forked(["run", "-n", "1", "--", "ending.py", "--lr", "0.1"], tmp_path, os.environ)
    out, err = launcher.communicate()
    assert launcher.returncode == code, err
    said = [line.removeprefix("[rank 0] ") for line in (out + err).splitlines() if line.startswith("[rank 0] ")]
    assert sorted(said) == sorted(lines), err
