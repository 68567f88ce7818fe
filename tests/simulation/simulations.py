"""Start the simulation as a program: it replaces clocks and files, so no test runs it in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forked_commands import Forked

HERE = Path(__file__).resolve().parent
LIMIT_S = 280.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a program left."""

    returncode: int | None
    stdout: str
    stderr: str


def simulate(*arguments: str) -> Simulated:
    """Run the program to its end. It is forked with torch loaded, and so are the processes that it starts: they replace
    what they replace before they load gradbus, as fresh ones do."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    program = Forked(arguments, Path.cwd(), environment, program=HERE / "fault_simulation" / "__main__.py")
    try:
        out, err = program.communicate(LIMIT_S)
    finally:
        program.kill()
    return Simulated(program.returncode, out, err)


def simulate_afresh(*arguments: str, hash_seed: int) -> Simulated:
    """Run the program in an interpreter of its own, with a hash seed of its own."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fault_simulation", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        check=False,
    )
    return Simulated(done.returncode, done.stdout, done.stderr)
