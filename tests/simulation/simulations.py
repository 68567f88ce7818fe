"""Start the simulation as a program: it replaces clocks and files, so no test runs it in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 280.0


def simulate(*arguments: str, hash_seed: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program, in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "fault_simulation", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        check=False,
    )
