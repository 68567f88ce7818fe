"""Instructions and replies between a hub and its nodes, over real DDS; without Flower."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flower_node
import pytest
import warm
from dds_domains import new_domain
from identities import Identities
from patience import eventually

import gradbus
from gradbus.actors.federated.controller import liveness, resending
from gradbus.actors.flower import hub as hub_module
from gradbus.actors.flower import request_batch
from gradbus.actors.flower.hub import Answer, MessageHub
from gradbus.actors.flower.node import WITHDRAWN_S, MessageNode, NodeSummary
from gradbus.actors.flower.protocol import (
    HEARTBEAT_S,
    MAX_OPEN,
    NodePlace,
    Payload,
    layout_of,
    make_payload,
    partitions_of,
)
from gradbus.actors.flower.request_batch import RequestBatch
from gradbus.runtime.errors import ConfigError, JoinRefused, TrainingFailed
from gradbus.runtime.fast_paths import has_memfd
from gradbus.runtime.security import Security
from gradbus.runtime.shm.segment import read
from gradbus.runtime.transport.channels import CHANNELS, ToController
from gradbus.runtime.wire.control import PROTOCOL, Hello, ModelRequest, Receipt
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, ModelBlob, PeerGone

RUN = 77
_jobs = itertools.count()


class Reversing:
    """Answers with the payload's bytes reversed, and its own name before them. ``gate``: what it waits for."""

    def __init__(self, name: str = "") -> None:
        self.name = name.encode()
        self.runs: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[int] = []
        self.released = 0
        self.gate: Callable[[], object] = lambda: None

    def begin(self, run_id: int, options: Mapping[str, Any]) -> None:
        self.runs.append((run_id, dict(options)))

    def answer(self, payload: memoryview, number: int) -> list[bytes | memoryview]:
        self.asked.append(number)
        self.gate()
        return [self.name, payload[::-1].tobytes()]

    def release(self) -> None:
        self.released += 1

    def refuse(self, reason: str) -> list[bytes | memoryview]:
        return [f"refused: {reason}".encode()]


class Hub(MessageHub):
    """A hub whose bus tests use as well."""

    def __init__(self, bus: gradbus.Bus, **settings: Any) -> None:
        super().__init__(bus, **settings)
        self.bus = bus


class DrivenHub(Hub):
    """A hub that does not run: a test gives it the messages of node 0, and its beats. One that runs takes them from the
    bus and the clock: by public calls none comes at a moment that a test chooses."""

    def hello(self, number: int, now_s: float) -> None:
        hello = Hello(PROTOCOL, 0, 0, True, self._identity.incarnation, "training", 1, -1, "host-a:1", -1)
        self._registry.answer_hello(Identity(0, 9), hello, number, now_s=now_s, next_round=0)

    def gone(self, *, certain: bool) -> None:
        self._on_gone(PeerGone(0, 9, certain=certain))

    async def beat(self) -> None:
        await self._beat()


class Scene:
    """A hub, and nodes that come and go, each with a bus of its own."""

    def __init__(self, *, shared_memory: bool = True, known: Identities | None = None) -> None:
        """``known``: each process has a key of its own, and what the hub sends is signed."""
        self.place = {"job": f"hub-{os.getpid()}-{next(_jobs)}", "domain": new_domain(), "shared_memory": shared_memory}
        self._known = known
        self.tasks: dict[int, asyncio.Task[NodeSummary]] = {}

    def bus(self, name: str) -> AbstractAsyncContextManager[gradbus.Bus]:
        """A bus for the process with this name."""
        if self._known is None:
            return gradbus.connect(**self.place)
        return gradbus.connect(**self.place, security=Security(**self._known.security(name)))

    @contextlib.asynccontextmanager
    async def hub(self, **settings: Any) -> AsyncIterator[Hub]:
        """A hub that serves; at the end it tells its nodes that all is done."""
        async with self.bus("server") as bus:
            hub = Hub(bus, run_id=RUN, **settings)
            serving = asyncio.create_task(hub.run())
            try:
                await hub.started.wait()
                yield hub
                await hub.end(ok=True, reason="done")
                await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            finally:
                for task in (serving, *self.tasks.values()):
                    task.cancel()
                await asyncio.gather(serving, *self.tasks.values(), return_exceptions=True)

    def start(self, partition: int, answering: Any, *, of: int = 2, **settings: Any) -> asyncio.Task[NodeSummary]:
        """Start a node with this partition."""
        return self.start_at(NodePlace.of_partition(partition, of), answering, **settings)

    def start_at(self, place: NodePlace, answering: Any, **settings: Any) -> asyncio.Task[NodeSummary]:
        """Start a node."""

        async def run() -> NodeSummary:
            async with self.bus(f"robot-{place.number}") as bus:
                return await MessageNode(bus, answering, place=place, **settings).run()

        self.tasks[place.number] = asyncio.create_task(run())
        return self.tasks[place.number]


