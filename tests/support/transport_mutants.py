"""Faults that are planted in the transport in memory, one for each clause of its contract, which alone notices it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.api import PEER_ID_BYTES, Envelope
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.flags import FlagWaiter
from gradbus.runtime.transport.kept_samples import KeptSamples
from gradbus.runtime.transport.memory import network
from gradbus.runtime.transport.memory.delivery import SampleDelivery
from gradbus.runtime.transport.memory.endpoints import MemoryInlet, MemoryOutlet, MemoryPlace
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import EndpointPair
from gradbus.runtime.transport.memory.transport import MemoryTransport

Plant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Plant] = {}
"""By the name of the clause that fails."""


def breaks(clause: str) -> Callable[[Plant], Plant]:
    """Add a fault to :data:`MUTANTS`."""

    def add(plant: Plant) -> Plant:
        assert clause not in MUTANTS
        MUTANTS[clause] = plant
        return plant

    return add


# Samples


def _is_impatient(patch: pytest.MonkeyPatch, wait_s: float, is_meant: Callable[[EndpointPair], bool]) -> None:
    """Have inlets hand over what is behind a gap after so long, and what has filled it later."""
    arrive, put, handed = SampleDelivery._arrive, MemoryInlet.put, list[Any]()  # noqa: SLF001 - the place of the fault

    def put_once(self: MemoryInlet, sample: Any, handle: int) -> None:
        if all(sample is not one for one in handed):
            put(self, sample, handle)

    def go_on(pair: EndpointPair, wanted: int) -> None:
        if pair.reader_knows and pair.wanted == wanted and wanted not in pair.early:
            for number in sorted(pair.early):
                pair.reader.put(pair.early[number], pair.handle)
                handed.append(pair.early[number])

    def arrive_and_go_on(self: SampleDelivery, pair: EndpointPair, *sample: Any) -> None:
        arrive(self, pair, *sample)
        if is_meant(pair):
            self._links.at(wait_s, go_on, pair, pair.wanted)

    patch.setattr(MemoryInlet, "put", put_once)
    patch.setattr(SampleDelivery, "_arrive", arrive_and_go_on)


@breaks("samples_arrive_in_the_order_of_their_writes")
def within_a_machine_samples_are_handed_over_as_they_come(patch: pytest.MonkeyPatch) -> None:
    _is_impatient(patch, 0.0, lambda pair: pair.source.machine == pair.target.machine)


@breaks("each_sample_arrives_once")
def a_sample_comes_again_after_a_while(patch: pytest.MonkeyPatch) -> None:
    put = MemoryInlet.put

    def put_twice(self: MemoryInlet, sample: Any, handle: int) -> None:
        put(self, sample, handle)
        if self.channel.name == "test/volatile" and self.node.machine == 0:
            schedule = self.place.network.schedule
            schedule.at(schedule.now_s() + 0.3, put, self, sample, handle)

    patch.setattr(MemoryInlet, "put", put_twice)


def _writes(patch: pytest.MonkeyPatch, change: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]) -> None:
    """Change the fields and parts of each sample."""
    write = MemoryOutlet.write
    patch.setattr(MemoryOutlet, "write", lambda self, fields, parts: write(self, *change(fields, parts)))


@breaks("the_fields_of_a_sample_arrive_with_its_octets")
def the_third_field_is_cut_to_32_bits(patch: pytest.MonkeyPatch) -> None:
    _writes(patch, lambda fields, parts: ((*fields[:2], *(field & 0xFFFF_FFFF for field in fields[2:])), parts))


@breaks("a_large_sample_in_parts_arrives_whole")
def a_sample_is_cut_at_4_mib(patch: pytest.MonkeyPatch) -> None:
    _writes(patch, lambda fields, parts: (fields, (b"".join(parts)[: 4 << 20],)))


@breaks("the_parts_of_a_sample_are_read_before_its_write_returns")
def memory_that_may_change_is_read_later(patch: pytest.MonkeyPatch) -> None:
    write = MemoryOutlet.write

    def write_later(self: MemoryOutlet, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        if not any(isinstance(part, bytearray) for part in parts):
            return write(self, fields, parts)
        schedule = self.place.network.schedule
        schedule.at(schedule.now_s() + 0.001, write, self, fields, parts)
        return True

    patch.setattr(MemoryOutlet, "write", write_later)


@breaks("a_take_returns_no_more_samples_than_it_is_asked_for")
def a_take_returns_all(patch: pytest.MonkeyPatch) -> None:
    take = MemoryInlet.take
    patch.setattr(MemoryInlet, "take", lambda self, limit: take(self, 1 << 20))


@breaks("the_sender_of_a_sample_is_a_peer_of_its_inlet")
def all_samples_have_one_sender(patch: pytest.MonkeyPatch) -> None:
    put = MemoryInlet.put
    patch.setattr(MemoryInlet, "put", lambda self, sample, handle: put(self, sample, 1))


# Channels


@breaks("a_late_inlet_of_a_retained_channel_gets_the_newest_samples")
def a_newcomer_gets_nothing_that_was_retained(patch: pytest.MonkeyPatch) -> None:
    finds = MemoryNetwork.writer_finds

    def find_for_the_first_time(self: MemoryNetwork, pair: EndpointPair) -> None:
        kept, retained = pair.writer.kept, pair.writer.kept._retained  # noqa: SLF001 - nobody else asks for it
        if pair.epoch == 0:
            kept._retained = deque(maxlen=retained.maxlen)  # noqa: SLF001 - likewise
        finds(self, pair)
        kept._retained = retained  # noqa: SLF001 - likewise

    patch.setattr(MemoryNetwork, "writer_finds", find_for_the_first_time)


@breaks("a_late_inlet_of_a_volatile_channel_gets_what_is_written_from_then_on")
def all_channels_retain(patch: pytest.MonkeyPatch) -> None:
    made = MemoryOutlet.__init__

    def retaining(self: MemoryOutlet, place: MemoryPlace, channel: Channel, retained_samples: int) -> None:
        made(self, place, channel, retained_samples)
        self.kept = KeptSamples(retained_samples, keeps_last=channel.keep_last)

    patch.setattr(MemoryOutlet, "__init__", retaining)


@breaks("an_outlet_that_retains_nothing_still_reaches_late_inlets")
def what_is_not_retained_is(patch: pytest.MonkeyPatch) -> None:
    made = MemoryOutlet.__init__

    def retaining(self: MemoryOutlet, place: MemoryPlace, channel: Channel, retained_samples: int) -> None:
        made(self, place, channel, retained_samples or 3)

    patch.setattr(MemoryOutlet, "__init__", retaining)


def _opens(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Open inlets with a channel that is another one in these attributes."""
    inlet = MemoryTransport.inlet
    patch.setattr(MemoryTransport, "inlet", lambda self, channel: inlet(self, replace(channel, **changes)))


