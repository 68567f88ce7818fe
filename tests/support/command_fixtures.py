"""Fixtures of tests that run commands and examples: an environment without settings, and the example configurations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def begin_at_once(lone_controllers: None) -> None:
    """No test here has two controllers of a job in this process."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run a test in a folder of its own, without settings in the environment and without data."""
    launched = {"RANK", "WORLD", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
    prefixes = ("GRADBUS_", "CYCLONEDDS_", "SLURM_", "OMPI_", "PMI_")
    for name in [name for name in os.environ if name.startswith(prefixes) or name in launched]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRADBUS_DATA", str(tmp_path / "no-data"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def configs(root: Path) -> Path:
    """The folder of the example configurations."""
    return root / "experiments" / "configs"
