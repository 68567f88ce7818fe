"""Which processors this process may use: fewer than the machine has where it was bound to some."""

from __future__ import annotations

import os


def usable_cpus() -> list[int]:
    """Numbers of the logical processors."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many they are."""
    return len(usable_cpus())
