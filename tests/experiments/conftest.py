"""Examples and benchmarks run as commands do, with nothing set in the environment."""

from __future__ import annotations

import pytest
from command_fixtures import begin_at_once, configs, plain_environment

MEASURES = ("test_bench_", "test_figures", "test_ladder")

__all__ = ["begin_at_once", "configs", "plain_environment"]


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests of benchmarks and figures are nightly: what they run is in no wheel, and whoever measures runs it."""
    for item in items:
        if item.path.name.startswith(MEASURES) and "slow" in item.keywords:
            item.add_marker("nightly")
