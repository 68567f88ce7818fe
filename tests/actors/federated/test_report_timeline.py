"""The timelines of a round: moments by the controller's clock and durations by the client's, laid together."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.actors.federated.controller.report import (
    MAX_CLIENTS,
    TIMELINES_IN_MEMORY,
    ClientTimeline,
    Moment,
    Progress,
    RoundReport,
    RoundTiming,
)
from gradbus.runtime.wire.control import UploadRequest

OFFER = UploadRequest(5, 1, 7, 4_000, 600, 0.25, 2.0, 0.5, "", 1.0, 3.0, 0.75)  # waits 1 s, trains 2 s, encodes 0.5 s


class Clock:
    """Says what the test wants."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def one_client(
    timing: RoundTiming, clock: Clock, request: UploadRequest = OFFER, *, client_id: int = 3, at_s: float = 104
) -> None:
    """Its request comes at that time; then each step takes a second."""
    clock.now_s = at_s
    timing.offered(client_id, 1, request)
    for step in get_args(Moment):
        clock.now_s += 1
        timing.note(client_id, step)
    clock.now_s += 1
    timing.counted(client_id, request)


def test_the_parts_follow_each_other_without_a_gap_from_the_command_to_the_sum() -> None:
    clock = Clock()
    timing = RoundTiming(clock)
    timing.begin()
    timing.commanded()
    one_client(timing, clock)
    (timeline,) = timing.timelines()
    assert timeline.pieces() == [
        ("send", 0.0, 0.5),
        ("wait", 0.5, 1.5),
        ("train", 1.5, 3.5),
        ("encode", 3.5, 4.0),
        ("queue", 4.0, 5.0),
        ("upload", 5.0, 6.0),
        ("queue", 6.0, 7.0),
        ("decode", 7.0, 8.0),
    ]
    assert (timeline.client_id, timeline.num_bytes) == (3, 4_000)
    assert (timeline.update_norm, timeline.residual_norm) == (3.0, 0.75)
    assert json.loads(json.dumps(timeline.to_json()))["counted_s"] == 8.0


def test_what_is_said_again_counts_from_the_first_time_on() -> None:
    clock = Clock()
    timing = RoundTiming(clock)
    timing.begin()
    timing.commanded()
    clock.now_s = 104
    timing.offered(3, 1, OFFER)
    clock.now_s = 105
    timing.offered(3, 1, OFFER)
    timing.note(3, "granted")
    clock.now_s = 106
    timing.note(3, "granted")
    timing.counted(3, OFFER)
    (timeline,) = timing.timelines()
    assert (timeline.offered_s, timeline.granted_s) == (4.0, 5.0)
    timing.begin()
    timing.commanded()
    clock.now_s = 108
    timing.offered(3, 1, OFFER)
    clock.now_s = 109
    timing.offered(3, 2, OFFER)  # it died and is back
    timing.counted(3, OFFER)
    assert timing.timelines()[0].offered_s == 3.0


@pytest.mark.parametrize(("train_s", "commanded_s"), [(2.0, 20.0), (10.0, 0.0), (1e9, 0.0)])
def test_of_several_attempts_the_newest_that_leaves_room_for_the_clients_work_is_answered(train_s, commanded_s) -> None:
    clock = Clock()
    timing = RoundTiming(clock)
    timing.begin()
    timing.commanded()
    clock.now_s = 120
    timing.commanded()
    one_client(timing, clock, replace(OFFER, train_s=train_s), at_s=124)
    (timeline,) = timing.timelines()
    assert timeline.commanded_s == commanded_s
    assert timeline.pieces()[0].start_s == commanded_s


def test_a_round_begins_with_its_first_command_however_often_it_is_tried() -> None:
    clock = Clock()
    timing = RoundTiming(clock)
    timing.begin()
    for attempt in range(40):
        clock.now_s = 100.0 + 10 * attempt
        timing.commanded()
    assert timing.first_command_s == 100.0
    one_client(timing, clock, at_s=494)
    (timeline,) = timing.timelines()
    assert (timeline.commanded_s, timeline.offered_s) == (390.0, 394.0)


def test_an_update_that_is_read_without_being_sent_has_no_upload() -> None:
    clock = Clock()
    timing = RoundTiming(clock)
    timing.begin()
    timing.commanded()
    clock.now_s = 104
    timing.offered(3, 1, OFFER)
    clock.now_s = 106
    timing.note(3, "adding")
    clock.now_s = 107
    timing.counted(3, OFFER)
    (timeline,) = timing.timelines()
    assert timeline.granted_s is None
    assert [(piece.phase, piece.end_s) for piece in timeline.pieces()[4:]] == [("queue", 6.0), ("decode", 7.0)]


def test_norms_that_are_none_are_not_kept() -> None:
    clock = Clock()
    timing = RoundTiming(clock)
    timing.begin()
    timing.commanded()
    one_client(timing, clock, replace(OFFER, update_norm=math.nan, residual_norm=-1.0))
    (timeline,) = timing.timelines()
    assert (timeline.update_norm, timeline.residual_norm) == (None, None)


def test_of_many_clients_those_are_kept_that_counted_last() -> None:
    timing = RoundTiming(Clock())
    timing.begin()
    timing.commanded()
    for client_id in range(MAX_CLIENTS + 10):
        timing.offered(client_id, 1, OFFER)
        timing.counted(client_id, OFFER)
    assert [timeline.client_id for timeline in timing.timelines()] == list(range(10, MAX_CLIENTS + 10))
    timing.begin()
    assert timing.timelines() == ()


def test_steps_of_a_client_that_never_offered_are_not_noted() -> None:
    timing = RoundTiming(Clock())
    timing.begin()
    timing.commanded()
    for step in get_args(Moment):
        timing.note(3, step)
    timing.counted(3, OFFER)
    assert timing.timelines() == ()


moments = st.floats(0, 1e6)


@settings(derandomize=True, deadline=None)
@given(st.lists(moments, min_size=5, max_size=5), st.lists(st.floats(-1, 1e9), min_size=3, max_size=3), st.booleans())
def test_whatever_a_client_says_the_parts_stay_in_order_between_command_and_sum(times, own, granted) -> None:
    commanded_s, offered_s, granted_s, received_s, counted_s = sorted(times)
    timeline = ClientTimeline(
        client_id=0,
        commanded_s=commanded_s,
        offered_s=offered_s,
        granted_s=granted_s if granted else None,
        received_s=received_s,
        adding_s=received_s,
        counted_s=counted_s,
        wait_s=own[0],
        train_s=own[1],
        encode_s=own[2],
    )
    at_s = commanded_s
    for piece in timeline.pieces():
        assert piece.start_s == at_s
        assert piece.end_s > piece.start_s
        at_s = piece.end_s
    assert at_s == pytest.approx(counted_s)


def test_a_list_of_reports_keeps_the_timelines_of_the_newest_rounds_only() -> None:
    progress = Progress()
    for round_id in range(1, TIMELINES_IN_MEMORY + 6):
        progress.add(RoundReport(round_id=round_id, timeline=(ClientTimeline(client_id=0),)))
    assert [report.round_id for report in progress.reports if report.timeline] == list(
        range(6, TIMELINES_IN_MEMORY + 6)
    )
