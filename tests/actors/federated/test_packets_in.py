"""The packets of an update at the controller: any order, each once, all or nothing, whoever dies between two."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from intake_hall import CHUNK_BYTES, DIM, RUN, Hall, Lies, Sender, deliver, run_with
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.packet_sum import MAX_PACKETS, max_packet_bytes, max_update_bytes
from gradbus.actors.aggregation.updates import MODEL
from gradbus.actors.federated.controller.packets_in import CompleteUpdate, PacketCollector
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.control import MAX_SEQS, PacketRequest, PacketsMissing, Receipt
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate

MIXED = (("q8", 2), ("s4", 1), ("fp32", 2), ("sq8", 2))


@dataclass(frozen=True)
class Packet(Sender):
    """One packet of an update of several, of the codecs of MIXED in turn."""

    number: int = 1
    of: int = 4
    update: int = 1

    @property
    def delta(self) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.number)
        return torch.randn(DIM, generator=generator)

    @property
    def data(self) -> bytes:
        name, version = MIXED[(self.number - 1) % len(MIXED)]
        return self.payload or codecs.get(name, version=version).encode(self.delta)

    @property
    def request(self) -> PacketRequest:
        return PacketRequest(
            self.run_id,
            self.round_id,
            self.transfer,
            len(self.data),
            self.num_samples,
            0.5,
            1.0,
            0.1,
            self.memory,
            update=self.update,
            packet=self.number,
            last=self.number == self.of,
        )

    @property
    def source(self) -> RequestedUpload:
        return RequestedUpload(self.client_id, self.incarnation, self.request)


def packets(count: int = 4, first: int = 1, **others: Any) -> list[Packet]:
    """All packets of one update. ``first``: the number of the upload of its first packet."""
    return [
        Packet(number=number, of=count, transfer=first + number - 1, update=first, num_samples=number, **others)
        for number in range(1, count + 1)
    ]


def expected(sent: list[Packet]) -> Tensor:
    total = codecs.decode(sent[0].data, expected_dim=DIM).vector.clone()
    for packet in sent[1:]:
        total = total + codecs.decode(packet.data, expected_dim=DIM).vector
    return total


def add(collector: PacketCollector, packet: Packet) -> CompleteUpdate | None:
    assert collector.fault(packet.source) == ""
    return collector.add(packet.source, memoryview(packet.data))


# The collector


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=12), st.randoms(use_true_random=False))
def test_an_update_is_complete_once_whatever_the_order_and_the_repeats(
    order: list[int], repeats: list[int], chance: random.Random
) -> None:
    sent, collector = packets(6), PacketCollector(DIM)
    arrivals = list(order)
    for repeated in repeats:  # each comes again, somewhere after its first time
        arrivals.insert(chance.randint(arrivals.index(repeated) + 1, len(arrivals)), repeated)
    first_times: set[int] = set()
    for place in arrivals:
        if len(first_times) == 6:
            break  # it is complete, and what comes again has its receipt by the key of the whole update
        if collector.has(sent[place].source):
            continue
        whole = add(collector, sent[place])
        first_times.add(place)
        assert (whole is not None) == (len(first_times) == 6)
    assert whole is not None
    assert [bytes(one) for one in whole.packets] == [packet.data for packet in sent]
    assert whole.source.request.num_samples == 6  # of the last packet
    assert whole.source.request.total_bytes == sum(len(packet.data) for packet in sent)
    assert collector.num_bytes == 0


def test_two_hundred_schedules_of_kills_orders_and_repeats_lose_nothing_and_double_nothing() -> None:
    """A model of both ends: each client sends its packets in any order, some twice, until its update counts; it may be
    killed and start again, and so may the controller, which then has nothing."""
    kills = 0
    for seed in range(200):
        chance = random.Random(seed)
        collector, counted = PacketCollector(DIM), {}
        starts = dict.fromkeys(range(3), 100)
        updates = {client_id: packets(chance.randint(1, 6), client_id=client_id) for client_id in range(3)}
        while len(counted) < 3:
            client_id = chance.choice([one for one in range(3) if one not in counted])
            event = chance.random()
            if event < 0.03:  # the client: it trains again, as another start of itself
                starts[client_id] += 1
                updates[client_id] = packets(
                    chance.randint(1, 6), client_id=client_id, incarnation=starts[client_id], seed=starts[client_id]
                )
                if chance.random() < 0.5:  # else its packets are replaced when the first of the new start comes
                    assert collector.forget(client_id, starts[client_id]) is False
                    collector.forget(client_id, starts[client_id] - 1)
                kills += 1
            elif event < 0.05:
                collector, kills = PacketCollector(DIM), kills + 1
            else:
                packet = chance.choice(updates[client_id])
                if collector.has(packet.source):
                    continue  # told again that it is here
                whole = add(collector, packet)
                if whole is not None:
                    assert client_id not in counted
                    counted[client_id] = [bytes(one) for one in whole.packets]
                elif (missing := collector.missing(packet.source)) is not None:
                    assert missing.packets
                    assert packet.number not in missing.packets
        assert counted == {client_id: [one.data for one in sent] for client_id, sent in updates.items()}
    assert kills > 100


def test_packets_of_an_earlier_update_are_dropped_by_a_later_one_and_do_not_come_back() -> None:
    before, after, collector = packets(), packets(first=7, seed=1), PacketCollector(DIM)
    for packet in before[:3]:
        assert add(collector, packet) is None
    assert add(collector, after[0]) is None
    assert collector.is_outdated(before[3].source)
    assert not collector.has(before[0].source)
    assert collector.num_bytes == len(after[0].data)


def test_what_was_forgotten_is_asked_for_when_the_last_packet_is_here() -> None:
    sent, collector = packets(), PacketCollector(DIM)
    add(collector, sent[1])
    add(collector, sent[3])
    assert collector.missing(sent[1].source) is None  # its client need not know before
    assert collector.missing(sent[3].source) == PacketsMissing(0, 100, 1, 4, [1, 3])


def test_packets_are_bounded_in_number_and_bytes() -> None:
    assert MAX_PACKETS == MAX_SEQS  # what a message has room for
    longest = max_packet_bytes(DIM)
    too_long = Packet(payload=bytes(longest + 1))
    assert "at most" in PacketCollector(DIM).fault(too_long.source)
    collector, count = PacketCollector(DIM), max_update_bytes(DIM) // longest
    for packet in packets(count + 2, payload=bytes(longest))[:count]:
        assert add(collector, packet) is None
    one_more = packets(count + 2, payload=bytes(longest))[count]
    assert "in all, at most" in collector.fault(one_more.source)
    assert collector.num_bytes <= max_update_bytes(DIM)


def test_packets_that_contradict_each_other_are_no_honest_clients() -> None:
    def held(*numbers: int) -> PacketCollector:
        collector = PacketCollector(DIM)
        for number in numbers:
            add(collector, packets()[number - 1])
        return collector

    assert "the last one is number" in held(4).fault(Packet(number=5, of=9, transfer=5).source)
    assert "the last one is number" in held(3).fault(Packet(number=2, of=2, transfer=2).source)
    assert "the last one is number" in held(4).fault(Packet(number=3, of=3, transfer=9).source)
    assert "other content" in held(2).fault(Packet(number=2, transfer=2, num_samples=99).source)
    assert "shared memory" in held().fault(Packet(memory="host/boot/1 2 3").source)


# The receiver


def test_four_packets_of_mixed_codecs_count_as_one_update_in_full() -> None:
    async def test(hall: Hall) -> None:
        sent = packets(seed=3)
        for packet in sent:
            assert not hall.round.accepted
            await deliver(hall, packet)
        await hall.until(lambda: hall.round.accepted)
        assert hall.bus.all(Receipt) == [Receipt(0, 100, RUN, 1, number, True, "") for number in (1, 2, 3, 4)]
        totals = hall.intake.totals
        assert (totals.num_samples, totals.losses) == (4, [(4, 0.5)])
        assert totals.bytes_up == sum(len(packet.data) for packet in sent)
        assert torch.equal(hall.mean(), expected(sent))

    run_with(test)


def test_packets_in_any_order_with_every_message_twice_count_once() -> None:
    async def test(hall: Hall) -> None:
        sent = packets()
        for packet in (sent[3], sent[1], sent[1], sent[0], sent[2]):
            for _ in range(2):
                await packet.offer_to(hall)
            for _ in range(2):
                await packet.send_to(hall)
        await hall.until(lambda: hall.round.accepted)
        await hall.until(lambda: (4, True) in [(one.transfer, one.accepted) for one in hall.bus.all(Receipt)])
        assert hall.bus.all(PacketsMissing)[0].packets == [1, 2, 3]
        for packet in sent:  # their receipts may be lost
            before = len(hall.bus.receipts)
            await packet.offer_to(hall)
            assert hall.bus.all(Receipt)[before].accepted
        assert hall.strategy.added == [0]
        assert torch.equal(hall.mean(), expected(sent))

    run_with(test)


def test_a_client_that_dies_between_two_packets_leaves_nothing_and_counts_once_when_it_is_back() -> None:
    async def test(hall: Hall) -> None:
        for packet in packets(seed=1)[:3]:
            await deliver(hall, packet)
        hall.intake.forget(0, 100)
        assert hall.dropped == {"cut short": 1}
        again = packets(seed=2, incarnation=101)
        for packet in again:
            await deliver(hall, packet)
        await hall.until(lambda: hall.round.accepted)
        assert hall.strategy.added == [0]
        assert torch.equal(hall.mean(), expected(again))

    run_with(test)


def test_packets_of_a_round_that_ended_are_none_of_its_next_attempt() -> None:
    async def test(hall: Hall) -> None:
        sent = packets()
        for packet in sent[:3]:
            await deliver(hall, packet)
        await hall.intake.close()
        hall.open_round(1)
        await sent[3].offer_to(hall)
        await sent[3].send_to(hall)
        await hall.until(lambda: hall.bus.all(PacketsMissing))
        assert hall.bus.all(PacketsMissing)[0].packets == [1, 2, 3]
        assert not hall.round.accepted
        for packet in sent[:3]:
            await deliver(hall, packet)
        await hall.until(lambda: hall.round.accepted)
        assert torch.equal(hall.mean(), expected(sent))

    run_with(test)


def test_a_packet_that_cannot_be_read_makes_none_of_the_update_count() -> None:
    async def test(hall: Hall) -> None:
        for packet in packets(payload=b"nonsense"):
            await packet.offer_to(hall)
            await packet.send_to(hall)
        await hall.until(lambda: (0, False) in hall.bus.receipts)
        assert "packet 1 of 4" in hall.bus.all(Receipt)[-1].reason
        assert hall.dropped == {"malformed": 1}
        assert hall.strategy.added == []
        assert len(hall.strikes) <= 1

    run_with(test)


def test_clients_in_packets_do_not_wait_for_each_other_where_the_budget_is_small() -> None:
    async def test(hall: Hall) -> None:
        first, second = packets(seed=1), packets(client_id=1, seed=2)
        await deliver(hall, first[0])
        await second[0].offer_to(hall)  # no room beside the packet that is here
        assert hall.bus.granted == [0]
        for packet in first[1:]:
            await deliver(hall, packet)
        await hall.until(lambda: 1 in hall.bus.granted)
        await second[0].send_to(hall)
        for packet in second[1:]:
            await deliver(hall, packet)
        await hall.until(lambda: len(hall.round.accepted) == 2)

    run_with(test, budget_bytes=1)


def test_a_client_in_training_does_not_keep_the_others_out_with_its_packets() -> None:
    async def test(hall: Hall) -> None:
        early = packets(seed=1)
        await deliver(hall, early[0])  # it goes on training, or never sends another
        await deliver(hall, Sender(1))
        assert hall.round.accepted == {1}
        for packet in early[1:]:
            await packet.offer_to(hall)
            await packet.send_to(hall)
        assert hall.bus.all(PacketsMissing)[-1].packets == [1]
        await deliver(hall, early[0])
        await hall.until(lambda: hall.round.accepted == {0, 1})
        assert torch.allclose(hall.mean(), (4 * expected(early) + 10 * Sender(1).delta) / 14, atol=1e-6)

    run_with(test, budget_bytes=1)


def test_an_announced_update_of_which_nothing_comes_any_more_gives_up_its_place() -> None:
    async def test(hall: Hall) -> None:
        stalled = packets(client_id=0)[3]
        await stalled.offer_to(hall)
        await stalled.send_to(hall)
        assert hall.bus.all(PacketsMissing)
        await Sender(1).offer_to(hall)
        await hall.until(lambda: hall.bus.granted == [0, 1])
        await Sender(1).send_to(hall)
        await hall.until(lambda: hall.round.accepted == {1})

    run_with(test, budget_bytes=1, repair_after_s=0.02, stall_after_s=0.1)


def test_a_packet_and_the_last_one_wait_for_room_at_the_same_time() -> None:
    async def test(hall: Hall) -> None:
        await Sender(1).offer_to(hall)
        sent = packets(2)
        for packet in sent:
            await packet.offer_to(hall)
        assert hall.bus.granted == [1]
        await Sender(1).send_to(hall)
        for packet, count in zip(sent, (2, 3), strict=True):
            await hall.until(lambda count=count: len(hall.bus.granted) == count)  # type: ignore[misc]
            await packet.send_to(hall)
        await hall.until(lambda: hall.round.accepted == {0, 1})

    run_with(test, budget_bytes=1)


def test_two_last_packets_under_way_are_no_honest_clients_and_one_client_has_one_vote() -> None:
    async def test(hall: Hall) -> None:
        for number in (1, 2, 3):
            one = Packet(number=number, of=number, transfer=number, num_samples=1 << 29)
            await one.offer_to(hall)
            assert len(hall.bus.granted) <= 1
        assert [strike.reason for strike in hall.strikes] == ["packets"]
        for client_id in (1, 2):
            await Sender(client_id, num_samples=10).offer_to(hall)
            await Sender(client_id, num_samples=10).send_to(hall)
        await hall.until(lambda: hall.round.accepted == {1, 2})
        assert hall.bounds is not None
        assert hall.bounds.in_force()["weights"] == [10.0]

    run_with(test, lies=Lies())


def test_one_packet_has_one_upload() -> None:
    async def test(hall: Hall) -> None:
        for transfer in (1, 2):
            await Packet(number=1, transfer=transfer).offer_to(hall)
        assert len(hall.bus.granted) == 1
        assert "comes again" in hall.bus.all(Receipt)[-1].reason
        await Packet(number=2, transfer=1, client_id=1).offer_to(hall)
        await Packet(number=3, transfer=1, client_id=1).offer_to(hall)
        assert "has the number of an upload" in hall.bus.all(Receipt)[-1].reason

    run_with(test)


def test_no_packets_of_an_update_that_is_refused_make_it_count_after_all() -> None:
    async def test(hall: Hall) -> None:
        sent = packets(3)
        await deliver(hall, sent[0])
        for packet in sent[1:]:
            await packet.offer_to(hall)
        await Packet(number=2, transfer=9, num_samples=5).offer_to(hall)  # another packet 2
        assert hall.bus.receipts[-1] == (0, False)
        for packet in sent:
            await packet.offer_to(hall)
            await packet.send_to(hall)
        await deliver(hall, Sender(1))
        assert hall.round.accepted == {1}
        assert hall.strategy.added == [1]

    run_with(test)


def test_the_last_packet_announces_the_update_while_others_are_missing() -> None:
    async def test(hall: Hall) -> None:
        sent = packets(2)
        await sent[1].offer_to(hall)
        await sent[1].send_to(hall)
        for client_id in (1, 2):
            await Sender(client_id).offer_to(hall)
            await Sender(client_id).send_to(hall)
        await hall.until(lambda: hall.round.accepted == {1, 2})
        await deliver(hall, sent[0])
        await hall.until(lambda: hall.round.accepted == {0, 1, 2})

    run_with(test, lies=Lies())


def test_in_a_first_round_an_update_in_packets_that_has_been_measured_makes_room_for_the_next() -> None:
    async def test(hall: Hall) -> None:
        sent = packets(2)
        for packet in sent:
            await deliver_packet(hall, packet)
        for client_id in (1, 2):
            await Sender(client_id, seed=client_id).offer_to(hall)
            await hall.until(lambda client_id=client_id: hall.bus.granted[-1] == client_id)  # type: ignore[misc]
            await Sender(client_id, seed=client_id).send_to(hall)
        while hall.round.open:
            count = len(hall.bus.granted)
            for packet in sent:
                await packet.offer_to(hall)
                await packet.send_to(hall)
            for client_id in (1, 2):
                await Sender(client_id, seed=client_id).send_to(hall)
            await hall.until(lambda count=count: len(hall.bus.granted) > count or not hall.round.open)  # type: ignore[misc]
        totals = hall.intake.totals
        assert totals.samples == {0: 2, 1: 10, 2: 10}
        assert totals.bytes_up == sum(map(len, (*(one.data for one in sent), Sender(1).data, Sender(2).data)))

    run_with(test, lies=Lies((MODEL,)), budget_bytes=1)


async def deliver_packet(hall: Hall, packet: Packet) -> None:
    await packet.offer_to(hall)
    await packet.send_to(hall)


def test_a_site_sends_its_sum_in_one_piece() -> None:
    async def test(hall: Hall) -> None:
        await packets()[0].offer_to(hall)
        (receipt,) = hall.bus.all(Receipt)
        assert not receipt.accepted
        assert "in one piece" in receipt.reason

    run_with(test, sites=True)


def test_frames_of_a_packet_carry_its_own_upload() -> None:
    packet = packets()[1]
    key = FrameKey(Kind.UPDATE, RUN, 1, 0, 100, 2)
    head, data = next(iter(frames.split(key, packet.data, chunk_bytes=CHUNK_BYTES)))
    assert packet.frames[0] == ClientUpdate(0, 1, 2, frames.parse(head + bytes(data)))
    assert packet.source.whole_key == key._replace(transfer=1)


@pytest.mark.parametrize("seed", range(4))
def test_random_orders_of_several_clients_end_with_each_update_once(seed: int) -> None:
    async def test(hall: Hall) -> None:
        chance = random.Random(seed)
        of = {client_id: packets(5, client_id=client_id, seed=client_id) for client_id in range(3)}
        todo = [packet for sent in of.values() for packet in [*sent, *chance.sample(sent, 2)]]
        chance.shuffle(todo)
        for packet in todo:
            await packet.offer_to(hall)
            await packet.send_to(hall)
        await hall.until(lambda: len(hall.round.accepted) == 3)
        assert sorted(hall.strategy.added) == [0, 1, 2]
        weights = torch.stack([expected(sent).double() for sent in of.values()]).mean(0)
        assert torch.allclose(hall.mean().double(), weights, atol=1e-6)

    run_with(test)
