"""Versions of what decides a run's numbers and its bytes, found without importing any of it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("gradbus", "torch", "cyclonedds", "numpy")


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
