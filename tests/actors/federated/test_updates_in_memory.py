"""Updates that lie in their clients' memory: added from there without a grant, or sent like all others."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from intake_hall import DIM, Hall, Sender, deliver, hall_of, run_with

from gradbus import codecs
from gradbus.actors.federated.controller import update_sum
from gradbus.actors.federated.controller import updates_in as update_receiver
from gradbus.actors.federated.controller.rounds import Round, RoundRules
from gradbus.runtime.shm.segment import PayloadMemory, SharedMemoryFault, SharedPayload, machine
from gradbus.runtime.transport.channels import CHANNELS, ClientUpdate
from gradbus.runtime.wire.control import Receipt, RetransmitRequest

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")

UPDATES = CHANNELS[ClientUpdate].name


@pytest.fixture(autouse=True)
def threads_of_intakes_end(nothing_is_left: None) -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("gradbus-intake-test"):
            thread.join(10.0)  # it lets go of what it has worked on a moment after it has said so


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The warnings of the intake that concern memory."""
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **facts: Any) -> None:
            if event == "no shared memory":
                lines.append(facts)

    monkeypatch.setattr(update_receiver, "log", Log())
    return lines


def sealed(sender: Sender) -> tuple[Sender, SharedPayload]:
    """The sender with its update in memory, and that memory."""
    lies = SharedPayload(sender.data)
    return replace(sender, memory=lies.place), lies


async def receipts(hall: Hall, count: int) -> None:
    await hall.until(lambda: len(hall.bus.receipts) == count)


def test_an_update_in_memory_is_added_without_a_grant_or_a_frame() -> None:
    async def test(hall: Hall) -> None:
        sender, _lies = sealed(Sender(1, num_samples=7))
        await sender.offer_to(hall)
        await receipts(hall, 1)
        assert (hall.bus.receipts, hall.bus.granted) == ([(1, True)], [])
        assert (hall.mean() - sender.delta).abs().max() < 1e-6
        size = len(sender.data)
        assert (hall.intake.totals.bytes_up, hall.intake.totals.bytes_up_shared) == (size, size)
        assert hall.bus.memory.read_bytes == {UPDATES: size}
        assert hall.dropped == {}

    run_with(test)


def test_the_sum_is_the_same_to_the_bit_whichever_way_each_update_takes() -> None:
    async def mean_of(in_memory: set[int]) -> torch.Tensor:
        async with hall_of() as hall:
            for client_id in range(3):
                sender, _lies = sealed(Sender(client_id, seed=client_id, num_samples=3 + client_id))
                if client_id in in_memory:
                    await sender.offer_to(hall)
                    await receipts(hall, client_id + 1)
                else:
                    await deliver(hall, replace(sender, memory=""))
            return hall.mean()

    means = [asyncio.run(mean_of(chosen)) for chosen in (set(), {1}, {0, 1, 2})]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])


def test_updates_in_memory_take_nothing_from_the_budget() -> None:
    async def test(hall: Hall) -> None:
        await Sender(0).offer_to(hall)  # takes all of it
        sender, _lies = sealed(Sender(1))
        await sender.offer_to(hall)
        await receipts(hall, 1)
        await Sender(2).offer_to(hall)
        assert (hall.bus.receipts, hall.bus.granted) == ([(1, True)], [0])

    run_with(test, budget_bytes=1)


def test_an_offer_that_is_repeated_while_its_update_is_read_counts_once() -> None:
    async def test(hall: Hall) -> None:
        sender, _lies = sealed(Sender())
        for _ in range(3):
            await sender.offer_to(hall)
        await hall.strategy.entered.wait()
        await sender.offer_to(hall)
        hall.strategy.go_on.set()
        await receipts(hall, 1)
        await sender.offer_to(hall)
        assert hall.bus.receipts == [(0, True)] * 2
        assert (hall.strategy.added, hall.bus.granted) == ([0], [])

    run_with(test, held=True)


