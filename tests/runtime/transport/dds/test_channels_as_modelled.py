"""What the simulation's network takes for granted of DDS, checked against Cyclone DDS between real processes.

The network in memory of tests/simulation may allow more than DDS does, and never less: what DDS does here must be
allowed there. The rules, of a pair of one writer and one reader of the same topic:

1. While both sides are matched samples arrive in order, exactly once, and eventually; loss below shows as delay.
2. There is no order between topics, nor between writers.
3. Each side matches and loses the other by itself.
4. What is written while the writer does not know the reader is gone (volatile), or comes again at the next match
   (retained). Loss and repetition are possible there, and in two places more: what a writer is deleted with before it
   was acknowledged is lost, and a reader that loses a writer and finds it again may get again, or never, what it had
   not acknowledged by then, though the writer knew it all the time and the topic is volatile.
5. A write that returns False is never delivered; one that returns True is, as far as 1 and 4 say.
6. A full reader makes its writers wait, or drops its oldest samples where the topic says so (overwrites, keep_last).
   While it makes them wait, it holds up all that its process receives: other topics, other writers, the answers to its
   own writes, and with them the signs of life of others, which it loses when their lease is over.
7. A side that is deleted is reported at once; one that is killed, only when its lease ends. Until then writes to it are
   taken, and then refused, for all readers of the topic.

Simpler rules, by which samples are lost or repeated only while the writer does not know the reader, and a full reader
holds up its own topic alone, are not true of DDS: see the ends of 4 and 6.

Readers and writers are in processes of their own: within one process samples do not leave DDS, so nothing is lost.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from channel_node import Channel, ChannelNode
from dds_domains import new_domain

from gradbus.commands.lab.namespaces import Host, set_link

# Of Cyclone DDS alone: only another release of it changes what comes of them.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

LONG_LEASE_S = 60.0  # nobody is lost by mistake
SHORT_LEASE_S = 1.0
VOLATILE = Channel("volatile")
RETAINED = Channel("retained", retained=True)
BOTH = (VOLATILE, RETAINED)
KEPT = 100  # samples that a retained writer keeps

Start = Callable[..., ChannelNode]
_jobs = itertools.count()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of one job, which end with the test."""
    domain, job = new_domain(), f"channels-{os.getpid()}-{next(_jobs)}"
    with ExitStack() as stack:

        def begin(**network: Any) -> ChannelNode:
            given = {"domain": domain, "job": job, "lease_s": LONG_LEASE_S, **network}
            return stack.enter_context(ChannelNode(**given))

        yield begin


def joined(writer: ChannelNode, reader: ChannelNode, *channels: Channel) -> None:
    """Open these channels from one process to the other, and wait until both sides are matched."""
    for channel in channels:
        writer.open_writer(channel, retained_samples=KEPT)
        reader.open_reader(channel)
    for channel in channels:
        writer.wait_matched(channel.name, 1)
        reader.wait_matched(channel.name, 1)


# 1: in order, exactly once, eventually


@pytest.mark.parametrize("channel", [VOLATILE, RETAINED, Channel("bounded", reader_samples=16)], ids=lambda c: c.name)
def test_while_matched_samples_arrive_in_order_and_once_though_one_packet_in_five_is_lost(
    channel: Channel, start: Start
) -> None:
    writer, reader = start(loss_per_mille=200), start(loss_per_mille=200)
    joined(writer, reader, channel)
    writer.write(channel.name, *range(300), until_taken=True)
    writer.write(channel.name, *range(300, 305), size=300_000, until_taken=True)  # in several packets each
    assert reader.wait_for(channel.name, 304, timeout_s=60.0) == list(range(305))
    assert writer.wait_for_acks(channel.name)
    assert reader.take(channel.name) == []


def test_a_pause_that_is_shorter_than_the_lease_shows_as_delay(start: Start) -> None:
    writer, reader = start(), start()
    joined(writer, reader, *BOTH)
    reader.stop()
    for channel in BOTH:
        writer.write(channel.name, *range(50))
        assert not writer.wait_for_acks(channel.name, 0.5)
        assert writer.matched(channel.name) == 1
    reader.go_on()
    for channel in BOTH:
        assert reader.wait_for(channel.name, 49) == list(range(50))


