"""Fast paths that only some systems have, such as Linux's memfd and futex: which of them this process may use.

Each has a slower path beside it that every system has, and nothing but speed depends on the choice. With
``GRADBUS_PORTABLE=1`` in the environment a process does as one on a system that has none of them, so that the slower
paths can be tried anywhere. Processes with and without it work together.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
import platform
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SWITCH = "GRADBUS_PORTABLE"
PORTABLE = os.environ.get(SWITCH, "0") not in ("", "0")
IS_LINUX = sys.platform == "linux" and not PORTABLE
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface that leads to this machine alone

no_fence: Callable[[], object] = bool
"""The fence of processors that need none. It does nothing, and is not in Python: it is in the way of every frame."""

_X86_64 = ("x86_64", "AMD64")
_ARM_64 = ("aarch64", "arm64")
_SEQ_CST = 5  # memory_order_seq_cst of stdatomic.h, in GCC and Clang


class FastPath(NamedTuple):
    """Holds what ``gradbus doctor`` shows of a fast path.

    Attributes:
        name: what it is made of.
        is_used: whether this process has it.
        purpose: what it makes faster.
        instead: what happens without it.
    """

    name: str
    is_used: bool
    purpose: str
    instead: str


def has_memfd() -> bool:
    """Whether there are files in memory that can be made immutable: ``memfd_create`` and its seals (Linux 3.17)."""
    return not PORTABLE and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def has_pidfd() -> bool:
    """Whether the kernel tells at once when a process has ended: ``pidfd_open`` (Linux 5.3)."""
    return not PORTABLE and hasattr(os, "pidfd_open")


@functools.cache
def futex_number() -> int | None:
    """Number of the system call ``futex`` where a 64-bit Linux is known to have it; None: do without."""
    if not IS_LINUX or sys.maxsize <= 1 << 32:
        return None
    numbers = dict.fromkeys(_X86_64, 202) | dict.fromkeys(_ARM_64, 98)
    return numbers.get(platform.machine())


@functools.cache
def mallopt() -> Callable[[int, int], int] | None:
    """glibc's ``mallopt``; None: this is another C library."""
    return None if PORTABLE or sys.platform == "win32" else getattr(ct.CDLL(None), "mallopt", None)


@functools.cache
def memory_fence() -> Callable[[], object] | None:
    """A function after which all stores before it are seen by other processes, and all loads after it see theirs.

    x86-64 keeps the order of stores and that of loads, and the locks that are taken between a store and a load of
    another word keep that order too: there the function does nothing. 64-bit ARM keeps none, so it needs a fence, which
    libatomic (part of GCC's runtime library) has as a function.

    Returns:
        The function, or None: memory that another process writes at the same time cannot be used here.
    """
    if PORTABLE:
        return None
    if platform.machine() in _X86_64:
        return no_fence
    if platform.machine() not in _ARM_64:
        return None
    try:
        fence: Any = ct.PyDLL("libatomic.so.1").atomic_thread_fence  # keeps the GIL: it takes nanoseconds
    except (OSError, AttributeError):
        return None
    fence.argtypes, fence.restype = (ct.c_int,), None
    return functools.partial(fence, _SEQ_CST)


def shares_memory() -> bool:
    """Whether processes of one machine can read what another one of them writes at the same time."""
    return has_memfd() and memory_fence() is not None


def fast_paths() -> tuple[FastPath, ...]:
    """All fast paths of this process, for reports."""
    return (
        FastPath("memfd", has_memfd(), "large data between processes of one machine", "goes over DDS"),
        FastPath("memory fence", shares_memory(), "shared memory of a group", "goes over DDS"),
        FastPath(
            "futex",
            shares_memory() and futex_number() is not None,
            "small collectives on one machine",
            "go over DDS",
        ),
        FastPath(
            "pidfd", has_pidfd(), "the end of a process of this machine", "is noticed after its lease (bus.lease_s)"
        ),
        FastPath("mallopt", mallopt() is not None, "freed memory", "goes back to the kernel: page faults"),
    )


# glibc's parameters of malloc. DDS allocates and frees memory for each chunk on its way, and receives into buffers of
# 1 MiB. By default glibc gives such memory back to the kernel at once, which then has to hand out zeroed pages again:
# half of the time of a 4 MiB all_reduce over DDS went there (750 page faults a call instead of 8). The same with the
# activations of a model: a step of the CNN with 64 samples has 31,000 page faults and takes 1.5 times as long where
# 4 MiB are the limit, and 1,300 with this one. Setting it by hand ends glibc's own adapting, so it has to be large.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PARAMETERS = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most that glibc takes; what is larger is given back at once
    # Free memory at the end of the main arena that it keeps for the next time. It is more than a step frees: glibc 2.36
    # leaves splinters between aligned blocks, so little of it lay at the end, but 2.41 joins them. There a step that
    # frees 177 MiB on the main thread had 24,320 page faults each time with 128 MiB, and has none with this.
    (_M_TRIM_THRESHOLD, 512 << 20),
    # Room to grow, which costs nothing until it is used: threads' arenas, in heaps of 64 MiB, give an empty heap back
    # only if so much stays free in the one before it, so now they keep what they had at most. Without, a federated run
    # still had four times the page faults.
    (_M_TOP_PAD, 64 << 20),
)


@functools.cache
def keep_memory() -> bool:
    """Have malloc keep freed memory of the size of chunks and of activations. Once per process.

    False: this is not glibc, or the user has set its parameters.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    set_parameter = mallopt()
    if set_parameter is None:
        return False
    return all(set_parameter(parameter, size) for parameter, size in _PARAMETERS)
