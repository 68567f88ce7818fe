"""When a hub sends an instruction that its nodes request one by one."""

from __future__ import annotations

import pytest

from gradbus.actors.flower.request_batch import MOST_S, SETTLE_S, RequestBatch

AWAITED = {0: 7, 1: 8, 2: 9}  # incarnations by node


def requested(*times_s: float) -> RequestBatch:
    batch = RequestBatch()
    for node, at_s in enumerate(times_s):
        batch.note_request(node, AWAITED[node], at_s)
    return batch


def test_it_is_sent_at_once_when_all_nodes_have_requested_it() -> None:
    assert requested(10.0, 10.001, 10.5).due_in_s(AWAITED, 10.5) <= 0


def test_it_waits_for_a_further_node_that_is_to_have_it() -> None:
    batch = requested(10.0, 10.001)
    assert batch.due_in_s(AWAITED, 10.001) == pytest.approx(SETTLE_S)
    assert batch.due_in_s(AWAITED, 10.001 + SETTLE_S) == pytest.approx(0, abs=1e-9)


def test_it_waits_longer_while_nodes_take_longer() -> None:
    assert requested(10.0, 11.0).due_in_s(AWAITED, 11.0) == pytest.approx(0.25)


def test_it_waits_for_a_bounded_time() -> None:
    batch = RequestBatch()
    for node in range(100):
        batch.note_request(node, 1, node * 0.1)
    assert batch.due_in_s(dict.fromkeys(range(200), 1), MOST_S) <= 0


def test_a_node_that_requests_it_again_does_not_hold_it_up() -> None:
    batch = requested(10.0, 10.001)
    batch.note_request(1, AWAITED[1], 10.019)
    assert batch.due_in_s(AWAITED, 10.001 + SETTLE_S) == pytest.approx(0, abs=1e-9)


def test_another_start_of_a_node_requests_it_for_itself() -> None:
    batch = requested(10.0, 10.0, 10.0)
    assert batch.due_in_s({**AWAITED, 2: 10}, 10.0) == pytest.approx(SETTLE_S)


def test_a_request_after_it_was_sent_begins_another_batch() -> None:
    batch = requested(10.0, 10.001)
    batch.note_sent()
    batch.note_request(2, AWAITED[2], 20.0)
    assert batch.due_in_s({**AWAITED, 3: 1}, 20.0) == pytest.approx(SETTLE_S)
