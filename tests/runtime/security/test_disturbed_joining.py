"""Strangers, and members that have turned, who want to keep a node from joining: without a bus."""

from __future__ import annotations

import contextlib
import secrets

import pytest
from joining_hall import JOB, LIST, ONE, SERVER, STRANGER, TWO, Hall, stamped

from gradbus.runtime.errors import FrameError, JobInUse
from gradbus.runtime.security import rate_limits
from gradbus.runtime.security.identity import admission, duplicate_controllers, handshake, join_client
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import ROLES, AllowList, Entry
from gradbus.runtime.security.identity.join_client import FIRST_S, LONGEST_S, SILENT_S, JoinClient
from gradbus.runtime.security.identity.join_messages import Beacon, JoinConfirm, JoinHello
from gradbus.runtime.security.identity.key import NodeKey, new_node_key
from gradbus.runtime.security.identity.key_messages import COMMANDS
from gradbus.runtime.security.identity.membership import ControllerMembership

TRUE, OTHER = 1, 99  # handles of DDS writers: the controller's, and a stranger's


def newcomer() -> JoinClient:
    return JoinClient(JOB, TWO, SERVER.public, "client")


def test_a_beacon_that_was_not_checked_in_a_flood_of_others_is_taken_when_it_is_said_again() -> None:
    hall, node = Hall(), newcomer()
    for number in range(join_client.CHECKS_AT_ONCE):
        forged = handshake.signed(JOB, STRANGER, Beacon(secrets.token_bytes(16), number, STRANGER.public))
        node.receive_beacon(memoryview(forged), OTHER + number, hall.now_s)
    with pytest.raises(FrameError, match="more beacons came"):
        node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    hall.nodes.append(node)
    hall.later(2.0)
    hall.meet(node)
    hall.later(2.0)
    assert node.keys is not None


def test_a_beacon_that_a_stranger_says_too_is_there_as_long_as_its_controller() -> None:
    hall, node = Hall(), newcomer()
    assert len(node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)) == 1  # this Hello is lost
    for number in range(join_client.MAX_SOURCES):
        assert node.receive_beacon(memoryview(hall.controller.beacon), OTHER + number, hall.now_s) == []
    assert node.tick(hall.now_s + 10.0, lambda source: source == TRUE) == []  # all is full of strangers' writers
    node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)  # it says it again
    for number in range(join_client.MAX_SOURCES - 1):
        node.receive_beacon(memoryview(hall.controller.beacon), OTHER + number, hall.now_s)
    assert len(node.tick(hall.now_s + 20.0, lambda source: source == TRUE)) == 1


def test_saying_a_beacon_again_brings_neither_checks_nor_hellos() -> None:
    hall, node = Hall(), newcomer()
    said = 0
    for number in range(2 * join_client.CHECKS_AT_ONCE):
        said += len(node.receive_beacon(memoryview(hall.controller.beacon), number, hall.now_s))
    assert said == 1


def test_a_controller_with_another_key_cannot_take_the_place_of_the_one_whose_session_it_says() -> None:
    hall, node = Hall(), newcomer()
    forged = handshake.signed(
        JOB, STRANGER, Beacon(hall.controller.session, hall.controller.start + 1, STRANGER.public)
    )
    said = node.receive_beacon(memoryview(forged), OTHER, hall.now_s)
    said += node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    said += node.receive_beacon(memoryview(forged), OTHER + 1, hall.now_s)
    hall.nodes.append(node)
    hall.pass_on(said, node)
    hall.later(20.0)
    hall.later(20.0)
    assert node.keys is not None


def recording(start: int) -> memoryview:
    """A beacon of an earlier start of the controller, which anybody can say again."""
    return memoryview(handshake.signed(JOB, SERVER, Beacon(secrets.token_bytes(16), start, SERVER.public)))


def test_a_member_whose_controller_is_silent_and_there_asks_no_recording_of_earlier_ones() -> None:
    hall = Hall(ONE)
    (one,) = hall.nodes
    for number in range(4):
        assert one.receive_beacon(recording(1 + number), OTHER, hall.now_s) == []
    for _ in range(10):
        hall.now_s += SILENT_S
        assert one.tick(hall.now_s) == []
    assert len(one.tick(hall.now_s, lambda source: source == OTHER)) == 1  # it is gone: any of them may be the one


def test_a_beacon_that_is_newer_than_the_one_asked_is_answered_at_once() -> None:
    hall, node = Hall(), newcomer()
    assert len(node.receive_beacon(recording(1), OTHER, hall.now_s)) == 1
    for _ in range(8):
        hall.now_s += 2 * LONGEST_S
        assert len(node.tick(hall.now_s)) == 1
    assert node.receive_beacon(recording(0), OTHER, hall.now_s) == []
    hall.nodes.append(node)
    hall.meet(node)
    assert node.keys is not None


