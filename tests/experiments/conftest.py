"""Examples and benchmarks run as commands do, with nothing set in the environment."""

from __future__ import annotations

import pytest
from command_fixtures import begin_at_once, configs, plain_environment

__all__ = ["begin_at_once", "configs", "plain_environment"]


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests of benchmarks are nightly: what they run is in no wheel, and whoever measures runs it anyway."""
    for item in items:
        if item.path.name.startswith("test_bench_") and "slow" in item.keywords:
            item.add_marker("nightly")