@breaks("an_inlet_that_keeps_the_last_sample_has_that_one_only")
def no_inlet_keeps_the_last_sample_only(patch: pytest.MonkeyPatch) -> None:
    _opens(patch, keep_last=False)


@breaks("a_full_inlet_that_overwrites_drops_its_oldest_samples")
def a_full_inlet_drops_its_newest_samples(patch: pytest.MonkeyPatch) -> None:
    put = MemoryInlet.put

    def put_if_there_is_room(self: MemoryInlet, sample: Any, handle: int) -> None:
        if not self.channel.overwrites or len(self.queue) < self.channel.reader_samples:
            put(self, sample, handle)

    patch.setattr(MemoryInlet, "put", put_if_there_is_room)


@breaks("a_transport_that_ignores_itself_gets_nothing_of_its_own")
def a_transport_gets_its_own_samples(patch: pytest.MonkeyPatch) -> None:
    outlet = MemoryTransport.outlet

    def opened(self: MemoryTransport, channel: Channel, *, retained_samples: int = 1) -> MemoryOutlet:
        return outlet(self, replace(channel, ignore_local=False), retained_samples=retained_samples)

    patch.setattr(MemoryTransport, "outlet", opened)


@breaks("transports_of_two_jobs_do_not_see_each_other")
def all_jobs_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryOutlet, "job", "")
    patch.setattr(MemoryInlet, "job", "")


