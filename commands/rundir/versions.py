"""Versions and the machine that decide a run's numbers, found without importing any of the packages."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from gradbus.runtime.cores import usable_cores
from gradbus.runtime.needs import is_core_alone

PACKAGES = ("gradbus", "torch", "cyclonedds", "numpy")


def machine() -> dict[str, str | int]:
    """The processor, the cores of this process, and the bytes of memory, as far as the system reports them."""
    found: dict[str, str | int] = {"cpu": _cpu(), "cores": usable_cores()}
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system has these
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions(*more: str) -> dict[str, str]:
    """The versions of Python and of the packages that decide the numbers, and of ``more`` packages."""
    found = {"python": platform.python_version()}
    own, *others = PACKAGES
    for name in (f"{own}-core" if is_core_alone() else own, *others, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