def test_an_update_that_was_refused_before_its_round_was_open_never_counts_and_a_newer_one_does() -> None:
    """Its client repeats the request when the command comes, which may be before the answer."""

    async def test(hall: Hall) -> None:
        early, _early = sealed(Sender(round_id=2))
        await early.offer_to(hall)
        await hall.intake.close()
        hall.open_round(2)
        await early.offer_to(hall)
        newer, _newer = sealed(Sender(round_id=2, transfer=2, seed=5))
        await newer.offer_to(hall)
        await receipts(hall, 3)
        answers = [(receipt.transfer, receipt.accepted) for receipt in hall.bus.all(Receipt)]
        assert answers == [(1, False), (1, False), (2, True)]
        assert {receipt.reason for receipt in hall.bus.all(Receipt)[:2]} == {"round 2 is not open"}
        assert (hall.mean() - newer.delta).abs().max() < 1e-6

    run_with(test)


def test_a_newer_update_takes_the_place_of_one_that_waits_to_be_read() -> None:
    async def test(hall: Hall) -> None:
        other, _others = sealed(Sender(0))
        await other.offer_to(hall)
        await hall.strategy.entered.wait()
        older, _older = sealed(Sender(1, transfer=1))
        newer, _newer = sealed(Sender(1, transfer=2, seed=5))
        for sender in (older, newer):
            await sender.offer_to(hall)
        hall.strategy.go_on.set()
        await receipts(hall, 2)
        assert [(receipt.to, receipt.transfer) for receipt in hall.bus.all(Receipt)] == [(0, 1), (1, 2)]
        assert hall.bus.memory.read_bytes == {UPDATES: len(other.data) + len(newer.data)}  # the older one was not read
        assert (hall.mean() - (other.delta + newer.delta) / 2).abs().max() < 1e-6

    run_with(test, held=True)


def test_a_client_that_goes_before_its_memory_is_read_does_not_count() -> None:
    async def test(hall: Hall) -> None:
        other, _others = sealed(Sender(0))
        await other.offer_to(hall)
        await hall.strategy.entered.wait()
        gone, _lies = sealed(Sender(1))
        await gone.offer_to(hall)
        hall.intake.forget(1, 100)
        hall.strategy.go_on.set()
        await receipts(hall, 1)
        await hall.intake.close()
        assert hall.round.accepted == {0}
        assert hall.dropped == {"cut short": 1}

    run_with(test, held=True)


def test_the_end_of_the_round_drops_what_waits_to_be_read() -> None:
    async def test(hall: Hall) -> None:
        senders = [sealed(Sender(client_id)) for client_id in range(3)]
        for sender, _ in senders:
            await sender.offer_to(hall)
        await hall.strategy.entered.wait()
        closing = asyncio.create_task(hall.intake.close())
        await asyncio.sleep(0)
        hall.strategy.go_on.set()
        await closing
        assert hall.round.accepted == {0}
        assert hall.strategy.added == [0]

    run_with(test, held=True)


def test_an_update_that_waits_to_be_read_in_a_round_that_nobody_has_closed_is_in_no_other_one() -> None:
    async def test(hall: Hall) -> None:
        first, _firsts = sealed(Sender(0))
        await first.offer_to(hall)
        await hall.strategy.entered.wait()
        late, _lates = sealed(Sender(1))
        await late.offer_to(hall)
        hall.open_round(2)
        hall.strategy.go_on.set()
        newer, _newers = sealed(Sender(2, round_id=2))
        await newer.offer_to(hall)
        await receipts(hall, 2)
        assert hall.strategy.added == [0, 2]

    run_with(test, held=True)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [(b"\xff" * 50, "malformed"), (codecs.get("fp32").encode(torch.full((DIM,), 1e30)), "refused")],
    ids=["no known format", "huge"],
)
def test_what_is_no_update_is_refused_as_if_it_had_been_sent(payload: bytes, reason: str) -> None:
    async def test(hall: Hall) -> None:
        sender, _lies = sealed(Sender(payload=payload))
        await sender.offer_to(hall)
        await receipts(hall, 1)
        assert hall.bus.receipts == [(0, False)]
        assert hall.dropped == {reason: 1}
        assert hall.round.failed == {0: reason}

    run_with(test)


