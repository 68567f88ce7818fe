"""Two processes that give the keys of a job of ranks: one after the other, or at once, by mistake. Without a bus."""

from __future__ import annotations

import secrets

from joining_hall import JOB, ONE, RANKS, SERVER, TWO, RankHall, everybody_hears_everybody

from gradbus.runtime.security.identity import handshake, key_epoch
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.join_messages import Beacon


def gone_over(hall: RankHall, node: JoinClient, to: Admission, source: int) -> None:
    """The node asks another giver of the keys, as DDS does not see the one before any more."""
    former, hall.controller = hall.controller, to
    node.receive_beacon(memoryview(to.beacon), source, hall.now_s)
    hall.now_s += 0.1
    hall.pass_on(node.tick(hall.now_s, lambda one: one == source), node)
    hall.controller = former


def test_to_a_giver_that_was_started_anew_all_go_over_together() -> None:
    hall = RankHall(ONE, TWO)
    one, two = hall.nodes
    everybody_hears_everybody(hall)
    before = hall.keys(one).current.key_id
    hall.later(1.0)
    hall.controller = hall.new_controller(RANKS)
    gone_over(hall, one, hall.controller, 2)  # two hears later that it is there
    assert hall.keys(one).current.key_id == before
    assert hall.hears(two, hall.says(one, b"before")) == "before"
    gone_over(hall, two, hall.controller, 2)
    hall.later(key_epoch.SETTLE_S / 2)
    assert hall.hears(one, hall.says(two, b"between")) == "between"
    hall.later(key_epoch.SETTLE_S)
    assert hall.keys(one).current.key_id == hall.keys(two).current.key_id == hall.keys(hall.controller).current.key_id
    everybody_hears_everybody(hall)


def test_who_goes_back_to_the_giver_before_goes_on_with_the_key_that_all_others_have() -> None:
    hall = RankHall(ONE, TWO)
    one, _ = hall.nodes
    everybody_hears_everybody(hall)
    before = hall.keys(one).current
    second = hall.new_controller(RANKS)
    gone_over(hall, one, second, 2)
    assert hall.keys(one).accepts(second.group.key.key_id)
    gone_over(hall, one, hall.controller, 1)
    for _ in range(10):
        hall.later(key_epoch.SETTLE_S / 4)
        everybody_hears_everybody(hall)
    assert hall.keys(one).current is before


def test_who_has_gone_over_already_goes_back_to_the_key_that_all_others_have() -> None:
    hall = RankHall(ONE, TWO)
    one, _ = hall.nodes
    before = hall.keys(one).current
    gone_over(hall, one, hall.new_controller(RANKS), 2)
    hall.later(key_epoch.SETTLE_S + 0.1)
    assert hall.keys(one).current is not before
    gone_over(hall, one, hall.controller, 1)
    hall.later(key_epoch.SETTLE_S + 0.1)
    everybody_hears_everybody(hall)


def test_who_hears_of_a_third_giver_at_once_goes_over_to_that_one_and_not_to_the_second() -> None:
    hall = RankHall(ONE)
    (one,) = hall.nodes
    before, second, third = hall.keys(one).current, hall.new_controller(RANKS), hall.new_controller(RANKS)
    gone_over(hall, one, second, 2)
    gone_over(hall, one, third, 3)
    assert hall.keys(one).current is before
    assert hall.keys(one).accepts(second.group.key.key_id)  # some may seal with it
    hall.controller = third
    hall.later(key_epoch.SETTLE_S + 0.1)
    everybody_hears_everybody(hall)


def test_a_second_giver_of_keys_that_was_started_by_mistake_leads_nobody_away() -> None:
    hall = RankHall(ONE, TWO)
    hall.later(60.0)  # no words about keys come meanwhile
    second = hall.new_controller(RANKS)
    for node in hall.nodes:
        assert node.receive_beacon(memoryview(second.beacon), 2, hall.now_s) == []
    newcomer = JoinClient(JOB, ONE, SERVER.public, "worker")
    hall.nodes.append(newcomer)
    (hello,) = newcomer.receive_beacon(memoryview(second.beacon), 2, hall.now_s)
    (probe,) = second.receive(memoryview(hall.controller.beacon), hall.now_s)
    assert second.receive(memoryview(hello), hall.now_s) == []
    (refusal,) = hall.controller.receive(memoryview(probe), hall.now_s)
    second.receive(memoryview(refusal), hall.now_s)
    assert second.refusal
    hall.meet(newcomer)
    hall.later(1.0)
    for _ in range(3):
        hall.later(key_epoch.SETTLE_S)
        everybody_hears_everybody(hall)


def test_a_giver_that_hears_recordings_of_earlier_ones_lets_others_in_all_the_same() -> None:
    hall = RankHall()
    for number in range(100):
        recorded = handshake.signed(JOB, SERVER, Beacon(secrets.token_bytes(16), number, SERVER.public))
        hall.controller.receive(memoryview(recorded), hall.now_s)
        hall.later(0.1)
    node = JoinClient(JOB, ONE, SERVER.public, "worker")
    hall.nodes.append(node)
    hall.meet(node)
    assert hall.keys(node).has_key