# Back-pressure


@breaks("an_inlet_that_takes_nothing_holds_a_bounded_number_of_samples")
def an_inlet_has_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryInlet, "has_room", True)


@breaks("a_write_for_a_full_inlet_waits_before_it_is_refused")
def a_write_for_a_full_inlet_is_refused_at_once(patch: pytest.MonkeyPatch) -> None:
    wait = MemoryOutlet._waits_for_room  # noqa: SLF001 - the place of the fault
    patch.setattr(MemoryOutlet, "_waits_for_room", lambda self: (self.is_closed or self._has_room()) and wait(self))


@breaks("no_accepted_sample_is_lost_where_an_inlet_is_full")
def a_sample_that_waits_for_room_is_lost(patch: pytest.MonkeyPatch) -> None:
    take = MemoryInlet.take

    def take_and_lose(self: MemoryInlet, limit: int) -> list[tuple[Any, int]]:
        for pair in self.pairs:
            if pair.wanted in pair.early and self.channel.reader_samples:
                del pair.early[pair.wanted]
                pair.wanted += 1
        return take(self, limit)

    patch.setattr(MemoryInlet, "take", take_and_lose)


@breaks("an_outlet_knows_since_when_it_is_refused")
def an_outlet_knows_its_last_refusal_only(patch: pytest.MonkeyPatch) -> None:
    def refused_since_s(self: MemoryOutlet) -> float:
        return self.place.network.schedule.now_s() if self._refused_since_s else 0.0

    patch.setattr(MemoryOutlet, "refused_since_s", property(refused_since_s))


@breaks("an_inlet_that_is_not_reliable_holds_up_no_outlet")
def all_inlets_are_reliable(patch: pytest.MonkeyPatch) -> None:
    _opens(patch, reliable=True)


# Acknowledgements, pauses and ends


@breaks("a_sample_is_acknowledged_once_it_has_been_received")
def a_sample_is_acknowledged_once_it_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryOutlet, "_has_acks", lambda self: True)


@breaks("what_is_written_during_a_short_silence_arrives_after_it")
def what_waits_for_a_silent_process_is_lost(patch: pytest.MonkeyPatch) -> None:
    resume = MemoryNetwork.resume

    def lose_and_resume(self: MemoryNetwork, node: Any) -> None:
        for pair in self.pairs:
            pair.begin_at(pair.writer.kept.last + 1)
        resume(self, node)

    patch.setattr(MemoryNetwork, "resume", lose_and_resume)


@breaks("a_process_that_ends_without_a_goodbye_is_lost_after_its_lease")
def the_dead_are_never_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryNetwork, "ended", lambda self, node: None)


@breaks("a_process_that_was_lost_is_found_again_and_gets_what_is_retained")
def the_lost_are_never_found_again(patch: pytest.MonkeyPatch) -> None:
    find = MemoryNetwork._find  # noqa: SLF001 - the place of the fault

    def find_new(self: MemoryNetwork, pair: EndpointPair, within_s: float) -> None:
        if within_s != network.FOUND_AGAIN_S:
            find(self, pair, within_s)

    patch.setattr(MemoryNetwork, "_find", find_new)


@breaks("an_endpoint_that_is_closed_is_no_peer_any_more")
def only_a_transport_says_goodbye(patch: pytest.MonkeyPatch) -> None:
    removed = MemoryNetwork.removed

    def removed_with_its_transport(self: MemoryNetwork, endpoint: Any) -> None:
        if not endpoint.owner._is_open:  # noqa: SLF001 - nobody else asks for it
            removed(self, endpoint)

    patch.setattr(MemoryNetwork, "removed", removed_with_its_transport)


