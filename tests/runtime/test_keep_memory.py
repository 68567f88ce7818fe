"""Memory that malloc keeps between the steps of a training, in processes of their own: it is set once for a process."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, threading, torch
from gradbus.runtime import fast_paths

def step():
    sizes = (9 << 20, 20 << 20, 30 << 20)
    [torch.ones(size, dtype=torch.uint8) for size in sizes for _ in range(3)]

def train():
    for _ in range(16):  # until blocks have found their places: 12 steps with glibc 2.41, 4 with 2.36
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

print(fast_paths.keep_memory())
if sys.argv[1] == "main":
    train()
else:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
"""
PAGES = 10 * 3 * (59 << 20) // resource.getpagesize()  # of all tensors of ten steps
is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
pytestmark = pytest.mark.skipif(is_set or platform.libc_ver()[0] != "glibc", reason="not glibc, or set from outside")


def told(program: str, *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("thread", ["main", "other"])  # malloc's main arena, which is trimmed, and an arena of its own
def test_what_a_step_of_training_has_freed_is_there_for_the_next_step(thread: str) -> None:
    kept, faults = told(STEPS, thread)
    assert kept == "True"
    assert int(faults) < PAGES / 20


def test_who_has_set_parameters_of_malloc_keeps_them() -> None:
    program = "from gradbus.runtime import fast_paths; print(fast_paths.keep_memory())"
    assert told(program, MALLOC_ARENA_MAX="2") == ["False"]