def test_within_one_process_samples_arrive_in_order_and_once(start: Start) -> None:
    node = start()
    node.open_writer(VOLATILE, key="out")
    node.open_reader(VOLATILE, key="in")
    node.wait_matched("out", 1)
    node.write("out", *range(100))
    assert node.wait_for("in", 99) == list(range(100))


# 2: no order between topics and writers


def test_a_sample_may_overtake_one_that_was_written_before_it_to_another_topic(start: Start) -> None:
    writer, reader = start(loss_per_mille=100), start()
    large, small = Channel("large"), Channel("small")
    joined(writer, reader, large, small)

    def overtakes(numbers: range) -> bool:
        writer.write_by_turns(["large", "small"], *numbers, sizes=[400_000, 16])
        came = reader.take_all(["large", "small"])
        for key in ("large", "small"):
            assert [number for one, number in came if one == key] == list(numbers)
        return any(came.index(("small", number)) < came.index(("large", number)) for number in numbers)

    assert any(overtakes(numbers) for numbers in batches()), "rule 2 says too much"


def test_a_sample_may_overtake_one_that_another_writer_of_the_topic_has_written_before_it(start: Start) -> None:
    writer, reader = start(loss_per_mille=100), start()
    for key in ("first", "second"):
        writer.open_writer(VOLATILE, key=key)
    reader.open_reader(VOLATILE)
    reader.wait_matched(VOLATILE.name, 2)
    for key in ("first", "second"):
        writer.wait_matched(key, 1)
    writer.write("first", 1000)
    (_, first), *_ = wait_with_sources(reader, [1000])

    def overtakes(numbers: range) -> bool:
        writer.write_by_turns(["first", "second"], *numbers, sizes=[400_000, 16])
        came = wait_with_sources(reader, [*numbers, *numbers])
        of_first, of_second = (
            {number: place for place, (number, source) in enumerate(came) if (source == first) == is_first}
            for is_first in (True, False)
        )
        assert list(of_first) == list(of_second) == list(numbers)
        return any(of_second[number] < of_first[number] for number in numbers)

    assert any(overtakes(numbers) for numbers in batches()), "rule 2 says too much"


def batches() -> Iterator[range]:
    """Numbers of samples, for what may happen and need not: chance decides which packets are lost."""
    return (range(first, first + 10) for first in range(0, 300, 10))


def wait_with_sources(reader: ChannelNode, numbers: list[int]) -> list[tuple[int, int]]:
    """All samples with their sources, in their order, once these are there."""
    came: list[tuple[int, int]] = []
    until_s = time.monotonic() + 60.0
    while sorted(number for number, _ in came) != sorted(numbers):
        assert time.monotonic() < until_s, came
        came += reader.take_with_sources(VOLATILE.name)
    return came


# 3 and 4: each side matches and loses the other by itself


def test_a_writer_may_lose_a_reader_that_has_not_lost_it_and_only_what_it_writes_then_is_gone(start: Start) -> None:
    # The lease that counts is that of the silent side: the reader is away for longer than its own, not the writer's.
    writer, reader = start(), start(lease_s=SHORT_LEASE_S)
    joined(writer, reader, *BOTH)
    for channel in BOTH:
        writer.write(channel.name, *range(5))
        assert writer.wait_for_acks(channel.name)
    reader.stop()
    for channel in BOTH:
        writer.wait_matched(channel.name, 0)
        assert writer.write(channel.name, *range(5, 10)) == [True] * 5
        assert writer.wait_for_acks(channel.name, 0.0)  # nobody is left that could
    reader.go_on()
    assert [reader.matched(channel.name) for channel in BOTH] == [1, 1]  # it has not noticed anything
    for channel in BOTH:
        writer.wait_matched(channel.name, 1)
        writer.write(channel.name, *range(10, 15))
    assert reader.wait_for("volatile", 14) == [*range(5), *range(10, 15)]
    assert reader.wait_for("retained", 14) == [*range(15)]