def test_memory_that_cannot_be_read_is_done_without_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    def refuse(place: str, size: int) -> memoryview:
        raise SharedMemoryFault("no permission")

    monkeypatch.setattr(update_sum, "read", refuse)

    async def test(hall: Hall) -> None:
        for round_id in (1, 2, 3):
            for client_id in (0, 1):
                sender, _lies = sealed(Sender(client_id, round_id=round_id, transfer=round_id))
                count = len(hall.bus.granted)
                await sender.offer_to(hall)
                await hall.until(lambda count=count: len(hall.bus.granted) > count)  # type: ignore[misc]
                await sender.offer_to(hall)  # it may not have heard the grant
                await sender.send_to(hall)
                await receipts(hall, 2 * round_id - 1 + client_id)
            await hall.intake.close()
            hall.open_round(round_id + 1)
        assert hall.bus.receipts == [(0, True), (1, True)] * 3
        assert hall.intake.totals.bytes_up_shared == 0

    run_with(test)
    assert [(line["client"], line["reason"]) for line in logged] == [(0, "no permission"), (1, "no permission")]


def test_a_client_that_starts_again_is_read_again(
    monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    async def test(hall: Hall) -> None:
        first, lies = sealed(Sender())
        lies.hide()
        await first.offer_to(hall)
        await hall.until(lambda: hall.bus.granted)
        again, _lies = sealed(Sender(incarnation=101))
        await again.offer_to(hall)
        await receipts(hall, 1)
        assert hall.bus.granted == [0]
        assert len(logged) == 1

    run_with(test)


@pytest.mark.parametrize(
    "place",
    [
        lambda here: here.replace(machine(), "elsewhere/b/1"),
        lambda here: "nonsense",
        lambda here: here.rpartition(" ")[0] + " " + "0" * 32,
        lambda here: f"{machine()} 4194304 3 {'0' * 32}",
        lambda here: f"{machine()} 1 1 {'0' * 32}",
        lambda here: f"{machine()} {os.getpid()} 0 {'0' * 32}",
    ],
    ids=["machine", "text", "token", "process", "another's file", "another file"],
)
def test_an_offer_that_lies_about_its_memory_is_granted_and_sent_and_others_go_on(
    place: Callable[[str], str], logged: list[dict[str, Any]]
) -> None:
    async def test(hall: Hall) -> None:
        honest, _lies = sealed(Sender(1))
        liar = replace(honest, client_id=0, memory=place(honest.memory))
        for sender in (liar, honest):
            await sender.offer_to(hall)
        await hall.until(lambda: hall.bus.granted == [0])
        await receipts(hall, 1)
        assert hall.bus.receipts == [(1, True)]
        await liar.send_to(hall)
        await receipts(hall, 2)
        assert hall.round.accepted == {0, 1}
        assert len(logged) <= 1

    run_with(test)


@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_memory_of_another_size_than_offered_is_not_read(change: int, logged: list[dict[str, Any]]) -> None:
    async def test(hall: Hall) -> None:
        sender, _lies = sealed(Sender(payload=codecs.get("s4").encode(torch.ones(DIM))))
        request = replace(sender.request, total_bytes=len(sender.data) + change)
        await hall.intake.on_request(0, 100, request)
        await hall.until(lambda: hall.bus.granted or hall.bus.receipts)
        assert hall.bus.receipts == ([(0, False)] if change == 1000 else [])  # more than an update can have
        assert hall.round.accepted == set()

    run_with(test)


def test_a_file_of_the_controllers_own_is_not_read(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    """Whoever knows where the model of another round lies, say, gains nothing by it: only by a token that it knows."""

    async def test(hall: Hall) -> None:
        secret = SharedPayload(Sender(2).data)
        parts = secret.place.split(" ")
        parts[3] = "0" * 32
        with (tmp_path / "weights").open("wb") as file:
            for client_id, number in enumerate((parts[2], str(file.fileno()))):
                parts[2] = number
                await replace(Sender(client_id), memory=" ".join(parts)).offer_to(hall)
                await hall.until(lambda count=client_id + 1: len(hall.bus.granted) == count)
        assert hall.round.accepted == set()

    run_with(test)


def test_a_controller_that_shares_no_memory_has_it_sent_without_a_word(logged: list[dict[str, Any]]) -> None:
    async def test(hall: Hall) -> None:
        hall.bus.memory = PayloadMemory(switched_on=False)
        sender, _lies = sealed(Sender())
        await deliver(hall, sender)
        assert (hall.bus.granted, hall.bus.receipts) == ([0], [(0, True)])
        assert hall.intake.totals.bytes_up_shared == 0

    run_with(test)
    assert logged == []


def test_another_attempt_at_a_round_reads_no_second_time() -> None:
    async def test(hall: Hall) -> None:
        sender, _lies = sealed(Sender())
        await sender.offer_to(hall)
        await receipts(hall, 1)
        await hall.intake.close()
        rules = RoundRules(minimum=1, quorum=1.0, deadline_s=60.0, grace_s=1.0)
        hall.round = Round(1, [0, 1], rules, now_s=0.0, accepted=hall.round.accepted)
        hall.intake.open_round(hall.round, hall.base)
        await sender.offer_to(hall)
        assert hall.bus.receipts == [(0, True)] * 2
        assert hall.strategy.added == [0]

    run_with(test)


async def add_slowly(hall: Hall) -> None:
    """Updates are added slowly, and the last frame of that of client 0 is lost."""
    add = hall.strategy.add

    def slowly(*arguments: Any) -> None:
        time.sleep(0.03)
        add(*arguments)

    hall.strategy.add = slowly  # type: ignore[method-assign]
    far = Sender(0)
    await far.offer_to(hall)
    await far.send_to(hall, slice(-1))


def test_updates_in_memory_do_not_keep_it_from_asking_for_lost_frames() -> None:
    async def test(hall: Hall) -> None:
        await add_slowly(hall)
        near = [sealed(Sender(client_id)) for client_id in range(1, 6)]
        for sender, _ in near:
            await sender.offer_to(hall)
        await hall.until(lambda: hall.bus.all(RetransmitRequest))
        assert len(hall.bus.receipts) < len(near)
        assert hall.dropped["stalled"] == 0

    run_with(test, clients=6, repair_after_s=0.02, stall_after_s=0.04)


def test_updates_that_are_complete_one_by_one_do_not_keep_it_from_asking_for_lost_frames() -> None:
    async def test(hall: Hall) -> None:
        await add_slowly(hall)
        near = [sealed(Sender(client_id)) for client_id in range(1, 9)]
        for count, (sender, _) in enumerate(near, 1):
            await sender.offer_to(hall)  # the one before has its receipt: none waits to be added meanwhile
            await receipts(hall, count)
        assert hall.bus.all(RetransmitRequest)

    run_with(test, clients=9, repair_after_s=0.06)


def test_an_offer_without_a_loss_is_the_same_when_it_is_repeated() -> None:
    async def test(hall: Hall) -> None:
        sender = replace(Sender(0), memory="")
        request = replace(sender.request, loss=float("nan"))
        await hall.intake.on_request(0, sender.incarnation, request)
        for frame in sender.frames[:-1]:
            await hall.intake.on_frame(frame)
        await hall.intake.on_request(0, sender.incarnation, replace(request, loss=float("nan")))
        await hall.intake.on_frame(sender.frames[-1])
        await receipts(hall, 1)

    run_with(test)
