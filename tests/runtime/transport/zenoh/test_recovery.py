"""How soon outlets on Zenoh repair what was lost: over a simulated relay, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from joined_endpoints import LEASE_S, VOLATILE, Joined, Members, NoThread, Stranger
from transport_scenes import SteppedZenohScene, take, write

from gradbus.runtime.security.identity.join_transport import BEACON, LAST_BEACON
from gradbus.runtime.transport.kept_samples import NumberedSample
from gradbus.runtime.transport.zenoh.outlet import PROBE_MAX_S, PROBE_S, InletState

REPAIRED_S = 2 * PROBE_S  # a PROBE, and what it has the inlet ask for
ROUND_S = 0.1


@pytest.fixture
def scene() -> SteppedZenohScene:
    return SteppedZenohScene()


def repair_last(joined: Joined) -> float:
    """Lose a sample after which none is written. Returns how long its repair takes."""
    joined.source.session.loss = 1.0
    assert write(joined.outlet, 7) == [True]
    joined.source.session.loss = 0.0
    began_s = joined.scene.now_s()
    assert joined.arrive(1) == [7]
    return joined.scene.now_s() - began_s


def test_an_unreliable_inlet_whose_link_was_down_gets_what_is_written_later(scene: SteppedZenohScene) -> None:
    joined = Joined(scene, is_reliable=False)
    joined.target.session.is_refused = True
    joined.target.session.break_link()
    scene.until(lambda: not joined.outlet.peers(), "the inlet is lost")
    assert all(write(joined.outlet, 2, 3, 4))
    scene.pass_time(ROUND_S)
    joined.target.session.is_refused = False
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "it is back")
    for number in range(10, 15):
        assert write(joined.outlet, number) == [True]
        scene.pass_time(ROUND_S)
    assert take(joined.inlet)[-5:] == list(range(10, 15))


def joined_by_beacons(scene: SteppedZenohScene) -> Joined:
    """Return the outlet of a controller, which keeps its last beacon only, and the inlet of a node."""
    joined = Joined(scene)
    joined.outlet = joined.source.transport.outlet(LAST_BEACON)
    joined.inlet = joined.target.transport.inlet(BEACON)
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "they match")
    return joined


def test_a_node_waits_for_no_beacon_that_a_later_one_has_replaced(scene: SteppedZenohScene) -> None:
    joined = joined_by_beacons(scene)
    joined.source.session.loss = 1.0
    assert write(joined.outlet, 1) == [True]
    joined.source.session.loss = 0.0
    assert write(joined.outlet, 2) == [True]
    assert joined.arrive(1) == [2]
    assert write(joined.outlet, 3) == [True]
    assert joined.arrive(1) == [3]


def test_beacons_that_a_node_does_not_take_fill_no_more_than_their_room(scene: SteppedZenohScene) -> None:
    joined = joined_by_beacons(scene)
    last = 3 * BEACON.reader_samples
    for number in range(last + 1):
        assert write(joined.outlet, number) == [True]
        scene.pass_time(ROUND_S)
    held = take(joined.inlet)
    assert held == list(range(BEACON.reader_samples))
    assert joined.arrive(1) == [last]


def test_a_node_that_has_not_joined_yet_is_sent_again_what_it_has_missed_while_it_was_cut_off(
    scene: SteppedZenohScene,
) -> None:
    joined = Joined(scene)
    joined.source.transport.start(NoThread(), Members())
    joined.source.transport.look_around()
    joined.target.session.loss = 1.0
    assert all(write(joined.outlet, *range(100)))
    scene.pass_time(LEASE_S / 2)
    joined.target.session.loss = 0.0
    assert joined.arrive(100) == list(range(100))
    assert write(joined.outlet, 100) == [True]
    assert joined.arrive(1) == [100]


def test_large_data_that_waits_holds_up_no_control_message(scene: SteppedZenohScene) -> None:
    data = Joined(scene)
    control = Joined(scene, replace(VOLATILE, name="control", reader_samples=4096, overwrites=True), is_control=True)
    data.source.session.congested = control.source.session.congested = {False}
    assert write(data.outlet, 1) == [False]
    assert write(control.outlet, 1) == [True]
    assert control.arrive(1) == [1]


def test_a_first_answer_that_is_late_slows_no_later_repair(scene: SteppedZenohScene) -> None:
    joined = Joined(scene, answers=False)
    scene.pass_time(2 * LEASE_S)
    joined.target.session.loss = 0.0
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "they match")
    assert repair_last(joined) < REPAIRED_S


def test_a_token_that_never_answers_delays_no_repair(scene: SteppedZenohScene) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    stranger.session.declare_token(stranger.keys.token("in", stranger.id))
    scene.pass_time(20 * LEASE_S)
    assert repair_last(joined) < REPAIRED_S
    published = joined.source.session.published
    scene.pass_time(10 * LEASE_S)
    assert joined.source.session.published - published < 20  # a START each lease


@pytest.mark.parametrize("seed", range(5))
def test_an_inlet_that_has_forgotten_an_idle_outlet_is_found_again_though_the_probe_is_lost(seed: int) -> None:
    scene = SteppedZenohScene(seed)
    joined = Joined(scene)
    session = joined.source.session
    session.is_refused = True
    session.break_link()
    # The inlet misses the token at once, and forgets after a lease; the outlet misses its token for a lease.
    scene.pass_time(1.5 * LEASE_S)
    session.is_refused, session.loss = False, 1.0
    scene.until(lambda: session.is_linked, "the link stands")
    scene.pass_time(ROUND_S / 2)
    session.loss = 0.0
    scene.until(lambda: joined.outlet.peers() and joined.inlet.peers(), "both know of the match")
    published = session.published
    scene.pass_time(LEASE_S)
    assert session.published == published


def test_what_was_sent_again_is_not_sent_once_more_before_it_can_have_arrived() -> None:
    inlet = InletState("an inlet", b"its process")
    at_first_s = inlet.repeat_interval_s
    inlet.note_sent(NumberedSample(1, 1 << 20, b""), 10.0)
    inlet.note_sent(NumberedSample(2, 1 << 20, b""), 11.0)
    inlet.note_arrival(1, 12.0)  # behind what waited for the link
    assert (at_first_s, inlet.repeat_interval_s) == (PROBE_S / 2, 2.0)
    inlet.note_sent(NumberedSample(3, 1 << 20, b""), 20.0)
    inlet.note_arrival(3, 20.01)
    assert inlet.repeat_interval_s == PROBE_S / 2
    inlet.note_sent(NumberedSample(4, 1 << 20, b""), 30.0)
    inlet.note_arrival(4, 90.0)
    assert inlet.repeat_interval_s == PROBE_MAX_S


def test_an_answer_is_not_asked_for_again_before_it_can_have_come() -> None:
    inlet = InletState("an inlet", b"its process")
    inlet.note_sent(NumberedSample(1, 100, b""), 10.0)
    inlet.note_arrival(1, 11.0)  # many share a busy relay
    assert inlet.patience_s == 2.0
    inlet.note_sent(NumberedSample(2, 100, b""), 20.0)
    inlet.note_arrival(2, 20.01)
    assert inlet.patience_s == PROBE_S
    inlet.note_sent(NumberedSample(3, 100, b""), 30.0)
    inlet.note_arrival(3, 90.0)
    assert inlet.patience_s == PROBE_MAX_S


def test_however_long_deliveries_take_an_inlet_is_asked_several_times_in_a_lease() -> None:
    inlet = InletState("an inlet", b"its process", longest_patience_s=LEASE_S / 4)
    inlet.note_sent(NumberedSample(1, 100, b""), 10.0)
    inlet.note_arrival(1, 90.0)
    assert inlet.patience_s == LEASE_S / 4


def test_what_one_inlet_lacks_waits_while_the_link_is_congested(scene: SteppedZenohScene) -> None:
    """Else it would fill the lane with copies, and hold up what is for all."""
    joined = Joined(scene, replace(VOLATILE, name="retained", retained=True))
    assert write(joined.outlet, 1) == [True]
    assert joined.arrive(1) == [1]
    joined.source.session.congested.add(False)
    late = scene.join("one", LEASE_S)
    inlet = late.transport.inlet(joined.inlet.channel)
    scene.until(lambda: len(joined.outlet.peers()) == 2, "it matches")
    scene.pass_time(LEASE_S / 2)
    assert take(inlet) == []
    joined.source.session.congested.clear()
    found: list[int] = []
    scene.until(lambda: found.extend(take(inlet)) or found, "it gets what is retained")
    assert found == [1]