async def ready(hub: MessageHub, *nodes: int) -> None:
    await eventually(lambda: hub.nodes() == list(nodes))


async def next_hello(scene: Scene, is_wanted: Callable[[Hello], bool] = lambda hello: True) -> Hello:
    """The next heartbeat of a node that is like this."""
    async with asyncio.timeout(20), scene.bus("reader") as bus:
        with bus.subscribe(ToController) as inbox:
            async for message in inbox:
                if isinstance(message, Control) and isinstance(message.body, Hello) and is_wanted(message.body):
                    return message.body
    raise AssertionError("the bus was closed")


async def push(hub: Hub, nodes: list[int], data: bytes, ttl_s: float = 60.0) -> int:
    return await hub.push(nodes, make_payload(hub.bus.memory, [data[:5], data[5:]]), ttl_s)


async def answers(hub: MessageHub, number: int, *nodes: int) -> dict[int, Answer]:
    """The answers of these nodes."""
    found: dict[int, Answer] = {}
    async with asyncio.timeout(30):
        while len(found) < len(nodes):
            came = await hub.collect([(number, node) for node in nodes if node not in found], 1.0)
            found |= {node: answer for (_, node), answer in came.items()}
    return found


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("size_bytes", [100, 3_000_001])
def test_each_node_answers_and_the_bytes_arrive(size_bytes: int, shared_memory: bool) -> None:
    async def run() -> None:
        scene, data = Scene(shared_memory=shared_memory), os.urandom(size_bytes)
        async with scene.hub(options={"lr": 0.5}) as hub:
            answering = [Reversing("zero"), Reversing("one")]
            nodes = [scene.start(index, one) for index, one in enumerate(answering)]
            await ready(hub, 0, 1)
            for number in (1, 2):
                assert await push(hub, [0, 1], data) == number
                found = await answers(hub, number, 0, 1)
                assert bytes(found[0].payload or b"") == b"zero" + data[::-1]
                assert bytes(found[1].payload or b"") == b"one" + data[::-1]
            if has_memfd() and size_bytes > 100_000:
                assert bool(hub.bus.memory.read_bytes) is shared_memory
        assert answering[0].runs == [(RUN, {"lr": 0.5})]
        assert [node.result().answered for node in nodes] == [2, 2]

    asyncio.run(run())


@pytest.mark.parametrize("shared_memory", [True, False])
def test_with_a_key_for_each_node_instructions_are_signed_and_arrive(tmp_path: Path, shared_memory: bool) -> None:
    async def run() -> None:
        scene, data = Scene(shared_memory=shared_memory, known=Identities(tmp_path)), os.urandom(50_000)
        async with scene.hub() as hub:
            scene.start(0, Reversing())
            await ready(hub, 0)
            assert hub.bus.access_policy.signs_models
            assert bytes((await answers(hub, await push(hub, [0], data), 0))[0].payload or b"") == data[::-1]

    asyncio.run(run())


def test_the_messages_of_a_killed_node_fail_before_their_time() -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            process = warm.fork(flower_node.hang, scene.place)
            await ready(hub, 1)
            number = await push(hub, [1], b"instruction")
            await next_hello(scene, lambda hello: hello.phase == "training")
            process.kill()
            async with asyncio.timeout(10):
                found = await answers(hub, number, 1)
            assert found[1].kind == "gone"
            assert hub.nodes() == []
            process.join()

    asyncio.run(run())


