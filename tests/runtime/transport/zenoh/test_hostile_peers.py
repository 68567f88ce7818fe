"""What one session on the relay that lies, floods or takes little can do to others: over a simulated relay, in virtual
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from channel_node import Channel
from joined_endpoints import LEASE_S, VOLATILE, Joined, Members, NoThread, Stranger
from transport_scenes import SteppedZenohScene, take, write

from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.kept_samples import LEAST_BYTES
from gradbus.runtime.transport.zenoh.keys import endpoint_id
from gradbus.runtime.transport.zenoh.messages import (
    MAX_NUMBER,
    START,
    Ack,
    MatchStart,
    pack_ack,
    pack_start,
    parse_start,
    sample_message,
    set_number,
)
from gradbus.runtime.transport.zenoh.outlet import FOREIGN_BYTES

ROUND_S = 0.1
MIB = 1 << 20


@pytest.fixture
def scene() -> SteppedZenohScene:
    return SteppedZenohScene()


def admit(place: Any, *members: Any) -> None:
    """Have the transport of a process know who belongs to the job."""
    place.transport.start(NoThread(), Members(*(one.transport.own for one in members)))
    place.transport.look_around()


def match_stranger(joined: Joined, stranger: Stranger) -> Callable[[Ack], None]:
    """Have the outlet match an inlet of a stranger. Returns what sends an answer of it, in the epoch of the match."""
    starts: list[MatchStart] = []
    keys, session = stranger.keys, stranger.session

    def receive(_: str, message: bytes) -> None:
        if message[0] == START:
            starts.append(MatchStart(*parse_start(message)))

    def answer(ack: Ack) -> None:
        made = ack._replace(epoch=starts[-1].epoch)
        session.publish(keys.ack(joined.outlet.id, stranger.id), pack_ack(made), urgent=True)

    session.subscribe(keys.to_one(stranger.id), receive)
    session.declare_token(keys.token("in", stranger.id))
    joined.scene.until(lambda: starts, "the stranger gets START")
    answer(Ack(0, starts[-1].first, starts[-1].first))
    joined.scene.until(lambda: len(joined.outlet.peers()) == 2, "the stranger matches")
    return answer


def count_published(joined: Joined) -> list[int]:
    """Return a list that the sizes of what the process of the outlet publishes from now on are added to."""
    sizes: list[int] = []
    session: Any = joined.source.session
    publish = session.publish

    def note(key: str, message: bytes, *, urgent: bool, **more: Any) -> bool:
        sizes.append(len(message))
        return bool(publish(key, message, urgent=urgent, **more))

    session.publish = note
    return sizes


def test_a_forged_answer_that_all_has_arrived_stops_no_pair_for_good(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    joined.source.session.loss = 1.0
    assert all(write(joined.outlet, 0, 1, 2))
    joined.source.session.loss = 0.0
    epoch = joined.outlet._inlets[joined.inlet.id].epoch  # noqa: SLF001 - which the stranger has overheard
    forged = pack_ack(Ack(epoch, 4, MAX_NUMBER))
    stranger.session.publish(stranger.keys.ack(joined.outlet.id, joined.inlet.id), forged, urgent=True)
    scene.pass_time(ROUND_S)
    assert all(write(joined.outlet, 3, 4))
    scene.pass_time(1.0)
    assert all(write(joined.outlet, 5, 6, 7))
    found: list[int] = []
    scene.until(lambda: found.extend(take(joined.inlet)) or found[-3:] == [5, 6, 7], "what is written later arrives")
    assert found == sorted(set(found))
    scene.until(lambda: joined.outlet.is_acknowledged, "all is acknowledged")
    assert joined.source.transport.rejected["answer that takes back another"]


@pytest.mark.parametrize("epoch", [0, 1, MAX_NUMBER])
@pytest.mark.parametrize("first", [1, MAX_NUMBER])
def test_a_forged_start_stops_no_pair_for_good(scene: SteppedZenohScene, first: int, epoch: int) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    assert all(write(joined.outlet, 0, 1))
    assert joined.arrive(2) == [0, 1]
    next_epoch = joined.outlet._epoch + 1  # noqa: SLF001 - which the stranger guesses
    forged = pack_start(MatchStart(min(next_epoch + epoch, MAX_NUMBER), first))
    stranger.session.publish(stranger.keys.to_one(joined.inlet.id, joined.outlet.id), forged, urgent=False)
    scene.pass_time(ROUND_S)
    assert all(write(joined.outlet, 2, 3, 4))
    assert joined.arrive(3) == [2, 3, 4]
    scene.until(lambda: joined.outlet.peers() and joined.outlet.is_acknowledged, "all is acknowledged")


def test_asking_for_samples_again_and_again_costs_little(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    admit(joined.source, joined.target)
    answer = match_stranger(joined, stranger)
    answer(Ack(0, 1, MAX_NUMBER))
    scene.pass_time(ROUND_S)
    assert all(write(joined.outlet, *range(8), size=MIB))
    scene.pass_time(ROUND_S)
    sizes = count_published(joined)
    for _ in range(100):
        answer(Ack(0, 1, MAX_NUMBER, 1, MAX_NUMBER))
        scene.pass_time(1e-3)
    scene.pass_time(1.0)
    assert sum(sizes) < 3 * 8 * MIB
    for _ in range(200):
        answer(Ack(0, 1, MAX_NUMBER, 1, MAX_NUMBER))
        scene.pass_time(0.5)
    sizes.clear()
    answer(Ack(0, 1, MAX_NUMBER, 1, MAX_NUMBER))
    scene.pass_time(ROUND_S)
    assert sum(sizes) < MIB  # it has had its time


def test_asking_for_many_small_samples_costs_little(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    admit(joined.source, joined.target)
    answer = match_stranger(joined, stranger)
    assert all(write(joined.outlet, *range(1000)))
    assert joined.arrive(1000) == list(range(1000))
    for _ in range(20):
        answer(Ack(0, 1, MAX_NUMBER))
        scene.pass_time(ROUND_S)
    scene.pass_time(5.0)
    sizes = count_published(joined)
    for _ in range(10):
        answer(Ack(0, 1, MAX_NUMBER, 1, MAX_NUMBER))
        scene.pass_time(1e-3)
    scene.pass_time(ROUND_S)
    assert 0 < len(sizes) < 2 * FOREIGN_BYTES // LEAST_BYTES


def test_forgetting_a_match_again_and_again_costs_little(scene: SteppedZenohScene) -> None:
    retained = Channel("retained", retained=True)
    joined, stranger = Joined(scene, retained), Stranger(scene, retained)
    assert write(joined.outlet, 1, size=MIB) == [True]
    joined.arrive(1)
    answer = match_stranger(joined, stranger)
    sizes = count_published(joined)
    for _ in range(400):
        forgets = pack_ack(Ack(0, 0, 0))
        stranger.session.publish(stranger.keys.ack(joined.outlet.id, stranger.id), forgets, urgent=True)
        scene.pass_time(0.03)
        answer(Ack(0, 1, MAX_NUMBER))
        scene.pass_time(0.03)
    assert sum(sizes) < 20 * MIB


def test_a_stranger_that_takes_little_at_a_time_slows_no_member(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    admit(joined.source, joined.target)
    answer = match_stranger(joined, stranger)
    found: list[int] = []
    wanted = 1
    for number in range(400):
        assert write(joined.outlet, number) == [True]
        scene.pass_time(0.05)
        found += take(joined.inlet)
        if number % 3 == 0:
            wanted = min(wanted + 1, number + 1)
            answer(Ack(0, wanted, wanted))
    scene.pass_time(ROUND_S)
    found += take(joined.inlet)
    assert found == list(range(400))
    assert joined.outlet.is_acknowledged  # the stranger has had its time
    assert joined.outlet._inlets[stranger.id].acknowledged < 200  # noqa: SLF001 - it is far behind


def test_a_dead_member_whose_token_is_shown_by_another_is_lost_after_the_lease(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    stranger.session.declare_token(stranger.keys.token("in", joined.inlet.id))
    scene.pass_time(1.0)
    joined.target.kill()
    scene.pass_time(LEASE_S)
    began_s, accepted = scene.now_s(), 0
    while scene.now_s() < began_s + 3 * LEASE_S:
        accepted += write(joined.outlet, accepted, size=MIB)[0]
        scene.pass_time(1.0)
    assert not joined.outlet.peers()
    assert accepted > 1.5 * LEASE_S


def test_an_inlet_that_answers_though_it_is_full_is_never_lost(scene: SteppedZenohScene) -> None:
    joined = Joined(scene, Channel("bounded", reader_samples=16))
    assert all(write(joined.outlet, *range(40)))
    peers = joined.outlet.peers()
    scene.pass_time(20 * LEASE_S)
    assert joined.outlet.peers() == peers
    found: list[int] = []
    scene.until(lambda: found.extend(take(joined.inlet)) or len(found) == 40, "all arrive")
    assert found == list(range(40))


def test_an_inlet_that_says_nothing_for_long_is_found_again_with_its_next_answer(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.target.session.loss = 1.0
    assert write(joined.outlet, 1) == [True]
    scene.until(lambda: not joined.outlet.peers(), "it is lost")
    assert all(write(joined.outlet, 2, 3))
    joined.target.session.loss = 0.0
    scene.until(lambda: joined.outlet.peers() and joined.outlet.is_acknowledged, "it is found again")
    assert joined.arrive(3) == [1, 2, 3]


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_member_that_many_tokens_have_shut_out_is_found_when_they_are_gone(
    scene: SteppedZenohScene, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    for module in ("place", "inlet", "outlet"):
        monkeypatch.setattr(f"gradbus.runtime.transport.zenoh.{module}.MAX_PEERS", 8)
    stranger, watched, late = Stranger(scene), scene.join("one", LEASE_S), scene.join("one", LEASE_S)
    opened = VOLATILE.opened()
    first = watched.transport.outlet(opened) if side == "in" else watched.transport.inlet(opened)
    ids = [endpoint_id(stranger.owner, number) for number in range(12)]
    tokens = [stranger.session.declare_token(stranger.keys.token(side, one)) for one in ids]
    scene.pass_time(1.0)
    second = late.transport.inlet(opened) if side == "in" else late.transport.outlet(opened)
    scene.pass_time(1.0)
    assert not first.peers()
    for one in tokens:
        one.undeclare()
    scene.pass_time(LEASE_S + 2.0)
    scene.until(lambda: first.peers() and second.peers(), "they match")


def test_starts_without_tokens_shut_out_no_member(scene: SteppedZenohScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.runtime.transport.zenoh.inlet.MAX_PEERS", 32)
    stranger, watched = Stranger(scene), scene.join("one", LEASE_S)
    inlet = watched.transport.inlet(VOLATILE.opened())
    for number in range(100):
        key = stranger.keys.to_one(inlet.id, endpoint_id(stranger.owner, number))  # type: ignore[attr-defined]
        stranger.session.publish(key, pack_start(MatchStart(1, 1)), urgent=False)
    scene.pass_time(ROUND_S)
    outlet = scene.join("one", LEASE_S).transport.outlet(VOLATILE.opened())
    began_s = scene.now_s()
    scene.until(lambda: inlet.peers() and outlet.peers(), "they match")
    assert scene.now_s() < began_s + 1.0


def test_what_waits_behind_gaps_of_all_outlets_takes_one_window(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    keys, session, inlet = stranger.keys, stranger.session, joined.inlet
    for number in range(4):
        outlet = endpoint_id(stranger.owner, number)
        session.declare_token(keys.token("out", outlet))
        scene.pass_time(ROUND_S)
        session.publish(keys.to_one(inlet.id, outlet), pack_start(MatchStart(1, 1)), urgent=False)
        scene.pass_time(ROUND_S)
        for sample in range(2, 12):
            message = sample_message(MIB, ())
            set_number(message, sample)
            session.publish(keys.to_one(inlet.id, outlet), message, urgent=False)
        scene.pass_time(ROUND_S)
    waiting = sum(one.early_bytes for one in inlet._outlets.values())  # noqa: SLF001 - what waits is no part of the contract
    assert 0 < waiting <= WINDOW_BYTES + 2 * MIB
