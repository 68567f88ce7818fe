"""Clients that ask for the model again: all get it who miss something, and nobody without end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from downlink_scene import DIM, Scene, new_copy, rounds, run_with

from gradbus.actors.federated.controller import publish as downlink_module


def test_a_request_for_frames_that_do_not_exist_alone_is_nothing() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.need(0, 1, [12, 999])  # of 12 frames
        await asyncio.sleep(0)
        assert scene.bus.started == 1

    run_with(test)


async def resent() -> int:
    """Wait for what is being sent again. Returns how many tasks do that."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "resend-model"]
    await asyncio.gather(*tasks)
    return len(tasks)


@pytest.mark.parametrize("seqs", [range(12), ()], ids=["frames", "the whole model"])
def test_no_client_by_itself_keeps_the_way_to_the_others_full(
    seqs: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)
    monkeypatch.setattr(downlink_module, "RESEND_FRAMES", 1)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        for time in range(2, 30):
            scene.need(0, 1 if seqs else 0, seqs)
            assert await resent() == (time <= 9)
            assert len(scene.bus.sent) == min(time, 9)
        assert sum(message.size for message in scene.bus.sent) == 9 * 4 * DIM
        scene.need(0, 1, [3], client_id=1)  # others get what they miss
        await scene.bus.until(lambda: len(scene.bus.sent) == 10)
        await rounds(scene, 1)
        scene.need(1, 0, (), client_id=0)  # and so does it, of the next model
        await scene.bus.until(lambda: len(scene.bus.sent) == 12)

    run_with(test)


@pytest.mark.parametrize("seqs", [range(12), ()], ids=["frames", "the whole model"])
def test_who_asks_for_what_is_on_its_way_asks_for_nothing(seqs: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        scene.bus.open.clear()  # a slow way
        for _ in range(20):
            scene.need(0, 1 if seqs else 0, seqs)
        await scene.bus.until(lambda: scene.bus.started == 2)
        transfer = scene.bus.sent[-1].key.transfer
        for _ in range(20):
            scene.need(0, transfer, range(12))
        scene.bus.open.set()
        assert await resent()
        assert (len(scene.bus.sent), scene.downlink.queue.asked[0]) == (2, 12)

    run_with(test)


@pytest.mark.parametrize("lost", [0.1, 0.3, 0.5])
def test_who_loses_half_of_all_frames_gets_the_model_long_before_that(
    lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_FRAMES", 1)
    chance = random.Random(1)

    async def test(scene: Scene) -> None:
        copy = new_copy()
        await scene.downlink.publish_full(0)
        while True:
            for blob in scene.bus.sent[-1].blobs:
                if (chance.random() > lost or blob.frame.seq == 0) and (complete := copy.feed(blob)) is not None:
                    copy.adopt(complete[0], copy.decode(*complete))
            if copy.round_id == 0:
                break
            before = len(scene.bus.sent)
            scene.need(0, *copy.missing(0))
            await scene.bus.until(lambda before=before: len(scene.bus.sent) > before)  # type: ignore[misc]
        assert scene.downlink.queue.asked[0] <= 24

    run_with(test)
