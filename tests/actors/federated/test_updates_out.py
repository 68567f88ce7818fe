"""How often a client repeats its request, on a clock that jumps to the next timer instead of waiting."""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gradbus.actors.federated.client.updates_out import EncodedUpdate, UpdateSender
from gradbus.actors.federated.controller.uploads import STALL_AFTER_S
from gradbus.actors.federated.protocol import ON_THE_WAY_S
from gradbus.runtime.wire.control import Grant, Receipt, RetransmitRequest, UploadRequest
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

KEY = FrameKey(Kind.UPDATE, 7, 1, 0, 100, 1)
UPDATE = EncodedUpdate(KEY, UploadRequest(7, 1, 1, 4, 10, 0.5, 1.0, 0.1), b"data")


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Does not wait: its clock goes on to the end of each wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is waited for: the test would stand still"
        self.now_s += timeout
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s


class Bus:
    """Keeps when requests were published, and answers some of them."""

    def __init__(self) -> None:
        self.requested_s: list[float] = []
        self.answer: Callable[[int], None] = lambda number: None
        self.sent: list[object] = []
        self.delivered = True

    async def publish(self, sender: Identity, body: Any) -> None:
        self.requested_s.append(asyncio.get_running_loop().time())
        self.answer(len(self.requested_s))

    async def send_update(self, key: FrameKey, num_samples: int, data: bytes, *, only: object = None) -> int:
        self.sent.append(only)
        return len(data)

    def is_delivered(self, kind: object) -> bool:
        return self.delivered


def receipt() -> Receipt:
    return Receipt(0, 100, 7, 1, 1, True, "")


def run(test: Callable[[Bus, UpdateSender], Coroutine[Any, Any, None]]) -> Bus:
    bus = Bus()
    sender = UpdateSender(bus, Identity(0, 100))  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(test(bus, sender))
    return bus


@pytest.mark.parametrize(
    ("is_held", "times_s"), [(False, [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 23.5]), (True, [0.0, 4.0, 12.0, 20.0, 28.0])]
)
def test_each_wait_for_an_answer_is_twice_as_long_up_to_a_bound(is_held: bool, times_s: list[float]) -> None:
    async def test(bus: Bus, sender: UpdateSender) -> None:
        async with asyncio.TaskGroup() as group:
            bus.answer = lambda number: number == len(times_s) and sender.on_answer(receipt(), group)  # type: ignore[func-returns-value,assignment]
            found = await sender.deliver(UPDATE, check=lambda: True, is_held=is_held)
            assert found == receipt()

    assert run(test).requested_s == pytest.approx(times_s)
    assert max(after - before for before, after in itertools.pairwise(times_s)) < STALL_AFTER_S


def test_an_update_that_is_held_for_a_minute_is_requested_a_few_times_only_also_after_its_grant() -> None:
    async def test(bus: Bus, sender: UpdateSender) -> None:
        async with asyncio.TaskGroup() as group:
            delivering = group.create_task(sender.deliver(UPDATE, check=lambda: True, is_held=True))
            await asyncio.sleep(1.0)
            assert sender.on_answer(Grant(0, 100, 1, 1), group)
            await asyncio.sleep(59.0)
            assert sender.on_answer(receipt(), group)
            await delivering
            assert (sender.bytes_up, sender.phase) == (4, "idle")

    assert len(run(test).requested_s) <= 9


def test_a_new_command_has_the_request_repeated_at_once_and_the_waits_begin_again() -> None:
    async def test(bus: Bus, sender: UpdateSender) -> None:
        async with asyncio.TaskGroup() as group:
            delivering = group.create_task(sender.deliver(UPDATE, check=lambda: True))
            await asyncio.sleep(10.0)
            sender.interrupt()
            await asyncio.sleep(1.0)
            sender.on_answer(receipt(), group)
            await delivering

    assert run(test).requested_s == pytest.approx([0.0, 0.5, 1.5, 3.5, 7.5, 10.0, 10.5])


def test_what_is_no_longer_wanted_ends_without_another_request() -> None:
    wanted = True

    async def test(bus: Bus, sender: UpdateSender) -> None:
        nonlocal wanted
        async with asyncio.TaskGroup() as group:
            delivering = group.create_task(sender.deliver(UPDATE, check=lambda: wanted))
            await asyncio.sleep(5.0)
            wanted = False
            sender.interrupt()
            assert await delivering is None
            assert asyncio.get_running_loop().time() < math.nextafter(5.0, 6.0) + 0.1

    assert run(test).requested_s == pytest.approx([0.0, 0.5, 1.5, 3.5])


@pytest.mark.parametrize("is_late", [True, False], ids=["the send ends too late", "the send ends as the receipt comes"])
def test_an_update_whose_receipt_overtakes_the_end_of_its_sending_counts_with_its_bytes_once(is_late: bool) -> None:
    """The controller has all frames, and answers, before the call that sends them returns."""

    async def test(bus: Bus, sender: UpdateSender) -> None:
        returns = asyncio.Event()

        async def send_update(*_: Any, **__: Any) -> int:
            await returns.wait()
            return 4

        bus.send_update = send_update  # type: ignore[method-assign,assignment]
        async with asyncio.TaskGroup() as group:
            delivering = group.create_task(sender.deliver(UPDATE, check=lambda: True))
            await asyncio.sleep(0.1)
            assert sender.on_answer(Grant(0, 100, 1, 1), group)
            await asyncio.sleep(0.1)
            if not is_late:
                returns.set()
            assert sender.on_answer(receipt(), group)
            assert await delivering == receipt()
        assert sender.bytes_up == 4

    run(test)


def test_frames_on_their_way_are_not_sent_again_until_they_have_arrived_or_it_takes_too_long() -> None:
    """As on a link that is slow: the controller, which sees no frame for a while, grants the upload once more."""
    grant, missing = Grant(0, 100, 1, 1), RetransmitRequest(0, 100, 1, 1, [0])

    async def test(bus: Bus, sender: UpdateSender) -> None:
        async def answer(body: Grant | RetransmitRequest) -> list[object]:
            before = len(bus.sent)
            assert sender.on_answer(body, group)
            await asyncio.sleep(0.01)
            return bus.sent[before:]

        async with asyncio.TaskGroup() as group:
            delivery = group.create_task(sender.deliver(UPDATE, check=lambda: True))
            await asyncio.sleep(0.01)
            assert await answer(grant) == [None]
            bus.delivered = False
            assert await answer(grant) == await answer(missing) == []
            bus.delivered = True
            assert await answer(missing) == [[0]]
            bus.delivered = False
            await asyncio.sleep(ON_THE_WAY_S)
            assert await answer(missing) == [[0]]
            assert await answer(missing) == []
            sender.interrupt()  # as by another controller, which has none of it
            assert await answer(grant) == [None]
            sender.on_answer(receipt(), group)
            assert await delivery == receipt()

    run(test)
