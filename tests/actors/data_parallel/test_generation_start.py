"""Where a generation goes on, as its ranks decide from their hellos."""

from __future__ import annotations

from typing import Any

import pytest

from gradbus.actors.data_parallel.generation_start import GenerationStart
from gradbus.runtime.errors import CollectiveError, ConfigError


def hello(synced: int, step: int, **more: Any) -> dict[str, Any]:
    """What a rank says that has the state of this generation, and stands at this step."""
    usual: dict[str, Any] = {
        "settings": {"lr": 0.1}, "data": {"batches": 8}, "layout": [], "ended_exchanges": 0, "epoch": 0, "broken": [],
        "is_stopped": False, "schedule_steps": 40, "begins": False, "callbacks": False,
    }  # fmt: skip
    return {**usual, "synced": synced, "step": step, **more}


def start(*hellos: dict[str, Any], generation: int = 3) -> GenerationStart:
    return GenerationStart.of(hellos, range(len(hellos)), generation)


def test_all_go_on_where_the_newest_state_is_and_those_behind_get_it_from_those_that_have_it() -> None:
    found = start(hello(-1, 0), hello(2, 7), hello(2, 6), hello(2, 7, schedule_steps=80), hello(1, 9))
    assert (found.source, found.has_state, found.is_apart) == (1, True, True)
    assert found.sends_to == {1: [0, 4], 3: [2]}
    assert found.schedule_steps == 40


def test_of_two_ranks_at_one_step_that_with_more_exchanges_has_the_newer_state() -> None:
    found = start(hello(2, 7), hello(2, 7, ended_exchanges=1))
    assert (found.source, found.sends_to) == (1, {1: [0]})


def test_ranks_at_one_step_in_two_epochs_have_one_state_and_share_the_place_alone() -> None:
    found = start(hello(2, 8, epoch=0), hello(2, 8, epoch=1))
    assert (found.source, found.is_apart, found.sends_to) == (1, True, {})


def test_a_run_begins_while_process_0_has_been_there_from_the_first_generation_on() -> None:
    found = start(hello(-1, 0, begins=True), hello(-1, 0), generation=1)
    assert (found.source, found.has_state, found.is_apart, found.sends_to) == (0, False, False, {})


def test_a_run_whose_state_no_rank_has_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CollectiveError, match="no rank of generation 3 has the state of the run: go on from a check"):
        start(hello(-1, 0), hello(-1, 0))


def test_a_copy_is_requested_from_another_process_than_the_one_whose_copy_was_broken() -> None:
    assert start(hello(2, 7), hello(2, 7), hello(-1, 0)).sends_to == {0: [2]}
    assert start(hello(2, 7), hello(2, 7), hello(-1, 0, broken=[0])).sends_to == {1: [2]}


def test_a_run_is_stopped_by_those_that_have_its_state_and_by_no_rank_of_another_past() -> None:
    assert not start(hello(2, 7), hello(1, 9, is_stopped=True)).is_stopped
    assert start(hello(2, 7), hello(2, 6, is_stopped=True)).is_stopped


def test_ranks_with_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same data set"):
        start(hello(2, 7), hello(2, 7, data={"batches": 9}))


@pytest.mark.parametrize("callbacks", [True, False])
def test_all_vote_after_epochs_if_some_rank_has_callbacks(callbacks: bool) -> None:
    assert start(hello(2, 7), hello(2, 7, callbacks=callbacks)).has_callbacks == callbacks
