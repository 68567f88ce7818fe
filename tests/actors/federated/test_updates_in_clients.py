"""Clients that die, start again, change their mind or are slow: what they leave behind, and what counts."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
import torch
from intake_hall import DIM, MAX_SAMPLES, Hall, Sender, deliver, run_with

from gradbus import codecs
from gradbus.actors.federated.controller.rounds import RoundTotals
from gradbus.runtime.errors import WriteTimeout
from gradbus.runtime.wire.control import Grant, Receipt, RetransmitRequest


def test_a_client_forgotten_in_the_middle_of_a_transfer_makes_room_for_the_next() -> None:
    async def test(hall: Hall) -> None:
        await Sender(0).offer_to(hall)
        await Sender(0).send_to(hall, slice(2))
        await Sender(1).offer_to(hall)
        assert hall.bus.granted == [0]
        hall.intake.forget(0, 100)
        assert hall.dropped == {"cut short": 1}
        await deliver(hall, Sender(1))  # its request repeated, as clients do
        assert hall.round.accepted == {1}
        await Sender(0).send_to(hall, slice(2, None))
        assert hall.dropped["unexpected frame"] > 0
        assert hall.round.accepted == {1}

    run_with(test, budget_bytes=1)


def test_a_client_forgotten_before_its_grant_gets_none() -> None:
    async def test(hall: Hall) -> None:
        for client_id in range(3):
            await Sender(client_id).offer_to(hall)
        hall.intake.forget(1, 100)
        await Sender(0).send_to(hall)
        await hall.until(lambda: 2 in hall.bus.granted)
        assert hall.bus.granted == [0, 2]

    run_with(test, budget_bytes=1)


def test_forgetting_another_start_of_a_client_leaves_this_one_alone() -> None:
    async def test(hall: Hall) -> None:
        await Sender().offer_to(hall)
        hall.intake.forget(0, 99)
        await Sender().send_to(hall)
        await hall.until(lambda: hall.bus.receipts)
        assert hall.round.accepted == {0}

    run_with(test)


def test_the_offer_of_a_restarted_client_replaces_its_older_transfer() -> None:
    async def test(hall: Hall) -> None:
        old, new = Sender(seed=1), Sender(incarnation=200, seed=2)
        await old.offer_to(hall)
        await old.send_to(hall, slice(2))
        await new.offer_to(hall)
        assert [grant.incarnation for grant in hall.bus.all(Grant)] == [100, 200]
        await old.send_to(hall, slice(2, None))
        assert hall.bus.receipts == []
        await new.send_to(hall)
        await hall.until(lambda: hall.bus.receipts)
        assert hall.bus.all(Receipt)[0].incarnation == 200
        assert (hall.mean() - new.delta).abs().max() < 1e-6

    run_with(test)


def test_a_client_that_offers_something_new_while_its_update_is_being_added_counts_once() -> None:
    async def test(hall: Hall) -> None:
        first, second = Sender(seed=1), Sender(transfer=2, seed=2)
        await first.offer_to(hall)
        await first.send_to(hall)
        await hall.strategy.entered.wait()
        await second.offer_to(hall)
        await second.send_to(hall)
        hall.strategy.go_on.set()
        await hall.until(lambda: hall.bus.receipts)
        await second.offer_to(hall)
        await second.send_to(hall)
        await hall.until(lambda: len(hall.bus.receipts) >= 2)
        await deliver(hall, Sender(1))
        assert hall.strategy.added == [0, 1]
        assert hall.intake.totals.num_samples == 20
        assert hall.bus.receipts == [(0, True), (0, False), (1, True)]
        assert hall.bus.all(Receipt)[0].transfer == 1

    run_with(test, held=True)


def test_a_client_that_dies_while_its_update_is_being_added_counts_and_was_not_cut_short() -> None:
    async def test(hall: Hall) -> None:
        await Sender().offer_to(hall)
        await Sender().send_to(hall)
        await hall.strategy.entered.wait()
        hall.intake.forget(0, 100)
        hall.round.lose(0)
        hall.strategy.go_on.set()
        await hall.until(lambda: hall.bus.receipts)
        assert hall.round.accepted == {0}
        assert hall.dropped == {}
        assert hall.intake.totals.num_samples == 10

    run_with(test, held=True)


def test_a_complete_update_of_a_client_that_died_still_counts() -> None:
    async def test(hall: Hall) -> None:
        for client_id in (0, 1):
            await Sender(client_id).offer_to(hall)
            await Sender(client_id).send_to(hall)
        await hall.strategy.entered.wait()  # client 1 waits behind client 0
        hall.intake.forget(1, 100)
        hall.round.lose(1)
        hall.strategy.go_on.set()
        await hall.until(lambda: len(hall.bus.receipts) == 2)
        assert hall.round.accepted == {0, 1} <= hall.round.expected
        assert hall.dropped == {}

    run_with(test, held=True)


def test_closing_waits_for_the_update_that_is_being_added_and_drops_those_behind_it() -> None:
    async def test(hall: Hall) -> None:
        for client_id in (0, 1):
            await Sender(client_id).offer_to(hall)
            await Sender(client_id).send_to(hall)
        await hall.strategy.entered.wait()
        closing = asyncio.create_task(hall.intake.close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        hall.strategy.go_on.set()
        await closing
        assert hall.strategy.added == [0]
        assert hall.round.accepted == {0}
        assert hall.bus.receipts == [(0, True)]
        before = hall.round
        hall.open_round(2)
        await deliver(hall, Sender(2, round_id=2))
        assert before.accepted == {0}
        assert hall.round.accepted == {2}
        assert hall.intake.totals.num_samples == 10

    run_with(test, held=True)


def test_with_no_round_open_every_offer_is_stale() -> None:
    async def test(hall: Hall) -> None:
        await hall.intake.close()
        await Sender().offer_to(hall)
        assert hall.bus.receipts == [(0, False)]
        assert hall.dropped == {"stale": 1}

    run_with(test)


def test_frames_that_do_not_come_are_asked_for() -> None:
    async def test(hall: Hall) -> None:
        sender = Sender()
        await sender.offer_to(hall)
        messages = sender.frames
        for seq in (0, 2, 3, 5, 6):
            await hall.intake.on_frame(messages[seq])
        await hall.until(lambda: hall.bus.all(RetransmitRequest))
        assert hall.bus.all(RetransmitRequest)[0] == RetransmitRequest(0, 100, 1, 1, [1, 4])
        await hall.intake.on_frame(messages[1])
        await hall.until(lambda: hall.bus.all(RetransmitRequest)[-1].seqs == [4])
        await hall.intake.on_frame(messages[4])
        await hall.until(lambda: hall.bus.receipts)
        assert hall.round.accepted == {0}

    run_with(test, repair_after_s=0.02)


def test_a_grant_without_an_echo_is_said_again() -> None:
    async def test(hall: Hall) -> None:
        await Sender().offer_to(hall)
        await hall.until(lambda: len(hall.bus.granted) >= 3)
        assert hall.bus.all(RetransmitRequest) == []

    run_with(test, repair_after_s=0.02)


def test_a_transfer_that_stalls_gives_its_place_to_the_next() -> None:
    async def test(hall: Hall) -> None:
        for client_id in (0, 1):
            await Sender(client_id).offer_to(hall)
        await Sender(0).send_to(hall, slice(1))
        await hall.until(lambda: 1 in hall.bus.granted)
        assert hall.dropped["stalled"] == 1
        await Sender(1).send_to(hall)
        await hall.until(lambda: (1, True) in hall.bus.receipts)
        await deliver(hall, Sender(0))  # it is back, and may still count
        assert hall.round.accepted == {0, 1}

    run_with(test, budget_bytes=1, repair_after_s=0.02, stall_after_s=0.06)


def test_an_answer_that_cannot_be_sent_is_given_when_it_is_asked_for_again() -> None:
    async def test(hall: Hall) -> None:
        hall.bus.error = WriteTimeout("train/control", 1.0)
        await Sender().offer_to(hall)
        assert hall.bus.said == []
        hall.bus.error = None
        await deliver(hall, Sender())
        assert hall.bus.receipts == [(0, True)]

    run_with(test)


# The tally


def test_the_loss_of_a_round_is_weighted_by_samples_and_does_not_depend_on_the_order() -> None:
    losses = [(10, 0.1), (1, 0.7), (1_000_000, 1e-9), (3, 0.3)]
    expected = math.fsum(samples * loss for samples, loss in losses) / sum(samples for samples, _ in losses)
    (loss,) = {RoundTotals(losses=list(order)).loss() for order in itertools.permutations(losses)}
    assert loss == pytest.approx(expected)


def test_losses_that_are_no_numbers_are_left_out() -> None:
    assert RoundTotals().loss() is None
    assert RoundTotals(losses=[(5, math.nan)]).loss() is None
    assert RoundTotals(losses=[(5, math.nan), (5, 2.0), (1, math.inf), (1, -math.inf)]).loss() == 2.0


@pytest.mark.parametrize("losses", [[(1, 1.7e308)] * 2, [(9, 1.7e308), (9, -1.7e308)], [(1 << 30, 1.7e308), (1, 0.5)]])
def test_absurd_losses_are_no_error(losses: list[tuple[int, float]]) -> None:
    loss = RoundTotals(losses=losses).loss()
    assert loss is None or math.isfinite(loss)


@pytest.mark.parametrize("greedy_first", [True, False])
def test_an_update_that_takes_up_all_the_room_brings_nobody_a_strike(greedy_first: bool) -> None:
    largest = codecs.get("fp32").encode(torch.nextafter(torch.full((DIM,), 4.0), torch.zeros(DIM)))

    async def test(hall: Hall) -> None:
        greedy = Sender(0, payload=largest, num_samples=MAX_SAMPLES)
        others = [Sender(1, num_samples=60_000), Sender(2, num_samples=60_000)]
        await deliver(hall, *([greedy, *others] if greedy_first else [*others, greedy]))
        assert hall.round.accepted == {0, 1, 2}
        assert (hall.strikes, hall.round.failed, hall.dropped) == ([], {}, {})

    run_with(test)
