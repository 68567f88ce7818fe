"""Models that a client reads from the memory of its controller, and what it does where it cannot."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from downlink_scene import DIM, RUN, SESSION, Scene, assert_holds, hear, look, new_copy, rounds, run_with
from structlog.testing import capture_logs
from torch import Tensor

from gradbus.actors.federated.client import global_model as shared_model_reader
from gradbus.actors.federated.client.global_model import READ_TRIES, ModelReplica, SharedModelReader
from gradbus.actors.federated.controller import publish as downlink_module
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.shm import segment
from gradbus.runtime.shm.segment import SharedMemoryFault, machine, read
from gradbus.runtime.wire.control import ModelAvailable
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


@pytest.fixture(autouse=True)
def all_sizes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "SHARED_BYTES", 1)
    monkeypatch.setattr(segment, "SHARED_BYTES", 1)


def said_of(scene: Scene, **changes: Any) -> ModelAvailable:
    said = scene.bus.said[-1]
    fields = {name: getattr(said, name) for name in said.__dataclass_fields__}
    return ModelAvailable(**fields | changes)


@asynccontextmanager
async def reader_of(scene: Scene, replica: ModelReplica | None = None) -> AsyncIterator[SharedModelReader]:
    with ComputeThread("reader-test") as thread:
        yield SharedModelReader(scene.bus.memory, replica or new_copy(), thread, client_id=0)


async def miss(scene: Scene, memory: SharedModelReader, said: ModelAvailable) -> None:
    key = memory.expect(SESSION, said)
    assert key is not None
    read = dict(scene.bus.memory.read_bytes)
    await memory.take(key, said)
    assert scene.bus.memory.read_bytes == read


def test_a_model_that_is_gone_is_asked_for_and_the_next_one_read_in_memory() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        gone = scene.bus.said[-1]
        await rounds(scene, 1, 2)
        replica = new_copy()
        async with reader_of(scene, replica) as memory:
            with capture_logs() as lines:
                await miss(scene, memory, gone)
                await miss(scene, memory, said_of(scene, memory=gone.memory[:-32] + "0" * 32))
                said = scene.bus.said[-1]
                key = memory.expect(SESSION, said)
                assert key is not None
                await memory.take(key, said)
            assert_holds(replica, 2, scene.downlink.held)
            assert (memory.here, lines) == (machine(), [])

    run_with(test)


def test_a_model_that_is_never_where_it_is_said_to_be_ends_the_reading_with_one_line_in_the_log() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        said = scene.bus.said[-1]
        scene.downlink.close()
        async with reader_of(scene) as memory:
            with capture_logs() as lines:
                for _ in range(READ_TRIES):
                    assert memory.here
                    await miss(scene, memory, said)
            assert not memory.here
            assert [line["event"] for line in lines] == ["no shared memory"]
            memory.start()  # another controller
            assert memory.here

    run_with(test)


def test_memory_that_the_system_keeps_from_this_process_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(place: str, size: int) -> memoryview:
        raise SharedMemoryFault("not allowed, says the test") from PermissionError()

    monkeypatch.setattr(shared_model_reader, "read", refused)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        async with reader_of(scene) as memory:
            with capture_logs() as lines:
                await miss(scene, memory, scene.bus.said[-1])
            assert not memory.here
            assert [line["reason"] for line in lines] == ["not allowed, says the test"]

    run_with(test)


def test_what_cannot_be_read_when_the_run_has_ended_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(place: str, size: int) -> memoryview:
        raise SharedMemoryFault("not allowed, says the test") from PermissionError()

    monkeypatch.setattr(shared_model_reader, "read", refused)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        async with reader_of(scene) as memory:
            with capture_logs() as lines:
                memory.end()
                await miss(scene, memory, scene.bus.said[-1])
            assert (memory.here, lines) == (machine(), [])

    run_with(test)


@pytest.mark.parametrize("changes", [{"run_id": RUN + 1}, {"round_id": -1}, {"delta": True}, {"total_bytes": 1 << 40}])
def test_a_model_that_is_no_use_is_not_looked_for(changes: dict[str, Any]) -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        assert not look(new_copy(), said_of(scene, **changes))

    run_with(test)


def test_what_cannot_be_read_is_asked_for_and_its_frames_are_taken() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        scene.join(1, "")
        await scene.downlink.publish_full(0)
        copy, said = new_copy(), scene.bus.said[-1]
        key = scene.bus.sent[-1].key
        assert copy.expect(key, 0, said.total_bytes)
        assert not copy.expect(key, 0, said.total_bytes)  # it is being read
        hear(copy, scene.bus.sent[-1])
        assert copy.vector is None
        assert copy.give_up(key)
        assert not copy.give_up(key)
        assert copy.missing(0) == (0, [])  # that is: all of it
        hear(copy, scene.bus.sent[-1])
        assert_holds(copy, 0, scene.weights)

    run_with(test)


def test_what_was_given_up_for_a_newer_model_was_no_longer_wanted() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        copy = new_copy()
        older = FrameKey(Kind.MODEL, RUN, 0, CONTROLLER, SESSION, 1)
        assert copy.expect(older, 0, 4 * DIM)
        await rounds(scene, 1)
        assert look(copy, scene.bus.said[-1])
        assert not copy.give_up(older)
        assert_holds(copy, 1, scene.weights)

    run_with(test)


def test_a_model_that_is_read_is_not_copied() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        copy, said = new_copy(), scene.bus.said[-1]
        key = FrameKey(Kind.MODEL, RUN, 0, CONTROLLER, SESSION, said.transfer)
        payload = read(said.memory, said.total_bytes)
        assert copy.expect(key, 0, said.total_bytes)
        model = copy.decode(key, payload)
        assert model is not None
        assert shares(model.vector, payload)

    run_with(test)


def shares(vector: Tensor, payload: memoryview) -> bool:
    return vector.data_ptr() == torch.frombuffer(payload, dtype=torch.float32).data_ptr()
