"""Secure aggregation without a network: the sum is that of the survivors, and nobody reveals both kinds of shares."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masking_scene import ATTEMPT, DIM, Scene

from gradbus.actors.secure_aggregation import keys, shamir
from gradbus.actors.secure_aggregation.keys import Dishonest, NotInProtocol, NotMember, Roster, TooFewMembers
from gradbus.actors.secure_aggregation.masking_client import MaskingClient
from gradbus.actors.secure_aggregation.masks import Stopped, add_masks


@given(secret=st.binary(min_size=32, max_size=32), count=st.integers(1, 12), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count))
    points = list(range(1, count + 1))
    shares = dict(zip(points, shamir.split(secret, threshold, points), strict=True))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert shamir.Interpolation(chosen).secret(shares) == secret


def factors_at(*points: int) -> list[int]:
    """Lagrange's: times the values of a polynomial at these points they add up to the one at 0."""
    pairs = [[other * pow(other - point, -1, shamir.PRIME) for other in points if other != point] for point in points]
    return [math.prod(one) % shamir.PRIME for one in pairs]


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    points, guess = [1, 2, 3, 4], bytes(range(32))
    shares = dict(zip(points, shamir.split(bytes(32), 3, points), strict=True))
    # With any third value at another point the two known shares are of another secret: take the one that gives ours.
    # The line through two of them is not the polynomial.
    line = sum(factor * int.from_bytes(shares[point]) for point, factor in zip([1, 2], factors_at(1, 2), strict=True))
    assert line % shamir.PRIME != 0
    factors = factors_at(1, 2, 3)
    known = factors[0] * int.from_bytes(shares[1]) + factors[1] * int.from_bytes(shares[2])
    third = (int.from_bytes(guess) - known) * pow(factors[2], -1, shamir.PRIME) % shamir.PRIME
    forged = {1: shares[1], 2: shares[2], 3: third.to_bytes(shamir.SHARE_BYTES)}
    assert shamir.Interpolation([1, 2, 3]).secret(forged) == guess


def test_the_field_is_prime() -> None:
    assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_sum_is_that_of_the_survivors_with_clients_dropping_out_in_every_phase(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**31 - 2), min_size=2, max_size=10, unique=True))
    scene = Scene(ids)
    drops = {one: data.draw(st.sampled_from((9, 9, 9, 0, 1, 2, 3))) for one in ids}
    stays = [{one for one in ids if drops[one] > phase} for phase in range(4)]
    try:
        scene.share(stays[0], stays[1])
        total = scene.finish(stays[2], stays[3])
    except TooFewMembers:
        count = len(stays[0])
        needed = keys.default_threshold(count, 0.6)
        assert min(map(len, stays)) < needed
        return
    expected = np.zeros(DIM, np.uint64)
    for one in stays[2]:
        expected += scene.values[one]
    assert (total == expected).all()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_client_reveals_both_shares_of_another_whatever_the_server_asks(data: st.DataObject) -> None:
    ids = list(range(data.draw(st.integers(2, 8))))
    scene = Scene(ids)
    scene.share(set(ids), set(ids))
    assert scene.server.roster is not None
    threshold = scene.server.roster.threshold
    for one in ids:
        if data.draw(st.booleans()):
            scene.masked(one)
    seed_shares: dict[int, set[int]] = {one: set() for one in ids}
    key_shares: dict[int, set[int]] = {one: set() for one in ids}
    for _ in range(data.draw(st.integers(1, 12))):
        asked = data.draw(st.sampled_from(ids))
        survivors = data.draw(st.lists(st.sampled_from([*ids, 99]), max_size=9))
        if data.draw(st.booleans()):
            survivors = sorted(set(survivors))
        try:
            answer = scene.clients[asked].unmask(survivors)
        except NotInProtocol:
            continue
        assert len(survivors) >= threshold
        for sender, share in zip(ids, answer, strict=True):
            own, key = scene.clients[asked]._shares[sender]  # noqa: SLF001 - nobody else may know which is which
            assert share == (own if sender in survivors else key)
            (seed_shares if sender in survivors else key_shares)[sender].add(asked)
        with pytest.raises(NotInProtocol):  # nor does it mask after it has answered
            scene.clients[asked].mask(np.zeros(DIM, np.uint64))
    for one in ids:
        assert not seed_shares[one] & key_shares[one], "a client has revealed both of its shares of another"
        assert min(len(seed_shares[one]), len(key_shares[one])) < threshold, "both secrets can be reconstructed"