def test_a_reader_may_lose_a_writer_that_has_not_lost_it(start: Start) -> None:
    writer, reader = start(lease_s=SHORT_LEASE_S), start()
    joined(writer, reader, *BOTH)
    for channel in BOTH:
        writer.write(channel.name, *range(5))
        assert writer.wait_for_acks(channel.name)
    writer.stop()
    for channel in BOTH:
        reader.wait_matched(channel.name, 0)
    writer.go_on()
    for channel in BOTH:
        assert writer.matched(channel.name) == 1
        writer.write(channel.name, *range(5, 10))  # the reader may or may not have found it again
        reader.wait_matched(channel.name, 1)
        writer.write(channel.name, *range(10, 15))
    volatile, retained = (reader.wait_for(channel.name, 14) for channel in BOTH)
    assert volatile == [*range(5), *range(15 - len(volatile) + 5, 15)]  # a gap at most, where the reader had lost it
    assert without_repetitions(retained) == [*range(15)]


@pytest.mark.netns
def test_a_cut_that_is_longer_than_both_leases_loses_what_is_volatile_and_may_repeat_what_is_retained(
    hosts: tuple[Host, Host], start: Start
) -> None:
    left, right = hosts
    here, there = (
        {
            "profile": "network",
            "interface": one.interface,
            "peers": [one.address, other.address],
            "lease_s": SHORT_LEASE_S,
            "prefix": one.prefix,
        }
        for one, other in ((left, right), (right, left))
    )
    writer, reader = start(**here), start(**there)
    joined(writer, reader, *BOTH)
    for channel in BOTH:
        writer.write(channel.name, *range(5))
        assert writer.wait_for_acks(channel.name)
    set_link(right, up=False)
    for channel in BOTH:
        writer.wait_matched(channel.name, 0)
        reader.wait_matched(channel.name, 0)
        writer.write(channel.name, *range(5, 10))
    set_link(right, up=True)
    for channel in BOTH:
        writer.wait_matched(channel.name, 1)
        reader.wait_matched(channel.name, 1)
        writer.write(channel.name, *range(10, 15))
    volatile, retained = (reader.wait_for(channel.name, 14) for channel in BOTH)
    assert volatile == [*range(5), *range(10, 15)]
    assert without_repetitions(retained) == [*range(15)]
    assert retained[-10:] == [*range(5, 15)]  # repeated ones come before those that are new


