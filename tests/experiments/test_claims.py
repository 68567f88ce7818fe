"""Where two claims of job completion times hold: solved by the closed forms, and looked at in the simulator."""

from __future__ import annotations

import math

import pytest

from gradbus.experiments.studies.claims import (
    SAVED,
    both_at,
    crossing,
    memory_at,
    saved,
    share_at,
    times_by_formula,
    times_by_simulation,
)


def test_a_crossing_is_found_whichever_side_is_positive_and_none_is_made_up() -> None:
    assert crossing(lambda x: x - 0.3, 0.1, 1.0, steps=40) == pytest.approx(0.3)
    assert crossing(lambda x: 0.3 - x, 0.1, 1.0, steps=40) == pytest.approx(0.3)
    assert crossing(lambda x: x, 0.1, 1.0, steps=40) is None


@pytest.mark.parametrize(("world", "memory", "share"), [(8, 0.498, 1.137), (16, 0.462, 0.905)])
def test_both_claims_hold_at_about_half_of_the_slots(world: int, memory: float, share: float) -> None:
    times = times_by_formula(world)
    found = both_at(times, steps=40)
    assert found == pytest.approx((memory, share), abs=1e-3)
    assert found is not None
    for other, wanted in SAVED.items():
        assert saved(times(*found), other) == pytest.approx(wanted, abs=1e-6)


def test_where_a_claim_holds_is_solved_for_r_and_for_m() -> None:
    times = times_by_formula(8)
    assert share_at(times, "SwitchML", 0.5, steps=40) == pytest.approx(1.158, abs=1e-3)
    assert share_at(times, "the ring", 0.5, steps=40) == pytest.approx(1.128, abs=1e-3)
    assert share_at(times, "SwitchML", 1.0, steps=40) == math.inf  # both send at full rate
    assert share_at(times, "SwitchML", 0.07, steps=40) == 0.0
    assert memory_at(times, "SwitchML", 1.0, steps=40) == "up to 0.49"
    assert memory_at(times, "the ring", 1.0, steps=40) == "from 0.53"
    assert memory_at(times, "the ring", 0.1, steps=40) == "never"
    assert memory_at(times_by_formula(2), "the ring", 64.0, steps=40) == "never"  # it is no faster than a ring


def test_the_simulator_has_one_job_near_the_claims_where_the_formulas_have_both() -> None:
    times = times_by_simulation(8, 1)(0.498, 1.137)
    for other, wanted in SAVED.items():
        assert saved(times, other) == pytest.approx(wanted, abs=0.03)