@breaks("a_transport_that_is_closed_leaves_with_all_its_endpoints")
def a_transport_forgets_some_of_its_endpoints(patch: pytest.MonkeyPatch) -> None:
    close = MemoryTransport.close_endpoints
    patch.setattr(
        MemoryTransport,
        "close_endpoints",
        lambda self, inlets, outlets: close(self, inlets[:1], outlets[:1]),
    )


@breaks("a_closed_outlet_refuses_writes_with_an_error")
def a_closed_outlet_writes_to_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryOutlet, "_check_open", lambda self: None)


# Resending


def _mends(patch: pytest.MonkeyPatch, change: Callable[[MemoryNetwork, EndpointPair], None]) -> None:
    """Do something to each pair whose link is mended, just before that."""
    mend = MemoryNetwork.mend

    def change_and_mend(self: MemoryNetwork, one: int, other: int) -> None:
        for pair in self.pairs:
            if {pair.source.machine, pair.target.machine} == {one, other}:
                change(self, pair)
        mend(self, one, other)

    patch.setattr(MemoryNetwork, "mend", change_and_mend)


@breaks("what_is_written_while_a_link_is_cut_arrives_after_it")
def an_inlet_goes_on_with_what_is_written_after_a_cut(patch: pytest.MonkeyPatch) -> None:
    _mends(patch, lambda network, pair: pair.begin_at(pair.writer.kept.last + 1))


@breaks("nothing_arrives_twice_after_a_cut")
def what_has_waited_for_a_link_arrives_twice(patch: pytest.MonkeyPatch) -> None:
    def send_twice(network: MemoryNetwork, pair: EndpointPair) -> None:
        for one in pair.writer.kept.since(pair.wanted):
            network.at(0.2, pair.reader.put, one.sample, pair.handle)

    _mends(patch, send_twice)


@breaks("what_is_written_during_a_cut_arrives_before_what_is_written_after_it")
def what_has_waited_for_a_link_arrives_last(patch: pytest.MonkeyPatch) -> None:
    def send_last(network: MemoryNetwork, pair: EndpointPair) -> None:
        for one in pair.writer.kept.since(pair.wanted):
            network.at(0.1, pair.reader.put, one.sample, pair.handle)
        pair.begin_at(pair.writer.kept.last + 1)

    _mends(patch, send_last)


@breaks("what_is_lost_on_the_way_is_sent_again")
def an_outlet_sends_each_sample_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SampleDelivery, "_resend_later", lambda self, pair: None)


@breaks("no_sample_is_handed_over_before_one_that_was_lost")
def an_inlet_waits_12_ms_for_what_is_lost(patch: pytest.MonkeyPatch) -> None:
    _is_impatient(patch, 0.012, lambda pair: pair.source.machine != pair.target.machine)


@breaks("a_write_is_refused_once_the_window_of_an_inlet_out_of_reach_is_full")
def an_outlet_keeps_all_for_an_inlet_out_of_reach(patch: pytest.MonkeyPatch) -> None:
    has_room = MemoryOutlet._has_room  # noqa: SLF001 - the place of the fault

    def has_always_room(self: MemoryOutlet) -> bool:
        is_up = self.place.network.is_up
        return has_room(self) or not all(is_up(pair.source, pair.target) for pair in self.pairs)

    patch.setattr(MemoryOutlet, "_has_room", has_always_room)


# The waiter


@breaks("a_wait_ends_with_the_number_of_an_inlet_that_has_samples")
def an_empty_inlet_still_ends_waits(patch: pytest.MonkeyPatch) -> None:
    take = MemoryInlet.take

    def take_quietly(self: MemoryInlet, limit: int) -> list[tuple[Any, int]]:
        taken = take(self, limit)
        self.arrivals.is_on = True
        return taken

    patch.setattr(MemoryInlet, "take", take_quietly)


