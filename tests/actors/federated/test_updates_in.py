"""The way in for updates: offered, granted, put together, added once, and answered, whatever clients do."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from intake_hall import DIM, MAX_SAMPLES, RUN, Hall, Sender, deliver, hall_of, run_with
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.strategies import NoRoom
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.controller.rounds import Round, RoundRules
from gradbus.actors.federated.controller.update_admission import Quarantine, UpdateAdmission
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.runtime.testing.journal import History
from gradbus.runtime.wire.control import Receipt

# Offers and grants


def test_offers_are_granted_in_their_order_as_far_as_the_budget_goes() -> None:
    size = len(Sender().data)

    async def test(hall: Hall) -> None:
        senders = [Sender(client_id) for client_id in (2, 0, 1)]
        for sender in senders:
            await sender.offer_to(hall)
        assert hall.bus.granted == [2, 0]
        await senders[1].send_to(hall)  # the second is done first
        await hall.until(lambda: hall.bus.receipts)
        await hall.until(lambda: len(hall.bus.granted) == 3)
        assert hall.bus.granted == [2, 0, 1]

    run_with(test, budget_bytes=2 * size + size // 2)


def test_one_update_is_always_let_in_however_small_the_budget() -> None:
    async def test(hall: Hall) -> None:
        for client_id in range(3):
            await Sender(client_id).offer_to(hall)
        for client_id in range(3):
            assert hall.bus.granted == list(range(client_id + 1))
            await Sender(client_id).send_to(hall)
            await hall.until(lambda count=client_id + 1: len(hall.bus.receipts) == count)  # type: ignore[misc]
            await hall.until(lambda count=client_id + 2: len(hall.bus.granted) == min(count, 3))  # type: ignore[misc]
        assert hall.round.accepted == {0, 1, 2}

    run_with(test, budget_bytes=1)


def test_a_repeated_offer_is_not_granted_again_as_its_frames_may_be_on_their_way() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender()
        for _ in range(3):
            await sender.offer_to(hall)
        assert hall.bus.granted == [0]

    run_with(test)


def test_a_grant_that_may_be_lost_is_repeated_when_nothing_comes() -> None:
    async def test(hall: Hall) -> None:
        await Sender().offer_to(hall)
        await hall.until(lambda: len(hall.bus.granted) > 1)

    run_with(test, repair_after_s=0.02)


def test_a_repeated_offer_that_waits_keeps_its_place_and_is_granted_once() -> None:
    async def test(hall: Hall) -> None:
        for client_id in (0, 1, 2, 1, 1, 0):
            await Sender(client_id).offer_to(hall)
        await Sender(0).send_to(hall)
        await hall.until(lambda: 1 in hall.bus.granted)
        assert [client_id for client_id in hall.bus.granted if client_id] == [1]

    run_with(test, budget_bytes=1)


def test_grants_that_take_long_to_say_do_not_get_in_each_others_way() -> None:
    """Offers are heard while the intake grants others: both go over the same list."""

    async def test(hall: Hall) -> None:
        await Sender(0).offer_to(hall)
        for client_id in (1, 2):
            await Sender(client_id).offer_to(hall)  # no room yet
        await hall.intake.on_frame(Sender(0).frames[0])
        hall.intake.forget(0, 100)  # room for all
        hall.admission.budget_bytes = 1 << 20
        hall.bus.open.clear()
        granting = [asyncio.create_task(Sender(client_id).offer_to(hall)) for client_id in (1, 2, 1)]
        await hall.until(lambda: {1, 2} <= set(hall.bus.granted))
        hall.bus.open.set()
        await asyncio.gather(*granting)
        for client_id in (1, 2):
            await Sender(client_id).send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) == 2)
        assert hall.round.accepted == {1, 2}

    run_with(test, budget_bytes=1)


def test_no_offer_is_granted_after_the_round_ended_in_the_middle_of_a_grant() -> None:
    async def test(hall: Hall) -> None:
        for client_id in range(3):
            await Sender(client_id).offer_to(hall)
        hall.intake.forget(0, 100)
        hall.admission.budget_bytes = 1 << 20
        hall.bus.open.clear()
        granting = asyncio.create_task(Sender(1).offer_to(hall))
        await hall.until(lambda: 1 in hall.bus.granted)
        await hall.intake.close()
        hall.bus.open.set()
        await granting
        assert hall.bus.granted == [0, 1]

    run_with(test, budget_bytes=1)


# What counts


def test_an_accepted_update_counts_once_and_gets_a_receipt() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender(1, num_samples=7)
        await deliver(hall, sender)
        (receipt,) = hall.bus.all(Receipt)
        assert receipt == Receipt(1, 100, RUN, 1, 1, True, "")
        assert hall.round.accepted == {1}
        tally = hall.intake.totals
        assert (tally.bytes_up, tally.num_samples, tally.losses) == (len(sender.data), 7, [(7, 0.5)])
        assert (tally.train_s, tally.encode_s) == (1.0, 0.1)
        assert len(hall.changes) == 1
        assert (hall.mean() - sender.delta).abs().max() < 1e-6

    run_with(test)


def test_a_repeated_offer_after_acceptance_gets_its_receipt_again_and_counts_no_second_time() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender()
        await deliver(hall, sender)
        for _ in range(2):
            await sender.offer_to(hall)
            await sender.send_to(hall)
        assert hall.bus.receipts == [(0, True)] * 3
        assert hall.intake.totals.num_samples == 10
        assert hall.strategy.added == [0]
        assert hall.bus.granted == [0]

    run_with(test)


def test_a_receipt_that_was_lost_at_the_end_of_a_round_is_said_again_in_the_next() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender()
        await deliver(hall, sender)
        await hall.intake.close()
        await sender.offer_to(hall)
        hall.open_round(2)
        await sender.offer_to(hall)
        assert hall.bus.receipts == [(0, True)] * 3
        assert hall.intake.totals.num_samples == 0
        assert hall.round.accepted == set()

    run_with(test)


def test_another_attempt_at_a_round_goes_on_with_what_has_counted() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender()
        await deliver(hall, sender)
        await hall.intake.close()
        rules = RoundRules(minimum=1, quorum=1.0, deadline_s=60.0, grace_s=1.0)
        hall.round = Round(1, [0, 1], rules, now_s=0.0, accepted=hall.round.accepted)
        hall.intake.open_round(hall.round, hall.base)
        await sender.offer_to(hall)
        assert hall.bus.granted == [0]  # not a second time
        assert hall.bus.receipts[-1] == (0, True)
        assert hall.round.open == {1}
        assert hall.intake.totals.num_samples == 10

    run_with(test)


def test_another_update_of_a_client_that_counts_already_is_refused() -> None:
    async def test(hall: Hall) -> None:
        await deliver(hall, Sender())
        await Sender(transfer=2, seed=1).offer_to(hall)
        assert hall.bus.receipts == [(0, True), (0, False)]
        assert hall.dropped == {"unexpected": 1}
        assert hall.round.failed == {}

    run_with(test)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_sum_does_not_depend_on_the_order_of_arrival(order: tuple[int, ...]) -> None:
    async def mean_in(order: tuple[int, ...]) -> Tensor:
        async with hall_of() as hall:
            await deliver(hall, *(Sender(i, seed=i, num_samples=10 * i + 1) for i in order))
            return hall.mean()

    assert torch.equal(asyncio.run(mean_in(order)), asyncio.run(mean_in((0, 1, 2))))


def test_frames_of_several_clients_may_come_mixed_doubled_and_backwards() -> None:
    async def test(hall: Hall) -> None:
        senders = [Sender(i, seed=i) for i in range(3)]
        for sender in senders:
            await sender.offer_to(hall)
        for messages in zip(*(reversed(sender.frames) for sender in senders), strict=True):
            for message in messages:
                await hall.intake.on_frame(message)
                await hall.intake.on_frame(message)
        await hall.until(lambda: len(hall.bus.receipts) == 3)
        assert hall.round.accepted == {0, 1, 2}
        expected = torch.stack([sender.delta for sender in senders]).mean(0)
        assert (hall.mean() - expected).abs().max() < 1e-6
        assert set(hall.dropped) <= {"repeated frame", "unexpected frame", "unexpected"}

    run_with(test)


# What does not count


def test_who_offers_without_end_does_not_fill_the_disk_with_refusals(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        for transfer in range(300):
            await Sender(round_id=2, transfer=transfer).offer_to(hall)
        assert hall.dropped == {"stale": 300}

    run_with(test, history=History(tmp_path, "controller"))
    assert len((tmp_path / "controller.jsonl").read_text().splitlines()) == 100


@pytest.mark.parametrize(
    ("sender", "reason", "words"),
    [
        (Sender(round_id=2), "stale", "round 2 is not open"),
        (Sender(round_id=0), "stale", "round 0 is not open"),
        (Sender(run_id=RUN + 1), "stale", "is not open"),
        (Sender(client_id=9), "unexpected", "client 9 is not expected in this round"),
    ],
)
def test_an_offer_that_does_not_belong_here_is_refused_with_the_reason(sender: Sender, reason: str, words: str) -> None:
    async def test(hall: Hall) -> None:
        await sender.offer_to(hall)
        (receipt,) = hall.bus.all(Receipt)
        assert not receipt.accepted
        assert words in receipt.reason
        assert (receipt.to, receipt.run_id, receipt.round_id) == (sender.client_id, sender.run_id, sender.round_id)
        assert hall.dropped == {reason: 1}
        assert hall.round.failed == {}
        assert hall.bus.granted == []

    run_with(test)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"num_samples": 0}, "samples", "0 samples are out of range"),
        ({"num_samples": MAX_SAMPLES + 1}, "samples", f"{MAX_SAMPLES + 1} samples are out of range"),
        ({"total_bytes": 0}, "oversized", "0 bytes, at most"),
        ({"total_bytes": 1 << 40}, "oversized", f"{1 << 40} bytes, at most"),
    ],
)
def test_an_offer_out_of_range_is_refused_and_its_client_not_waited_for(
    change: dict[str, Any], reason: str, words: str
) -> None:
    async def test(hall: Hall) -> None:
        await hall.intake.on_request(0, 100, replace(Sender().request, **change))
        (receipt,) = hall.bus.all(Receipt)
        assert not receipt.accepted
        assert words in receipt.reason
        assert hall.round.failed == {0: reason}
        assert hall.dropped == {reason: 1}
        assert len(hall.changes) == 1
        assert hall.bus.granted == []
        await Sender().offer_to(hall)  # and has no second chance in this round
        assert hall.bus.granted == []

    run_with(test)


def non_finite() -> bytes:
    values = torch.zeros(DIM)
    values[7] = float("nan")
    return values.numpy().tobytes()


@pytest.mark.parametrize(
    ("payload", "num_samples", "reason"),
    [
        (b"\xff" * 50, 10, "malformed"),
        (codecs.get("q8").encode(torch.zeros(DIM + 1)), 10, "malformed"),
        (codecs.get("sq8").encode(torch.ones(DIM))[:-1], 10, "malformed"),
        (non_finite(), 10, "non-finite"),
        (codecs.get("fp32").encode(torch.full((DIM,), 1e30)), 10, "refused"),
        (codecs.get("fp32").encode(torch.full((DIM,), 5.0)), MAX_SAMPLES, "refused"),
        (codecs.get("s4").encode(torch.ones(DIM), is_delta=False), 10, "refused"),
    ],
    ids=["no known format", "another size", "cut short", "nan", "huge", "too heavy", "sparse weights"],
)
def test_a_bad_payload_is_refused_its_client_not_waited_for_and_the_sum_untouched(
    payload: bytes, num_samples: int, reason: str
) -> None:
    async def test(hall: Hall) -> None:
        good = Sender(0)
        await deliver(hall, good, Sender(1, payload=payload, num_samples=num_samples))
        assert hall.bus.receipts == [(0, True), (1, False)]
        assert hall.bus.all(Receipt)[1].reason
        assert hall.round.failed == {1: reason}
        assert hall.round.accepted == {0}
        assert hall.dropped == {reason: 1}
        assert hall.intake.totals.num_samples == good.num_samples
        assert (hall.mean() - good.delta).abs().max() < 1e-6
        await deliver(hall, Sender(2))  # the round goes on
        assert hall.round.accepted == {0, 2}

    run_with(test)


def test_bad_updates_are_strikes_and_who_has_too_many_is_turned_away_before_it_sends() -> None:
    async def test(hall: Hall) -> None:
        for round_id in (1, 2, 3):
            hall.open_round(round_id)
            sender = Sender(1, round_id=round_id, transfer=round_id, payload=non_finite())
            await (deliver(hall, sender) if round_id < 3 else sender.offer_to(hall))
        assert [(s.client_id, s.round_id, s.reason, s.out_until) for s in hall.strikes] == [
            (1, 1, "non-finite", 0),
            (1, 2, "non-finite", 6),
        ]
        assert hall.bus.granted == [1, 1]
        assert hall.dropped == {"non-finite": 2, "quarantine": 1}
        assert "client 1 is in quarantine, out until round 6 after strike 2" in hall.bus.all(Receipt)[-1].reason

    run_with(test)


def test_who_is_late_or_finds_no_room_gets_no_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise NoRoom("2 updates are all there is memory for")

    async def test(hall: Hall) -> None:
        await Sender(0, round_id=9).offer_to(hall)
        await Sender(9).offer_to(hall)
        monkeypatch.setattr(hall.strategy, "add", full)
        await deliver(hall, Sender(1))
        assert hall.strikes == []
        assert hall.dropped == {"stale": 1, "unexpected": 1, "no room": 1}
        assert hall.round.failed == {1: "no room"}

    run_with(test)


def test_frames_that_nobody_waits_for_are_counted_and_dropped() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender()
        await hall.intake.on_frame(sender.frames[0])
        assert hall.dropped == {"unexpected frame": 1}
        await sender.offer_to(hall)
        await hall.intake.on_frame(replace(sender, transfer=2).frames[0])
        await hall.intake.on_frame(replace(sender, incarnation=99).frames[0])
        await hall.intake.on_frame(replace(sender, run_id=RUN + 1).frames[0])
        assert hall.dropped == {"unexpected frame": 4}
        await hall.intake.on_frame(replace(sender, num_samples=11).frames[0])
        await hall.intake.on_frame(replace(sender, payload=sender.data + b"1").frames[0])
        assert hall.dropped == {"unexpected frame": 4, "mismatch": 2}
        await sender.send_to(hall, slice(1))
        await sender.send_to(hall, slice(1))
        assert hall.dropped["repeated frame"] == 1
        await hall.intake.close()
        await sender.send_to(hall, slice(1, 2))
        assert hall.dropped["late frame"] == 1
        assert hall.bus.receipts == []

    run_with(test)


def test_admission_refuses_with_a_reason_and_strikes_only_where_no_honest_client_errs() -> None:
    quarantine = Quarantine(max_strikes=1, quarantine_rounds=3)
    admission = UpdateAdmission(quarantine, run_id=RUN, max_bytes=400, budget_bytes=500, max_samples=100)
    rules = RoundRules(minimum=1, quorum=1.0, deadline_s=9.0, grace_s=0.0)
    round_ = Round(1, range(2), rules, now_s=0.0)

    def refused(sender: Sender, total_bytes: int = 400, **values: Any) -> tuple[str, bool] | None:
        request = replace(sender.request, total_bytes=total_bytes, **values)
        refusal = admission.refusal(RequestedUpload(sender.client_id, 1, request), round_)
        return None if refusal is None else (refusal.reason, refusal.is_strike)

    assert refused(Sender(0)) is None
    assert refused(Sender(0), run_id=RUN + 1) == ("stale", False)
    assert refused(Sender(0), round_id=2) == ("stale", False)
    assert refused(Sender(5)) == ("unexpected", False)
    assert refused(Sender(0), num_samples=101) == ("samples", True)
    assert refused(Sender(0), total_bytes=401) == ("oversized", True)
    quarantine.strike(0, 0, "samples", "")
    assert refused(Sender(0)) == ("quarantine", False)


def test_numbers_with_which_a_strategy_cannot_compute_are_a_strike_and_the_others_count() -> None:
    async def test(hall: Hall) -> None:
        add = hall.strategy.add

        def divide(update: Update, facts: Facts) -> None:
            assert 1 / (facts.num_samples - 10)
            add(update, facts)

        hall.strategy.add = divide  # type: ignore[method-assign]
        await deliver(hall, Sender(0, num_samples=10), Sender(1, num_samples=11))
        assert hall.bus.receipts == [(0, False), (1, True)]
        assert [(strike.client_id, strike.reason) for strike in hall.strikes] == [(0, "refused")]

    run_with(test)


def test_an_update_without_a_metric_that_the_strategy_reads_is_a_strike_and_never_reaches_it() -> None:
    async def test(hall: Hall) -> None:
        hall.strategy.metrics = ("accuracy",)
        await deliver(hall, Sender(0))
        assert "does not announce accuracy, by which HeldFedAvg weighs" in hall.bus.all(Receipt)[0].reason
        assert hall.strategy.added == []

    run_with(test)


def test_one_update_is_always_let_in_and_a_second_only_within_the_budget() -> None:
    admission = UpdateAdmission(Quarantine(0, 0), run_id=RUN, max_bytes=9999, budget_bytes=500, max_samples=100)
    small, large = (replace(Sender().request, total_bytes=size) for size in (200, 900))
    assert admission.has_room(large, 0)
    assert admission.has_room(small, small.total_bytes)
    assert not admission.has_room(large, small.total_bytes)
