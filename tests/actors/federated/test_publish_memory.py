"""Models in the controller's memory: once for all clients of this machine; frames only where somebody needs them."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
from downlink_scene import DIM, Scene, assert_holds, hear, look, new_copy, rounds, run_with

from gradbus.actors.federated.controller import publish as downlink_module
from gradbus.runtime.shm import segment
from gradbus.runtime.shm.segment import PayloadMemory, SharedMemoryFault, machine, read
from gradbus.runtime.wire.control import ModelAvailable

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


@pytest.fixture(autouse=True)
def all_sizes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "SHARED_BYTES", 1)
    monkeypatch.setattr(segment, "SHARED_BYTES", 1)


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
        assert scene.downlink.notified == 2

    run_with(test, name)


@pytest.mark.parametrize("elsewhere", ["", "elsewhere/b/1"])
def test_where_one_is_elsewhere_or_shares_none_frames_go_out_as_well(elsewhere: str) -> None:
    async def test(scene: Scene) -> None:
        near, far = new_copy(), new_copy()
        scene.join(0, machine())
        scene.join(1, elsewhere)
        await scene.downlink.publish_full(0)
        await rounds(scene, 1)
        assert (len(scene.bus.sent), len(scene.bus.said), scene.downlink.notified) == (2, 2, 1)
        assert look(near, scene.bus.said[-1])
        hear(near, scene.bus.sent[-1])  # they are for the other one
        hear(far, scene.bus.sent[-1])
        for copy in (near, far):
            assert_holds(copy, 1, scene.weights)

    run_with(test)


def test_with_nobody_there_frames_go_out_for_those_who_come() -> None:
    async def test(scene: Scene) -> None:
        await scene.downlink.publish_full(0)
        assert (len(scene.bus.sent), scene.bus.said, scene.downlink.notified) == (1, [], 0)

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
        await scene.downlink.announce_memory_for(1)
        late = new_copy()
        assert look(late, scene.bus.said[-1])
        assert_holds(late, 0, scene.weights)
        scene.join(2, "")
        await scene.downlink.announce_memory_for(2)
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
        assert (len(scene.bus.sent), scene.bus.said, scene.downlink.notified) == (1, [], 0)
        scene.need(0, client_id=0)
        await scene.bus.until(lambda: len(scene.bus.sent) == 2)

    run_with(test)


def is_there(said: ModelAvailable) -> bool:
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
            scene.members.note_model(0, 1, round_id - 1)  # an update of it came
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