@breaks("a_wait_ends_with_the_number_of_an_endpoint_whose_peers_have_changed")
def an_outlet_does_not_report_its_peers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryOutlet, "note_peers_changed", lambda self: None)


@breaks("what_is_detached_ends_no_wait")
def nothing_is_ever_detached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlagWaiter, "detach", lambda self, trigger: None)


@breaks("any_thread_may_wake_a_wait")
def nobody_is_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlagWaiter, "wake", lambda self: None)


@breaks("many_threads_may_write_to_one_outlet")
def what_another_thread_writes_is_lost(patch: pytest.MonkeyPatch) -> None:
    write = MemoryOutlet.write

    def write_on_one(self: MemoryOutlet, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        is_lost = threading.current_thread() is not threading.main_thread() and self._has_room()
        return is_lost or write(self, fields, parts)

    patch.setattr(MemoryOutlet, "write", write_on_one)


@breaks("an_outlet_can_be_closed_while_a_thread_waits_in_a_write")
def a_write_that_ends_with_an_error_counts_for_ever(patch: pytest.MonkeyPatch) -> None:
    wait = MemoryOutlet._waits_for_room  # noqa: SLF001 - the place of the fault

    def wait_for_ever(self: MemoryOutlet) -> bool:
        try:
            return wait(self)
        except BusClosed:
            self._writes += 1
            raise

    patch.setattr(MemoryOutlet, "_waits_for_room", wait_for_ever)


@breaks("a_child_by_fork_may_close_what_it_has_inherited_and_its_parent_goes_on")
def a_child_says_goodbye_for_its_parent(patch: pytest.MonkeyPatch) -> None:
    def close(self: MemoryTransport) -> None:
        self.close_endpoints(list(self.inlets), list(self.outlets))

    patch.setattr(MemoryTransport, "close", close)


# Octets in place, and identity


@breaks("octets_that_are_made_in_a_write_arrive_whole")
def an_envelope_loses_its_header(patch: pytest.MonkeyPatch) -> None:
    def write_made(self: MemoryOutlet, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        return self.write(fields, (envelope.octets()[len(envelope.header) :],))

    patch.setattr(MemoryOutlet, "write_made", write_made)


@breaks("the_octets_of_a_sample_can_be_had_alone")
def the_first_octet_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryInlet, "octets", lambda self, raw: raw.data[1:])


@breaks("transports_of_a_job_have_names_of_their_own")
def all_transports_have_one_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryNetwork, "new_peer_id", lambda self: bytes(PEER_ID_BYTES))


@breaks("an_outlet_tells_whose_its_inlets_are")
def an_outlet_takes_all_inlets_for_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryOutlet, "receivers", lambda self: [self.place.own] * self.matched)


@breaks("octets_that_are_made_for_a_full_inlet_are_refused")
def made_octets_seem_to_be_accepted(patch: pytest.MonkeyPatch) -> None:
    def write_made(self: MemoryOutlet, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        self.write(fields, (envelope.octets(),))
        return True

    patch.setattr(MemoryOutlet, "write_made", write_made)


@breaks("an_outlet_counts_the_inlets_that_are_there")
def an_outlet_counts_those_that_were_there(patch: pytest.MonkeyPatch) -> None:
    counting_all(patch, MemoryOutlet)


@breaks("an_inlet_counts_the_outlets_that_are_there")
def an_inlet_counts_those_that_were_there(patch: pytest.MonkeyPatch) -> None:
    counting_all(patch, MemoryInlet)


def counting_all(patch: pytest.MonkeyPatch, kind: type[MemoryInlet | MemoryOutlet]) -> None:
    refresh = kind.refresh

    def refresh_upwards(self: Any) -> bool:
        before = self.matched
        is_new = refresh(self)
        self.matched = max(before, self.matched)
        return is_new

    patch.setattr(kind, "refresh", refresh_upwards)
