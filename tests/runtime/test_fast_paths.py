"""Which fast paths are used on which system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gradbus.runtime import fast_paths


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    for cached in (fast_paths.futex_number, fast_paths.memory_fence, fast_paths.mallopt):
        cached.cache_clear()


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 202), ("aarch64", 98), ("riscv64", None), ("armv7l", None)])
def test_the_futex_has_the_number_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, machine: str, number: int | None
) -> None:
    forget()
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert fast_paths.futex_number() == (number if sys.platform == "linux" else None)


def test_a_processor_without_a_fence_shares_no_memory_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert fast_paths.memory_fence() is None
    assert not fast_paths.shares_memory()


def test_the_fence_of_arm_is_a_call_of_libatomic(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    calls: list[tuple[int, ...]] = []

    class Library:
        class atomic_thread_fence:  # noqa: N801 - as it is called there
            def __init__(self, *arguments: int) -> None:
                calls.append(arguments)

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(fast_paths.ct, "PyDLL", lambda name: Library if name == "libatomic.so.1" else None)
    fence = fast_paths.memory_fence()
    assert fence is not None
    fence()
    assert calls == [(5,)]  # memory_order_seq_cst


def test_the_switch_turns_all_of_them_off() -> None:
    program = "from gradbus.runtime.fast_paths import *; print([path.is_used for path in fast_paths()], PORTABLE)"
    for value, portable in (("1", True), ("0", False), ("", False)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, fast_paths.SWITCH: value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("True" not in done.stdout.partition("]")[0]) == portable
        assert done.stdout.split()[-1] == str(portable)
