"""What outlets and inlets on Zenoh make of broken links, lost messages and hostile ones: over a simulated relay, in
virtual time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from channel_node import Channel
from joined_endpoints import LEASE_S, VOLATILE, Joined, Members, NoThread, Stranger
from transport_scenes import SimulatedRemote, SteppedZenohScene, take, write

from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.zenoh.inlet import LEAST_CREDIT, ZenohInlet
from gradbus.runtime.transport.zenoh.messages import Ack, LossProbe, MatchStart, pack_ack, pack_probe, pack_start
from gradbus.runtime.transport.zenoh.outlet import ZenohOutlet

RETAINED = Channel("retained", retained=True)
BOUNDED = Channel("bounded", reader_samples=16)
SOON_S = 0.1  # in which a killed process is lost
CHUNK_BYTES = 1 << 20
WINDOW = WINDOW_BYTES // CHUNK_BYTES


@pytest.fixture
def scene() -> SteppedZenohScene:
    return SteppedZenohScene()


def do_harm(rng: random.Random, scene: SteppedZenohScene, remotes: list[SimulatedRemote]) -> None:
    """Do one of the things that a network does."""
    one = rng.choice(remotes)
    match rng.randrange(4):
        case 0:
            scene.relay.restart()
        case 1:
            one.session.break_link()
        case 2:
            one.cut_off()
            scene.pass_time(rng.uniform(0.0, LEASE_S / 4))
            one.reconnect()
        case _:
            one.stop()
            scene.pass_time(rng.uniform(0.0, LEASE_S / 4))
            one.go_on()


@pytest.mark.parametrize("seed", range(25))
def test_whatever_becomes_of_links_within_the_lease_each_sample_arrives_once_and_in_order(seed: int) -> None:
    rng, scene = random.Random(seed), SteppedZenohScene(seed)
    channel = rng.choice([VOLATILE, BOUNDED, Channel("small", reader_samples=4), RETAINED])
    pairs = [Joined(scene, replace(channel, name=f"{channel.name}-{number}"), loss=0.05) for number in range(2)]
    found: list[list[int]] = [[], []]
    written = [0, 0]
    for _ in range(40):
        if rng.random() < 0.3:
            do_harm(rng, scene, [one for pair in pairs for one in (pair.source, pair.target)])
        for number, pair in enumerate(pairs):
            for _ in range(rng.randrange(8)):
                written[number] += write(pair.outlet, written[number], size=rng.choice([64, 100_000]))[0]
            if rng.random() < 0.6:
                found[number] += take(pair.inlet)
        scene.pass_time(rng.uniform(0.0, 0.3))
    for number, pair in enumerate(pairs):
        found[number] += (
            pair.arrive(written[number] - len(found[number])) if written[number] > len(found[number]) else []
        )
        assert found[number] == list(range(written[number]))
        scene.until(lambda pair=pair: pair.outlet.is_acknowledged, "all is acknowledged")  # type: ignore[misc]


def test_what_is_lost_again_and_again_is_found_while_others_arrive(scene: SteppedZenohScene) -> None:
    joined = Joined(scene, loss=0.15)
    found: list[int] = []
    behind = 0
    for number in range(2000):
        assert write(joined.outlet, number) == [True]
        scene.pass_time(0.01)
        found += take(joined.inlet)
        behind = max(behind, number - len(found))
    found += joined.arrive(2000 - len(found))
    assert found == list(range(2000))
    assert behind < 1000  # samples, of 10 ms each


def test_a_channel_that_is_idle_costs_nothing(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    write(joined.outlet, *range(20))
    joined.arrive(20)
    scene.until(lambda: joined.outlet.is_acknowledged, "all is acknowledged")
    before = joined.source.session.published, joined.target.session.published
    scene.pass_time(3600.0)
    assert (joined.source.session.published, joined.target.session.published) == before


def test_an_inlet_that_takes_the_place_of_one_that_was_closed_finds_the_outlet(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.inlet.close()
    scene.until(lambda: not joined.outlet.peers(), "the inlet is lost")
    joined.inlet = joined.target.transport.inlet(VOLATILE.opened())
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "they match")
    write(joined.outlet, 7)
    assert joined.arrive(1) == [7]


def test_the_end_of_a_process_is_known_at_once(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.target.kill()
    began_s = scene.now_s()
    scene.until(lambda: not joined.outlet.peers(), "the inlet is lost")
    assert scene.now_s() - began_s < SOON_S


def test_a_restart_of_the_relay_loses_no_peer(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    before = joined.outlet.peers(), joined.inlet.peers()
    for _ in range(5):
        scene.relay.restart()
        scene.pass_time(2.0)
        assert (joined.outlet.peers(), joined.inlet.peers()) == before


def test_peers_are_lost_when_the_own_link_is_down_for_the_lease_and_no_sooner(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.source.session.is_refused = True
    joined.source.session.break_link()
    scene.pass_time(0.9 * LEASE_S)
    assert joined.outlet.peers()
    scene.pass_time(0.2 * LEASE_S)
    assert not joined.outlet.peers()
    joined.source.session.is_refused = False
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "they match anew")
    write(joined.outlet, 7)
    assert joined.arrive(1) == [7]


def test_an_inlet_whose_link_is_down_holds_up_no_write_and_gets_what_the_window_held(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.target.session.is_refused = True
    joined.target.session.break_link()
    scene.until(lambda: not joined.outlet.peers(), "the inlet is lost")
    assert all(write(joined.outlet, *range(WINDOW // 2), size=CHUNK_BYTES))
    joined.target.session.is_refused = False
    assert joined.arrive(WINDOW // 2) == list(range(WINDOW // 2))


def test_an_inlet_that_has_missed_more_than_the_window_begins_a_new_match(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    write(joined.outlet, 1)
    joined.arrive(1)
    joined.target.session.is_refused = True
    joined.target.session.break_link()
    scene.until(lambda: not joined.outlet.peers(), "the inlet is lost")
    assert all(write(joined.outlet, *range(3 * WINDOW), size=CHUNK_BYTES))
    joined.target.session.is_refused = False
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "they match anew")
    found = take(joined.inlet)
    assert write(joined.outlet, 99) == [True]
    found += joined.arrive(1)
    assert found[-1] == 99
    assert found == sorted(set(found))


def test_the_credit_of_an_inlet_is_shared_by_its_outlets(scene: SteppedZenohScene) -> None:
    inlet = scene.open().inlet(BOUNDED.opened())
    outlets = [scene.open().outlet(BOUNDED.opened()) for _ in range(4)]
    scene.until(lambda: len(inlet.peers()) == 4 and all(one.peers() for one in outlets), "all match")
    assert isinstance(inlet, ZenohInlet)
    for one in outlets:
        assert all(write(one, *range(100)))
    scene.pass_time(5.0)
    # What was promised to the first before the others came stays promised.
    assert len(inlet._queue) <= BOUNDED.reader_samples + sum(BOUNDED.reader_samples // n for n in (1, 2, 3))  # noqa: SLF001 - what it holds is no part of the contract
    for one in outlets:
        assert isinstance(one, ZenohOutlet)
    found: list[int] = []
    scene.until(lambda: found.extend(take(inlet)) or len(found) == 400, "all arrive")
    many = [scene.open().outlet(BOUNDED.opened()) for _ in range(40)]
    scene.until(lambda: len(inlet.peers()) == 44 and all(one.peers() for one in many), "all match")
    for one in many:
        assert all(write(one, *range(20)))
    scene.pass_time(5.0)
    assert len(inlet._queue) <= 44 * LEAST_CREDIT + BOUNDED.reader_samples * 4  # noqa: SLF001 - as above
    found.clear()
    scene.until(lambda: found.extend(take(inlet)) or len(found) == 800, "all arrive")


def test_an_inlet_that_comes_while_another_is_out_of_reach_gets_what_is_written(scene: SteppedZenohScene) -> None:
    joined = Joined(scene, BOUNDED)
    joined.target.cut_off()
    assert all(write(joined.outlet, *range(2 * BOUNDED.reader_samples)))
    late = scene.open().inlet(BOUNDED.opened())
    scene.until(lambda: late.peers() and len(joined.outlet.peers()) == 2, "it matches")
    began_s = scene.now_s()
    assert write(joined.outlet, 99) == [True]
    found: list[int] = []
    scene.until(lambda: found.extend(take(late)) or found, "the sample arrives")
    assert found == [99]
    assert scene.now_s() < began_s + 1.0
    joined.target.reconnect()
    assert joined.arrive(2 * BOUNDED.reader_samples + 1) == [*range(2 * BOUNDED.reader_samples), 99]


def test_hostile_messages_are_dropped_and_counted_and_all_others_arrive(scene: SteppedZenohScene) -> None:
    joined, stranger, rng = Joined(scene), Stranger(scene), random.Random(1)
    keys, session = stranger.keys, stranger.session
    outlet, inlet = joined.outlet.id, joined.inlet.id
    session.declare_token(keys.token("out", stranger.id))
    session.declare_token(keys.token("in", stranger.id))
    session.declare_token(keys.token("in", "no-endpoint"))
    messages = [
        b"",
        b"\x01",
        bytes(64),
        *(pack_ack(Ack(epoch, 1 << 40, 1 << 40, 1, 1 << 40)) for epoch in range(1, 4)),
        pack_ack(Ack(99, 1, 1)),
        pack_ack(Ack(0, 0, 0)),
        pack_start(MatchStart(1 << 40, 1 << 40)),
        pack_probe(LossProbe(1 << 40, 1 << 40)),
        *(rng.randbytes(rng.randrange(80)) for _ in range(50)),
    ]
    for number in range(30):
        for message in messages:
            for key in (
                keys.to_all(stranger.id),
                keys.to_one(inlet, stranger.id),
                keys.ack(outlet, stranger.id),
                keys.ack(outlet, "no-endpoint"),
                keys.to_all("no-endpoint"),
            ):
                session.publish(key, message, urgent=rng.random() < 0.5)
        assert write(joined.outlet, number) == [True]
        scene.pass_time(0.01)
    assert joined.arrive(30) == list(range(30))
    scene.until(lambda: joined.outlet.is_acknowledged, "the stranger holds up nothing")
    for transport in (joined.source.transport, joined.target.transport):
        assert sum(transport.rejected.values()) > 100  # type: ignore[attr-defined]
    assert joined.source.transport.rejected["answer to what was not sent"]  # type: ignore[attr-defined]


def test_an_inlet_that_never_answers_holds_up_no_write(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    stranger.session.declare_token(stranger.keys.token("in", stranger.id))
    scene.pass_time(1.0)
    found: list[int] = []
    for number in range(3 * WINDOW):
        assert write(joined.outlet, number, size=CHUNK_BYTES) == [True]
        scene.pass_time(0.05)
        found += take(joined.inlet)
    assert found == list(range(3 * WINDOW))
    assert len(joined.outlet.peers()) == 1


@pytest.mark.parametrize("has_members", [True, False])
def test_an_inlet_of_no_member_holds_up_writes_for_a_moment_only(scene: SteppedZenohScene, has_members: bool) -> None:
    joined, stranger = Joined(scene), scene.join("one")
    silent = stranger.transport.inlet(VOLATILE.opened())
    scene.until(lambda: len(joined.outlet.peers()) == 2 and silent.peers(), "the stranger matches")
    transport: Any = joined.source.transport
    transport.start(NoThread(), Members(joined.target.transport.own) if has_members else None)
    transport.look_around()
    stranger.cut_off()
    found: list[int] = []
    accepted, began_s = 0, scene.now_s()
    while accepted < 3 * WINDOW and scene.now_s() < began_s + LEASE_S:
        accepted += write(joined.outlet, accepted, size=CHUNK_BYTES)[0]
        scene.pass_time(0.01)
        found += take(joined.inlet)
    assert (accepted == 3 * WINDOW) == has_members
    assert found == list(range(accepted))