def without_repetitions(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


def test_what_a_writer_that_knows_a_reader_writes_arrives_also_if_the_reader_does_not_know_it_yet(start: Start) -> None:
    writer, reader = start(), start()
    for turn in range(10):
        channel = Channel(f"turn-{turn}")
        writer.open_writer(channel)
        reader.open_reader(channel)
        writer.wait_matched(channel.name, 1)  # on this side alone
        writer.write(channel.name, 0, 1)
        assert reader.wait_for(channel.name, 1) == [0, 1]


def test_a_late_reader_gets_the_newest_retained_samples_once_in_order_and_before_those_that_come_later(
    start: Start,
) -> None:
    writer, reader = start(), start()
    newest = Channel("newest", retained=True, keep_last=True)  # as a TrainCmd
    for channel, kept in ((VOLATILE, 1), (RETAINED, 10), (newest, 1)):
        writer.open_writer(channel, retained_samples=kept)
        writer.write(channel.name, *range(30))
        reader.open_reader(channel)
    assert reader.wait_for("newest", 29) == [29]
    for number in range(30, 60):  # while the reader is being matched
        writer.write("retained", number)
    assert reader.wait_for("retained", 59) == [*range(20, 60)]
    writer.wait_matched("volatile", 1)
    reader.wait_matched("volatile", 1)
    writer.write("volatile", 30)
    assert reader.wait_for("volatile", 30) == [30]


# 5 and 6: full readers


def test_a_refused_write_never_arrives_and_one_that_was_taken_always_does_for_all_readers(start: Start) -> None:
    writer, full, quick = start(), start(), start()
    channel, size = Channel("bounded", reader_samples=4), 300_000
    writer.open_writer(channel)
    for reader in (full, quick):
        reader.open_reader(channel)
        reader.wait_matched(channel.name, 1)
    writer.wait_matched(channel.name, 2)
    taken: list[int] = []
    refused: list[int] = []
    at_quick: list[int] = []
    for number in range(200):
        was_taken = writer.write(channel.name, number, size=size) == [True]
        (taken if was_taken else refused).append(number)
        at_quick += quick.take(channel.name)
        if len(refused) == 5:
            break
    assert len(refused) == 5, "a reader that takes nothing must make its writer wait"
    assert 4 <= len(taken) < 200
    last = 1000
    at_full: list[int] = []
    until_s, is_written = time.monotonic() + 60.0, False
    while not (last in at_full and last in at_quick):
        assert time.monotonic() < until_s, (is_written, at_full, at_quick)
        at_full += full.take(channel.name)
        at_quick += quick.take(channel.name)
        is_written = is_written or writer.write(channel.name, last, size=size) == [True]
    assert at_full == at_quick == [*taken, last]


@pytest.mark.parametrize(
    ("channel", "left"),
    [
        (Channel("newest", keep_last=True), [39]),
        (Channel("newest", keep_last=True, retained=True), [39]),
        (Channel("overwrites", reader_samples=8, overwrites=True), [*range(32, 40)]),
    ],
    ids=["keep_last", "keep_last and retained", "overwrites"],
)
def test_a_full_reader_drops_its_oldest_samples_where_its_topic_says_so_and_no_writer_waits(
    channel: Channel, left: list[int], start: Start
) -> None:
    writer, reader = start(), start()
    joined(writer, reader, channel)
    assert writer.write(channel.name, *range(40)) == [True] * 40
    assert writer.wait_for_acks(channel.name)
    assert reader.take(channel.name) == left


def test_a_full_reader_holds_up_all_that_its_process_receives_until_it_has_room(start: Start) -> None:
    writer, other, reader = start(), start(), start()
    full, same, another = Channel("full", reader_samples=4), Channel("same"), Channel("another")
    joined(writer, reader, full, same)
    joined(other, reader, another)
    joined(reader, other, Channel("back"))
    assert writer.write("full", *range(10)) == [True] * 10  # DDS of the reader waits at the fifth
    writer.write("same", 0)
    assert reader.take_all(["same"]) == []
    reader.write("back", 0)
    assert other.wait_for("back", 0) == [0]  # it sends, but learns of no acknowledgement
    assert not reader.wait_for_acks("back", 0.5)
    assert reader.wait_for("full", 9) == [*range(10)]
    assert reader.wait_for("same", 0) == [0]
    assert reader.wait_for_acks("back")
    other.write("another", 0)
    assert reader.wait_for("another", 0) == [0]


def test_a_full_reader_may_lose_a_writer_that_sends_and_gets_samples_of_a_volatile_topic_again_or_never(
    start: Start,
) -> None:
    writer, reader = start(lease_s=SHORT_LEASE_S), start()
    irregular = 0
    for turn in range(10):
        full = Channel(f"full-{turn}", reader_samples=4)
        joined(writer, reader, full)
        writer.write(full.name, *range(10))
        reader.wait_matched(full.name, 0)  # it receives no sign of life of the writer
        assert writer.matched(full.name) == 1  # which knows it all the time
        reader.wait_matched(full.name, 1)
        came = reader.take(full.name)
        writer.write(full.name, 10)
        came += reader.wait_for(full.name, 10)
        assert came[:4] == [0, 1, 2, 3]
        assert set(came) <= {*range(11)}
        irregular += came != [*range(11)]
        if irregular:
            break
    assert irregular, "neither loss nor repetition in ten turns: rule 4 says too much"


# 7: sides that end


@pytest.mark.netns
def test_what_a_writer_is_deleted_with_before_it_was_acknowledged_is_lost_and_a_cut_by_itself_is_not(
    hosts: tuple[Host, Host], start: Start
) -> None:
    left, right = hosts
    here, there = (
        {"profile": "network", "interface": one.interface, "peers": [one.address, other.address], "prefix": one.prefix}
        for one, other in ((left, right), (right, left))
    )
    writer, reader = start(**here), start(**there)
    joined(writer, reader, *BOTH)
    for channel in BOTH:
        writer.write(channel.name, *range(5))
        assert writer.wait_for_acks(channel.name)
    set_link(right, up=False)
    for channel in BOTH:
        writer.write(channel.name, *range(5, 305), size=1000)
    writer.delete(VOLATILE.name)  # which waits for a second
    set_link(right, up=True)
    # The writer's own cut is over: what the other one, which is still there, has written comes late.
    assert reader.wait_for(RETAINED.name, 304) == [*range(305)]
    reader.wait_matched(VOLATILE.name, 0)
    came = reader.take(VOLATILE.name)
    assert came == [*range(len(came))]  # the kernel may have kept some packets
    assert 5 <= len(came) < 305


def test_a_reader_that_is_deleted_is_reported_at_once_and_a_new_one_gets_nothing_of_the_meantime(start: Start) -> None:
    writer, reader = start(), start()
    joined(writer, reader, VOLATILE)
    reader.delete(VOLATILE.name)
    writer.wait_matched(VOLATILE.name, 0)  # long before a lease is over
    assert writer.write(VOLATILE.name, 0, 1) == [True, True]
    reader.open_reader(VOLATILE)
    writer.wait_matched(VOLATILE.name, 1)
    writer.write(VOLATILE.name, 2)
    assert reader.wait_for(VOLATILE.name, 2) == [2]


def test_what_a_reader_has_when_its_writer_is_deleted_or_killed_can_still_be_taken(start: Start) -> None:
    reader = start()
    for end in ("delete", "kill"):
        writer = start(lease_s=SHORT_LEASE_S)
        channel = Channel(end)
        joined(writer, reader, channel)
        writer.write(channel.name, *range(10))
        assert writer.wait_for_acks(channel.name)
        writer.delete(channel.name) if end == "delete" else writer.kill()
        reader.wait_matched(channel.name, 0)
        assert reader.take(channel.name) == [*range(10)]


def test_writes_to_a_killed_reader_are_taken_then_refused_and_taken_again_once_its_lease_is_over(start: Start) -> None:
    writer, dead, alive = start(), start(lease_s=5.0), start()
    channel = Channel("bounded", reader_samples=16)
    writer.open_writer(channel)
    for reader in (dead, alive):
        reader.open_reader(channel)
        reader.wait_matched(channel.name, 1)
    writer.wait_matched(channel.name, 2)
    dead.kill()
    outcomes: list[bool] = []
    came: list[int] = []
    while writer.matched(channel.name) == 2 and len(outcomes) < 10_000:
        outcomes += writer.write(channel.name, len(outcomes), size=300_000)
        came += alive.take(channel.name)
    assert outcomes[0]
    assert not all(outcomes)  # the living reader starves with it
    writer.wait_matched(channel.name, 1)
    last, until_s = len(outcomes), time.monotonic() + 60.0
    while writer.write(channel.name, last, size=300_000) == [False]:
        assert time.monotonic() < until_s, came
        came += alive.take(channel.name)
    came += alive.wait_for(channel.name, last)
    assert came == [*(number for number, taken in enumerate(outcomes) if taken), last]


def test_a_process_that_is_started_again_is_another_source_and_gets_nothing_that_was_for_the_one_before(
    start: Start,
) -> None:
    stays, first = start(), start(lease_s=SHORT_LEASE_S)
    joined(first, stays, VOLATILE)
    there = Channel("there")
    joined(stays, first, there)
    first.write(VOLATILE.name, 1)
    ((_, source),) = wait_with_sources(stays, [1])
    first.kill()
    stays.write(there.name, *range(10))  # for a process that is gone, as nobody knows yet
    second = start()
    second.open_reader(there)
    second.open_writer(VOLATILE)
    second.wait_matched(there.name, 1)
    second.wait_matched(VOLATILE.name, 1)
    second.write(VOLATILE.name, 2)
    ((number, other),) = wait_with_sources(stays, [2])
    assert number == 2
    assert other != source
    stays.wait_matched(there.name, 1)  # the lease of the first one is over
    stays.write(there.name, 99)
    came = second.wait_for(there.name, 99)
    assert came == [99]
