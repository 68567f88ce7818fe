"""No content of a residual goes out in two rounds, whatever receipts say."""

from __future__ import annotations

import torch
from torch import Tensor

from gradbus.actors.federated.client.unsent_residuals import UnsentResiduals

RUN, TERMS, OTHER = 7, "terms", "other terms"


def vector(value: float) -> Tensor:
    return torch.full((3,), value)


def value_of(residual: Tensor | None) -> float | None:
    return None if residual is None else float(residual[0])


def test_what_was_kept_goes_out_until_a_sum_with_it_may_be_known() -> None:
    unsent = UnsentResiduals()
    assert value_of(unsent.before((RUN, 2), 1, vector(1.0), {1: TERMS})) == 1.0, "round 1 counts: this is what it left"
    unsent.note((RUN, 2), TERMS, vector(2.0))
    assert value_of(unsent.before((RUN, 3), 1, vector(1.0), {1: TERMS})) == 1.0, "no sum of round 2 was unmasked"
    unsent.note((RUN, 3), TERMS, vector(3.0))
    assert value_of(unsent.before((RUN, 4), 1, vector(1.0), {1: TERMS, 3: TERMS})) == 3.0, "and of round 3 one was"


def test_the_same_round_begins_with_the_same_again_whatever_was_unmasked_in_it() -> None:
    unsent = UnsentResiduals()
    for spent in ({}, {2: TERMS}):
        assert value_of(unsent.before((RUN, 2), 1, vector(1.0), spent)) == 1.0
        unsent.note((RUN, 2), TERMS, vector(2.0))
    for spent in ({2: TERMS}, {2: TERMS, 3: TERMS}):
        assert value_of(unsent.before((RUN, 3), 1, vector(1.0), spent)) == 2.0
        unsent.note((RUN, 3), TERMS, vector(3.0))
    assert value_of(unsent.before((RUN, 4), 1, vector(1.0), {2: TERMS, 3: TERMS})) == 3.0


def test_what_is_left_is_that_of_the_sum_that_was_unmasked_and_not_of_a_later_attempt() -> None:
    unsent = UnsentResiduals()
    unsent.before((RUN, 2), 1, vector(1.0), {})
    unsent.note((RUN, 2), TERMS, vector(2.0))
    unsent.note((RUN, 2), OTHER, vector(2.5))
    assert value_of(unsent.before((RUN, 3), 1, vector(1.0), {2: TERMS})) == 2.0


def test_where_that_is_not_known_any_more_nothing_goes_out_twice() -> None:
    unsent = UnsentResiduals()
    for round_id in (2, 3):
        unsent.before((RUN, round_id), 1, vector(1.0), {})
        unsent.note((RUN, round_id), TERMS, vector(round_id))
    assert unsent.before((RUN, 4), 1, vector(1.0), {2: TERMS}) is None
    assert value_of(unsent.before((RUN + 1, 4), 1, vector(1.0), {})) == 1.0, "another run has its own"


def test_a_controller_that_goes_back_gets_the_same_updates_again() -> None:
    unsent = UnsentResiduals()
    for round_id in (2, 3):
        unsent.before((RUN, round_id), round_id - 1, vector(round_id - 1.0), {})
        unsent.note((RUN, round_id), TERMS, vector(round_id))
    spent = {2: TERMS, 3: TERMS}
    assert value_of(unsent.before((RUN, 2), 1, vector(1.0), spent)) == 1.0
    assert value_of(unsent.before((RUN, 3), 2, vector(2.0), spent)) == 2.0
