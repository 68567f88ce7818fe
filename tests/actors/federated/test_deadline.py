"""The deadline of a round by how long the last rounds took."""

from __future__ import annotations

import pytest

from gradbus.actors.federated.deadline import FIRST_ROUNDS, LEAST_S, RoundDeadline
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError


def after(*rounds_s: float, times: float | None = 2.0) -> RoundDeadline:
    deadline = RoundDeadline(times, 300.0)
    for seconds in rounds_s:
        deadline.round_done(seconds)
    return deadline


def test_the_first_rounds_have_the_fixed_deadline() -> None:
    assert after(*[10.0] * (FIRST_ROUNDS - 1)).seconds() == 300.0
    assert after(*[10.0] * FIRST_ROUNDS).seconds() == 20.0


def test_without_the_setting_it_is_fixed() -> None:
    assert after(*[10.0] * 9, times=None).seconds() == 300.0


def test_it_follows_the_median_of_the_last_five_rounds() -> None:
    assert after(100.0, 100.0, 100.0, 10.0, 12.0, 11.0, 90.0, 8.0).seconds() == 22.0


def test_it_is_never_longer_than_the_fixed_one_and_never_next_to_nothing() -> None:
    assert after(*[200.0] * 5).seconds() == 300.0
    assert after(*[0.001] * 5).seconds() == LEAST_S


def test_another_attempt_at_a_round_has_all_the_time() -> None:
    assert after(*[10.0] * 5).seconds(attempt=2) == 300.0


def test_asynchronous_rounds_which_wait_for_nobody_have_none() -> None:
    with pytest.raises(ConfigError, match="timeout_times_median is of synchronous rounds"):
        FederatedConfig(mode="asynchronous", round={"timeout_times_median": 2.0})
