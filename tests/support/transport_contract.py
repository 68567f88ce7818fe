"""The clauses of the contract of a transport (gradbus.runtime.transport.api), a function each.

A clause asserts one promise and takes as little else for granted as it can, so that a transport which breaks one
promise fails one clause: :mod:`transport_mutants` checks that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from channel_node import Channel
from transport_scenes import PATIENCE_S, SHORT_LEASE_S, Scene, take, write

from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.api import PEER_ID_BYTES, WOKEN, Endpoint, Inlet, Outlet, Transport
from gradbus.runtime.transport.channels import CHANNELS, WINDOW_BYTES
from gradbus.runtime.wire.messages import ClientUpdate

VOLATILE = Channel("volatile")
RETAINED = Channel("retained", retained=True)
BOUNDED = Channel("bounded", reader_samples=4)
LATEST = Channel("latest", keep_last=True)
OVERWRITES = Channel("overwrites", reader_samples=4, overwrites=True)
QUIET_S = 0.5  # in which what must not arrive would have arrived
MANY = 2000  # samples: more than any transport keeps
FULL_BYTES = 1 << 20  # of a sample: a window takes some
MORE_THAN_A_WINDOW = 3 * WINDOW_BYTES // FULL_BYTES
LARGE_BYTES = 8 << 20
WAIT_S = 5.0
CHILD_S = 20.0


@dataclass(frozen=True)
class Clause:
    """One promise. ``check`` raises AssertionError where it is not kept.

    Attributes:
        needs_threads: it has several threads, or processes, and so cannot be checked in virtual time.
        needs_remote: it has another process.
    """

    name: str
    check: Callable[[Scene], None]
    needs_threads: bool = False
    needs_remote: bool = False

    def __str__(self) -> str:
        return self.name


CLAUSES: list[Clause] = []


def clause(
    *, needs_threads: bool = False, needs_remote: bool = False
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Add a function to :data:`CLAUSES`, under its name."""

    def add(check: Callable[[Scene], None]) -> Callable[[Scene], None]:
        CLAUSES.append(Clause(check.__name__, check, needs_threads, needs_remote))
        return check

    return add


def pair(scene: Scene, channel: Channel, *, retained_samples: int = 1) -> tuple[Outlet, Inlet]:
    """Return an outlet and an inlet, of two transports, that know each other."""
    outlet = scene.open().outlet(channel.opened(), retained_samples=retained_samples)
    inlet = scene.open().inlet(channel.opened())
    matched(scene, outlet, inlet)
    return outlet, inlet


def matched(scene: Scene, *endpoints: Endpoint) -> None:
    """Wait until each of them has a peer."""
    scene.until(lambda: all(one.peers() for one in endpoints), "the endpoints find each other")


def received(scene: Scene, inlet: Inlet, count: int) -> list[int]:
    """Take until so many different samples are there, and return all."""
    found: list[int] = []
    scene.until(lambda: found.extend(take(inlet)) or len(set(found)) >= count, f"{count} samples arrive")
    return found


def write_all(scene: Scene, outlet: Outlet, *numbers: int) -> None:
    """Write samples, each once the one before was received."""
    for number in numbers:
        assert write(outlet, number) == [True]
        scene.until(lambda: outlet.is_acknowledged, f"sample {number} is acknowledged")


def fill(scene: Scene, outlet: Outlet, most: int = 300) -> tuple[int, bool]:
    """Write until a sample is refused, or so many were accepted. Returns how many were, and whether one was refused.

    That one is refused at all is a clause of its own; other clauses say nothing where it is not kept.
    """
    accepted, is_quiet = 0, False
    while accepted < most:
        if write(outlet, accepted, size=FULL_BYTES) == [True]:
            accepted, is_quiet = accepted + 1, False
        elif is_quiet:
            return accepted, True
        else:
            scene.pass_time(0.05)  # what is on its way may find room
            is_quiet = True
    return most, False


# Samples


