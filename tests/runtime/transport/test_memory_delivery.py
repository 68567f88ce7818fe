"""What the network in memory keeps, sends again and forgets, beyond the contract of all transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from channel_node import Channel
from transport_scenes import MemoryScene, in_steps, take, with_threads, write

from gradbus.runtime.errors import BusError
from gradbus.runtime.transport.kept_samples import LEAST_BYTES, KeptSamples
from gradbus.runtime.transport.memory.endpoints import MemoryInlet, MemoryOutlet
from gradbus.runtime.transport.memory.network import LINGER_S
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport

VOLATILE = Channel("volatile")


def numbers(kept: KeptSamples, since: int = 1) -> list[int]:
    return [one.number for one in kept.since(since)]


def kept_samples(count: int, retained_samples: int = 0, *, keeps_last: bool = False) -> KeptSamples:
    kept = KeptSamples(retained_samples, keeps_last=keeps_last)
    for number in range(count):
        kept.append(f"sample {number + 1}", 10)
    return kept


def test_samples_are_kept_until_they_are_acknowledged() -> None:
    kept = kept_samples(5)
    assert (numbers(kept), kept.num_bytes) == ([1, 2, 3, 4, 5], 5 * LEAST_BYTES)
    kept.acknowledge(3)
    assert (numbers(kept), kept.num_bytes) == ([4, 5], 2 * LEAST_BYTES)
    assert numbers(kept, 5) == [5]
    kept.acknowledge(5)
    assert (numbers(kept), kept.num_bytes, kept.first_retained) == ([], 0, 6)


def test_what_is_retained_stays_and_takes_no_room_of_the_window_until_somebody_lacks_it() -> None:
    kept = kept_samples(5, retained_samples=2)
    kept.acknowledge(5)
    assert (numbers(kept), kept.num_bytes, kept.first_retained) == ([4, 5], 0, 4)
    kept.keep_since(4)
    kept.append("sample 6", 10)
    assert (numbers(kept), kept.num_bytes, kept.first_retained) == ([4, 5, 6], 3 * LEAST_BYTES, 5)


def test_who_lacks_less_than_others_takes_nothing_from_them() -> None:
    kept = kept_samples(5, retained_samples=2)
    kept.keep_since(4)
    assert numbers(kept) == [1, 2, 3, 4, 5]


def test_where_the_last_sample_counts_no_other_is_kept() -> None:
    kept = kept_samples(5, retained_samples=1, keeps_last=True)
    assert (numbers(kept), kept.num_bytes) == ([5], LEAST_BYTES)


@pytest.fixture
def scene() -> Iterator[MemoryScene]:
    made = in_steps()
    yield made
    made.close()


def joined(
    scene: MemoryScene, channel: Channel = VOLATILE, of_inlet: Channel | None = None
) -> tuple[MemoryOutlet, MemoryInlet]:
    """An outlet on one machine, and an inlet on another. ``of_inlet``: its channel, if it is another."""
    transports = [MemoryTransport(scene.network, MemoryNode(f"node-{number}", number), "one") for number in range(2)]
    outlet, inlet = transports[0].outlet(channel.opened()), transports[1].inlet((of_inlet or channel).opened())
    scene.until(lambda: outlet.peers() and inlet.peers(), "they find each other")
    return outlet, inlet


def test_an_outlet_keeps_nothing_that_all_inlets_have(scene: MemoryScene) -> None:
    scene.network.loss = 0.3
    outlet, inlet = joined(scene)
    for start in range(0, 1000, 10):
        assert all(write(outlet, *range(start, start + 10)))
        scene.until(lambda: outlet.is_acknowledged, "the samples are received")
    assert (outlet.kept.num_bytes, numbers(outlet.kept)) == (0, [])
    assert take(inlet) == list(range(1000))


def test_a_sample_that_is_lost_before_its_outlet_is_closed_arrives_before_the_goodbye(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene)
    scene.network.loss = 0.5
    assert all(write(outlet, *range(10)))
    outlet.close()
    scene.until(lambda: not inlet.peers(), "the outlet is lost")
    assert take(inlet) == list(range(10))


def test_an_outlet_that_is_closed_for_an_inlet_that_takes_nothing_is_lost_all_the_same(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene, Channel("bounded", reader_samples=4))
    assert all(write(outlet, *range(10)))
    outlet.close()
    closed_s = scene.now_s()
    scene.until(lambda: not inlet.peers(), "the outlet is lost")
    assert LINGER_S <= scene.now_s() - closed_s <= 2 * LINGER_S
    assert take(inlet) == [0, 1, 2, 3]


def test_an_inlet_that_asks_for_what_its_acknowledgement_has_overtaken_gets_nothing_again(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene)
    (pair,) = outlet.pairs
    with scene.network.schedule.lock:
        scene.network.delivery.ask(pair)  # it is on its way, and slower than what follows
    scene.network.jitter_s = 0.0
    assert write(outlet, 0) == [True]
    scene.until(lambda: outlet.is_acknowledged, "the sample is received")
    scene.pass_time(1.0)
    assert outlet.is_acknowledged
    assert take(inlet) == [0]


def test_where_the_network_has_failed_writes_and_waits_say_so() -> None:
    def fail() -> None:
        raise ValueError("no such pair")

    scene = with_threads()
    try:
        outlet, _ = joined(scene)
        transport = scene.open()
        waiter = transport.waiter()
        scene.network.base_s = 60.0
        assert write(outlet, 0) == [True]  # it is on its way
        scene.network.at(0.0, fail)
        with pytest.raises(BusError, match="no such pair"):
            scene.pass_time(10.0)
        with pytest.raises(BusError, match="no such pair"):
            write(outlet, 1)
        with pytest.raises(BusError, match="no such pair"):
            outlet.wait_for_acks(1.0)
        with pytest.raises(OSError, match="no such pair"):  # as the contract has it for what waits
            waiter.wait(1.0)
    finally:
        scene.network.close()


RETAINED = Channel("retained", retained=True)


def test_an_inlet_that_lost_its_outlet_gets_what_is_retained_though_its_request_is_lost(scene: MemoryScene) -> None:
    for _ in range(20):
        outlet, inlet = joined(scene, RETAINED)
        assert all(write(outlet, 1))
        scene.until(lambda outlet=outlet: outlet.is_acknowledged, "the sample is received")
        take(inlet)
        scene.network.loss = 0.8
        scene.network.lose_one_side(inlet.node, outlet.node, 0.05)
        scene.pass_time(1.0)
        scene.network.loss = 0.0
        scene.until(lambda outlet=outlet: outlet.is_acknowledged, "it is received again")
        outlet.close()
        inlet.close()


def test_an_acknowledgement_from_before_an_inlet_asks_for_what_is_retained_stops_nothing(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene, RETAINED)
    scene.network.base_s = 0.5
    assert write(outlet, 0) == [True]
    scene.until(lambda: inlet.queue, "the sample is there, and its acknowledgement is on its way")
    scene.network.lose_one_side(inlet.node, outlet.node, 0.0)
    scene.until(lambda: not inlet.peers(), "the outlet is lost")
    scene.until(inlet.peers, "it is found again")
    assert write(outlet, 1) == [True]
    scene.until(lambda: outlet.is_acknowledged, "what was written since is received")
    assert take(inlet)[-1] == 1


def test_an_inlet_waits_for_no_sample_that_its_outlet_has_replaced(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene, Channel("newest", retained=True, keep_last=True), Channel("newest", retained=True))
    assert write(outlet, 0) == [True]
    scene.until(lambda: outlet.is_acknowledged, "the first sample is received")
    scene.network.loss = 1.0 - 1e-12
    assert write(outlet, 1) == [True]
    scene.network.loss = 0.0
    assert write(outlet, 2) == [True]
    scene.until(lambda: outlet.is_acknowledged, "the newest sample is received")
    assert take(inlet) == [0, 2]


def test_what_a_killed_process_had_closed_is_not_sent_again(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene)
    scene.network.loss = 1.0 - 1e-12
    assert all(write(outlet, *range(5)))
    outlet.close()
    scene.network.kill(outlet.node)
    scene.network.loss = 0.0
    scene.pass_time(2 * LINGER_S)
    assert take(inlet) == []


def test_of_an_outlet_that_is_closed_before_its_link_is_cut_an_inlet_knows_after_the_lease(scene: MemoryScene) -> None:
    outlet, inlet = joined(scene)
    scene.network.loss = 1.0 - 1e-12
    assert all(write(outlet, 1))
    outlet.close()
    scene.network.cut(0, 1, 60.0)
    scene.pass_time(LINGER_S + 1.0)
    assert inlet.peers()
    scene.pass_time(scene.network.lease_s + 1.0)
    assert not inlet.peers()


def test_no_outlet_has_the_free_room_of_an_inlet_each_time(scene: MemoryScene) -> None:
    channel = Channel("bounded", reader_samples=4)
    inlet = MemoryTransport(scene.network, MemoryNode("node-0", 0), "one").inlet(channel.opened())
    outlets = [
        MemoryTransport(scene.network, MemoryNode(f"node-{number}", number), "one").outlet(channel.opened())
        for number in (1, 2)
    ]
    scene.until(lambda: len(inlet.peers()) == 2, "they find each other")
    for first, outlet in zip((0, 1000), outlets, strict=True):
        write(outlet, *range(first, first + 40))
    scene.pass_time(1.0)
    found: list[int] = []
    for _ in range(8):
        found += take(inlet)
        scene.pass_time(0.2)
    assert {number >= 1000 for number in found} == {True, False}
