"""Rounds on their way between the threads of a client and that of a script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from patience import PATIENT_S, until

from gradbus.actors.federated.client.handover import RoundHandover, ScriptLeft, ScriptResult, TrainingRound
from gradbus.runtime.errors import OutOfTurn

ROUND = TrainingRound(round_id=1, epochs=1, lr=0.1, steps=0, seed=0, subset_size=0)
RESULT = ScriptResult(7, None)


@pytest.fixture
def handover() -> RoundHandover:
    return RoundHandover()


def start(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call it on another thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return future


def offered(handover: RoundHandover) -> Future[ScriptResult]:
    """A round that the script has taken."""
    handover.begin_wait()
    assert handover.claim()
    training = start(handover.train, ROUND, lambda: False)
    assert handover.take(PATIENT_S) == ROUND
    return training


def test_a_round_is_offered_taken_given_back_and_answered(handover: RoundHandover) -> None:
    training = offered(handover)
    giving = start(handover.give, RESULT)
    assert training.result(PATIENT_S) == RESULT
    handover.answer(True)
    assert giving.result(PATIENT_S) is True
    with pytest.raises(OutOfTurn, match="each receive that returns True is followed by one send"):
        handover.give(RESULT)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_result_that_comes_after_the_end_of_the_client_does_not_count(
    handover: RoundHandover, is_answered: bool
) -> None:
    """The script has done nothing wrong: what has ended the client is for its caller to raise, not OutOfTurn."""
    training = offered(handover)
    handover.end()
    with pytest.raises(ScriptLeft):
        training.result(PATIENT_S)
    if is_answered:
        handover.answer(False)
    assert handover.should_stop()
    assert handover.give(RESULT) is False
    with pytest.raises(OutOfTurn, match="after the end of the run"):
        handover.give(RESULT)


def test_a_wait_with_a_deadline_ends_without_a_round(handover: RoundHandover) -> None:
    handover.begin_wait()
    with pytest.raises(TimeoutError, match=r"no round has begun within 0.01 s"):
        handover.take(0.01)
    assert not handover.claim(), "the model is the script's again"


def test_a_model_that_is_claimed_is_not_given_back_at_the_deadline(handover: RoundHandover) -> None:
    """The client writes to it then, and offers the round directly after that."""
    handover.begin_wait()
    assert handover.claim()
    taking = start(handover.take, 0.01)
    threading.Event().wait(0.1)  # past the deadline: nothing tells that it has passed
    assert not taking.done()
    training = start(handover.train, ROUND, lambda: False)
    assert taking.result(PATIENT_S) == ROUND
    handover.leave()
    with pytest.raises(ScriptLeft):
        training.result(PATIENT_S)


def test_a_claim_that_comes_to_nothing_ends_such_a_wait(handover: RoundHandover) -> None:
    handover.begin_wait()
    assert handover.claim()
    taking = start(handover.take, 0.01)
    handover.answer(False)  # what came before the training has failed
    with pytest.raises(TimeoutError):
        taking.result(PATIENT_S)


def test_a_round_that_is_passed_over_has_an_empty_result(handover: RoundHandover) -> None:
    training = offered(handover)
    handover.begin_wait()
    assert training.result(PATIENT_S) == ScriptResult(0, None)
    until(handover.claim)
    with pytest.raises(OutOfTurn, match="send was called without a round"):
        handover.give(RESULT)
