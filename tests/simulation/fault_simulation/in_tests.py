"""A plugin of pytest that plants the fault named in ``GRADBUS_PLANTED``: ``pytest -p fault_simulation.in_tests``."""

from __future__ import annotations

import os

from fault_simulation.mutations import find

ENVIRONMENT = "GRADBUS_PLANTED"


def pytest_configure() -> None:
    """Plant the fault before tests are collected."""
    find(os.environ[ENVIRONMENT]).apply(setattr)
