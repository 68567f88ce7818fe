"""Examples and benchmarks run as commands do, with nothing set in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_fixtures import begin_at_once, configs, plain_environment

MEASURES = ("test_bench_", "test_ladder")
WITH_RUNS = {"finished", "drawn"}  # fixtures of figures

__all__ = ["begin_at_once", "configs", "plain_environment"]


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests of benchmarks, and of figures of real runs, are nightly: what they run is in no wheel, and whoever
    measures runs it anyway."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent) and "slow" in item.keywords]
    for item in here:
        if item.path.name.startswith(MEASURES) or WITH_RUNS & set(getattr(item, "fixturenames", ())):
            item.add_marker("nightly")
