"""The model on its way down: what clients hold is what the controller thinks they hold, to the bit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from downlink_scene import (
    DIM,
    LOSSY,
    RUN,
    FakeBus,
    Scene,
    assert_holds,
    codec_of,
    hear,
    new_copy,
    new_members,
    publisher_of,
    run_with,
)

from gradbus import codecs
from gradbus.actors.federated.controller import publish as downlink_module
from gradbus.actors.federated.controller import resending
from gradbus.actors.federated.controller.publish import RETAIN_BYTES
from gradbus.actors.federated.controller.resending import ResendQueue
from gradbus.actors.federated.protocol import ON_THE_WAY_S
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import WriteTimeout
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CONTROLLER, Flags
from gradbus.runtime.wire.messages import ModelBlob

# Round after round


def test_without_loss_the_message_is_the_bytes_of_the_weights() -> None:
    async def test(scene: Scene) -> None:
        assert await scene.downlink.publish_full(0) == 4 * DIM
        (message,) = scene.bus.sent
        assert b"".join(bytes(blob.frame.data) for blob in message.blobs) == scene.weights.numpy().tobytes()
        assert message.flags == Flags.NONE
        assert (message.key.job, message.key.round_id, message.key.sender) == (RUN, 0, CONTROLLER)
        assert scene.downlink.held is scene.weights
        assert scene.downlink.held_apart is None

    run_with(test)


@pytest.mark.parametrize("name", codecs.ALL)
def test_clients_that_apply_every_message_hold_exactly_what_the_controller_thinks(name: str) -> None:
    async def test(scene: Scene) -> None:
        copy = new_copy()
        await scene.downlink.publish_full(0)
        hear(copy, scene.bus.sent[-1])
        assert_holds(copy, 0, scene.downlink.held)
        for round_id in range(1, 6):
            scene.train(round_id)
            size = await scene.downlink.prepare(round_id)
            assert await scene.downlink.publish() == size == scene.bus.sent[-1].size
            hear(copy, scene.bus.sent[-1])
            assert_holds(copy, round_id, scene.downlink.held)
        assert len(scene.bus.sent) == 6

    run_with(test, name)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_message_is_a_difference_and_smaller_than_the_model(name: str) -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.train(1)
        assert await scene.downlink.prepare(1) < 2 * DIM
        await scene.downlink.publish()
        assert [message.flags for message in scene.bus.sent] == [Flags.NONE, Flags.DELTA]
        assert scene.downlink.held_apart is scene.downlink.held
        assert not torch.equal(scene.downlink.held, scene.weights)

    run_with(test, name)


@pytest.mark.parametrize("name", LOSSY)
def test_what_a_message_did_not_say_is_said_later(name: str) -> None:
    async def test(scene: Scene) -> None:
        scene.train(1)
        owed = []
        for round_id in range(1, 60):
            await scene.downlink.prepare(round_id)
            owed.append((scene.weights - scene.downlink.held).abs().max().item())
        assert owed[-1] < owed[0] / 100

    run_with(test, name)


@pytest.mark.parametrize("name", LOSSY)
def test_the_weights_themselves_are_not_changed_by_sending_them(name: str) -> None:
    async def test(scene: Scene) -> None:
        before = scene.weights.clone()
        await scene.downlink.publish_full(0)
        await scene.downlink.prepare(1)
        await scene.downlink.publish()
        assert torch.equal(scene.weights, before)

    run_with(test, name)


@pytest.mark.parametrize("name", LOSSY)
def test_a_client_that_comes_late_gets_the_model_that_the_others_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        early, late = new_copy(), new_copy()
        await scene.downlink.publish_full(0)
        for round_id in (1, 2, 3):
            scene.train(round_id)
            await scene.downlink.prepare(round_id)
            await scene.downlink.publish()
        hear(early, *scene.bus.sent)
        hear(late, scene.bus.sent[-1])
        assert late.vector is None  # a difference alone is no use to it
        scene.need(3)
        await scene.bus.until(lambda: len(scene.bus.sent) == 5)
        hear(late, scene.bus.sent[-1])
        assert_holds(late, 3, scene.downlink.held)
        scene.train(4)
        await scene.downlink.quiesce()
        await scene.downlink.prepare(4)
        await scene.downlink.publish()
        for copy in (early, late):
            hear(copy, scene.bus.sent[-1])
            assert_holds(copy, 4, scene.downlink.held)

    run_with(test, name)


def test_each_message_is_a_transfer_of_its_own() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        for round_id in (1, 2):
            await scene.downlink.prepare(round_id)
            await scene.downlink.publish()
        assert len({message.key for message in scene.bus.sent}) == 3

    run_with(test)


@pytest.mark.parametrize("dim", [10, RETAIN_BYTES // 4, RETAIN_BYTES // 4 + 1])
def test_a_model_that_is_not_too_large_is_kept_whole_for_late_readers(dim: int) -> None:
    async def main() -> None:
        bus = FakeBus()
        with ComputeThread("downlink-test") as compute:
            publisher_of(bus, compute, codec_of("fp32"), new_members(), torch.empty(dim))
        whole = frames.chunk_count(4 * dim)
        assert bus.writers == [(ModelBlob, whole if 4 * dim <= RETAIN_BYTES else 1)]

    asyncio.run(main())


# Resending


def test_frames_that_a_client_misses_are_sent_again() -> None:
    async def test(scene: Scene) -> None:
        copy = new_copy()
        await scene.downlink.publish_full(0)
        message = scene.bus.sent[-1]
        for seq, blob in enumerate(message.blobs):
            if seq not in (2, 5):
                copy.feed(blob)
        scene.need(0, *copy.missing(0))
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)
        again = scene.bus.sent[-1]
        assert again.only == [2, 5]
        assert again.key == message.key
        hear(copy, again)
        assert_holds(copy, 0, scene.weights)

    run_with(test)


@pytest.mark.parametrize("name", LOSSY)
def test_frames_of_a_difference_are_sent_again_as_they_were(name: str) -> None:
    async def test(scene: Scene) -> None:
        copy = new_copy()
        await scene.downlink.publish_full(0)
        hear(copy, scene.bus.sent[-1])
        scene.train(1)
        await scene.downlink.prepare(1)
        await scene.downlink.publish()
        difference = scene.bus.sent[-1]
        scene.need(1, difference.key.transfer, [0])
        await scene.bus.until(lambda: len(scene.bus.sent) == 3)
        again = scene.bus.sent[-1]
        assert (again.key, again.flags, again.only) == (difference.key, Flags.DELTA, [0])
        assert bytes(again.blobs[0].frame.data) == bytes(difference.blobs[0].frame.data)

    run_with(test, name)


def test_frames_on_their_way_to_a_client_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    for module in (downlink_module, resending):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def test(scene: Scene) -> None:
        nonlocal now_s
        scene.join(0, "elsewhere")
        await scene.downlink.publish_full(0)
        transfer = scene.bus.sent[-1].key.transfer
        scene.bus.delivered = False
        now_s += ON_THE_WAY_S / 2
        for wanted in [(0, []), (transfer, [1, 2])]:
            scene.need(0, *wanted)
        assert not scene.downlink.queue
        scene.bus.delivered = True
        scene.need(0, transfer, [1, 2])
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)
        assert scene.bus.sent[-1].only == [1, 2]
        scene.bus.delivered = False
        scene.need(0, transfer, [2])
        assert not scene.downlink.queue  # what was sent again is on its way, too
        now_s += ON_THE_WAY_S
        scene.need(0, transfer, [2])  # the transport takes too long
        await scene.bus.until(lambda: len(scene.bus.sent) == 3)

    run_with(test)


def test_frames_are_not_requested_anew_while_the_model_is_handed_to_the_transport() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, "elsewhere")
        scene.bus.open.clear()
        sending = asyncio.create_task(scene.downlink.publish_full(0))
        await scene.bus.until(lambda: scene.bus.started == 1)
        scene.need(0, 1, [1])
        assert not scene.downlink.queue
        scene.bus.open.set()
        await sending
        scene.need(0, 1, [1])
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)

    run_with(test)


def test_a_client_that_came_after_the_model_was_sent_does_not_wait_for_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        scene.join(0, "elsewhere")
        await scene.downlink.publish_full(0)
        scene.bus.delivered = False
        scene.join(1, "elsewhere")
        scene.need(0, client_id=1)
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)

    run_with(test)


def test_frames_of_the_full_model_of_a_late_client_are_sent_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        await scene.downlink.prepare(1)
        await scene.downlink.publish()
        scene.need(1)
        await scene.bus.until(lambda: len(scene.bus.sent) == 3)
        whole = scene.bus.sent[-1]
        scene.need(1, whole.key.transfer, [3])
        await scene.bus.until(lambda: len(scene.bus.sent) == 4)
        assert scene.bus.sent[-1].key == whole.key
        assert scene.bus.sent[-1].only == [3]

    run_with(test, "sq8")


def test_requests_for_the_whole_model_that_come_together_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(downlink_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def test(scene: Scene) -> None:
        nonlocal now_s
        await scene.downlink.publish_full(0)
        scene.train(1)
        await scene.downlink.prepare(1)
        await scene.downlink.publish()
        now_s += 2 * downlink_module.RESEND_PAUSE_S
        for _ in range(10):
            scene.need(1)
        await scene.bus.until(lambda: len(scene.bus.sent) == 3)
        await scene.downlink.quiesce()
        assert scene.bus.started == 3
        copy = new_copy()
        hear(copy, scene.bus.sent[-1])
        assert_holds(copy, 1, scene.downlink.held)

    run_with(test, "sq8")


def test_after_the_pause_the_whole_model_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        for count in (2, 3):
            scene.need(0)
            await scene.bus.until(lambda count=count: len(scene.bus.sent) == count)  # type: ignore[misc]
        assert len({message.key for message in scene.bus.sent}) == 1  # the same transfer: its frames add up

    run_with(test)


def test_a_model_that_was_just_sent_to_all_is_not_sent_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", 1000.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.need(0)
        await asyncio.sleep(0)
        assert scene.bus.started == 1

    run_with(test)


@pytest.mark.parametrize(
    "request_",
    [(1, 0, ()), (-1, 0, ()), (0, 99, (0,)), (0, 1, (0,), RUN + 1)],
    ids=["newer", "older", "transfer", "run"],
)
def test_a_request_that_nobody_can_answer_is_nothing(
    request_: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.need(*request_)
        await asyncio.sleep(0)
        assert scene.bus.started == 1

    run_with(test)


def test_after_the_last_round_who_asks_for_an_earlier_model_gets_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(3)
        scene.need(1)  # a command for the present one may be on its way
        await asyncio.sleep(0)
        assert scene.bus.started == 1
        scene.downlink.note_last()
        scene.need(4)
        scene.need(-1)
        await asyncio.sleep(0)
        assert scene.bus.started == 1
        scene.need(1)
        await asyncio.sleep(0)
        assert scene.bus.started == 2

    run_with(test)


def test_a_request_before_the_first_model_is_nothing() -> None:
    async def test(scene: Scene) -> None:
        scene.need(-1)
        await asyncio.sleep(0)
        assert scene.bus.started == 0

    run_with(test)


def test_numbers_of_frames_that_do_not_exist_are_no_error() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.need(0, 1, [999, 1])
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)
        assert [blob.frame.seq for blob in scene.bus.sent[-1].blobs] == [1]

    run_with(test)


def test_a_resend_that_fails_ends_nothing() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.bus.error = WriteTimeout("train/model_blob", 1.0)
        scene.need(0, 1, [0])
        await scene.bus.until(lambda: scene.bus.started == 2)
        await scene.downlink.quiesce()
        scene.bus.error = None
        await scene.downlink.prepare(1)
        assert await scene.downlink.publish() == 4 * DIM

    run_with(test)


# The weights are about to change


def test_quiesce_ends_what_is_being_sent_again() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.bus.open.clear()
        for seq in range(3):
            scene.need(0, 1, [seq])
        await scene.bus.until(lambda: scene.bus.started == 2)  # one resend at a time; the others wait in it
        await scene.downlink.quiesce()
        scene.bus.open.set()
        await asyncio.sleep(0)
        assert len(scene.bus.sent) == 1

    run_with(test)


def test_quiesce_ends_a_resend_that_has_not_even_started() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.need(0, 1, [0])
        await scene.downlink.quiesce()
        assert scene.bus.started == 1

    run_with(test)


@pytest.mark.parametrize("name", ["fp32", "sq8"])
def test_between_quiesce_and_the_next_message_nothing_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights, and with a lossy codec what the clients hold, are being changed meanwhile."""
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        await scene.downlink.quiesce()
        scene.need(0)
        scene.need(0, 1, [0, 1])
        await asyncio.sleep(0)
        assert scene.bus.started == 1
        scene.train(1)
        await scene.downlink.prepare(1)
        await scene.downlink.publish()
        scene.need(1)
        await scene.bus.until(lambda: len(scene.bus.sent) == 3)
        copy = new_copy()
        hear(copy, scene.bus.sent[-1])
        assert_holds(copy, 1, scene.downlink.held)

    run_with(test, name)


# The queue of requests by itself


def test_a_client_beyond_its_quota_is_marked_once_and_other_clients_are_served() -> None:
    queue = ResendQueue()
    assert queue.request(0, 1, range(6), 8)
    assert not queue.request(0, 1, range(6, 12), 8)
    assert queue.mark_exhausted(0, 8) == 6
    assert queue.mark_exhausted(0, 8) is None
    assert not queue.request(0, 1, [7], 8)
    assert queue.request(1, 1, [7], 8)
    assert queue.begin() == (1, {0, 1, 2, 3, 4, 5, 7})
    assert not queue


def test_frames_that_are_being_sent_cost_no_quota_when_they_are_requested_again() -> None:
    queue = ResendQueue()
    queue.want(1, range(4))
    queue.begin()
    assert queue.request(0, 1, range(5), 8)
    assert (queue.begin(), queue.asked[0]) == ((1, {4}), 1)
    queue.done()
    assert queue.request(0, 1, range(5), 8)
    assert queue.asked[0] == 6
