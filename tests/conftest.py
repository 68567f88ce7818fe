"""What holds for every test. Helpers that a test imports live beside it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: figures are drawn without a screen


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """No test leaves another number of torch threads behind: the last bits of what others compute depend on it."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None:
        sys.modules["torch"].set_num_threads(before)
