"""Commands of podman for the tests of images and of Compose, each with a deadline."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from typing import Any

DEADLINE_S = 240.0  # of a command, or of a line of a log, on a busy machine; at rest they take seconds


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman. Raises AssertionError: it failed, and ``check``."""
    command = ["podman", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def inspected(name: str, kind: str = "container") -> Any:
    """Return what podman knows of a container or image."""
    return json.loads(podman(kind, "inspect", name).stdout)[0]


def healthy(name: str) -> bool:
    """Run the health check of a container once."""
    return podman("healthcheck", "run", name, check=False).returncode == 0


def await_healthy(name: str) -> None:
    """Run the health check of a container until it succeeds: where the machine is busy it may miss its own deadline.

    Raises AssertionError: it does not succeed in time."""
    end_s = time.monotonic() + DEADLINE_S
    while not healthy(name):
        assert time.monotonic() < end_s, f"{name} is not healthy after {DEADLINE_S:g} s"


def await_line(name: str, *words: str, nth: int = 1, deadline_s: float = DEADLINE_S) -> str:
    """Return the nth line of a container's log with all these words; of ``one|other`` either. Raises AssertionError:
    none in time."""
    command = ["podman", "logs", "--follow", name]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as log:
        clock = threading.Timer(deadline_s, log.kill)
        clock.start()
        try:
            for line in log.stdout or ():
                lines.append(line)
                nth -= all(any(one in line for one in word.split("|")) for word in words)
                if not nth:
                    return line
        finally:
            clock.cancel()
            log.kill()
    rare = "".join([line for line in lines if "final-ready" not in line and "round done" not in line][-20:])
    raise AssertionError(f"{name}: no line with {words} within {deadline_s:g} s; the last of other events:\n{rare}")


def count_lines(name: str, *words: str) -> int:
    """Return how many lines of a container's log so far have all these words."""
    done = podman("logs", name)
    return sum(all(word in line for word in words) for line in (done.stdout + done.stderr).splitlines())