def test_a_node_that_is_gone_fails_at_once_and_answers_again_when_it_is_back() -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            stuck, other = Reversing("old"), Reversing("other")
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            stuck.gate = lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            scene.start(0, stuck)
            scene.start(1, other)
            await ready(hub, 0, 1)
            number = await push(hub, [0, 1], b"instruction")
            await eventually(lambda: stuck.asked == [number])
            scene.tasks[0].cancel()
            release.set()
            found = await answers(hub, number, 0, 1)
            assert found[0].kind == "gone"
            assert "node 0 is gone" in found[0].failure
            assert bytes(found[1].payload or b"") == b"other" + b"instruction"[::-1]
            missing = await push(hub, [0], b"instruction")
            assert (await answers(hub, missing, 0))[0].kind == "gone"
            scene.start(0, Reversing("new"))
            await ready(hub, 0, 1)
            again = await push(hub, [0], b"instruction")
            assert bytes((await answers(hub, again, 0))[0].payload or b"") == b"new" + b"instruction"[::-1]

    asyncio.run(run())


@pytest.mark.parametrize("then", ["speaks", "says nothing", "has ended for certain"])
def test_a_hub_that_stood_still_waits_for_a_node_that_seems_gone_and_fails_one_that_is(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    for module in (hub_module, liveness):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> Answer | None:
        nonlocal now_s
        async with gradbus.connect(**Scene().place) as bus:
            hub = DrivenHub(bus, run_id=RUN)
            hub.hello(1, now_s)
            number = await hub.push([0], Payload(memoryview(b"x"), None), float("inf"))
            await hub.beat()
            now_s += 3 * HEARTBEAT_S
            hub.gone(certain=then == "has ended for certain")
            if found := await hub.collect([(number, 0)], 0.0):
                assert then == "has ended for certain"
                return found[number, 0]
            if then == "speaks":
                hub.hello(2, now_s)
            for _ in range(8):
                await hub.beat()
                now_s += HEARTBEAT_S
            assert then != "has ended for certain"
            return (await hub.collect([(number, 0)], 0.0)).get((number, 0))

    found = asyncio.run(run())
    assert (found and found.kind) == (None if then == "speaks" else "gone")


def test_frames_on_their_way_to_a_node_are_not_sent_again_although_it_requests_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow link delivers later than the node has patience."""
    publish, send_model, is_delivered = gradbus.Bus.publish, gradbus.Bus.send_model, gradbus.Bus.is_delivered
    requests, sent, has_delivered = 0, 0, False

    async def published(self: gradbus.Bus, sender: Identity, body: Any, **options: Any) -> None:
        nonlocal requests
        requests += isinstance(body, ModelRequest)
        await publish(self, sender, body, **options)

    async def sends(self: gradbus.Bus, key: Any, payload: Any, **options: Any) -> int:
        nonlocal sent
        sent += 1
        return await send_model(self, key, payload, **options) if has_delivered else 0

    def delivered(self: gradbus.Bus, kind: Any) -> bool:
        return has_delivered if kind is ModelBlob else is_delivered(self, kind)

    monkeypatch.setattr(resending, "ON_THE_WAY_S", 1_000.0)
    monkeypatch.setattr(gradbus.Bus, "publish", published)
    monkeypatch.setattr(gradbus.Bus, "send_model", sends)
    monkeypatch.setattr(gradbus.Bus, "is_delivered", delivered)

    async def run() -> None:
        nonlocal has_delivered
        scene = Scene(shared_memory=False)
        async with scene.hub() as hub:
            scene.start(0, Reversing())
            await ready(hub, 0)
            number = await push(hub, [0], b"instruction")
            await eventually(lambda: requests >= 4)
            assert sent == 1
            has_delivered = True
            assert bytes((await answers(hub, number, 0))[0].payload or b"") == b"noitcurtsni"

    asyncio.run(run())


def test_an_instruction_is_sent_once_to_nodes_that_request_it_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    publish, send_model = gradbus.Bus.publish, gradbus.Bus.send_model
    first_is_here = asyncio.Event()
    sent = 0

    async def published(self: gradbus.Bus, sender: Identity, body: Any, **options: Any) -> None:
        if isinstance(body, ModelRequest) and sender.sender == 1:
            await first_is_here.wait()
        await publish(self, sender, body, **options)

    async def sends(self: gradbus.Bus, *arguments: Any, **options: Any) -> int:
        nonlocal sent
        sent += 1
        return await send_model(self, *arguments, **options)

    def noted(self: RequestBatch, node: int, incarnation: int, now_s: float) -> None:
        note_request(self, node, incarnation, now_s)
        first_is_here.set()

    note_request = RequestBatch.note_request
    monkeypatch.setattr(request_batch, "SETTLE_S", 1_000.0)
    monkeypatch.setattr(request_batch, "MOST_S", 1_000.0)
    monkeypatch.setattr(RequestBatch, "note_request", noted)
    monkeypatch.setattr(gradbus.Bus, "publish", published)
    monkeypatch.setattr(gradbus.Bus, "send_model", sends)

    async def run() -> None:
        scene = Scene(shared_memory=False)
        async with scene.hub() as hub:
            for node in range(2):
                scene.start(node, Reversing())
            await ready(hub, 0, 1)
            number = await push(hub, [0, 1], b"instruction")
            found = await answers(hub, number, 0, 1)
            assert [bytes(one.payload or b"") for one in found.values()] == [b"noitcurtsni"] * 2
            assert sent == 1

    asyncio.run(run())


def test_a_message_without_a_reply_in_its_time_fails() -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            slow = Reversing()
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            slow.gate = lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            scene.start(0, slow)
            await ready(hub, 0)
            number = await push(hub, [0], b"instruction", ttl_s=0.2)
            assert (await answers(hub, number, 0))[0].kind == "expired"
            release.set()
            slow.gate = lambda: None
            again = await push(hub, [0], b"another")
            assert bytes((await answers(hub, again, 0))[0].payload or b"") == b"rehtona"

    asyncio.run(run())


@pytest.mark.skipif(not has_memfd(), reason="there is no memory to share")
@pytest.mark.parametrize("how", ["withdrawn", "expired"])
def test_a_node_that_comes_too_late_to_an_instruction_goes_on_at_once_and_reads_memory(how: str) -> None:
    async def run() -> None:
        scene, data = Scene(), os.urandom(100_000)
        async with scene.hub() as hub:
            busy = Reversing()
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            busy.gate = lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            scene.start(0, busy)
            await ready(hub, 0)
            first = await push(hub, [0], data)
            await eventually(lambda: busy.asked == [first])
            late = await push(hub, [0], data, ttl_s=60.0 if how == "withdrawn" else 0.1)
            if how == "withdrawn":
                await hub.withdraw([(late, 0)])
            else:
                assert (await answers(hub, late, 0))[0].kind == "expired"
            release.set()
            await answers(hub, first, 0)
            after = await push(hub, [0], data)
            async with asyncio.timeout(2):
                await answers(hub, after, 0)
            assert busy.asked == [first, after]
            assert (await next_hello(scene)).memory == hub.bus.memory.here != ""

    asyncio.run(run())


@pytest.mark.parametrize("instructions", [3, 330, MAX_OPEN])
def test_however_many_instructions_are_open_each_is_named_before_nodes_give_it_up(instructions: int) -> None:
    beats = [set[int]()]

    class Naming(DrivenHub):
        """Notes what each beat names: on the bus nothing tells to which beat an announcement belongs."""

        async def _name(self, instruction: Any) -> None:
            beats[-1].add(instruction.number)

    async def run() -> None:
        async with gradbus.connect(**Scene().place) as bus:
            hub = Naming(bus, run_id=RUN)
            hub.hello(1, time.monotonic())
            for _ in range(instructions):
                await hub.push([0], Payload(memoryview(b"x"), None), float("inf"))
            beats.clear()
            for _ in range(12):
                beats.append(set())
                await hub.beat()

    asyncio.run(run())
    window = int(WITHDRAWN_S / HEARTBEAT_S) - 1
    for first in range(len(beats) - window + 1):
        assert set().union(*beats[first : first + window]) == set(range(1, instructions + 1))


def test_of_a_reply_that_is_complete_as_it_is_withdrawn_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            scene.start(0, Reversing())
            await ready(hub, 0)
            publish, complete, withdrawn = gradbus.Bus.publish, asyncio.Event(), asyncio.Event()

            async def late_receipt(bus: gradbus.Bus, identity: Identity, body: Any) -> None:
                if isinstance(body, Receipt):
                    complete.set()
                    await withdrawn.wait()
                await publish(bus, identity, body)

            monkeypatch.setattr(gradbus.Bus, "publish", late_receipt)
            number = await push(hub, [0], b"instruction")
            await complete.wait()
            await hub.withdraw([(number, 0)])
            withdrawn.set()
            again = await push(hub, [0], b"another")
            await answers(hub, again, 0)
            assert await hub.collect([(number, 0), (again, 0)], 0.0) == {}

    asyncio.run(run())


@pytest.mark.skipif(not has_memfd(), reason="there is no memory to share")
def test_the_memory_of_a_node_is_read_also_after_a_reply_that_was_withdrawn_before_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        scene, data, answering = Scene(), os.urandom(100_000), Reversing()
        loop, reading, withdrawn = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def late_read(place: str, size: int) -> memoryview:
            loop.call_soon_threadsafe(reading.set)
            assert withdrawn.wait(30)
            return read(place, size)

        monkeypatch.setattr(hub_module, "read", late_read)
        async with scene.hub() as hub:
            scene.start(0, answering)
            await ready(hub, 0)
            number = await push(hub, [0], data)
            await reading.wait()
            await hub.withdraw([(number, 0)])
            await eventually(lambda: answering.released == 1)  # it has its receipt, and hides what it had made
            withdrawn.set()
            again = await push(hub, [0], data)
            assert bytes((await answers(hub, again, 0))[0].payload or b"") == data[::-1]
            assert hub.bus.memory.read_bytes[CHANNELS[ClientUpdate].name] == len(data)

    asyncio.run(run())


def test_one_node_more_than_there_may_be_is_refused_and_those_that_are_there_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "MAX_NODES", 1)

    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            scene.start(0, Reversing())
            await ready(hub, 0)
            with pytest.raises(JoinRefused, match="this run has 1 nodes already"):
                await scene.start(1, Reversing())
            assert await answers(hub, await push(hub, [0], b"instruction"), 0)

    asyncio.run(run())


def test_messages_beyond_the_limits_are_refused_on_both_sides_before_they_are_read() -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub(max_bytes=20_000) as hub:
            scene.start(0, Reversing(), max_bytes=30_000)
            await ready(hub, 0)
            number = await push(hub, [0], bytes(40_000))
            refusal = bytes((await answers(hub, number, 0))[0].payload or b"")
            assert b"a message of 40000 bytes, at most 30000 are accepted" in refusal
            number = await push(hub, [0], bytes(25_000))
            answer = (await answers(hub, number, 0))[0]
            assert answer.kind == "refused"
            assert "a reply of 25000 bytes, at most 20000" in answer.failure

    asyncio.run(run())


def test_nodes_that_do_not_fit_are_refused_with_the_reason() -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            scene.start(0, Reversing(), of=2)
            await ready(hub, 0)
            with pytest.raises(JoinRefused, match=r"3 partitions, and node 0 says 2: give all nodes the same --of"):
                await scene.start(1, Reversing(), of=3)

    asyncio.run(run())


def test_a_node_outlives_its_hub_and_takes_part_in_the_next_run() -> None:
    async def run() -> None:
        scene, answering = Scene(), Reversing("same")
        async with gradbus.connect(**scene.place) as bus:
            first = Hub(bus, run_id=1)
            serving = asyncio.create_task(first.run())
            await first.started.wait()
            node = scene.start(0, answering)
            await ready(first, 0)
            assert (await answers(first, await push(first, [0], b"1"), 0))[0].payload is not None
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        async with scene.hub() as hub:
            await ready(hub, 0)
            assert (await answers(hub, await push(hub, [0], b"2"), 0))[0].payload is not None
        assert [run_id for run_id, _ in answering.runs] == [1, RUN]
        assert node.result().answered == 2

    asyncio.run(run())


def test_a_node_outlives_a_hub_that_goes_while_it_begins_the_run() -> None:
    async def run() -> None:
        scene, answering = Scene(), Reversing()
        release, loop = asyncio.Event(), asyncio.get_running_loop()

        def begin(run_id: int, options: Mapping[str, Any]) -> None:
            answering.runs.append((run_id, dict(options)))
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        answering.begin = begin  # type: ignore[method-assign]
        async with gradbus.connect(**scene.place) as bus:
            first = Hub(bus, run_id=1)
            serving = asyncio.create_task(first.run())
            await first.started.wait()
            node = scene.start(0, answering)
            await ready(first, 0)
            await push(first, [0], b"1")
            await eventually(lambda: len(answering.runs) == 1)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        await next_hello(scene, lambda hello: hello.session == 0)  # it is welcomed by nobody
        release.set()
        async with scene.hub() as hub:
            await ready(hub, 0)
            assert await answers(hub, await push(hub, [0], b"2"), 0)
        assert node.result().answered == 1

    asyncio.run(run())


def test_the_error_of_the_server_ends_its_nodes_with_the_reason() -> None:
    async def run() -> None:
        scene = Scene()
        async with scene.hub() as hub:
            node = scene.start(0, Reversing())
            await ready(hub, 0)
            await hub.end(ok=False, reason="the ServerApp failed: ValueError: no")
            with pytest.raises(TrainingFailed, match="the ServerApp failed: ValueError: no"):
                await node

    asyncio.run(run())


def test_wrong_settings_of_a_node_are_refused_at_the_start() -> None:
    async def run() -> None:
        async with gradbus.connect(**Scene().place) as bus:
            with pytest.raises(ConfigError, match="partition 2 of 2: partitions count from 0, so give one of 0 to 1"):
                NodePlace.of_partition(2, 2)
            with pytest.raises(ConfigError, match=r"set flower\.max_bytes"):
                MessageHub(bus, run_id=1, max_bytes=5)

    asyncio.run(run())


def test_nodes_known_by_their_names_and_by_partitions_serve_one_run() -> None:
    """A name has the same number in each run, and a second process with it is refused."""

    async def run() -> None:
        scene = Scene()
        robot, other = NodePlace.derive_from_name("robot-1"), NodePlace.derive_from_name("robot-2")
        assert robot == NodePlace.derive_from_name("robot-1")
        async with scene.hub() as hub:
            scene.start(0, Reversing("a"))
            scene.start_at(robot, Reversing("b"))
            scene.start_at(other, Reversing("c"))
            numbers = sorted([0, robot.number, other.number])
            await ready(hub, *numbers)
            number = await push(hub, numbers, b"12345678")
            found = await answers(hub, number, *numbers)
            assert found[robot.number].payload == b"b87654321"
            async with scene.bus("second") as bus:
                with pytest.raises(
                    JoinRefused,
                    match=rf"the name 'robot-1' is in use by .* \(node {robot.number}\): give each node its own --name",
                ):
                    await MessageNode(bus, Reversing(), place=robot).run()
                text = f"its name 'robot-9' has the number {robot.number}, which is also that of 'robot-1'"
                with pytest.raises(JoinRefused, match=text):
                    await MessageNode(bus, Reversing(), place=NodePlace(robot.number, 0, "robot-9")).run()

    asyncio.run(run())


def test_a_node_leaves_a_call_that_does_not_return_after_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.runtime.compute.LET_GO_S", 0.05)

    async def run() -> None:
        scene, answering, release = Scene(), Reversing(), threading.Event()
        answering.gate = lambda: release.wait(60)
        async with scene.hub() as hub:
            node = scene.start(0, answering)
            await ready(hub, 0)
            await push(hub, [0], b"12345678")
            await eventually(lambda: bool(answering.asked))
            await hub.end(ok=True, reason="done")
            assert (await node).left_call
            release.set()

    asyncio.run(run())


def test_the_layout_of_a_hello_tells_nodes_of_flower_apps_from_clients() -> None:
    assert partitions_of(layout_of(5)) == 5
    assert partitions_of(5) is None
