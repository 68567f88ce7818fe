"""Models in the controller's memory: once for all clients of this machine; frames only where somebody needs them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from downlink_scene import DIM, RUN, SESSION, Scene, assert_holds, hear, new_copy, run_with
from structlog.testing import capture_logs
from torch import Tensor

from gradbus.actors import downlink as downlink_module
from gradbus.actors import model_memory
from gradbus.actors.model_copy import ModelCopy
from gradbus.actors.model_memory import READ_TRIES, ModelMemory
from gradbus.runtime import sealed_memory
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.control import ModelHere
from gradbus.runtime.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.sealed_memory import PayloadMemory, read
from gradbus.runtime.shared_memory import SharedMemoryFault, machine

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


@pytest.fixture(autouse=True)
def all_sizes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "SHARED_BYTES", 1)
    monkeypatch.setattr(sealed_memory, "SHARED_BYTES", 1)


def look(copy: ModelCopy, said: ModelHere) -> bool:
    """A client that is told of a model, and takes it."""
    flags = int(Flags.DELTA if said.delta else Flags.NONE)
    key = FrameKey(Kind.MODEL, said.run_id, said.round_id, CONTROLLER, SESSION, said.transfer)
    if not copy.expect(key, flags, said.total_bytes):
        return False
    return copy.adopt(key, copy.decode(key, read(said.memory, said.total_bytes)))


async def rounds(scene: Scene, *numbers: int) -> None:
    for round_id in numbers:
        scene.train(round_id)
        await scene.downlink.quiesce()
        await scene.downlink.prepare(round_id)
        await scene.downlink.publish()


@pytest.mark.parametrize("name", ["fp32", "q8", "s4"])
def test_where_all_clients_read_memory_no_frame_goes_out_and_all_hold_the_same_model(name: str) -> None:
    async def test(scene: Scene) -> None:
        copies = [new_copy(), new_copy()]
        for client_id in (0, 1):
            scene.join(client_id, machine())
        await scene.downlink.publish_full(0)
        for round_id in (1, 2, 3):
            for copy in copies:
                assert look(copy, scene.bus.said[-1])
                assert_holds(copy, round_id - 1, scene.downlink.held)
            await rounds(scene, round_id)
        assert scene.bus.sent == []
        assert [said.delta for said in scene.bus.said] == [False, *[name != "fp32"] * 3]
        assert scene.downlink.told == 2

    run_with(test, name)


@pytest.mark.parametrize("elsewhere", ["", "elsewhere/b/1"])
def test_where_one_is_elsewhere_or_shares_none_frames_go_out_as_well(elsewhere: str) -> None:
    async def test(scene: Scene) -> None:
        near, far = new_copy(), new_copy()
        scene.join(0, machine())
        scene.join(1, elsewhere)
        await scene.downlink.publish_full(0)
        await rounds(scene, 1)
        assert (len(scene.bus.sent), len(scene.bus.said), scene.downlink.told) == (2, 2, 1)
        assert look(near, scene.bus.said[-1])
        hear(near, scene.bus.sent[-1])  # they are for the other one
        hear(far, scene.bus.sent[-1])
        for copy in (near, far):
            assert_holds(copy, 1, scene.weights)

    run_with(test)


def test_with_nobody_there_frames_go_out_for_those_who_come() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        assert (len(scene.bus.sent), scene.bus.said, scene.downlink.told) == (1, [], 0)

    run_with(test)


def test_what_is_small_goes_in_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "SHARED_BYTES", 4 * DIM + 1)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        assert (len(scene.bus.sent), scene.bus.said) == (1, [])

    run_with(test)


def test_who_is_welcomed_later_is_told_where_the_model_lies() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        scene.join(1, machine())
        await scene.downlink.welcome(1)
        late = new_copy()
        assert look(late, scene.bus.said[-1])
        assert_holds(late, 0, scene.weights)
        scene.join(2, "")
        await scene.downlink.welcome(2)
        assert (len(scene.bus.said), scene.bus.sent) == (2, [])

    run_with(test)


def test_who_is_elsewhere_asks_and_gets_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        scene.join(1, "")
        scene.need(0, client_id=1)
        await scene.bus.until(lambda: scene.bus.sent)
        far = new_copy()
        hear(far, scene.bus.sent[-1])
        assert_holds(far, 0, scene.weights)

    run_with(test)


def test_who_asks_for_the_whole_model_in_memory_gets_it_there_although_a_difference_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        await rounds(scene, 1)
        late = new_copy()
        assert not look(late, scene.bus.said[-1])
        scene.need(1, client_id=0)
        await scene.bus.until(lambda: len(scene.bus.said) == 3)
        assert look(late, scene.bus.said[-1])
        assert_holds(late, 1, scene.downlink.held)
        assert scene.bus.sent == []

    run_with(test, "sq8")


def test_where_there_is_no_memory_left_frames_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "RESEND_PAUSE_S", -1.0)
    monkeypatch.setattr(PayloadMemory, "put", lambda self, payload: None)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        assert (len(scene.bus.sent), scene.bus.said, scene.downlink.told) == (1, [], 0)
        scene.need(0, client_id=0)
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)

    run_with(test)


def is_there(said: ModelHere) -> bool:
    try:
        return len(read(said.memory, said.total_bytes)) == said.total_bytes
    except SharedMemoryFault:
        return False


def test_a_model_that_all_hold_is_there_until_the_next_one_is_told_and_no_longer() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        scene.join(1, "elsewhere/b/1")
        await scene.downlink.publish_full(0)
        scene.join(0, machine(), holds=0)
        first = scene.bus.said[-1]
        await scene.downlink.quiesce()
        await scene.downlink.prepare(1)
        assert is_there(first)
        await scene.downlink.publish()
        second = scene.bus.said[-1]
        assert (is_there(first), is_there(second)) == (False, True)
        scene.downlink.close()
        assert not is_there(second)

    run_with(test)


@pytest.mark.parametrize("name", ["fp32", "sq8"])
def test_who_lags_while_others_make_up_the_quorum_has_a_round_more_to_read_a_model(name: str) -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        scene.join(1, machine())
        await scene.downlink.publish_full(0)
        for round_id in (1, 2, 3):
            scene.members.holds(0, 1, round_id - 1)  # an update of it came
            await rounds(scene, round_id)
            assert [is_there(said) for said in scene.bus.said] == [False] * (round_id - 1) + [True] * 2
        scene.downlink.close()
        assert not any(map(is_there, scene.bus.said))

    run_with(test, name)


def test_who_asks_for_a_model_while_it_is_being_put_into_memory_is_told_of_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, begun, go = PayloadMemory.put, threading.Event(), threading.Event()

    def slowly(self: PayloadMemory, payload: Any) -> Any:
        begun.set()
        assert go.wait(10.0)
        return put(self, payload)

    monkeypatch.setattr(PayloadMemory, "put", slowly)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        publishing = asyncio.create_task(scene.downlink.publish_full(0))
        await asyncio.to_thread(begun.wait, 10.0)
        scene.need(0, client_id=0)
        await asyncio.sleep(0)  # the answer begins
        go.set()
        await publishing
        await scene.bus.until(lambda: len(scene.bus.said) == 2)
        assert len({said.memory for said in scene.bus.said}) == 1
        assert is_there(scene.bus.said[0])
        assert scene.bus.sent == []

    run_with(test)


def test_what_a_client_has_read_stays_when_the_weights_change() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        copy, before = new_copy(), scene.weights.clone()
        assert look(copy, scene.bus.said[-1])
        await rounds(scene, 1)
        scene.downlink.close()
        assert_holds(copy, 0, before)

    run_with(test)


# The client's side


def said_of(scene: Scene, **changes: Any) -> ModelHere:
    said = scene.bus.said[-1]
    fields = {name: getattr(said, name) for name in said.__dataclass_fields__}
    return ModelHere(**fields | changes)


@asynccontextmanager
async def reader_of(scene: Scene) -> AsyncIterator[ModelMemory]:
    with ComputeThread("reader-test") as thread:
        yield ModelMemory(scene.bus.memory, new_copy(), thread, client_id=0)


async def miss(memory: ModelMemory, said: ModelHere) -> None:
    key = memory.expect(SESSION, said)
    assert key is not None
    assert await memory.read(key, said) is None


def test_a_model_that_is_gone_is_asked_for_and_the_next_one_read_in_memory() -> None:
    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        gone = scene.bus.said[-1]
        await rounds(scene, 1, 2)
        async with reader_of(scene) as memory:
            with capture_logs() as lines:
                await miss(memory, gone)
                await miss(memory, said_of(scene, memory=gone.memory[:-32] + "0" * 32))
                said = scene.bus.said[-1]
                key = memory.expect(SESSION, said)
                assert key is not None
                payload = await memory.read(key, said)
            assert payload is not None
            assert len(payload) == said.total_bytes
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
                    await miss(memory, said)
            assert not memory.here
            assert [line["event"] for line in lines] == ["no shared memory"]
            memory.start()  # another controller
            assert memory.here

    run_with(test)


def test_memory_that_the_system_keeps_from_this_process_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(place: str, size: int) -> memoryview:
        raise SharedMemoryFault("not allowed, says the test") from PermissionError()

    monkeypatch.setattr(model_memory, "read", refused)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        async with reader_of(scene) as memory:
            with capture_logs() as lines:
                await miss(memory, scene.bus.said[-1])
            assert not memory.here
            assert [line["reason"] for line in lines] == ["not allowed, says the test"]

    run_with(test)


def test_what_cannot_be_read_when_the_run_has_ended_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(place: str, size: int) -> memoryview:
        raise SharedMemoryFault("not allowed, says the test") from PermissionError()

    monkeypatch.setattr(model_memory, "read", refused)

    async def test(scene: Scene) -> None:
        scene.join(0, machine())
        await scene.downlink.publish_full(0)
        async with reader_of(scene) as memory:
            with capture_logs() as lines:
                memory.end()
                await miss(memory, scene.bus.said[-1])
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
        vector = copy.decode(key, payload)
        assert vector is not None
        assert shares(vector, payload)

    run_with(test)


def shares(vector: Tensor, payload: memoryview) -> bool:
    return vector.data_ptr() == torch.frombuffer(payload, dtype=torch.float32).data_ptr()
