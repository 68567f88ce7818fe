"""Sleeping until a word in shared memory changes, and waking sleepers: Linux's futex, called without the GIL."""

from __future__ import annotations

import ctypes as ct
import errno
import time
from collections.abc import Callable
from typing import Any

from gradbus.runtime import fast_paths

AVAILABLE = fast_paths.futex_number() is not None
MAX_WORDS = 128  # that one thread can wait for

_SYS_FUTEX = fast_paths.futex_number() or 0
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFF_FFFF
_SYS_FUTEX_WAITV, _32_BITS, _CLOCK_MONOTONIC = 449, 2, 1


class _TimeSpec(ct.Structure):
    _fields_ = (("seconds", ct.c_long), ("nanoseconds", ct.c_long))


class _Word(ct.Structure):
    """``struct futex_waitv``."""

    _fields_ = (("value", ct.c_uint64), ("address", ct.c_uint64), ("flags", ct.c_uint32), ("reserved", ct.c_uint32))


def _system_call() -> Callable[..., int]:
    call = ct.CDLL(None, use_errno=True).syscall
    call.restype = ct.c_long
    call.argtypes = (ct.c_long, ct.c_void_p, ct.c_long, ct.c_long, ct.c_void_p, ct.c_void_p, ct.c_long)
    return call


_syscall = _system_call() if AVAILABLE else None


def _has_waitv() -> bool:
    """Whether the kernel has futex_waitv (Linux 5.16). Asked to wait for no word at all, it says that this is wrong."""
    return (
        _syscall is not None
        and _syscall(_SYS_FUTEX_WAITV, None, 0, 0, None, _CLOCK_MONOTONIC, 0) < 0
        and ct.get_errno() == errno.EINVAL
    )


HAS_WAITV = _has_waitv()


def wake(address: int) -> None:
    """Wake all threads, of all processes, that wait for the word at this address."""
    assert _syscall is not None
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at this address has this value: until it is woken, the time is over, or for no
    reason at all."""
    assert _syscall is not None
    timeout = _TimeSpec(int(timeout_s), int(timeout_s % 1.0 * 1e9))
    _syscall(_SYS_FUTEX, address, _WAIT, value, ct.byref(timeout), None, 0)


class WaitWords:
    """Words that one thread waits for all at once. Needs ``HAS_WAITV``."""

    def __init__(self, addresses: list[int]) -> None:
        """``addresses``: at most ``MAX_WORDS``."""
        words = (_Word * len(addresses))()
        for word, address in zip(words, addresses, strict=True):
            word.address, word.flags = address, _32_BITS
        self._words: Any = words
        self._count = len(addresses)

    def expect(self, number: int, value: int) -> None:
        """Sleep only while word ``number`` has this value."""
        self._words[number].value = value

    def wait(self, timeout_s: float) -> None:
        """Sleep while all words have the values that are expected: until one of them is woken, the time is over, or
        for no reason at all."""
        assert _syscall is not None
        until_s = time.monotonic() + timeout_s
        until = _TimeSpec(int(until_s), int(until_s % 1.0 * 1e9))
        _syscall(_SYS_FUTEX_WAITV, self._words, self._count, 0, ct.byref(until), _CLOCK_MONOTONIC, 0)