@clause()
def samples_arrive_in_the_order_of_their_writes(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    assert all(write(outlet, *range(40)))
    assert list(dict.fromkeys(received(scene, inlet, 40))) == list(range(40))


@clause()
def each_sample_arrives_once(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    assert all(write(outlet, *range(20)))
    found = received(scene, inlet, 20)
    scene.pass_time(QUIET_S)
    assert sorted(found + take(inlet)) == list(range(20))


@clause()
def the_fields_of_a_sample_arrive_with_its_octets(scene: Scene) -> None:
    outlet, inlet = (
        scene.open().outlet(CHANNELS[ClientUpdate]),
        scene.open().inlet(CHANNELS[ClientUpdate]),
    )
    matched(scene, outlet, inlet)
    assert outlet.write((3, 5, 1 << 40), (b"ab", memoryview(b"cd"), b"e"))
    raw: list[Any] = []
    scene.until(lambda: raw.extend(inlet.take(1)) or raw, "the sample arrives")
    sample = inlet.decode(raw[0][0])
    assert (sample.client_id, sample.round_id, sample.num_samples, bytes(sample.data)) == (3, 5, 1 << 40, b"abcde")


@clause()
def a_large_sample_in_parts_arrives_whole(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    part = bytes(range(256)) * (LARGE_BYTES // 1024)
    assert outlet.write((), (part, memoryview(part), part, part))
    raw: list[Any] = []
    scene.until(lambda: raw.extend(inlet.take(1)) or raw, "the sample arrives")
    assert bytes(inlet.decode(raw[0][0]).data) == part * 4


@clause()
def the_parts_of_a_sample_are_read_before_its_write_returns(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    memory = bytearray(b"before")
    assert outlet.write((), (memory,))
    memory[:] = b"later!"
    raw: list[Any] = []
    scene.until(lambda: raw.extend(inlet.take(1)) or raw, "the sample arrives")
    assert bytes(inlet.decode(raw[0][0]).data) == b"before"


@clause()
def a_take_returns_no_more_samples_than_it_is_asked_for(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    write_all(scene, outlet, *range(5))
    scene.pass_time(QUIET_S)
    taken = [len(inlet.take(2)) for _ in range(4)]
    assert max(taken) == 2


@clause()
def the_sender_of_a_sample_is_a_peer_of_its_inlet(scene: Scene) -> None:
    channel, inlet = VOLATILE.opened(), scene.open().inlet(VOLATILE.opened())
    outlets = [scene.open().outlet(channel) for _ in range(2)]
    matched(scene, *outlets)
    scene.until(lambda: len(inlet.peers()) == 2, "both outlets are found")
    for number, outlet in enumerate(outlets):
        write_all(scene, outlet, number)
    taken: list[Any] = []
    scene.until(lambda: taken.extend(inlet.take(2)) or len(taken) == 2, "both samples arrive")
    assert {peer for _, peer in taken} == set(inlet.peers())


# Channels


@clause()
def a_late_inlet_of_a_retained_channel_gets_the_newest_samples(scene: Scene) -> None:
    outlet = scene.open().outlet(RETAINED.opened(), retained_samples=3)
    assert all(write(outlet, *range(10)))
    inlet = scene.open().inlet(RETAINED.opened())
    assert sorted(received(scene, inlet, 3)) == [7, 8, 9]


@clause()
def an_outlet_that_retains_nothing_still_reaches_late_inlets(scene: Scene) -> None:
    outlet = scene.open().outlet(RETAINED.opened(), retained_samples=0)
    assert all(write(outlet, *range(10)))
    inlet = scene.open().inlet(RETAINED.opened())
    matched(scene, outlet, inlet)
    assert write(outlet, 10) == [True]
    found: list[int] = []
    scene.until(lambda: found.extend(take(inlet)) or 10 in found, "what is written later arrives")
    assert set(found) <= {9, 10}  # DDS keeps one


@clause()
def a_late_inlet_of_a_volatile_channel_gets_what_is_written_from_then_on(scene: Scene) -> None:
    outlet = scene.open().outlet(VOLATILE.opened(), retained_samples=3)
    assert all(write(outlet, *range(10)))
    inlet = scene.open().inlet(VOLATILE.opened())
    matched(scene, outlet, inlet)
    assert write(outlet, 10) == [True]
    found = received(scene, inlet, 1)
    scene.pass_time(QUIET_S)
    assert set(found + take(inlet)) == {10}


@clause()
def an_inlet_that_keeps_the_last_sample_has_that_one_only(scene: Scene) -> None:
    outlet, inlet = pair(scene, LATEST)
    write_all(scene, outlet, *range(5))
    scene.pass_time(QUIET_S)
    assert received(scene, inlet, 1) == [4]


@clause()
def a_full_inlet_that_overwrites_drops_its_oldest_samples(scene: Scene) -> None:
    outlet, inlet = pair(scene, OVERWRITES)
    write_all(scene, outlet, *range(20))
    scene.pass_time(QUIET_S)
    assert received(scene, inlet, 4) == [16, 17, 18, 19]


@clause()
def a_transport_that_ignores_itself_gets_nothing_of_its_own(scene: Scene) -> None:
    channel, other = replace(VOLATILE.opened(), ignore_local=True), scene.open()
    transport = scene.open()
    outlet, own, inlet = transport.outlet(channel), transport.inlet(channel), other.inlet(channel)
    matched(scene, outlet, inlet)
    scene.pass_time(QUIET_S)
    assert write(outlet, 1) == [True]
    assert received(scene, inlet, 1) == [1]
    scene.pass_time(QUIET_S)
    assert take(own) == []


@clause()
def transports_of_two_jobs_do_not_see_each_other(scene: Scene) -> None:
    outlet, inlet = scene.open("one").outlet(VOLATILE.opened()), scene.open("two").inlet(VOLATILE.opened())
    of_one, of_two = scene.open("one").inlet(VOLATILE.opened()), scene.open("two").outlet(VOLATILE.opened())
    matched(scene, outlet, inlet, of_one, of_two)
    scene.pass_time(QUIET_S)
    assert (len(outlet.peers()), len(inlet.peers())) == (1, 1)
    write_all(scene, outlet, 1)
    write_all(scene, of_two, 2)
    assert (received(scene, of_one, 1), received(scene, inlet, 1)) == ([1], [2])


# Back-pressure


@clause()
def an_inlet_that_takes_nothing_holds_a_bounded_number_of_samples(scene: Scene) -> None:
    outlet, _ = pair(scene, BOUNDED)
    accepted, is_refused = fill(scene, outlet)
    assert is_refused
    assert accepted >= BOUNDED.reader_samples


@clause()
def a_write_for_a_full_inlet_waits_before_it_is_refused(scene: Scene) -> None:
    outlet, _ = pair(scene, BOUNDED)
    if fill(scene, outlet)[1]:
        began_s = scene.now_s()
        assert write(outlet, MANY) == [False]
        assert scene.now_s() - began_s >= 0.9 * BOUNDED.block_s


@clause()
def no_accepted_sample_is_lost_where_an_inlet_is_full(scene: Scene) -> None:
    outlet, inlet = pair(scene, BOUNDED)
    accepted, _ = fill(scene, outlet)
    assert sorted(received(scene, inlet, accepted)) == list(range(accepted))


@clause()
def an_outlet_knows_since_when_it_is_refused(scene: Scene) -> None:
    outlet, inlet = pair(scene, BOUNDED)
    assert outlet.refused_since_s == 0.0
    if not fill(scene, outlet)[1]:
        return
    since_s = outlet.refused_since_s
    assert scene.now_s() - PATIENCE_S <= since_s <= scene.now_s()
    assert write(outlet, MANY) == [False]
    assert outlet.refused_since_s == since_s
    scene.pass_time(0.1)
    assert outlet.refused_since_s == since_s
    scene.until(lambda: (take(inlet), *write(outlet, MANY))[1], "a sample is accepted again")
    assert outlet.refused_since_s == 0.0


@clause()
def an_inlet_that_is_not_reliable_holds_up_no_outlet(scene: Scene) -> None:
    channel = BOUNDED.opened()
    inlet = scene.open().inlet(replace(channel, reliable=False))
    outlet = scene.open().outlet(channel)
    matched(scene, outlet, inlet)
    assert all(write(outlet, *range(MORE_THAN_A_WINDOW), size=FULL_BYTES))
    retaining = scene.open().outlet(replace(channel, retained=True), retained_samples=MORE_THAN_A_WINDOW)
    assert all(write(retaining, *range(MORE_THAN_A_WINDOW), size=FULL_BYTES))
    late = scene.open().inlet(replace(channel, retained=True, reliable=False))
    matched(scene, retaining, late)
    assert all(write(retaining, 0, 1, size=FULL_BYTES))


# Acknowledgements, pauses and ends


@clause(needs_remote=True)
def a_sample_is_acknowledged_once_it_has_been_received(scene: Scene) -> None:
    remote, outlet = scene.remote(), scene.open().outlet(VOLATILE.opened())
    remote.open_reader(VOLATILE)
    matched(scene, outlet)
    write_all(scene, outlet, 1)
    remote.stop()
    assert write(outlet, 2) == [True]
    assert (outlet.is_acknowledged, outlet.wait_for_acks(0.2)) == (False, False)
    remote.go_on()
    assert outlet.wait_for_acks(PATIENCE_S)


@clause(needs_remote=True)
def what_is_written_during_a_short_silence_arrives_after_it(scene: Scene) -> None:
    remote, outlet = scene.remote(), scene.open().outlet(VOLATILE.opened())
    remote.open_reader(VOLATILE)
    matched(scene, outlet)
    write_all(scene, outlet, 0)
    remote.stop()
    assert all(write(outlet, *range(1, 10)))
    scene.pass_time(QUIET_S)
    remote.go_on()
    found: list[int] = []
    scene.until(lambda: found.extend(remote.take(VOLATILE.name)) or len(set(found)) >= 10, "all samples arrive")
    assert sorted(set(found)) == list(range(10))


@clause(needs_remote=True)
def a_process_that_ends_without_a_goodbye_is_lost_after_its_lease(scene: Scene) -> None:
    remote, transport = scene.remote(SHORT_LEASE_S), scene.open()
    inlet, outlet = transport.inlet(RETAINED.opened()), transport.outlet(VOLATILE.opened())
    remote.open_writer(RETAINED)
    remote.open_reader(VOLATILE)
    matched(scene, inlet, outlet)
    remote.kill()
    scene.until(lambda: not inlet.peers() and not outlet.peers(), "the process is lost")
    assert all(write(outlet, *range(MORE_THAN_A_WINDOW), size=FULL_BYTES))  # for nobody


@clause(needs_remote=True)
def a_process_that_was_lost_is_found_again_and_gets_what_is_retained(scene: Scene) -> None:
    remote, outlet = scene.remote(SHORT_LEASE_S), scene.open().outlet(RETAINED.opened())
    remote.open_reader(RETAINED)
    matched(scene, outlet)
    write_all(scene, outlet, 1)
    remote.stop()
    scene.until(lambda: not outlet.peers(), "the process is lost")
    assert write(outlet, 2) == [True]
    remote.go_on()
    found: list[int] = []
    scene.until(lambda: found.extend(remote.take(RETAINED.name)) or 2 in found, "the process gets what it has missed")


@clause()
def an_endpoint_that_is_closed_is_no_peer_any_more(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    others = scene.open().inlet(VOLATILE.opened()), scene.open().outlet(VOLATILE.opened())
    scene.until(lambda: len(outlet.peers()) == 2 and len(inlet.peers()) == 2, "all find each other")
    for one in others:
        one.close()
    scene.until(lambda: len(outlet.peers()) == 1 and len(inlet.peers()) == 1, "the closed ones are lost")


@clause()
def an_outlet_counts_the_inlets_that_are_there(scene: Scene) -> None:
    outlet, _ = pair(scene, VOLATILE)
    other = scene.open().inlet(VOLATILE.opened())
    counted = counts(scene, outlet, 2)
    other.close()
    if counted and comes_to_be(scene, lambda: len(outlet.peers()) == 1):  # else other clauses are broken
        assert counts(scene, outlet, 1)


@clause()
def an_inlet_counts_the_outlets_that_are_there(scene: Scene) -> None:
    _, inlet = pair(scene, VOLATILE)
    other = scene.open().outlet(VOLATILE.opened())
    counted = counts(scene, inlet, 2)
    other.close()
    if counted and comes_to_be(scene, lambda: len(inlet.peers()) == 1):  # else other clauses are broken
        assert counts(scene, inlet, 1)


@clause()
def a_transport_that_is_closed_leaves_with_all_its_endpoints(scene: Scene) -> None:
    transport, other = scene.open(), scene.open()
    endpoints: list[Endpoint] = []
    for channel in (VOLATILE, RETAINED):
        transport.outlet(channel.opened())
        transport.inlet(channel.opened())
        endpoints += [other.inlet(channel.opened()), other.outlet(channel.opened())]
    scene.until(lambda: all(len(one.peers()) == 2 for one in endpoints), "all find each other and themselves")
    transport.close()
    transport.close()  # the second call does nothing
    scene.until(lambda: all(len(one.peers()) == 1 for one in endpoints), "the transport is lost")


@clause()
def a_closed_outlet_refuses_writes_with_an_error(scene: Scene) -> None:
    outlet, _ = pair(scene, VOLATILE)
    assert not outlet.is_writing
    outlet.close()
    with pytest.raises(BusClosed):
        write(outlet, 1)


# Resending


def after_a_cut(scene: Scene) -> list[int]:
    """Return what a remote process has received of samples 0 to 11 when its link was cut during 1 to 9. That all of
    them arrive is a clause of its own."""
    remote, outlet = scene.remote(), scene.open().outlet(VOLATILE.opened())
    remote.open_reader(VOLATILE)
    matched(scene, outlet)
    write_all(scene, outlet, 0)
    remote.cut_off()
    assert all(write(outlet, *range(1, 10)))
    scene.pass_time(QUIET_S)
    remote.reconnect()
    assert all(write(outlet, 10, 11))
    found = collected(scene, lambda: remote.take(VOLATILE.name), 12)
    scene.pass_time(QUIET_S)
    return found + remote.take(VOLATILE.name)


def collected(scene: Scene, take_some: Callable[[], list[int]], count: int) -> list[int]:
    """Take until so many different samples are there, or none comes any more, and return all."""
    found: list[int] = []
    until_s = scene.now_s() + PATIENCE_S / 2
    scene.until(
        lambda: found.extend(take_some()) or len(set(found)) >= count or scene.now_s() >= until_s, "the time is over"
    )
    return found


@clause(needs_remote=True)
def what_is_written_while_a_link_is_cut_arrives_after_it(scene: Scene) -> None:
    assert sorted(set(after_a_cut(scene))) == list(range(12))


@clause(needs_remote=True)
def nothing_arrives_twice_after_a_cut(scene: Scene) -> None:
    found = after_a_cut(scene)
    assert len(found) == len(set(found))


@clause(needs_remote=True)
def what_is_written_during_a_cut_arrives_before_what_is_written_after_it(scene: Scene) -> None:
    found = list(dict.fromkeys(after_a_cut(scene)))
    assert found == sorted(found)


def over_a_lossy_link(scene: Scene) -> list[int]:
    """Return what arrives of 40 samples from a process that loses a part of its packets."""
    remote, inlet = scene.remote(loss=0.3), scene.open().inlet(VOLATILE.opened())
    remote.open_writer(VOLATILE)
    scene.until(lambda: inlet.peers() and remote.matched(VOLATILE.name), "both sides know each other")
    assert all(remote.write(VOLATILE.name, *range(40)))
    return collected(scene, lambda: take(inlet), 40)


@clause(needs_remote=True)
def what_is_lost_on_the_way_is_sent_again(scene: Scene) -> None:
    assert sorted(set(over_a_lossy_link(scene))) == list(range(40))


@clause(needs_remote=True)
def no_sample_is_handed_over_before_one_that_was_lost(scene: Scene) -> None:
    found = list(dict.fromkeys(over_a_lossy_link(scene)))
    assert found == list(range(len(found)))


@clause(needs_remote=True)
def a_write_is_refused_once_the_window_of_an_inlet_out_of_reach_is_full(scene: Scene) -> None:
    remote, outlet = scene.remote(), scene.open().outlet(VOLATILE.opened())
    remote.open_reader(VOLATILE)
    matched(scene, outlet)
    write_all(scene, outlet, 0)
    remote.cut_off()
    accepted = 0
    while accepted < MORE_THAN_A_WINDOW and write(outlet, accepted, size=FULL_BYTES) == [True]:
        accepted += 1
    assert 0 < accepted <= WINDOW_BYTES // FULL_BYTES + 1


# The waiter


def news(scene: Scene, transport: Transport, *attached: tuple[Any, int]) -> Callable[[], list[int]]:
    """Return a function that asks a new waiter once what has happened."""
    waiter = transport.waiter()
    for trigger, number in attached:
        waiter.attach(trigger, number)
    return lambda: waiter.wait(0.01)


@clause()
def a_wait_ends_with_the_number_of_an_inlet_that_has_samples(scene: Scene) -> None:
    first, second = Channel("first"), Channel("second")
    transport, other = scene.open(), scene.open()
    inlets = [transport.inlet(one.opened()) for one in (first, second)]
    outlets = [other.outlet(one.opened()) for one in (first, second)]
    matched(scene, *inlets, *outlets)
    ask = news(scene, transport, (inlets[0].arrivals, 1), (inlets[1].arrivals, 2))
    assert ask() == []
    assert write(outlets[1], 7) == [True]
    scene.until(lambda: ask() == [2], "the wait ends with the number")
    assert take(inlets[1]) == [7]
    assert ask() == []


@clause()
def a_wait_ends_with_the_number_of_an_endpoint_whose_peers_have_changed(scene: Scene) -> None:
    transport, other = scene.open(), scene.open()
    outlet, inlet = transport.outlet(VOLATILE.opened()), transport.inlet(RETAINED.opened())
    ask = news(scene, transport, (outlet.changes, 3), (inlet.changes, 5))
    other.inlet(VOLATILE.opened())
    scene.until(lambda: ask() == [3], "the change is reported")
    scene.until(lambda: outlet.refresh() and outlet.matched == 1, "the peer is counted")
    assert (ask(), outlet.refresh(), inlet.matched) == ([], False, 0)
    other.outlet(RETAINED.opened())
    scene.until(lambda: ask() == [5], "the change is reported")
    scene.until(lambda: inlet.refresh() and inlet.matched == 1, "the peer is counted")


@clause()
def what_is_detached_ends_no_wait(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    transport = scene.open()
    own = transport.inlet(VOLATILE.opened())
    scene.until(lambda: len(outlet.peers()) == 2 and own.peers(), "the inlet is found")
    waiter = transport.waiter()
    waiter.attach(own.arrivals, 1)
    waiter.detach(own.arrivals)
    write_all(scene, outlet, 1)
    assert received(scene, inlet, 1) == [1]
    scene.pass_time(QUIET_S)
    assert waiter.wait(0.05) == []
    assert set(received(scene, own, 1)) == {1}


@clause(needs_threads=True)
def any_thread_may_wake_a_wait(scene: Scene) -> None:
    waiter = scene.open().waiter()
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(waiter.wait(WAIT_S)))
    waiting.start()
    waiter.wake()
    waiting.join(PATIENCE_S)
    assert found == [[WOKEN]]
    assert waiter.wait(0.01) == []  # it has been reported


@clause(needs_threads=True)
def many_threads_may_write_to_one_outlet(scene: Scene) -> None:
    outlet, inlet = pair(scene, VOLATILE)
    threads = [threading.Thread(target=write, args=(outlet, *range(start, start + 10))) for start in (0, 10, 20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(PATIENCE_S)
    assert sorted(received(scene, inlet, 30)) == list(range(30))


@clause(needs_threads=True)
def an_outlet_can_be_closed_while_a_thread_waits_in_a_write(scene: Scene) -> None:
    channel = replace(BOUNDED.opened(), block_s=scene.stall_s)
    outlet, inlet = scene.open().outlet(channel), scene.open().inlet(channel)
    matched(scene, outlet, inlet)
    if not fill(scene, outlet)[1]:
        return
    ends: list[object] = []

    def write_one() -> None:
        try:
            ends.append(write(outlet, MANY))
        except BusClosed as error:
            ends.append(error)

    writing = threading.Thread(target=write_one)
    writing.start()
    scene.until(lambda: outlet.is_writing or ends, "the write begins")
    outlet.close()
    writing.join(PATIENCE_S)
    assert not outlet.is_writing
    assert ends == [[False]] or isinstance(ends[0], BusClosed)


@clause(needs_threads=True)
def a_child_by_fork_may_close_what_it_has_inherited_and_its_parent_goes_on(scene: Scene) -> None:
    transport, other = scene.open(), scene.open()
    outlet, inlet, waiter = transport.outlet(VOLATILE.opened()), other.inlet(VOLATILE.opened()), transport.waiter()
    matched(scene, outlet, inlet)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(int(CHILD_S))  # the end of a child that hangs
            waiter.wake()
            transport.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    write_all(scene, outlet, 1)
    assert received(scene, inlet, 1) == [1]


# Octets in place, and identity


class Made:
    """An envelope whose octets are made of a number, and counts how often."""

    header = b"a header"

    def __init__(self, size: int) -> None:
        self.size = len(self.header) + size
        self.whole = self.header + bytes(range(256)) * (size // 256)
        self.times = 0

    def seal_into(self, room: memoryview) -> None:
        self.times += 1
        room[:] = self.whole[len(self.header) :]

    def octets(self) -> bytes:
        self.times += 1
        return self.whole


@clause()
def octets_that_are_made_in_a_write_arrive_whole(scene: Scene) -> None:
    outlet, inlet = scene.open().outlet(CHANNELS[ClientUpdate]), scene.open().inlet(CHANNELS[ClientUpdate])
    matched(scene, outlet, inlet)
    for size in (256, 1 << 20):
        envelope = Made(size)
        assert outlet.write_made((3, 5, 7), envelope)
        raw: list[Any] = []
        scene.until(lambda raw=raw: raw.extend(inlet.take(1)) or raw, "the sample arrives")
        sample = inlet.decode(raw[0][0])
        assert (sample.client_id, sample.round_id, sample.num_samples) == (3, 5, 7)
        assert bytes(sample.data) == envelope.whole
        assert envelope.times == 1


@clause(needs_threads=True)
def octets_that_are_made_for_a_full_inlet_are_refused(scene: Scene) -> None:
    outlet, _ = pair(scene, BOUNDED)
    _, is_full = fill(scene, outlet)
    if is_full:  # else a clause of its own is broken
        assert not outlet.write_made((), Made(FULL_BYTES))


@clause()
def the_octets_of_a_sample_can_be_had_alone(scene: Scene) -> None:
    outlet, inlet = scene.open().outlet(CHANNELS[ClientUpdate]), scene.open().inlet(CHANNELS[ClientUpdate])
    matched(scene, outlet, inlet)
    assert outlet.write((3, 5, 7), (b"ab", b"cde"))
    raw: list[Any] = []
    scene.until(lambda: raw.extend(inlet.take(1)) or raw, "the sample arrives")
    assert bytes(inlet.octets(raw[0][0])) == b"abcde"


@clause()
def transports_of_a_job_have_names_of_their_own(scene: Scene) -> None:
    names = [scene.open().own for _ in range(3)]
    assert len(set(names)) == 3
    assert {len(name) for name in names} == {PEER_ID_BYTES}


@clause()
def an_outlet_tells_whose_its_inlets_are(scene: Scene) -> None:
    outlet, transports = scene.open().outlet(VOLATILE.opened()), [scene.open(), scene.open()]
    inlets = [one.inlet(VOLATILE.opened()) for one in transports]
    for owners in (transports, transports[1:]):
        if not counts(scene, outlet, len(owners)):
            return  # that it counts them is a clause of its own
        receivers = outlet.receivers()
        assert receivers is None or sorted(receivers) == sorted(one.own for one in owners)
        inlets[0].close()


def counts(scene: Scene, endpoint: Endpoint, peers: int) -> bool:
    """Return whether an endpoint comes to count exactly so many peers."""
    return comes_to_be(scene, lambda: endpoint.refresh() is not None and endpoint.matched == peers)


def comes_to_be(scene: Scene, condition: Callable[[], bool]) -> bool:
    """Return whether a condition holds within some seconds."""
    for _ in range(100):
        if condition():
            return True
        scene.pass_time(0.03)
    return False