def test_masked_values_say_nothing_and_are_made_once() -> None:
    scene = Scene([1, 2, 3])
    scene.share({1, 2, 3}, {1, 2, 3})
    masked = scene.masked(1)
    assert (masked != scene.values[1]).sum() >= DIM - 1
    with pytest.raises(NotInProtocol, match="once"):
        scene.clients[1].mask(scene.values[1])


def test_a_client_that_is_told_another_roster_has_no_key_in_common() -> None:
    one, other = Scene([1, 2, 3], threshold=2), Scene([1, 2, 3], threshold=3)
    for scene in (one, other):
        for client_id in (1, 2, 3):
            scene.server.add_keys(client_id, one.clients[client_id].advertise())
    first, second = one.server.close_keys(), other.server.close_keys()
    for client_id in (1, 2):
        one.server.add_shares(client_id, one.clients[client_id].share(first))
    one.server.add_shares(3, one.clients[3].share(second))
    one.server.close_shares()
    assert one.clients[1].receive(one.server.senders, one.server.sealed_for(1)) == [3]
    with pytest.raises(NotInProtocol, match="second roster"):
        one.clients[1].share(second)


def test_clients_that_are_told_another_cap_on_samples_have_no_key_in_common() -> None:
    scene = Scene([1, 2])
    for client_id in (1, 2):
        scene.server.add_keys(client_id, scene.clients[client_id].advertise())
    roster = scene.server.close_keys()
    assert (roster.weight(50), dataclasses.replace(roster, cap=20).weight(50)) == (50, 20)
    scene.server.add_shares(1, scene.clients[1].share(roster))
    scene.server.add_shares(2, scene.clients[2].share(dataclasses.replace(roster, cap=20)))
    scene.server.close_shares()
    assert scene.clients[1].receive(scene.server.senders, scene.server.sealed_for(1)) == [2]
    assert not scene.clients[1].senders, "with one of two it masks nothing"


def test_the_sum_of_all_masks_may_be_made_before_there_are_values() -> None:
    scene = Scene([1, 2, 3])
    scene.share({1, 2, 3}, {1, 2, 3})
    total = np.zeros(DIM, np.uint64)
    for client_id, client in scene.clients.items():
        masks = np.zeros(DIM, np.uint64)
        client.mask(masks)
        total += scene.values[client_id] + masks
    for client_id, client in scene.clients.items():
        scene.server.add_unmasking(client_id, client.unmask(scene.server.close_inputs({1, 2, 3})))
    scene.server.unmask(total)
    assert (total == sum(scene.values.values())).all()


def test_shares_of_another_attempt_are_of_no_use() -> None:
    later = dataclasses.replace(ATTEMPT, number=2)
    scene = Scene([1, 2])
    for client_id in (1, 2):
        scene.server.add_keys(client_id, scene.clients[client_id].advertise())
    roster = scene.server.close_keys()
    with pytest.raises(NotInProtocol, match="this is"):
        scene.clients[1].share(Roster(later, roster.threshold, roster.members))


def test_a_wrong_share_is_noticed_and_no_wrong_sum_is_made() -> None:
    scene = Scene([1, 2, 3], threshold=3)
    scene.share({1, 2, 3}, {1, 2, 3})
    total = scene.masked(1) + scene.masked(2) + scene.masked(3)
    survivors = scene.server.close_inputs({1, 2, 3})
    answers = {client_id: scene.clients[client_id].unmask(survivors) for client_id in (1, 2, 3)}
    for client_id in (1, 3):
        scene.server.add_unmasking(client_id, answers[client_id])
    with pytest.raises(Dishonest, match="it gives a wrong share of client 1's secret"):
        scene.server.add_unmasking(2, [bytes([1] * 33), *answers[2][1:]])
    before = total.copy()
    with pytest.raises(TooFewMembers, match="2 clients have sent their shares"):
        scene.server.unmask(total)
    assert (total == before).all()


@pytest.mark.parametrize("liar", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [bytes(33), bytes([1] * 33)], ids=["none", "a wrong one"])
def test_with_one_answer_more_than_the_threshold_the_sum_is_made_without_a_wrong_one(liar: int, share: bytes) -> None:
    scene = Scene([1, 2, 3, 4, 5], threshold=3)
    scene.share({1, 2, 3, 4, 5}, {1, 2, 3, 4, 5})
    total = sum((scene.masked(one) for one in (1, 2, 3, 4)), np.zeros(DIM, np.uint64))
    survivors = scene.server.close_inputs({1, 2, 3, 4})
    for client_id in (1, 2, 3, 4):
        shares = scene.clients[client_id].unmask(survivors)
        wrong = [share, share, *shares[2:4], share]  # of survivors, and of the one that dropped out
        with contextlib.suppress(Dishonest):
            scene.server.add_unmasking(client_id, wrong if client_id == liar else shares)
    scene.server.unmask(total)
    assert (total == sum(scene.values[one] for one in (1, 2, 3, 4))).all()


