"""What tests of actors share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from dds_domains import new_domain

if TYPE_CHECKING:
    from federation import Federation


@pytest.fixture(autouse=True)
def begin_at_once(lone_controllers: None) -> None:
    """No test here has two controllers of a job in this process."""


@pytest.fixture
def federation() -> Iterator[Federation]:
    """A controller and clients as processes of their own, of which nobody is taken for dead by mistake."""
    from federation import NOBODY_DIES_S, Federation

    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        yield federation
