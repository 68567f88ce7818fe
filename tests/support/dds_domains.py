"""DDS domains for tests: what opens a bus asks here, so that no two tests that run at the same time share one."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time

# From domain 101 on, ports of a domain are among those that the system gives to anybody.
_ALL = range(1, 100)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# One more: a worker that replaces one which has crashed has a new number.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) + 1
_MINE = _ALL[_WORKER % _WORKERS :: _WORKERS]

# In another order each time: somebody else may run tests on this machine, too.
_domains = itertools.cycle(random.Random(os.getpid()).sample(_MINE, len(_MINE)))


def new_domain() -> int:
    """A domain that this pytest process alone uses, and has not used for a long while."""
    return next(_domains)


# Threads of a test that has ended may still be closing theirs.
CLOSING_S = 10.0


def open_ones() -> set[int]:
    """The domains that this process has open."""
    module = sys.modules.get("gradbus.runtime.transport.dds.domains")
    return set() if module is None else set(module._domains)  # noqa: SLF001 - nobody but tests wants to know


def left_open(before: set[int]) -> set[int]:
    """Those that are open for longer than :data:`CLOSING_S`, and were not before."""
    deadline = time.monotonic() + CLOSING_S
    while (left := open_ones() - before) and time.monotonic() < deadline:
        time.sleep(0.01)  # no event tells of it
    return left