def test_a_hello_to_the_true_controller_that_was_lost_among_recordings_is_soon_said_again() -> None:
    hall, node = Hall(), newcomer()
    said = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    assert len(said) == 1  # and lost
    for number in range(join_client.MAX_BEACONS):
        node.receive_beacon(recording(1 + number), OTHER + number, hall.now_s)
    hall.nodes.append(node)
    began_s = hall.now_s
    while node.keys is None:
        hall.later(0.05)
    assert hall.now_s - began_s < 4 * 1.5 * FIRST_S * 2  # two questions, of which the first one goes to a recording


def test_a_member_that_says_hello_with_the_session_of_another_does_not_keep_it_out() -> None:
    hall, node = Hall(ONE), newcomer()
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)

    def evil(attempt: int) -> bytes:
        session, key, high = hall.controller.session, secrets.token_bytes(32), 1 << 63
        says = JoinHello(node.session, session, high, attempt, key, key, ONE.public, SERVER.public, 0, ONE.name)
        return stamped(ONE, handshake.signed(JOB, ONE, says))

    assert len(hall.controller.receive(memoryview(evil(1 << 31)), hall.now_s)) == 1
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    assert len(hall.controller.receive(memoryview(evil((1 << 31) + 1)), hall.now_s)) == 1
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    (handed,) = hall.controller.receive(memoryview(confirm), hall.now_s)
    node.receive(memoryview(handed), hall.now_s)
    assert node.keys is not None
    assert hall.controller.members[TWO.name].session == node.session


def test_recorded_hellos_of_earlier_starts_do_not_push_out_the_one_that_lives() -> None:
    hall, node = Hall(), newcomer()
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    for number in range(2 * admission.MAX_PENDING_EACH):
        former = newcomer()
        former.start = node.start - 1 - number
        (recorded,) = former.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
        hall.controller.receive(memoryview(recorded), hall.now_s)
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    assert len(hall.controller.receive(memoryview(confirm), hall.now_s)) == 1
    assert TWO.name in hall.controller.members


def test_forged_confirms_do_not_eat_the_checks_of_hellos() -> None:
    hall, node = Hall(), newcomer()
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    forged = handshake.signed(JOB, STRANGER, JoinConfirm(hall.controller.session, node.session, bytes(32)))
    for _ in range(admission.CHECKS_AT_ONCE + 10):
        with pytest.raises(FrameError, match="without the keys of its exchange"):
            hall.controller.receive(memoryview(forged), hall.now_s)
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    assert len(hall.controller.receive(memoryview(confirm), hall.now_s)) == 1


def test_a_flood_of_hellos_does_not_keep_out_a_node_that_was_answered_already() -> None:
    hall, node = Hall(), newcomer()
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    flood = newcomer()
    (forged,) = flood.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    reasons = set()
    for _ in range(admission.CHECKS_AT_ONCE):
        with pytest.raises(FrameError) as caught:  # a member that has turned: a stamp of its own, and no signature
            hall.controller.receive(memoryview(stamped(TWO, forged[:-80] + bytes(64))), hall.now_s)
        reasons.add(caught.value.reason)
    assert reasons == {"signature", "busy"}
    assert len(hall.controller.receive(memoryview(confirm), hall.now_s)) == 1
    assert hall.controller.members[TWO.name].session == node.session


def test_confirms_that_a_stranger_makes_with_the_tag_of_the_true_one_are_checked_within_bounds() -> None:
    hall, node = Hall(), newcomer()
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    reasons = []
    for _ in range(admission.SHARE_AT_ONCE + 2):
        with pytest.raises(FrameError) as caught:
            hall.controller.receive(memoryview(confirm[:-64] + bytes(64)), hall.now_s)
        reasons.append(caught.value.reason)
    assert reasons.count("signature") == admission.SHARE_AT_ONCE  # the first one is free, and the Hello took one
    assert reasons[-1] == "busy"
    hall.now_s += 1.0 / admission.SHARE_PER_S
    assert len(hall.controller.receive(memoryview(confirm), hall.now_s)) == 1


