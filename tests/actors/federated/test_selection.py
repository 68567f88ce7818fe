"""When a run may start."""

from __future__ import annotations

import pytest

from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller.selection import StartCondition, StartTrouble
from gradbus.runtime.errors import BarrierTimeout

TIMEOUT_S = 120.0
GRACE_S = 10.0


def new_gathering(*, minimum: int = 1, expected: int | None = 3, now_s: float = 0.0) -> StartCondition:
    return StartCondition(
        minimum=minimum,
        expected=range(expected or 0),
        now_s=now_s,
        timeout_s=TIMEOUT_S,
        grace_s=GRACE_S,
        describe=lambda: StartTrouble("round 1: clients"),
    )


def test_it_starts_at_once_when_all_are_there() -> None:
    assert new_gathering().may_start([0, 1, 2], 0.0)


def test_more_than_expected_are_welcome() -> None:
    assert new_gathering().may_start([0, 1, 2, 3], 0.0)


def test_with_no_number_expected_it_starts_with_the_minimum() -> None:
    gathering = new_gathering(minimum=2, expected=None)
    assert not gathering.may_start([4], 0.0)
    assert gathering.may_start([4, 9], 0.0)


def test_with_enough_but_not_all_it_waits_for_the_grace() -> None:
    gathering = new_gathering(minimum=2)
    assert not gathering.may_start([0, 1], 5.0)
    assert gathering.next_check_s() == 5.0 + GRACE_S
    assert not gathering.may_start([0, 1], 5.0 + GRACE_S - 0.001)
    assert gathering.may_start([0, 1], 5.0 + GRACE_S)


def test_the_last_one_ends_the_grace() -> None:
    gathering = new_gathering(minimum=2)
    assert not gathering.may_start([0, 1], 5.0)
    assert gathering.may_start([0, 1, 2], 5.1)


def test_the_grace_starts_anew_when_there_were_too_few_in_between() -> None:
    gathering = new_gathering(minimum=2)
    assert not gathering.may_start([0, 1], 0.0)
    assert not gathering.may_start([1], 9.0)
    assert gathering.next_check_s() == TIMEOUT_S
    assert not gathering.may_start([1, 2], 11.0)
    assert not gathering.may_start([1, 2], 11.0 + GRACE_S - 0.001)
    assert gathering.may_start([1, 2], 11.0 + GRACE_S)


def test_with_too_few_it_waits_until_the_deadline_which_names_who_is_missing() -> None:
    gathering = new_gathering(minimum=2, now_s=50.0)
    assert gathering.next_check_s() == 50.0 + TIMEOUT_S
    assert not gathering.may_start([1], 50.0 + TIMEOUT_S - 0.001)
    with pytest.raises(BarrierTimeout, match=r"round 1: clients: 1 of 2 ready after 120 s, missing \[0, 2\]") as caught:
        gathering.may_start([1], 50.0 + TIMEOUT_S)
    assert caught.value.missing == (0, 2)
    assert (caught.value.ready, caught.value.needed) == (1, 2)


def test_clients_that_are_excused_are_neither_waited_for_nor_missing() -> None:
    gathering = StartCondition(
        minimum=1,
        expected=range(3),
        now_s=0.0,
        timeout_s=TIMEOUT_S,
        grace_s=GRACE_S,
        describe=lambda: StartTrouble("round 4"),
        excused={1},
    )
    assert not gathering.may_start([0], 0.0)
    assert gathering.may_start([0, 2], 0.0)
    with pytest.raises(BarrierTimeout, match=r"missing \[0, 2\]"):
        gathering.may_start([], TIMEOUT_S)


def test_the_error_shows_names_where_there_are_some_and_not_thousands_of_ids() -> None:
    names = ClientNames()
    names.keep("site-2", 1)
    condition = StartCondition(
        minimum=1,
        expected=range(5000),
        now_s=0.0,
        timeout_s=TIMEOUT_S,
        grace_s=GRACE_S,
        describe=lambda: StartTrouble("round 1", label=names.label),
    )
    with pytest.raises(BarrierTimeout, match=r"missing \[0, 1 \(site-2\), 2, .* and 4,980 more\]") as caught:
        condition.may_start([], TIMEOUT_S)
    assert caught.value.missing == tuple(range(5000))


def test_an_id_that_nobody_expects_excuses_nobody() -> None:
    gathering = StartCondition(
        minimum=1,
        expected=range(2),
        now_s=0.0,
        timeout_s=5.0,
        grace_s=1.0,
        describe=lambda: StartTrouble("round 1: clients"),
        excused={7, 9},
    )
    assert not gathering.may_start([0], 0.0)
    assert gathering.may_start([0, 1], 0.0)


def test_where_nobody_knows_who_should_come_the_deadline_names_only_numbers() -> None:
    gathering = new_gathering(minimum=2, expected=None)
    with pytest.raises(BarrierTimeout, match="0 of 2 ready") as caught:
        gathering.may_start([], TIMEOUT_S)
    assert caught.value.missing == ()


def test_enough_clients_at_the_deadline_still_get_their_grace() -> None:
    gathering = new_gathering(minimum=1)
    assert not gathering.may_start([0], TIMEOUT_S + 1.0)
    assert gathering.may_start([0], TIMEOUT_S + 1.0 + GRACE_S)
