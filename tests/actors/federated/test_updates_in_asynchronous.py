"""Updates of asynchronous rounds that come while one round ends and the next begins."""

from __future__ import annotations

from intake_hall import DIM, Hall, Lies, Sender, run_with

from gradbus import codecs
from gradbus.actors.federated.controller.asynchronous import Bases, BufferRound
from gradbus.actors.federated.controller.rounds import RoundRules
from gradbus.actors.federated.controller.update_sum import UpdateForm
from gradbus.runtime.config.federated import AsynchronousSettings

SETTINGS = AsynchronousSettings(buffer=100)


def asynchronous() -> UpdateForm:
    return UpdateForm(DIM, bases=Bases(SETTINGS, codecs.get("fp32"), DIM))


def open_buffer(hall: Hall, round_id: int) -> None:
    rules = RoundRules(minimum=1, quorum=1.0, deadline_s=1e9, grace_s=0.0)
    hall.round = BufferRound(round_id, range(3), rules, SETTINGS, now_s=0.0)
    hall.intake.open_round(hall.round, hall.base)


def test_an_update_that_waits_while_a_round_is_opened_counts_in_the_sum_of_that_round() -> None:
    size, late = len(Sender().data), Sender(2, seed=7)

    async def test(hall: Hall) -> None:
        open_buffer(hall, 1)
        for sender in (Sender(0), late, Sender(1)):  # the third has to wait for a grant
            await sender.offer_to(hall)
        hall.bus.open.clear()  # grants take long
        await Sender(0).send_to(hall)
        await hall.until(lambda: 1 in hall.bus.granted)
        await late.send_to(hall)
        await hall.intake.close()
        open_buffer(hall, 2)
        hall.bus.open.set()
        await hall.until(lambda: (2, True) in hall.bus.receipts)
        assert float((hall.mean() - late.delta * 2**-0.5).abs().max()) < 1e-6

    run_with(test, form=asynchronous(), budget_bytes=2 * size)


def test_an_update_that_waits_for_the_next_round_weighs_no_more_than_is_believed_in_that_round() -> None:
    liar = Sender(1, num_samples=1 << 20, seed=5)
    others = [Sender(client_id, round_id=2, seed=client_id) for client_id in (0, 2)]

    async def test(hall: Hall) -> None:
        assert hall.bounds is not None
        open_buffer(hall, 1)
        hall.bounds.open_round(1)  # nothing is known: the first buffer is held
        await liar.offer_to(hall)
        await hall.intake.close()
        await liar.send_to(hall)
        hall.bounds.open_round(2)
        open_buffer(hall, 2)
        for other in others:
            assert hall.bus.receipts == []
            await other.offer_to(hall)
            await other.send_to(hall)
        await hall.until(lambda: sorted(hall.bus.receipts) == [(0, True), (1, True), (2, True)])
        expected = (10 * others[0].delta + 10 * others[1].delta + 40 * liar.delta * 2**-0.5) / 60
        assert float((hall.mean() - expected).abs().max()) < 1e-6

    run_with(test, form=asynchronous(), lies=Lies(by_rounds=False))
