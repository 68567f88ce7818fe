"""Joining a job of ranks, without a bus: one key for all, who has it and when, and who has it no more."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joining_hall import CONTROL, JOB, ONE, RANKS, SERVER, STRANGER, TWO, RankHall, everybody_hears_everybody

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.envelope import parse as parse_header
from gradbus.runtime.security.identity import key_epoch, key_messages
from gradbus.runtime.security.identity.admission import most_processes
from gradbus.runtime.security.identity.allow_list import AllowList, Entry, with_entry, without
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.join_messages import JoinHello, parse
from gradbus.runtime.security.identity.key_messages import RankKeyGrant
from gradbus.runtime.security.identity.membership import ClientMembership
from gradbus.runtime.security.streams import StreamEncryptor
from gradbus.runtime.transport.channels import CHANNELS, ToClients

ROUNDS = 12


def test_who_joins_gets_the_key_that_all_seal_with_and_hears_which_ranks_it_may_be() -> None:
    hall = RankHall(ONE, TWO)
    everybody_hears_everybody(hall)
    assert [node.ids for node in hall.nodes] == [((1, 2),), ((3, 3),)]
    assert [node.epoch for node in hall.nodes] == [hall.controller.group.key.epoch] * 2
    assert hall.wrong == []


def test_a_stranger_has_no_key_and_what_he_seals_is_not_opened() -> None:
    hall = RankHall(ONE, STRANGER)
    one, stranger = hall.nodes
    assert "stranger is not on the allow list" in stranger.refusal
    assert not hall.keys(stranger).has_key
    said = hall.says(one, b"secret")
    assert hall.hears(stranger, said) == "no key"
    other = RankHall(TWO)  # of another controller, with the same key file or not
    assert hall.hears(one, other.says(other.nodes[0], b"forged")) == "no key"


def test_processes_of_one_machine_may_share_a_key_the_controllers_own_too() -> None:
    hall = RankHall(ONE, ONE, ONE, SERVER, SERVER)
    everybody_hears_everybody(hall)
    assert len(hall.controller.members) == 5
    assert hall.nodes[-1].ids == ((0, 1023),)


def test_of_more_processes_than_a_node_can_need_the_earliest_makes_room() -> None:
    hall = RankHall()
    bound = most_processes(RANKS.entries[1])
    assert bound == 2
    for _ in range(bound + 1):
        node = JoinClient(JOB, TWO, SERVER.public, "worker")
        hall.nodes.append(node)
        hall.meet(node)
    assert len(hall.controller.members) == bound
    assert [bool(node.refusal) for node in hall.nodes] == [True, False, False]
    assert "more processes than it has ranks" in hall.nodes[0].refusal


def test_a_new_key_is_taken_in_by_all_before_anybody_uses_it_so_nothing_is_lost() -> None:
    hall = RankHall(ONE, TWO, SERVER)
    one, _, third = hall.nodes
    before = hall.keys(hall.controller).current
    everybody_hears_everybody(hall)
    said = hall.controller.allow(without(RANKS, TWO.name), hall.now_s)
    heard: list[str] = []
    for number in range(ROUNDS):
        hall.pass_on(said if not number else [], hall.controller)  # from now on one has the key, and the third, too
        for speaker, ear in ((one, third), (third, one), (hall.controller, one), (one, hall.controller)):
            heard.append(hall.hears(ear, hall.says(speaker, b"word")))
        hall.later(0.3)
    assert heard == ["word"] * 4 * ROUNDS
    after = {hall.keys(party).current.key_id for party in (hall.controller, one, third)}
    assert len(after) == 1
    assert after != {before.key_id}


def test_who_is_removed_can_neither_read_nor_speak_nor_come_as_somebody_new() -> None:
    hall = RankHall(ONE, TWO)
    one, two = hall.nodes
    everybody_hears_everybody(hall)
    old = hall.keys(two).current
    late = hall.says(one, b"on its way")
    known, unheard = hall.says(two, b"removed"), JoinClient(JOB, TWO, SERVER.public, "worker")
    hall.pass_on(hall.controller.allow(without(RANKS, TWO.name), hall.now_s), hall.controller)
    hall.later(0.1)
    assert "has been taken off the allow list" in two.refusal
    assert hall.hears(hall.controller, late) == "on its way"
    assert [hall.hears(party, known) for party in (hall.controller, one)] == ["removed", "removed"]
    hall.keys(unheard).take(old, hall.controller.session, hall.now_s)  # it still has that key
    assert [hall.hears(party, hall.says(unheard, b"x")) for party in (hall.controller, one)] == ["old", "old"]
    assert (
        hall.hears(one, hall.says(hall.controller, b"a greeting")) == "a greeting"
    )  # with the new key: so one uses it, too
    hall.later(0.1)
    assert hall.hears(two, hall.says(one, b"secret")) == "no key"
    for _ in range(key_epoch.LOOKS + 1):
        hall.later(key_epoch.FORMER_RANKS_S / key_epoch.LOOKS)
    assert hall.hears(hall.controller, late) == "no key"


def test_a_node_cannot_have_another_one_or_the_giver_of_the_keys_removed_by_taking_its_session() -> None:
    hall = RankHall(ONE)
    (one,) = hall.nodes
    for session in (one.session, hall.controller.session):
        thief = JoinClient(JOB, TWO, SERVER.public, "worker")
        thief.session = session
        hall.nodes.append(thief)
        hall.meet(thief)
    third = JoinClient(JOB, ONE, SERVER.public, "worker")
    hall.nodes.append(third)
    hall.meet(third)
    for party in (hall.controller, one, third):
        hall.seal_of(party)
    hall.pass_on(hall.controller.allow(without(RANKS, TWO.name), hall.now_s), hall.controller)
    hall.later(3.0)
    for speaker in (hall.controller, one):
        assert hall.hears(third, hall.says(speaker, b"word")) == "word"


def test_the_giver_of_the_keys_cannot_seal_in_two_ways_which_would_use_nonces_twice() -> None:
    hall = RankHall(ONE)
    assert hall.hears(hall.nodes[0], hall.says(hall.controller, b"word")) == "word"
    for to in (None, 1):
        with pytest.raises(RuntimeError, match="a nonce would be used twice"):
            hall.tell(CONTROL, b"word", to)


def test_a_key_that_nobody_else_had_is_followed_by_the_next_as_well() -> None:
    hall = RankHall()
    for _ in range(3):
        hall.controller.rotation.begin(set(), hall.now_s, "tested")
        hall.later(0.1)
    one = JoinClient(JOB, ONE, SERVER.public, "worker")
    hall.nodes.append(one)
    hall.meet(one)
    everybody_hears_everybody(hall)


def test_who_is_removed_while_keys_are_changed_is_followed_by_one_more_change() -> None:
    hall = RankHall(ONE, TWO, SERVER)
    one, _, third = hall.nodes
    everybody_hears_everybody(hall)
    hall.controller.rotation.begin(set(hall.controller.members), hall.now_s, "tested")
    hall.controller.tick(hall.now_s)  # what it says is lost
    said = hall.controller.allow(without(RANKS, TWO.name), hall.now_s)
    hall.pass_on(said, hall.controller)
    heard: list[str] = []
    for _ in range(ROUNDS):
        hall.later(0.3)
        for speaker, ear in ((one, third), (third, one), (hall.controller, one), (one, hall.controller)):
            heard.append(hall.hears(ear, hall.says(speaker, b"word")))
    assert heard == ["word"] * 4 * ROUNDS
    assert hall.keys(one).current.key_id == hall.keys(third).current.key_id == hall.controller.group.key.key_id
    assert hall.keys(one).current.epoch >= 2 + min(hall.keys(two).current.epoch for two in hall.nodes)


def test_after_the_giver_is_gone_those_who_are_in_go_on() -> None:
    hall = RankHall(ONE, TWO)
    one, two = hall.nodes
    for _ in range(100):
        hall.now_s += 3600.0
        for node in hall.nodes:
            node.tick(hall.now_s)
    assert hall.hears(two, hall.says(one, b"word")) == "word"


@pytest.mark.parametrize(("role", "why"), [("client", "a job of ranks, which has no clients"), ("observer", "")])
def test_clients_have_no_place_among_ranks_and_observers_get_the_key(role: str, why: str) -> None:
    ids = ((0, 0),) if role == "client" else ()
    hall = RankHall(allowed=with_entry(RANKS, Entry(STRANGER.name, role, STRANGER.public, ids)))  # type: ignore[arg-type]
    node = JoinClient(JOB, STRANGER, SERVER.public, role)  # type: ignore[arg-type]
    hall.nodes.append(node)
    hall.meet(node)
    assert why in node.refusal
    assert bool(node.refusal) == bool(why) != hall.keys(node).has_key


def test_an_observer_of_ranks_hears_nothing_more_of_who_was_removed() -> None:
    hall = RankHall(ONE, TWO, allowed=with_entry(RANKS, Entry(STRANGER.name, "observer", STRANGER.public)))
    one, two = hall.nodes
    observer = JoinClient(JOB, STRANGER, SERVER.public, "observer")
    decrypt = ClientMembership(observer).decryptor(CHANNELS[ToClients])

    def read(data: bytes) -> bytes:
        opened = decrypt(data)
        return b"" if opened is None else bytes(opened.data)

    hall.nodes.append(observer)
    hall.meet(observer)
    for node in (one, two):
        assert read(hall.says(node, b"word")) == b"word"
    late = [hall.says(node, b"late") for node in (one, two)]
    hall.pass_on(hall.controller.allow(without(hall.controller.allowed, TWO.name), hall.now_s), hall.controller)
    assert read(late[0]) == b"late"
    with pytest.raises(FrameError) as caught:
        read(late[1])
    assert caught.value.reason == "removed"


def test_the_same_recording_is_opened_once_over_all_epochs() -> None:
    hall = RankHall(ONE, TWO)
    one, two = hall.nodes
    said = [hall.says(one, b"word") for _ in range(3)]
    assert [hall.hears(two, data) for data in (*said, *said)] == ["word"] * 3 + ["replay"] * 3
    hall.pass_on(hall.controller.allow(RANKS, hall.now_s), hall.controller)
    hall.controller.rotation.begin(set(hall.controller.members), hall.now_s, "tested")
    hall.later(0.1)
    hall.later(2.1)
    assert hall.keys(one).current.key_id != said[0][40:48]
    again = hall.says(one, b"anew")
    assert [hall.hears(two, data) for data in (again, again, *said)] == ["anew"] + ["replay"] * 4


def test_who_was_removed_cannot_keep_out_what_others_seal_with_the_next_key() -> None:
    hall = RankHall(ONE, TWO, SERVER)
    one, two, third = hall.nodes
    everybody_hears_everybody(hall)
    old = hall.keys(two).current
    hall.pass_on(hall.controller.allow(without(RANKS, TWO.name), hall.now_s), hall.controller)
    hall.later(0.1)
    forged = StreamEncryptor(old, one.session, CONTROL, start=1 << 31)
    assert hall.hears(third, forged.seal((b"as one",))) == "as one"  # it has the key for some seconds more
    hall.hears(one, hall.says(hall.controller, b"a greeting"))  # with the new key: so one uses it, too
    hall.later(0.1)
    said = hall.says(one, b"word")
    assert [hall.hears(third, data) for data in (said, said)] == ["word", "replay"]


def test_who_stood_still_for_long_opens_what_came_meanwhile_with_the_former_key() -> None:
    hall = RankHall(ONE, TWO)
    one, two = hall.nodes
    everybody_hears_everybody(hall)
    late = hall.says(one, b"on its way")
    hall.controller.rotation.begin(set(hall.controller.members), hall.now_s, "tested")
    for _ in range(10):
        hall.later(0.3)
    assert hall.keys(two).current is not hall.keys(two).of(parse_header(memoryview(late)))
    hall.later(10 * key_epoch.FORMER_RANKS_S)  # before it takes what lies there, it looks at the clock
    assert hall.hears(two, late) == "on its way"


def test_of_keys_that_are_over_nothing_is_remembered() -> None:
    hall = RankHall(ONE, TWO)
    one, two = hall.nodes
    for _ in range(10):
        everybody_hears_everybody(hall)
        hall.controller.rotation.begin(set(hall.controller.members), hall.now_s, "tested")
        for _ in range(20):
            hall.later(0.5)
    peer = hall.seal_of(two).peers.get(one.session)
    assert peer is not None
    assert len(peer.streams) <= 2


def test_a_hello_of_a_worker_is_one_that_older_programs_can_read() -> None:
    hall = RankHall()
    node = JoinClient(JOB, ONE, SERVER.public, "worker")
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    message = parse(memoryview(hello)).message
    assert isinstance(message, JoinHello)
    assert message.role == 2


SESSIONS = st.binary(min_size=16, max_size=16)
RANGES = st.tuples(st.integers(0, 1000), st.integers(0, 1000))


@settings(max_examples=50, deadline=None)
@given(st.lists(RANGES, max_size=64), st.lists(SESSIONS, max_size=300), st.data())
def test_what_ranks_are_handed_is_read_as_it_was_written_and_nothing_else_is(
    ids: list[tuple[int, int]], removed: list[bytes], data: st.DataObject
) -> None:
    word = RankKeyGrant(7, secrets.token_bytes(32), tuple(ids), tuple(removed))
    packed = key_messages.pack(word)
    assert key_messages.parse(memoryview(packed)) == replace(word, removed=word.removed[-256:])
    assert word.secret.hex() not in repr(word)
    cut = data.draw(st.integers(0, len(packed) - 1))
    for wrong in (packed[:cut], packed + b"x", bytes([key_messages.VERSION + 1]) + packed[1:]):
        with pytest.raises(FrameError):
            key_messages.parse(memoryview(wrong))


def test_ranks_and_clients_of_one_list_do_not_get_into_each_others_way() -> None:
    entries = (Entry("a", "client", ONE.public, ((0, 3),)), Entry("b", "worker", TWO.public, ((0, 3),)))
    assert AllowList(entries).owner_of(2) == "a"
    assert AllowList(entries[1:]).owner_of(2) is None
    assert CONTROL == "train/control/clients"
