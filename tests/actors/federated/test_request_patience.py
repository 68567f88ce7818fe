"""When a client requests the frames of a model that have not arrived."""

from __future__ import annotations

import pytest

from gradbus.actors.federated.request_patience import LEAST_S, MOST_S, RequestPatience


def requests_of(patience: RequestPatience, arrivals_s: list[float], *, began_s: float = 0.0) -> list[float]:
    """Wait for frames that arrive at these times. Return when they were requested."""
    patience.begin(began_s)
    now_s, requests = began_s, []
    for at_s in arrivals_s:
        while now_s + patience.due_in_s(now_s) < at_s:
            now_s += patience.due_in_s(now_s)
            requests.append(now_s)
            patience.note_request(now_s)
        now_s = at_s
        patience.note_frame(at_s)
    patience.end()
    return requests


def test_frames_of_a_slow_link_are_requested_while_it_is_not_known_and_not_any_more_afterwards() -> None:
    """1 MiB to each of eight clients at 100 Mbit/s takes 0.67 s: five frames of a model."""
    patience = RequestPatience()
    arrivals_s = [0.8 + 0.67 * number for number in range(5)]
    assert requests_of(patience, arrivals_s) == [LEAST_S, 3 * LEAST_S]
    for began_s in 10.0, 20.0:
        assert requests_of(patience, [began_s + at_s for at_s in arrivals_s], began_s=began_s) == []


def test_each_request_without_an_answer_doubles_the_wait_up_to_a_limit() -> None:
    assert requests_of(RequestPatience(), [14.0]) == [0.25, 0.75, 1.75, 3.75, 6.75, 9.75, 12.75]


def test_losses_on_a_fast_link_do_not_make_the_next_ones_cost_more() -> None:
    """What came after a request does not count as a slow link: each hundredth frame is lost, and requested."""
    patience = RequestPatience()
    for began_s in range(20):
        requests = requests_of(patience, [began_s + 0.01 * number for number in range(1, 10)], began_s=float(began_s))
        assert requests == []
        patience.begin(began_s + 0.5)
        patience.note_request(began_s + 0.5 + patience.due_in_s(began_s + 0.5))
        patience.note_frame(began_s + 0.99)
        assert patience.patience_s <= 2 * LEAST_S
        patience.end()


def test_what_is_sent_on_request_only_is_requested_at_once_and_its_answer_measures_the_link() -> None:
    patience = RequestPatience()
    patience.begin(1.0, 0.0)
    assert patience.due_in_s(1.0) <= 0
    patience.note_request(1.0)
    assert patience.due_in_s(1.0) == LEAST_S
    patience.note_frame(1.2)
    assert patience.patience_s == pytest.approx(0.4)
    assert patience.due_in_s(1.2) == pytest.approx(0.4)


def test_frames_that_no_wait_was_for_tell_nothing() -> None:
    patience = RequestPatience()
    assert requests_of(patience, [0.1]) == []
    patience.note_frame(50.0)
    assert patience.patience_s == LEAST_S


def test_the_patience_has_a_limit_and_goes_back_when_the_link_is_fast_again() -> None:
    patience = RequestPatience()
    patience.patience_s = MOST_S
    requests_of(patience, [2.9])
    assert patience.patience_s == MOST_S
    requests_of(patience, [10.0 + 0.01 * number for number in range(1, 12)], began_s=10.0)
    assert patience.patience_s == LEAST_S
