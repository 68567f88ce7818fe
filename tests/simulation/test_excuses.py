"""What a simulated run may show by design, and the nearest cases in which it may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fault_simulation.excuses import (
    CALM_ROUND_S,
    FOUND_AGAIN_S,
    MET_S,
    SITE_ROUND_S,
    Disturbances,
    had_living_rival,
    is_round_without_time,
    unheard_controller,
)

from gradbus.runtime.errors import ControllerReplaced, JobInUse, JoinRefused

LEASE_S = 4.0
AFTER_S = LEASE_S + FOUND_AGAIN_S
TOO_FEW = {"error": "RoundTimeout: round 2: 1 updates where 2 are needed, after 2 attempts"}


def test_the_longest_time_without_a_fault_begins_when_the_effect_of_all_before_is_over() -> None:
    disturbances = Disturbances()
    assert disturbances.longest_calm_s(0.0, 24.0, after_s=3.0) == 24.0
    disturbances.add(6.0, 7.0)
    disturbances.add(2.0, 12.0)
    assert disturbances.longest_calm_s(0.0, 24.0, after_s=3.0) == 9.0
    disturbances.add(20.0, 20.0)
    assert disturbances.longest_calm_s(0.0, 24.0, after_s=3.0) == 5.0
    assert disturbances.longest_calm_s(30.0, 40.0, after_s=3.0) == 10.0


def lacked_time(*spans_s: tuple[float, float], event: str = "training failed", **facts: Any) -> bool:
    disturbances = Disturbances()
    for span_s in spans_s:
        disturbances.add(*span_s)
    return is_round_without_time(disturbances, event, TOO_FEW | facts, now_s=SITE_ROUND_S, lease_s=LEASE_S)


def test_a_site_may_fail_a_round_only_where_faults_have_left_it_no_time() -> None:
    cut = (0.0, SITE_ROUND_S - AFTER_S)
    assert lacked_time(cut)
    assert lacked_time(cut, event="training failed on a client")
    assert lacked_time((0.0, 0.0), (AFTER_S + CALM_ROUND_S - 0.1, 15.0))
    assert not lacked_time()
    assert not lacked_time((0.0, cut[1] - CALM_ROUND_S))
    assert not lacked_time((CALM_ROUND_S, SITE_ROUND_S))
    assert not lacked_time(cut, event="message not handled")
    assert not lacked_time(cut, error="ValueError: shapes differ")


def controller(number: int, *, replaced: bool = False, ended_s: float = 0.0, went_on_s: float = 0.0) -> Any:
    name, dead = f"controller.{number}", ended_s > 0.0
    facts = {"replaced": replaced, "dead": dead, "ended_s": ended_s, "went_on_s": went_on_s}
    return SimpleNamespace(role="controller", name=name, **facts)


@pytest.mark.parametrize(
    ("runs", "died_s", "error", "is_excused"),
    [
        ({1: "a", 2: "b"}, 10.0 + MET_S - 0.1, JobInUse("in use"), True),
        ({1: "a", 2: "a"}, 10.0 + MET_S - 0.1, JobInUse("in use"), False),  # of one run the first one must give way
        ({1: "a", 2: "b"}, 10.0 + MET_S + 0.1, JobInUse("in use"), False),  # it has heard of the one in its place
        ({2: "b"}, 10.0, JobInUse("in use"), False),  # it has begun no run
        ({1: "a", 2: "b"}, 10.0, ControllerReplaced("replaced", 1, 1, ""), False),
    ],
)
def test_a_start_may_be_refused_only_by_a_controller_of_another_run_that_has_not_heard_of_it(
    runs: dict[int, str], died_s: float, error: Exception, is_excused: bool
) -> None:
    first, second, third = controller(1, replaced=True, went_on_s=10.0), controller(2, ended_s=died_s), controller(3)
    named = {f"controller.{number}": run for number, run in runs.items()}
    found = unheard_controller([first, second, third], named, third, error)
    assert found is (first if is_excused else None)


def test_a_client_may_be_refused_for_a_later_start_with_its_key_that_has_died_a_moment_ago() -> None:
    def excused(
        died_s: float, *, started_s: float = 4.0, is_stranger: bool = False, why: str = "one process, one key"
    ) -> bool:
        facts = {"role": "client-2", "started_s": started_s, "is_stranger": is_stranger}
        later = SimpleNamespace(ended_s=died_s, **facts)
        refused: Any = SimpleNamespace(role="client-2", started_s=1.0)
        return had_living_rival([later], refused, JoinRefused(why), now_s=9.0)

    assert excused(5.5)
    assert not excused(1.5), "it has been silent for so long that the client is admitted"
    assert not excused(5.5, started_s=0.5), "the client was started later"
    assert not excused(5.5, is_stranger=True), "another key"
    assert not excused(5.5, why="client-2 is not on the allow list of the controller")
