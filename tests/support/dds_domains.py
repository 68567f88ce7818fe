"""DDS domains for tests: what opens a bus asks here, so that no two tests that run at the same time share one."""

from __future__ import annotations

import itertools
import os
import random

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
