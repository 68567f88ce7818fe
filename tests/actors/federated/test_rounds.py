"""When a round is over, and with whom."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.actors.federated.controller.rounds import MAX_NAMES, SURPLUS, Outcome, Round, RoundRules, RoundTotals
from gradbus.runtime.wire.control import MAX_METRICS, UploadRequest

DEADLINE_S = 60.0
GRACE_S = 5.0


def new_round(clients: int = 3, *, minimum: int = 1, quorum: float = 1.0, now_s: float = 0.0) -> Round:
    return Round(
        1,
        range(clients),
        RoundRules(minimum=minimum, quorum=quorum, deadline_s=DEADLINE_S, grace_s=GRACE_S),
        now_s=now_s,
    )


def test_the_round_is_over_as_soon_as_all_have_answered() -> None:
    round_ = new_round(3)
    for client_id in (2, 0):
        round_.accept(client_id, 1.0)
        assert round_.verdict(1.0) is None
    round_.accept(1, 2.0)
    assert round_.verdict(2.0) is Outcome.ALL


def test_a_round_that_has_enough_updates_takes_no_further_one() -> None:
    rules = RoundRules(minimum=1, quorum=1.0, deadline_s=DEADLINE_S, grace_s=GRACE_S, enough=1)
    round_ = Round(1, range(2), rules, now_s=0.0)
    assert round_.may_send(1) is None
    round_.accept(0, 1.0)
    assert round_.may_send(1) == SURPLUS


def test_a_round_closes_at_the_deadline_with_one_update_of_three() -> None:
    round_ = new_round(3, now_s=100.0)
    round_.accept(1, 101.0)
    assert round_.verdict(100.0 + DEADLINE_S - 0.001) is None
    assert round_.verdict(100.0 + DEADLINE_S) is Outcome.DEADLINE


def test_a_round_with_fewer_than_the_minimum_goes_on_until_the_deadline_and_then_has_failed() -> None:
    round_ = new_round(3, minimum=2)
    round_.accept(0, 1.0)
    assert round_.verdict(DEADLINE_S - 0.001) is None
    assert round_.verdict(DEADLINE_S) is Outcome.TOO_FEW


def test_the_minimum_alone_does_not_end_a_round_before_the_deadline() -> None:
    round_ = new_round(3, minimum=1, quorum=1.0)
    round_.accept(0, 0.0)
    assert round_.verdict(DEADLINE_S - 0.001) is None


def test_the_quorum_ends_the_round_only_after_the_grace() -> None:
    round_ = new_round(4, quorum=0.5)
    round_.accept(0, 1.0)
    round_.accept(1, 10.0)
    assert round_.verdict(10.0 + GRACE_S - 0.001) is None
    assert round_.verdict(10.0 + GRACE_S) is Outcome.QUORUM


def test_the_grace_counts_from_the_update_that_made_the_quorum_and_is_not_prolonged_by_later_ones() -> None:
    round_ = new_round(4, quorum=0.5)
    for client_id, now_s in ((0, 1.0), (1, 2.0), (2, 6.5)):
        round_.accept(client_id, now_s)
    assert round_.verdict(2.0 + GRACE_S) is Outcome.QUORUM


def test_the_grace_does_not_outlast_the_deadline() -> None:
    round_ = new_round(4, quorum=0.5)
    for client_id in (0, 1):
        round_.accept(client_id, DEADLINE_S - 1.0)
    assert round_.verdict(DEADLINE_S) is Outcome.DEADLINE


def test_the_quorum_is_never_less_than_the_minimum() -> None:
    round_ = new_round(4, minimum=3, quorum=0.25)
    round_.accept(0, 0.0)
    round_.accept(1, 0.0)
    assert round_.verdict(DEADLINE_S - 0.001) is None
    round_.accept(2, 0.0)
    assert round_.verdict(GRACE_S) is Outcome.QUORUM


@pytest.mark.parametrize(("share", "clients", "needed"), [(0.55, 100, 55), (0.07, 100, 7), (0.5, 3, 2), (1.0, 7, 7)])
def test_the_quorum_is_the_share_asked_for_rounded_up_once(share: float, clients: int, needed: int) -> None:
    round_ = new_round(clients, quorum=share)
    for client_id in range(needed):
        assert round_.next_check_s() == DEADLINE_S
        round_.accept(client_id, 1.0)
    assert round_.next_check_s() == 1.0 + GRACE_S


def test_a_dead_client_is_not_waited_for() -> None:
    round_ = new_round(3)
    round_.accept(0, 1.0)
    round_.accept(1, 1.0)
    round_.lose(2)
    assert round_.needed == 2
    assert round_.open == set()
    assert round_.verdict(1.0) is Outcome.ALL


def test_a_dead_client_whose_update_counts_goes_on_counting() -> None:
    round_ = new_round(2, minimum=2)
    round_.accept(0, 1.0)
    round_.lose(0)
    assert round_.needed == 2
    assert round_.may_send(0) == "repeated"
    round_.accept(1, 2.0)
    assert round_.verdict(2.0) is Outcome.ALL


def test_an_update_that_was_being_added_when_its_client_died_makes_the_client_expected_again() -> None:
    round_ = new_round(2)
    round_.lose(0)
    round_.accept(0, 1.0)  # its last byte had come before it died
    assert round_.accepted <= round_.expected
    assert round_.needed == 2
    round_.accept(1, 1.0)
    assert len(round_.accepted) == round_.needed == 2


def test_a_client_that_failed_is_not_waited_for_but_lives() -> None:
    round_ = new_round(3)
    round_.fail(2, "training failed")
    assert round_.needed == 2
    assert round_.failed == {2: "training failed"}
    assert round_.may_send(2) is None  # what it said may have been of the attempt before
    round_.fail(1, "malformed")
    assert round_.may_send(1) == "failed"
    round_.accept(0, 1.0)
    round_.accept(1, 1.0)
    assert round_.verdict(1.0) is Outcome.SOME_FAILED
    assert Outcome.SOME_FAILED.value == "all live clients answered or failed"


def test_a_failure_after_the_update_counts_changes_nothing() -> None:
    round_ = new_round(2)
    round_.accept(0, 1.0)
    round_.fail(0, "training failed")
    assert round_.failed == {}
    assert round_.needed == 2


def test_the_first_reason_of_a_failure_stands() -> None:
    round_ = new_round(2)
    round_.fail(0, "malformed")
    round_.fail(0, "training failed")
    assert round_.failed == {0: "malformed"}


def test_who_sends_something_bad_after_its_training_failed_may_send_no_more() -> None:
    round_ = new_round(2)
    round_.fail(0, "training failed")
    round_.fail(0, "malformed")
    assert round_.failed == {0: "malformed"}
    assert round_.may_send(0) == "failed"


def test_a_failure_of_somebody_unknown_is_nothing() -> None:
    round_ = new_round(2)
    round_.fail(7, "malformed")
    assert round_.failed == {}
    assert round_.needed == 2


def test_a_client_that_failed_and_then_died_is_neither_expected_nor_failed() -> None:
    round_ = new_round(2)
    round_.fail(0, "malformed")
    round_.lose(0)
    assert round_.failed == {}
    assert round_.needed == 1
    assert round_.may_send(0) == "not expected"


def test_with_nobody_left_the_round_has_failed_at_once() -> None:
    round_ = new_round(2)
    round_.lose(0)
    assert round_.verdict(0.0) is None
    round_.fail(1, "malformed")
    assert round_.verdict(0.0) is Outcome.TOO_FEW


def test_a_round_that_nobody_takes_part_in_has_failed_at_once() -> None:
    assert new_round(0).verdict(0.0) is Outcome.TOO_FEW


def test_all_answers_are_too_few_when_there_are_fewer_clients_than_the_minimum() -> None:
    round_ = new_round(1, minimum=2)
    round_.accept(0, 1.0)
    assert round_.verdict(1.0) is Outcome.TOO_FEW


def test_only_an_expected_client_that_has_not_answered_may_send() -> None:
    round_ = new_round(2)
    assert round_.may_send(0) is None
    round_.accept(0, 1.0)
    assert round_.may_send(0) == "repeated"
    assert round_.may_send(2) == "not expected"


def test_the_next_check_is_the_deadline_and_with_a_quorum_the_end_of_the_grace() -> None:
    round_ = new_round(3, quorum=0.3)
    assert round_.next_check_s() == DEADLINE_S
    round_.accept(0, 10.0)
    assert round_.next_check_s() == 10.0 + GRACE_S
    late = new_round(3, quorum=0.3)
    late.accept(0, DEADLINE_S - 1.0)
    assert late.next_check_s() == DEADLINE_S


EVENTS = st.lists(
    st.tuples(st.sampled_from(["offer", "lose", "fail", "wait"]), st.integers(0, 5), st.floats(0.0, 20.0)), max_size=40
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    events=EVENTS,
    clients=st.integers(0, 5),
    minimum=st.integers(1, 4),
    quorum=st.floats(0.01, 1.0),
)
def test_after_any_events_the_round_is_consistent(
    events: list[tuple[str, int, float]], clients: int, minimum: int, quorum: float
) -> None:
    round_ = new_round(clients, minimum=minimum, quorum=quorum)
    now_s, counted, dead = 0.0, [], set()
    for event, client_id, step_s in events:
        before, over = set(round_.accepted), round_.verdict(now_s)
        match event:
            case "offer" if round_.may_send(client_id) is None:
                round_.accept(client_id, now_s)
                counted.append(client_id)
            case "lose":
                round_.lose(client_id)
                dead.add(client_id)
            case "fail":
                round_.fail(client_id, "malformed")
            case "wait":
                now_s += step_s
                # A round that is over stays over, and a good end stays a good one: time alone takes nothing away.
                if over is not None:
                    assert round_.verdict(now_s) is not None
                    assert (round_.verdict(now_s) is Outcome.TOO_FEW) == (over is Outcome.TOO_FEW)
                elif now_s < round_.next_check_s():
                    assert round_.verdict(now_s) is None  # it needs no look before the time it names
        verdict = round_.verdict(now_s)
        assert before <= round_.accepted
        assert len(counted) == len(set(counted)) == len(round_.accepted)
        assert round_.accepted <= round_.expected <= set(range(clients))
        assert not round_.accepted & round_.failed.keys()
        assert not round_.open & dead
        assert len(round_.accepted) <= round_.needed == len(round_.accepted) + len(round_.open)
        assert verdict is not None or round_.open
        assert verdict is None or (verdict is Outcome.TOO_FEW) == (len(round_.accepted) < minimum)
        assert verdict is not None or now_s < round_.next_check_s()


@settings(derandomize=True, deadline=None)
@given(order=st.permutations(range(5)))
def test_the_order_of_arrival_does_not_matter_for_the_end(order: list[int]) -> None:
    round_ = new_round(5, minimum=5)
    for client_id in order[:-1]:
        round_.accept(client_id, 1.0)
        assert round_.verdict(1.0) is None
    round_.accept(order[-1], 1.0)
    assert round_.verdict(1.0) is Outcome.ALL


def test_who_falls_silent_is_lost_to_the_round_until_it_is_heard_again() -> None:
    round_ = Round(1, [0, 1, 2], RoundRules(minimum=1, quorum=1.0, deadline_s=60.0, grace_s=0.0), now_s=0.0, silent=[3])
    assert round_.follow_clients({0, 1}, {2, 3}) == ([2], [])
    assert round_.may_send(2) == "not expected"
    assert round_.follow_clients({0, 1, 2, 3}, set()) == ([], [2, 3])
    assert (round_.open, round_.may_send(2), round_.may_send(3)) == ({0, 1, 2, 3}, None, None)


def test_who_is_dead_is_lost_for_good() -> None:
    round_ = Round(1, [0, 1], RoundRules(minimum=1, quorum=1.0, deadline_s=60.0, grace_s=0.0), now_s=0.0)
    assert round_.follow_clients({0}, set()) == ([1], [])
    assert round_.follow_clients({0, 1}, set()) == ([], [])  # another start of it, which takes part in the next round
    assert round_.open == {0}


def new_over_selected(asked: int, enough: int, *, minimum: int = 1) -> Round:
    rules = RoundRules(minimum=minimum, quorum=1.0, deadline_s=DEADLINE_S, grace_s=GRACE_S, enough=enough)
    return Round(1, range(asked), rules, now_s=0.0)


def test_with_more_clients_asked_than_are_needed_the_first_updates_end_the_round() -> None:
    round_ = new_over_selected(5, 3)
    assert (round_.wanted, round_.needed) == (3, 3)
    for client_id in (4, 0):
        round_.accept(client_id, 1.0)
    assert round_.verdict(1.0) is None
    round_.accept(2, 2.0)
    assert round_.verdict(2.0) is Outcome.ENOUGH
    assert round_.may_send(1) == "not needed any more"
    assert round_.answered_s == 2.0


def test_with_more_clients_asked_the_round_still_ends_when_no_other_can_answer() -> None:
    round_ = new_over_selected(4, 3)
    round_.accept(0, 1.0)
    round_.lose(1)
    round_.fail(2, "training failed")
    round_.accept(3, 1.0)
    assert round_.verdict(1.0) is Outcome.SOME_FAILED


def test_the_weights_of_a_first_round_need_as_many_requests_as_end_it() -> None:
    round_ = new_over_selected(5, 3)
    assert not round_.has_enough_requests([0, 1], 0.0)
    assert round_.has_enough_requests([0, 1, 4], 0.0)


def test_means_of_training_metrics_do_not_depend_on_arrival_and_have_as_many_names_as_one_update() -> None:
    def totals(announced: list[tuple[int, dict[str, float]]]) -> RoundTotals:
        found = RoundTotals()
        for client_id, (samples, metrics) in enumerate(announced):
            request = UploadRequest(
                run_id=1,
                round_id=1,
                transfer=1,
                total_bytes=1,
                num_samples=samples,
                loss=1.0,
                train_s=0.0,
                encode_s=0.0,
                metrics=metrics,
            )
            found.count(client_id, request, samples, from_memory=False)
        return found

    announced = [(3, {"f1": 0.1}), (7, {"f1": 0.7, "auc": 0.5}), (11, {"f1": 1e16}), (5, {"f1": -1e16}), (1, {})]
    means = [totals(list(order)).mean_metrics() for order in itertools.permutations(announced)]
    assert means == [means[0]] * len(means)
    assert means[0]["auc"] == 0.5
    assert totals([(1, {"f1": 1e200})]).mean_metrics() == {}
    many = totals([(1, {f"m{client_id}": 1.0}) for client_id in range(1000)])
    assert (len(many.mean_metrics()), len(many.metrics)) == (MAX_METRICS, MAX_NAMES)
    made_up = {f"a{number}": 1.0 for number in range(MAX_METRICS)}
    assert "f1" in totals([(1, made_up), (1, {"f1": 0.5}), (1, {"f1": 0.5})]).mean_metrics()
