"""What follows from complaints, without a network: liars are named, and honest clients are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masking_scene import DIM, Scene, reseal

from gradbus.actors.secure_aggregation.complaints import judge
from gradbus.actors.secure_aggregation.keys import (
    CIPHERTEXT_BYTES,
    SEALED_BYTES,
    Dishonest,
    NotInProtocol,
    Roster,
    TooFewMembers,
    derived,
)
from gradbus.actors.secure_aggregation.masking_client import NO_SHARE
from gradbus.actors.secure_aggregation.masking_server import WrongSecrets
from gradbus.actors.secure_aggregation.shamir import PRIME, SHARE_BYTES, is_share


def test_a_client_whose_shares_nobody_can_use_is_named_and_only_it() -> None:
    found = judge(range(4), 3, {0: [3], 1: [3], 2: [3]})
    assert found.liars == {3: "3 of 3 other clients cannot use the shares that it has sealed for them"}
    assert (found.disputed, found.is_blocked) == (set(), True)


def test_a_client_that_complains_about_all_others_is_named_and_the_attempt_goes_on_without_it() -> None:
    found = judge(range(10), 7, {4: [one for one in range(10) if one != 4]})
    assert list(found.liars) == [4]
    assert "in dispute with 9 of 9 other clients: 0 cannot use its shares" in found.liars[4]
    assert not found.is_blocked


def test_one_complaint_names_nobody_and_ends_nothing() -> None:
    found = judge(range(4), 3, {0: [3]})
    assert (found.liars, found.disputed, found.is_blocked) == ({}, set(), False)


@pytest.mark.parametrize("count", [2, 5])
def test_where_all_have_to_stay_one_complaint_leaves_out_both_and_names_nobody(count: int) -> None:
    found = judge(range(count), count, {0: [1]})
    assert (found.liars, found.disputed, found.is_blocked) == ({}, {0, 1}, True)


def test_two_of_four_whose_shares_nobody_can_use_are_both_named() -> None:
    found = judge(range(4), 3, {0: [2, 3], 1: [2, 3], 2: [3], 3: [2]})
    assert set(found.liars) == {2, 3}


def test_as_many_liars_as_honest_ones_name_nobody() -> None:
    found = judge(range(4), 3, {2: [0, 1], 3: [0, 1]})
    assert (found.liars, found.disputed) == ({}, {0, 1, 2, 3})


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_honest_client_is_named_whatever_liars_seal_and_say(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 12))
    threshold = data.draw(st.integers(max(2, count // 2 + 1), count))
    most = min(max(1, count - threshold), count - 1)
    liars = data.draw(st.sets(st.integers(0, count - 1), max_size=most))
    complaints = {
        by: {
            other
            for other in range(count)
            if other != by and (by in liars or other in liars) and data.draw(st.booleans())
        }
        for by in range(count)
    }
    found = judge(range(count), threshold, complaints)
    assert found.liars.keys() <= liars
    if count - threshold >= 1:
        assert found.disputed <= liars, "nobody honest is left out without a reason"
    for one in liars:
        honest = set(range(count)) - liars
        if all(one in complaints[by] for by in honest) and len(honest) > max(most, count // 2):
            assert one in found.liars


def garbled(piece: bytes) -> bytes:
    return bytes(len(piece))


Change = Callable[[Roster, int, bytes], bytes]


def shared(scene: Scene, liar: int, change: Change) -> dict[int, list[int]]:
    """Agree on keys and shares, where ``change(roster, receiver, piece)`` gives what a liar seals. Returns what the
    others complain about."""
    ids = sorted(scene.clients)
    for one in ids:
        scene.server.add_keys(one, scene.clients[one].advertise())
    roster = scene.server.close_keys()
    for one in ids:
        sealed = scene.clients[one].share(roster)
        if one == liar:
            others = [other for other in ids if other != one]
            sealed = [change(roster, to, piece) for to, piece in zip(others, sealed, strict=True)]
        scene.server.add_shares(one, sealed)
    senders = scene.server.close_shares()
    return {one: list(scene.clients[one].receive(senders, scene.server.sealed_for(one))) for one in senders}


def too_large(scene: Scene) -> Change:
    element = (PRIME + 5).to_bytes(SHARE_BYTES)
    return lambda roster, to, piece: reseal(scene.clients[3], roster, to, (element, element))


KINDS: dict[str, Callable[[Scene], Change]] = {
    "random bytes": lambda scene: lambda roster, to, piece: garbled(piece),
    "no elements of the field": too_large,
    "other digests": lambda scene: lambda roster, to, piece: piece[:CIPHERTEXT_BYTES] + bytes(32),
    "of another client": lambda scene: lambda roster, to, piece: scene.clients[0].share(roster)[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_shares_that_are_of_no_use_are_complained_about(kind: str) -> None:
    scene = Scene([0, 1, 2, 3, 4])
    complaints = shared(scene, 3, KINDS[kind](scene))
    assert complaints == {0: [3], 1: [3], 2: [3], 3: [], 4: [3]}
    for one, about in complaints.items():
        scene.server.add_complaints(one, about)
        scene.server.add_complaints(one, about)  # a repetition
    assert list(scene.server.judge().liars) == [3]


def test_the_sum_is_made_without_shares_that_some_could_not_use() -> None:
    scene = Scene([0, 1, 2, 3])  # three of four are enough
    complaints = shared(scene, 3, lambda roster, to, piece: garbled(piece) if to == 0 else piece)
    assert complaints == {0: [3], 1: [], 2: [], 3: []}
    total = sum((scene.masked(one) for one in range(4)), np.zeros(DIM, np.uint64))
    survivors = scene.server.close_inputs(range(4))
    answers = {one: scene.clients[one].unmask(survivors) for one in range(4)}
    assert answers[0][3] == NO_SHARE
    for one in (0, 1, 2):
        scene.server.add_unmasking(one, answers[one])  # whose first complaint this is: the one before was lost
    assert (scene.server.can_unmask, scene.server.lacking) == (False, [3])
    with pytest.raises(TooFewMembers, match="of client 3's secret 2 shares have come, the threshold is 3"):
        scene.server.unmask(total)
    scene.server.add_unmasking(3, answers[3])
    scene.server.unmask(total)
    assert (total == sum(scene.values.values())).all()


def test_a_client_that_can_use_too_few_shares_complains_and_masks_nothing() -> None:
    scene = Scene([0, 1, 2, 3])
    shared(scene, 3, lambda roster, to, piece: piece)
    other = Scene([0, 1, 2, 3])
    client = other.clients[0]
    for one in range(4):
        other.server.add_keys(one, other.clients[one].advertise())
    client.share(other.server.close_keys())
    assert client.receive((0, 1, 2, 3), [bytes(SEALED_BYTES)] * 3) == [1, 2, 3]
    with pytest.raises(NotInProtocol, match="after the shares have come"):
        client.mask(np.zeros(DIM, np.uint64))
    with pytest.raises(NotInProtocol, match="before the shares have come"):
        client.unmask((0, 1, 2, 3))


def test_shares_that_give_another_secret_than_was_advertised_name_their_sender() -> None:
    scene = Scene([0, 1, 2, 3, 4])
    complaints = shared(
        scene, 3, lambda roster, to, piece: reseal(scene.clients[3], roster, to, (b"\0" + bytes([to] * 32),) * 2)
    )
    assert not any(complaints.values())
    total = sum((scene.masked(one) for one in range(5)), np.zeros(DIM, np.uint64))
    survivors = scene.server.close_inputs(range(5))
    for one in range(5):
        scene.server.add_unmasking(one, scene.clients[one].unmask(survivors))
    before = total.copy()
    with pytest.raises(WrongSecrets) as caught:
        scene.server.unmask(total)
    assert caught.value.clients == (3,)
    assert (total == before).all()


def test_a_server_refuses_complaints_that_no_honest_client_makes() -> None:
    scene = Scene([0, 1, 2, 3])
    with pytest.raises(NotInProtocol, match="not in this phase"):
        scene.server.add_complaints(0, [3])
    scene.share({0, 1, 2, 3}, {0, 1, 2, 3})
    for about in ([0], [9], [3, 1], [3, 3]):
        with pytest.raises(Dishonest, match="complaints about clients"):
            scene.server.add_complaints(0, about)
    scene.server.add_complaints(0, [1])
    with pytest.raises(Dishonest, match="other complaints"):
        scene.server.add_complaints(0, [2])


@given(st.binary(min_size=SHARE_BYTES, max_size=SHARE_BYTES))
def test_shares_are_elements_of_the_field(share: bytes) -> None:
    assert is_share(share) == (int.from_bytes(share) < PRIME)
    assert not is_share(share[1:])


def test_keys_are_derived_for_one_direction_each() -> None:
    scene = Scene([0, 1, 2])
    scene.share({0, 1, 2}, {0, 1, 2})
    assert scene.server.roster is not None
    assert derived(bytes(32), b"seal", scene.server.roster, (0, 1)) != derived(
        bytes(32), b"seal", scene.server.roster, (1, 0)
    )


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_server_that_damages_shares_on_their_way_gets_fewer_shares_and_nothing_else(data: st.DataObject) -> None:
    ids = list(range(data.draw(st.integers(3, 7))))
    scene = Scene(ids)
    for one in ids:
        scene.server.add_keys(one, scene.clients[one].advertise())
    roster = scene.server.close_keys()
    for one in ids:
        scene.server.add_shares(one, scene.clients[one].share(roster))
    senders, client = scene.server.close_shares(), scene.clients[0]
    damaged = data.draw(st.sets(st.sampled_from(ids[1:])))
    at = data.draw(st.integers(0, SEALED_BYTES - 1))
    sealed = [
        piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :] if sender in damaged else piece
        for sender, piece in zip(ids[1:], scene.server.sealed_for(0), strict=True)
    ]
    assert client.receive(senders, sealed) == sorted(damaged)
    if len(ids) - len(damaged) < roster.threshold:
        with pytest.raises(NotInProtocol):
            client.unmask(senders)
        return
    client.mask(np.zeros(DIM, np.uint64))
    answer = client.unmask(senders)
    assert {sender for sender, share in zip(ids, answer, strict=True) if share == NO_SHARE} == damaged
    with pytest.raises(NotInProtocol, match="second set of survivors"):
        client.unmask(senders[1:])
