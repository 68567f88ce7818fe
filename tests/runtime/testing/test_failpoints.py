"""Places to die at: armed only when somebody asks, once, and only in the round that was named."""

from __future__ import annotations

import pytest

from gradbus.runtime.testing.failpoints import FailPoint


def test_it_fires_once_at_its_place_in_its_round() -> None:
    fired: list[str] = []
    point = FailPoint("after_command:3", lambda: fired.append("died"))
    for round_id in (1, 2, 3, 3, 4):
        point.reached("before_command", round_id)
        point.reached("after_command", round_id)
    assert fired == ["died"]


@pytest.mark.parametrize("spec", [None, ""])
def test_nothing_is_armed_unless_asked_for(spec: str | None) -> None:
    fired: list[str] = []
    FailPoint(spec, lambda: fired.append("died")).reached("", 0)
    assert fired == []


@pytest.mark.parametrize("spec", ["after_command", ":3", "after_command:", "after_command:x", "a:-1"])
def test_a_wrong_spec_is_answered_with_an_example(spec: str) -> None:
    with pytest.raises(ValueError, match="after_command:2"):
        FailPoint(spec)


def test_who_is_to_die_must_be_somebody() -> None:
    with pytest.raises(ValueError, match="client-N or rank-N"):
        FailPoint("clint-3/after_offer:2", who="client-3")