def test_many_masks_are_taken_off_a_few_at_a_time_and_that_can_be_stopped() -> None:
    drawn = 0

    def seeds() -> Iterator[tuple[bytes, bool]]:
        nonlocal drawn
        for number in range(1000):
            drawn += 1
            yield number.to_bytes(32, "little"), bool(number % 3)

    one_by_one = np.zeros(DIM, np.uint64)
    for seed in seeds():
        add_masks(one_by_one, [seed])
    add_masks(together := np.zeros(DIM, np.uint64), seeds())
    assert (one_by_one == together).all()
    drawn = 0
    with pytest.raises(Stopped):
        add_masks(together, seeds(), lambda: drawn > 300)
    assert drawn < 600


@pytest.mark.parametrize("dtype", ["u8", "u2"])
@pytest.mark.parametrize("count", [1, 65_536, 70_000, 200_001])
def test_masks_have_the_same_bits_on_any_number_of_threads(dtype: str, count: int) -> None:
    seeds = [(bytes([number] * 16 + [255] * 16), bool(number % 2)) for number in range(5)]  # the counter overflows
    add_masks(alone := np.zeros(count, dtype), seeds)
    for threads in (2, 3):
        add_masks(together := np.zeros(count, dtype), seeds, threads=threads)
        assert np.array_equal(alone, together)
    with pytest.raises(Stopped):
        add_masks(together, seeds, lambda: True, threads=3)


def test_rosters_that_no_honest_server_makes_are_refused() -> None:
    scene = Scene([1, 2, 3, 4], threshold=3)
    for client_id in scene.clients:
        scene.server.add_keys(client_id, scene.clients[client_id].advertise())
    roster = scene.server.close_keys()
    data, size = roster.to_bytes(), len(roster.to_bytes()) // 4
    for threshold, wrong in (
        (2, data),
        (5, data),
        (3, data[:-1]),
        (3, data[size:] + data[:size]),
        (2, data[:size] * 2),
        (2, data[:size]),
        (200, data * 100),
    ):
        with pytest.raises(NotInProtocol):
            Roster.parse(ATTEMPT, threshold, wrong)
    with pytest.raises(NotMember, match="without this client"):
        MaskingClient(ATTEMPT, 9).share(roster)
    with pytest.raises(NotInProtocol, match="other keys of this client"):
        MaskingClient(ATTEMPT, 1).share(roster)
    with pytest.raises(NotInProtocol, match="asks for 5"):
        MaskingClient(ATTEMPT, 1, least_members=5).share(roster)
    client = MaskingClient(ATTEMPT, 1, least_members=4)
    with pytest.raises(NotInProtocol, match="a sum of 3 of 4 members can be unmasked: this client asks for 4"):
        client.share(roster)


def test_a_server_takes_each_message_once_and_of_its_length_alone() -> None:
    scene = Scene([1, 2, 3])
    server, advertised = scene.server, {one: client.advertise() for one, client in scene.clients.items()}
    with pytest.raises(NotInProtocol, match="bytes"):
        server.add_keys(1, bytes(95))
    server.add_keys(1, advertised[1])
    server.add_keys(1, advertised[1])  # a repetition
    with pytest.raises(NotInProtocol, match="other ones"):
        server.add_keys(1, advertised[2])
    with pytest.raises(NotInProtocol, match="cannot be used"):  # a point of small order
        server.add_keys(2, bytes(32) + advertised[2][32:])
    with pytest.raises(NotInProtocol, match="another client"):
        server.add_keys(2, advertised[1])
    with pytest.raises(TooFewMembers):
        server.close_keys()
    server.add_keys(2, advertised[2])
    roster = server.close_keys()
    with pytest.raises(NotInProtocol):
        server.add_keys(3, advertised[3])
    with pytest.raises(NotInProtocol):
        server.add_shares(1, [bytes(3)])
    server.add_shares(1, scene.clients[1].share(roster))
    with pytest.raises(NotInProtocol):
        server.add_shares(1, scene.clients[1].share(roster))
    with pytest.raises(TooFewMembers, match="Nothing was revealed"):
        server.close_shares()
