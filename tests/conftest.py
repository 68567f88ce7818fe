"""What holds for every test. Helpers that a test imports live beside it."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: figures are drawn without a screen


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parents[1]
