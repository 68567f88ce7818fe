"""A client does not help to make sums that together show single updates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.actors.secure_aggregation.answered_sets import MAX_SETS, AnsweredSets, fewest_clients
from gradbus.actors.secure_aggregation.keys import NotInProtocol

ROUND = (7, 3)


def answer(answered: AnsweredSets, survivors: set[int], cap: int = 0, name: tuple[int, int] = ROUND) -> None:
    answered.check(name, cap, survivors)
    answered.note(name, cap, survivors)


def test_the_same_sum_is_unmasked_as_often_as_it_is_asked_for_and_one_of_one_client_less_never() -> None:
    answered = AnsweredSets()
    for _ in range(3):
        answer(answered, {1, 2, 3, 4})
    with pytest.raises(NotInProtocol, match="would show that of 1: it asks for 2"):
        answer(answered, {1, 2, 3})
    answer(answered, {1, 2, 3}, name=(7, 4))  # in another round the updates are other ones


def test_two_sums_differ_in_as_many_clients_as_a_client_asks_for() -> None:
    answer(both := AnsweredSets(), {1, 2, 3, 4, 5, 6})
    answer(both, {1, 2, 3, 4})
    answer(three := AnsweredSets(3), {1, 2, 3, 4, 5, 6})
    with pytest.raises(NotInProtocol, match="would show that of 2: it asks for 3"):
        answer(three, {1, 2, 3, 4})


def test_three_sums_of_which_each_two_would_do_are_too_much() -> None:
    answer(answered := AnsweredSets(), {1, 2, 3})
    answer(answered, {1, 4, 5})
    with pytest.raises(NotInProtocol, match="with 2 sums of the same round"):  # A + B - C is twice that of 1
        answer(answered, {2, 3, 4, 5})


def test_the_same_updates_with_other_weights_are_not_unmasked() -> None:
    answer(answered := AnsweredSets(), {1, 2, 3}, cap=0)
    with pytest.raises(NotInProtocol, match="with another cap on samples, or in other steps"):
        answer(answered, {1, 2, 3}, cap=20)


def test_more_sets_than_can_be_checked_are_refused() -> None:
    answered = AnsweredSets()
    for number in range(MAX_SETS):
        answer(answered, set(range(10 * number, 10 * number + 5)))
    with pytest.raises(NotInProtocol):
        answer(answered, set(range(100, 105)))


@given(st.lists(st.sets(st.integers(0, 6), min_size=1), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_no_combination_is_of_fewer_clients_than_is_found(sets: list[set[int]]) -> None:
    clients = set().union(*sets)
    found = fewest_clients(sets)
    for factors in itertools.product(range(-4, 5), repeat=len(sets)):
        sums = [sum(factor for factor, one in zip(factors, sets, strict=True) if client in one) for client in clients]
        assert not any(sums) or sum(map(bool, sums)) >= found
