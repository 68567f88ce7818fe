"""How much one client may weigh by the number of samples that it announces."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from intake_hall import Hall, Sender, deliver, run_with
from torch import nn

import gradbus
from gradbus.actors import Client, Controller
from gradbus.actors.aggregation.clipping import SampleCap
from gradbus.actors.federated.rounds import TRAINING_FAILED, Outcome, Round, RoundRules
from gradbus.models import NoopTask, TrainResult

pytestmark = pytest.mark.slow


def test_a_cap_is_so_many_times_the_median_of_those_known_before_and_the_same_in_every_attempt() -> None:
    cap = SampleCap(4.0)
    cap.begin(2, {0: 600, 1: 500, 2: 1 << 30})
    assert (cap.is_settled, cap.cap) == (True, 2400)
    cap.begin(2, {0: 1, 1: 1})
    assert (cap.weight(2000), cap.weight(1 << 30)) == (2000, 2400)


def test_of_two_clients_the_smaller_one_is_typical() -> None:
    cap = SampleCap(4.0)
    cap.begin(1, {0: 1 << 30, 1: 100})
    assert cap.cap == 400


def test_where_nothing_is_known_the_offers_decide_and_without_a_cap_nothing_has_to() -> None:
    cap = SampleCap(4.0)
    cap.begin(1, {})
    assert not cap.is_settled
    cap.settle({0: 10, 1: 20, 2: 1 << 30})
    assert (cap.is_settled, cap.cap) == (True, 80)
    free = SampleCap(None)
    free.begin(1, {})
    assert (free.is_settled, free.weight(1 << 40)) == (True, 1 << 40)


def test_one_client_alone_is_not_typical_of_those_who_come_later() -> None:
    cap = SampleCap(4.0)
    cap.begin(2, {0: 1 << 30})
    assert not cap.is_settled
    cap.settle({0: 1 << 30, 1: 100})
    assert cap.cap == 400
    alone = SampleCap(4.0)
    alone.begin(2, {0: 100})
    alone.settle({0: 1 << 30})  # what it says now is what counts, as for all others
    assert alone.cap == 1 << 32


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_in_a_first_round_updates_wait_for_all_offers_and_weigh_alike_in_whatever_order_they_come(
    order: tuple[int, ...],
) -> None:
    senders = [Sender(client_id, seed=client_id, num_samples=n) for client_id, n in enumerate((10, 20, 1 << 29))]

    async def main(hall: Hall) -> None:
        hall.admission.cap = SampleCap(4.0)
        hall.admission.cap.begin(1, {})
        for client_id in order[:2]:
            await senders[client_id].offer_to(hall)
        assert hall.bus.granted == []
        await senders[order[2]].offer_to(hall)
        assert sorted(hall.bus.granted) == [0, 1, 2]
        for sender in senders:
            await sender.send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        weights = torch.tensor([10.0, 20.0, 80.0]) / 110.0
        expected = sum(float(weight) * sender.delta for weight, sender in zip(weights, senders, strict=True))
        torch.testing.assert_close(hall.mean(), expected)
        assert hall.intake.capped == {2: 1 << 29}

    run_with(main)


def test_who_is_lost_in_a_first_round_is_not_waited_for() -> None:
    async def main(hall: Hall) -> None:
        hall.admission.cap = SampleCap(4.0)
        hall.admission.cap.begin(1, {})
        await Sender(0).offer_to(hall)
        assert hall.bus.granted == []
        for client_id in (1, 2):
            hall.round.lose(client_id)
        await hall.until(lambda: hall.bus.granted == [0])

    run_with(main, repair_after_s=0.02)


def test_where_earlier_rounds_tell_what_is_typical_nothing_waits() -> None:
    async def main(hall: Hall) -> None:
        hall.admission.cap = SampleCap(4.0)
        hall.admission.cap.begin(1, {7: 10, 8: 12, 9: 14})
        await deliver(hall, Sender(0, num_samples=48))
        assert hall.intake.capped == {}

    run_with(main)


def test_offers_wait_for_the_quorum_and_its_grace_or_for_half_of_the_time() -> None:
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


def test_where_one_update_does_not_suffice_the_first_one_waits_for_a_second_number() -> None:
    liar = Sender(0, num_samples=1 << 29)

    async def main(hall: Hall) -> None:
        hall.round = Round(
            1, range(3), RoundRules(minimum=2, quorum=1.0, deadline_s=1e9 + 1e6, grace_s=0.0), now_s=-1e9
        )
        hall.admission.cap = SampleCap(4.0)
        hall.admission.cap.begin(1, {})
        hall.intake.open(hall.round, hall.base)
        await liar.offer_to(hall)  # half of the time is over, and nobody else has answered
        assert hall.bus.granted == []
        await Sender(1, num_samples=100).offer_to(hall)
        assert sorted(hall.bus.granted) == [0, 1]
        assert hall.admission.cap.cap == 400

    run_with(main)


def test_a_round_in_which_only_one_is_left_of_two_ends_and_what_that_one_announced_decides_nothing() -> None:
    async def main(hall: Hall) -> None:
        hall.round = Round(1, range(2), RoundRules(minimum=2, quorum=1.0, deadline_s=1e9, grace_s=0.0), now_s=0.0)
        hall.admission.cap = SampleCap(4.0)
        hall.admission.cap.begin(1, {})
        hall.intake.open(hall.round, hall.base)
        await Sender(0, num_samples=1 << 29).offer_to(hall)
        hall.round.fail(1, TRAINING_FAILED)
        await hall.until(lambda: hall.round.verdict(1.0) is Outcome.TOO_FEW)
        assert (hall.round.accepted, hall.bus.granted, hall.admission.cap.cap) == (set(), [], None)

    run_with(main, repair_after_s=0.02)


class Shares(NoopTask):
    """Each client moves all parameters to a number of its own, and says how many samples it has."""

    def __init__(self, samples: int, value: float) -> None:
        super().__init__(100)
        self._samples, self._value = samples, value

    def train(self, model: nn.Module, **arguments: Any) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(self._value)
        return TrainResult(num_samples=self._samples, loss=0.5)


def _mean(*shares: tuple[int, float], **limits: Any) -> tuple[float, list[gradbus.RoundReport]]:
    """The model after one round of clients with these samples and values."""

    async def main() -> tuple[float, list[gradbus.RoundReport]]:
        place = {"job": f"cap-{os.getpid()}", "domain": new_domain()}
        clients = {"num": len(shares), "min": len(shares)}
        config = gradbus.FederatedConfig(rounds=1, clients=clients, eval_every=0, limits=limits)
        async with asyncio.timeout(60), gradbus.connect(**place) as bus, gradbus.connect(**place) as others:
            controller = Controller(bus, NoopTask(100), config)
            async with asyncio.TaskGroup() as group:
                for client_id, share in enumerate(shares):
                    group.create_task(Client(others, Shares(*share), client_id=client_id).run())
                reports = await controller.run()
            assert len(set(controller.weights.tolist())) == 1
            return float(controller.weights[0]), reports

    return asyncio.run(main())


def test_a_client_that_lies_about_its_samples_does_not_decide_the_model() -> None:
    honest = [(600, 0.0)] * 5
    poisoned, reports = _mean(*honest, (1 << 30, 0.11))
    assert poisoned == pytest.approx(0.11 * 4 / 9)  # four votes of nine
    assert reports[0].marks == {"samples capped": (5,)}
    assert _mean(*honest, (1 << 30, 0.11), cap_samples=None)[0] == pytest.approx(0.11, rel=1e-4)


def test_honest_clients_with_moderately_unequal_shares_weigh_exactly_as_many_samples_as_they_have() -> None:
    mean, reports = _mean((100, 1.0), (400, 2.0), (300, 4.0))
    assert mean == pytest.approx((100 * 1.0 + 400 * 2.0 + 300 * 4.0) / 800)
    assert (reports[0].marks, reports[0].num_samples) == ({}, 800)