def started_after(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> Admission:
    """A second start of the controller, however soon it came after the first one."""
    monkeypatch.setattr(admission, "new_incarnation", lambda: hall.controller.start + 1)
    return hall.new_controller(LIST, label="desk:2")


def test_recordings_of_beacons_do_not_hide_the_controller_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall()
    second = started_after(hall, monkeypatch)

    def receive(start: int) -> list[bytes]:
        recorded = handshake.signed(JOB, SERVER, Beacon(secrets.token_bytes(16), start, SERVER.public))
        return second.receive(memoryview(recorded), hall.now_s)

    asked = [len(receive(start)) for start in range(100, 100 + 2 * duplicate_controllers.MAX_DUPLICATES)]
    assert asked == [1] * len(asked)
    assert receive(99) == []  # a recording of before all of these
    (probe,) = second.receive(memoryview(hall.controller.beacon), hall.now_s)
    assert second.receive(memoryview(hall.controller.beacon), hall.now_s) == []
    for number in range(1, duplicate_controllers.PROBES + 2):
        said = second.tick(hall.now_s + number)
    assert said == []
    late_s = hall.now_s + number + duplicate_controllers.AGAIN_S + 1.0  # it was busy, and says again that it is there
    (probe,) = second.receive(memoryview(hall.controller.beacon), late_s)
    (refusal,) = hall.controller.receive(memoryview(probe), late_s)
    second.receive(memoryview(refusal), late_s)
    assert second.refusal == "the job is held by the controller desk:1"
    assert not second.is_busy


def test_an_earlier_start_of_the_controller_that_wakes_up_does_not_end_the_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hall = Hall()
    earlier = hall.controller
    hall.controller = second = started_after(hall, monkeypatch)
    (probe,) = second.receive(memoryview(earlier.beacon), hall.now_s)  # which stands still
    hall.later(duplicate_controllers.HOLD_S)
    node = newcomer()
    hall.nodes.append(node)
    hall.meet(node)
    assert node.keys is not None
    (refusal,) = earlier.receive(memoryview(probe), hall.now_s)
    hall.later(admission.LEADS_S + duplicate_controllers.AGAIN_S)
    assert second.receive(memoryview(refusal), hall.now_s) == []
    assert second.receive(memoryview(earlier.beacon), hall.now_s) == []
    assert not second.refusal


def test_a_second_controller_that_has_just_let_somebody_in_still_hears_who_holds_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hall = Hall()
    second = started_after(hall, monkeypatch)
    node = newcomer()
    (hello,) = node.receive_beacon(memoryview(second.beacon), TRUE, hall.now_s)
    (welcome,) = second.receive(memoryview(hello), hall.now_s)
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    second.receive(memoryview(confirm), hall.now_s)
    assert second.members
    (probe,) = second.receive(memoryview(hall.controller.beacon), hall.now_s)
    (refusal,) = hall.controller.receive(memoryview(probe), hall.now_s)
    second.receive(memoryview(refusal), hall.now_s)
    assert second.refusal == "the job is held by the controller desk:1"


def test_a_controller_that_must_not_go_on_lets_nobody_in_and_says_nothing_any_more() -> None:
    hall = Hall(ONE)
    member = ControllerMembership(hall.controller)
    assert member.encrypt(COMMANDS, (b"go",)) is not None
    hall.controller.refusal = "the job is held by the controller desk:9"
    with pytest.raises(JobInUse, match=r"held by the controller desk:9\. Stop that one first"):
        member.encrypt(COMMANDS, (b"go",))
    node = newcomer()
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), TRUE, hall.now_s)
    assert hall.controller.receive(memoryview(hello), hall.now_s) == []


def test_a_stranger_with_many_names_fills_no_log_and_takes_no_answer_from_those_who_are_known() -> None:
    hall, told = Hall(), []
    hall.controller.events.refused = lambda name, why: told.append(name)

    def refused(key: NodeKey, role: int = 0) -> int:
        session, nonce = secrets.token_bytes(16), secrets.token_bytes(32)
        says = JoinHello(
            session, hall.controller.session, 1, 1, nonce, nonce, key.public, SERVER.public, role, key.name
        )
        whole = stamped(key, handshake.signed(JOB, key, says))
        with contextlib.suppress(FrameError):  # busy
            return len(hall.controller.receive(memoryview(whole), hall.now_s))
        return 0

    names = [NodeKey(f"stranger-{number}", STRANGER.private) for number in range(300)]
    assert sum(map(refused, names)) == admission.REFUSALS_AT_ONCE
    assert told == [key.name for key in names[: rate_limits.REFUSED_AT_ONCE]]
    observer = ROLES.index("observer")
    assert refused(ONE, observer) == refused(SERVER, ROLES.index("controller")) == 1
    assert told[rate_limits.REFUSED_AT_ONCE :] == [ONE.name, SERVER.name]
    hall.now_s += 5.0
    assert refused(ONE, observer) == 1
    assert told[rate_limits.REFUSED_AT_ONCE :] == [ONE.name, SERVER.name]


def test_two_hundred_nodes_that_come_at_once_are_let_in_by_a_controller_that_is_slow() -> None:
    keys = [new_node_key(f"node-{number}") for number in range(200)]
    entries = tuple(Entry(key.name, "observer", key.public) for key in keys)
    hall = Hall(allowed=AllowList(entries))
    nodes = {node.session: node for node in (JoinClient(JOB, key, SERVER.public, "observer") for key in keys)}
    queue = [
        said for node in nodes.values() for said in node.receive_beacon(memoryview(hall.controller.beacon), TRUE, 0.0)
    ]
    now_s, turn_s = 0.0, 0.02  # of each message: a Hello, a Confirm and a Have of all of them take twelve seconds
    while queue and now_s < 120.0:
        now_s += turn_s
        answers = receive(hall.controller, queue.pop(0), now_s)
        for answer in answers:
            for node in nodes.values():
                queue += receive(node, answer, now_s)
        for node in nodes.values():
            queue += node.tick(now_s)
    assert set(hall.controller.members) == {key.name for key in keys}
    assert all(node.keys is not None for node in nodes.values())


def receive(party: Admission | JoinClient, data: bytes, now_s: float) -> list[bytes]:
    try:
        return party.receive(memoryview(data), now_s)
    except FrameError:
        return []
