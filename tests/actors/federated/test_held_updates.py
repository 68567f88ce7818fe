"""Updates that are held until it is known what is typical of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from intake_hall import DIM, Hall, Lies, Sender, deliver, run_with
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.bounds import Bounds
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import MODEL, Facts
from gradbus.actors.federated.controller.asynchronous import BufferRound
from gradbus.actors.federated.controller.held_updates import HeldUpdates, Settling
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.federated.protocol import TRAINING_FAILED
from gradbus.runtime.config.federated import AsynchronousSettings
from gradbus.runtime.wire.frames import FrameKey, Kind

SIZE = len(Sender().data)
NORMS = Lies((MODEL,))


def long(client_id: int, times: float) -> Sender:
    """An update of some length."""
    sender = Sender(client_id, seed=client_id)
    return dataclasses.replace(sender, payload=codecs.get("fp32").encode(times * sender.delta))


def mean(*weighted: tuple[float, Tensor]) -> Tensor:
    total = sum(weight for weight, _ in weighted)
    return sum((weight / total * delta for weight, delta in weighted), torch.zeros(DIM))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_updates_are_taken_at_once_and_added_when_all_are_announced_in_whatever_order(order: tuple[int, ...]) -> None:
    senders = [Sender(client_id, seed=client_id, num_samples=n) for client_id, n in enumerate((10, 20, 1 << 29))]

    async def main(hall: Hall) -> None:
        for client_id in order[:2]:
            await senders[client_id].offer_to(hall)
            await senders[client_id].send_to(hall)
        assert (sorted(hall.bus.granted), hall.bus.receipts) == (sorted(order[:2]), [])
        await senders[order[2]].offer_to(hall)
        await senders[order[2]].send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        expected = mean(*((min(one.num_samples, 80), one.delta) for one in senders))
        torch.testing.assert_close(hall.mean(), expected)
        assert hall.strikes == []

    run_with(main, lies=Lies())


def test_what_is_held_stays_within_the_budget_and_the_others_wait() -> None:
    async def main(hall: Hall) -> None:
        for client_id in range(3):
            await Sender(client_id, seed=client_id).offer_to(hall)
            if client_id < 2:
                await Sender(client_id, seed=client_id).send_to(hall)
                assert hall.bus.granted == list(range(client_id + 1))
        await hall.until(lambda: hall.bus.granted == [0, 1, 2])  # the first two have been added
        await Sender(2, seed=2).send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        torch.testing.assert_close(hall.mean(), mean(*((1.0, Sender(i, seed=i).delta) for i in range(3))))

    run_with(main, lies=Lies(), budget_bytes=2 * SIZE)


def test_a_first_round_measures_its_updates_before_it_adds_any() -> None:
    senders = [long(0, 1.0), long(1, 1.1), long(2, 1e3)]

    async def main(hall: Hall) -> None:
        for sender in senders:
            await sender.offer_to(hall)
            assert hall.bus.receipts == []
            await sender.send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        most = 4 * max(float(senders[0].delta.norm()), float((1.1 * senders[1].delta).norm()))
        liar = senders[2].delta
        expected = mean((1.0, senders[0].delta), (1.0, 1.1 * senders[1].delta), (1.0, liar * most / float(liar.norm())))
        torch.testing.assert_close(hall.mean(), expected)

    run_with(main, lies=NORMS)


def test_an_update_that_has_been_measured_makes_room_for_the_next_and_is_sent_again() -> None:
    senders = [long(0, 1.0), long(1, 1.1), long(2, 1.2)]

    async def main(hall: Hall) -> None:
        for sender in senders:
            await sender.offer_to(hall)
        for sender in senders:
            await hall.until(lambda sender=sender: hall.bus.granted[-1:] == [sender.client_id])  # type: ignore[misc]
            await sender.send_to(hall)
        # The last one is still there, and is added first; the others are requested once more, one by one.
        for client_id in (0, 1):
            await hall.until(lambda client_id=client_id: hall.bus.granted[-1] == client_id)  # type: ignore[misc]
            await senders[client_id].send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        assert hall.bus.granted == [0, 1, 2, 0, 1]
        expected = mean(*((1.0, times * one.delta) for one, times in zip(senders, (1.0, 1.1, 1.2), strict=True)))
        torch.testing.assert_close(hall.mean(), expected)

    run_with(main, lies=NORMS, budget_bytes=SIZE)


def test_an_update_that_cannot_be_measured_is_a_strike_and_the_others_count() -> None:
    broken = Sender(1, payload=bytes(SIZE))

    async def main(hall: Hall) -> None:
        for sender in (Sender(0), broken, Sender(2)):
            await sender.offer_to(hall)
            await sender.send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        assert sorted(hall.bus.receipts) == [(0, True), (1, False), (2, True)]
        assert [strike.client_id for strike in hall.strikes] == [1]

    run_with(main, lies=NORMS, repair_after_s=0.02)


def test_a_later_round_has_the_norms_of_the_one_before() -> None:
    async def main(hall: Hall) -> None:
        assert hall.bounds is not None
        for client_id in range(3):
            await long(client_id, 1.0).offer_to(hall)
            await long(client_id, 1.0).send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        await hall.intake.close()
        hall.mean()
        hall.bounds.commit()
        hall.open_round(2)
        assert (hall.bounds.needs_norms, hall.bounds.is_settled) == (False, False)

    run_with(main, lies=NORMS)


def test_who_is_lost_is_not_waited_for() -> None:
    async def main(hall: Hall) -> None:
        await Sender(0).offer_to(hall)
        await Sender(0).send_to(hall)
        for client_id in (1, 2):
            hall.round.lose(client_id)
        await hall.until(lambda: hall.bus.receipts == [(0, True)])

    run_with(main, lies=NORMS, repair_after_s=0.02)


def test_where_nobody_can_lie_nothing_waits() -> None:
    async def main(hall: Hall) -> None:
        await deliver(hall, Sender(0, num_samples=1 << 20))
        assert hall.bus.receipts == [(0, True)]

    run_with(main)


def test_a_round_in_which_only_one_is_left_of_two_ends_and_what_that_one_announced_decides_nothing() -> None:
    async def main(hall: Hall) -> None:
        hall.round = Round(1, range(2), RoundRules(minimum=2, quorum=1.0, deadline_s=1e9, grace_s=0.0), now_s=0.0)
        hall.intake.open_round(hall.round, hall.base)
        await Sender(0, num_samples=1 << 29).offer_to(hall)
        hall.round.fail(1, TRAINING_FAILED)
        await hall.until(lambda: hall.round.verdict(1.0) is Outcome.TOO_FEW)
        assert (hall.round.accepted, hall.bus.receipts) == (set(), [])

    run_with(main, lies=Lies(), repair_after_s=0.02)


def test_requests_are_waited_for_until_the_quorum_and_its_grace_or_half_of_the_time() -> None:
    def opened(quorum: float) -> Round:
        return Round(1, range(4), RoundRules(minimum=1, quorum=quorum, deadline_s=100.0, grace_s=5.0), now_s=0.0)

    half = opened(0.5)
    assert not half.has_enough_requests({0}, 1.0)
    assert not half.has_enough_requests({0, 1}, 2.0)
    assert half.has_enough_requests({0, 1}, 7.0)
    every = opened(1.0)
    assert not every.has_enough_requests({0, 1, 2}, 49.0)
    assert every.has_enough_requests({0}, 50.0)
    assert opened(1.0).has_enough_requests({0, 1, 2, 3}, 0.0)


def test_a_client_that_announces_an_update_and_never_sends_it_holds_a_first_round_for_three_quarters_of_its_time() -> (
    None
):
    bounds = Bounds(FedAvg(1), times=4.0, sections=(MODEL,))
    bounds.open_round(1)
    held = HeldUpdates(bounds)
    round_ = Round(1, range(3), RoundRules(minimum=2, quorum=1.0, deadline_s=100.0, grace_s=0.0), now_s=0.0)
    keys = [FrameKey(Kind.UPDATE, 1, 1, client_id, 1, 1) for client_id in range(3)]
    announced = {key: Facts(client_id=key.sender, num_samples=10) for key in keys}
    held.note(keys[0], {MODEL: 1.0})
    assert [held.may_settle(round_, 3, now_s) for now_s in (74.0, 75.0)] == [False, True]
    assert held.settle(round_, announced, 99.0) is Settling.WAIT
    held.note(keys[1], {MODEL: 2.0})
    assert held.settle(round_, announced, 74.0) is Settling.WAIT
    assert held.settle(round_, announced, 75.0) is Settling.SETTLED
    assert (held.is_settled, bounds.most_norm(MODEL)) == (True, 4.0)


def announced_by(*clients: int, samples: int = 10) -> dict[FrameKey, Facts]:
    keys = [FrameKey(Kind.UPDATE, 1, 1, client_id, 1, 1) for client_id in clients]
    return {key: Facts(client_id=key.sender, num_samples=samples) for key in keys}


def test_two_fast_liars_of_five_do_not_set_the_bounds_of_the_slow_honest_ones() -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=())
    bounds.open_round(1)
    held = HeldUpdates(bounds)
    rules = RoundRules(minimum=5, quorum=0.4, deadline_s=100.0, grace_s=0.0)
    round_ = Round(1, range(5), rules, now_s=0.0)
    lies = announced_by(0, 1, samples=1 << 30)
    assert [held.settle(round_, lies, now_s) for now_s in (1.0, 50.0, 99.0)] == [Settling.WAIT] * 3
    assert held.settle(round_, {**lies, **announced_by(2, 3, 4)}, 99.0) is Settling.SETTLED
    assert bounds.believed(Facts(client_id=0, num_samples=1 << 30)).num_samples == 40


def test_two_fast_liars_of_five_do_not_set_the_norms_of_a_first_round() -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=(MODEL,))
    bounds.open_round(1)
    held = HeldUpdates(bounds)
    round_ = Round(1, range(5), RoundRules(minimum=5, quorum=1.0, deadline_s=100.0, grace_s=0.0), now_s=0.0)
    announced = announced_by(*range(5))
    for key in list(announced)[:2]:
        held.note(key, {MODEL: 1e6})
    assert held.settle(round_, announced, 80.0) is Settling.WAIT
    for key in list(announced)[2:]:
        held.note(key, {MODEL: 1.0})
    assert held.settle(round_, announced, 81.0) is Settling.SETTLED
    assert bounds.most_norm(MODEL) == 4.0


def test_an_attempt_with_fewer_clients_than_a_round_needs_ends_without_bounds() -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=())
    bounds.open_round(1)
    round_ = Round(1, range(3), RoundRules(minimum=3, quorum=1.0, deadline_s=100.0, grace_s=0.0), now_s=0.0)
    round_.fail(2, TRAINING_FAILED)
    assert HeldUpdates(bounds).settle(round_, announced_by(0, 1), 1.0) is Settling.TOO_FEW
    assert not bounds.is_settled


@pytest.mark.parametrize(("repeats", "enough"), [(True, True), (False, False)])
def test_two_clients_with_several_updates_each_may_settle_a_first_buffer(repeats: bool, enough: bool) -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=(), by_rounds=False)
    bounds.open_round(1)
    rules = RoundRules(minimum=3, quorum=1.0, deadline_s=100.0, grace_s=0.0)
    settings = AsynchronousSettings(buffer=3, repeats=repeats)
    round_ = BufferRound(1, range(2), rules, settings, now_s=0.0)
    found = HeldUpdates(bounds).settle(round_, announced_by(0, 1), 1.0)
    assert found is (Settling.SETTLED if enough else Settling.TOO_FEW)


def test_what_cannot_be_weighed_is_refused_with_its_request_and_has_no_part_in_the_bounds() -> None:
    async def main(hall: Hall) -> None:
        def by_loss(facts: Facts) -> tuple[float, ...]:
            return (1 / facts.metrics["loss"],)

        hall.strategy.weights = by_loss  # type: ignore[method-assign]
        await Sender(0).offer_to(hall)
        assert hall.bus.receipts == [(0, False)]
        assert [(strike.client_id, strike.reason) for strike in hall.strikes] == [(0, "refused")]
        assert 0 not in hall.round.open

    run_with(main, lies=Lies())


def test_no_update_is_looked_at_before_there_may_be_enough() -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=())
    bounds.open_round(1)
    held = HeldUpdates(bounds)
    rules = RoundRules(minimum=1, quorum=0.5, deadline_s=100.0, grace_s=5.0)
    round_ = Round(1, range(10), rules, now_s=0.0)
    assert [held.may_settle(round_, waiting, 1.0) for waiting in (4, 5)] == [False, True]
    assert held.may_settle(round_, 1, 50.0)
    for client_id in range(8):
        round_.fail(client_id, TRAINING_FAILED)
    assert [held.may_settle(round_, waiting, 1.0) for waiting in (1, 2)] == [False, True]
