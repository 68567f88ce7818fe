"""Receiving the sums of sites: each counts in full and once, and one that is wrong is a strike and changes nothing."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from intake_hall import DIM, Hall, Sender, deliver, run_with

from gradbus import codecs
from gradbus.actors.aggregation import partial_sum
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.federated.controller.rounds import RoundTotals
from gradbus.runtime.wire.control import Receipt


def site_sum(*senders: Sender, ids: tuple[range, ...] = ()) -> bytes:
    """What the Controller of a site with these clients sends."""
    mean, totals = ExactMean(DIM), RoundTotals()
    for sender in senders:
        parsed = codecs.parse(sender.data, expected_dim=DIM)
        mean.add(parsed, base=torch.zeros(DIM), num_samples=sender.num_samples)
        totals.count(sender.client_id, sender.request, sender.num_samples, from_memory=False)
    parts, samples = totals.loss_parts()
    return mean.encode(ids or totals.clients(), parts, samples)


CLIENTS = [Sender(client_id=n, seed=n, num_samples=10 + n) for n in range(4)]
FIRST = Sender(client_id=0, payload=site_sum(*CLIENTS[:2]), num_samples=21)
SECOND = Sender(client_id=1, payload=site_sum(*CLIENTS[2:]), num_samples=25)


def test_sums_of_sites_are_added_as_the_updates_of_all_their_clients_would_be() -> None:
    flat: list[torch.Tensor] = []

    async def one_level(hall: Hall) -> None:
        await deliver(hall, *CLIENTS)
        flat.append(hall.mean())
        flat.append(torch.tensor(hall.intake.totals.loss()))

    async def two_levels(hall: Hall) -> None:
        await deliver(hall, SECOND, FIRST)
        totals = hall.intake.totals
        assert torch.equal(hall.mean(), flat[0])
        assert torch.tensor(totals.loss()) == flat[1]
        assert totals.clients() == (range(4),)
        assert (totals.num_samples, hall.round.accepted) == (46, {0, 1})

    run_with(one_level, clients=4)
    run_with(two_levels, clients=2, sites=True)


def field(offset: int, form: str, value: int) -> bytes:
    changed = bytearray(FIRST.payload)
    struct.pack_into(form, changed, offset, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("wrong", "reason", "text"),
    [
        (replace(FIRST, payload=codecs.get("fp32").encode(torch.ones(DIM))), "malformed", "sites alone take part"),
        (replace(FIRST, payload=field(8, "<Q", DIM + 1)), "malformed", "the model has 100"),
        (replace(FIRST, payload=field(4, "<B", 7)), "malformed", "version 7"),
        (replace(FIRST, num_samples=20), "malformed", "21 samples, 20 were announced"),
        (replace(FIRST, payload=field(16, "<Q", 1 << 50)), "malformed", "at most limits.max_samples"),
        (replace(FIRST, payload=FIRST.payload[:-1]), "malformed", "cut short"),
        (
            replace(
                FIRST,
                payload=partial_sum.encode(SumSummary(21, 2, (range(2),), (), 0), torch.full((DIM,), 1 << 62), None),
            ),
            "refused",
            "larger than theirs can be",
        ),
        (replace(FIRST, payload=bytes(partial_sum.max_bytes(DIM) + 1)), "oversized", "at most"),
    ],
)
def test_a_wrong_sum_is_a_strike_with_the_reason_and_the_others_count(wrong: Sender, reason: str, text: str) -> None:
    async def test(hall: Hall) -> None:
        await deliver(hall, SECOND)
        before = hall.mean()
        await wrong.offer_to(hall)
        if reason != "oversized":
            await wrong.send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) > 1)
        assert [strike.client_id for strike in hall.strikes] == [0]
        assert hall.dropped[reason] == 1
        assert text in hall.strikes[0].detail
        assert torch.equal(hall.mean(), before)
        assert hall.round.accepted == {1}

    run_with(test, clients=2, sites=True)


def test_a_client_that_two_sites_have_counts_once_and_neither_site_has_a_strike() -> None:
    async def test(hall: Hall) -> None:
        await deliver(hall, FIRST)
        before = hall.mean()
        moved = Sender(client_id=1, payload=site_sum(CLIENTS[1], CLIENTS[3]), num_samples=24)
        await deliver(hall, moved)
        assert not hall.bus.all(Receipt)[-1].accepted
        assert "client 1 counts already, in the sum of site 0" in hall.bus.all(Receipt)[-1].reason
        assert not hall.strikes
        assert torch.equal(hall.mean(), before)

    run_with(test, clients=2, sites=True)


def test_a_site_that_sends_again_after_a_restart_counts_once() -> None:
    async def test(hall: Hall) -> None:
        await deliver(hall, FIRST)
        before = hall.mean()
        await deliver(hall, FIRST)  # the receipt was lost
        assert hall.bus.all(Receipt)[-1].accepted
        await replace(FIRST, incarnation=101).offer_to(hall)
        assert not hall.bus.all(Receipt)[-1].accepted
        assert torch.equal(hall.mean(), before)

    run_with(test, clients=2, sites=True)


def test_a_sum_where_clients_are_expected_is_a_strike() -> None:
    async def test(hall: Hall) -> None:
        await deliver(hall, FIRST)
        assert not hall.bus.all(Receipt)[-1].accepted
        assert len(hall.strikes) == 1

    run_with(test)
