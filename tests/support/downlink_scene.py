"""A downlink with a bus that only keeps what is sent, and clients that hear it frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.merged_buffers import BufferLayout
from gradbus.actors.federated.client.global_model import ModelReplica
from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller import publish as downlink_module
from gradbus.actors.federated.controller.clients import ClientRegistry, ExpectedModel
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.state import RunContext
from gradbus.codecs import Codec
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import BusError
from gradbus.runtime.shm.segment import PayloadMemory, read
from gradbus.runtime.testing.journal import History
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.control import PROTOCOL, Hello, ModelAvailable, ModelRequest
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import Identity, ModelBlob

RUN, SESSION, DIM, CHUNK_BYTES = 0xABC, 1, 3000, 1024
LOSSY = ["q8", "s4", "sq8"]


@dataclass(frozen=True)
class Sent:
    """One call of the bus: the frames it would write."""

    key: FrameKey
    flags: int
    only: list[int] | None
    blobs: list[ModelBlob]
    size: int


class FakeBus:
    """Keeps what was sent; sending may be held up or fail."""

    def __init__(self) -> None:
        self.memory = PayloadMemory(switched_on=True)
        self.access_policy = AccessPolicy()
        self.said: list[ModelAvailable] = []
        self.sent: list[Sent] = []
        self.writers: list[tuple[type, int]] = []
        self.started = 0
        self.open = asyncio.Event()
        self.open.set()
        self.error: BusError | None = None
        self.delivered = True
        self.news = asyncio.Event()

    def open_writer(self, kind: type, *, retained_samples: int = 1) -> None:
        self.writers.append((kind, retained_samples))

    async def publish(self, sender: Identity, body: ModelAvailable) -> None:
        self.said.append(body)
        self.news.set()

    async def send_model(
        self, key: FrameKey, payload: Any, *, flags: int = 0, only: Sequence[int] | None = None
    ) -> int:
        self.started += 1
        self.news.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error
        parts = frames.split(key, payload, chunk_bytes=CHUNK_BYTES, flags=flags, only=only)
        blobs = [ModelBlob(key.round_id, frames.parse(head + bytes(data))) for head, data in parts]
        size = sum(len(blob.frame.data) for blob in blobs)
        self.sent.append(Sent(key, flags, None if only is None else list(only), blobs, size))
        self.news.set()
        return size

    def is_delivered(self, kind: type) -> bool:
        return self.delivered

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.news.clear()
                await self.news.wait()


_numbers = itertools.count(1)


@dataclass
class Scene:
    bus: FakeBus
    downlink: ModelPublisher
    members: ClientRegistry
    weights: Tensor
    group: asyncio.TaskGroup

    def train(self, seed: int) -> None:
        self.weights += 0.01 * random_vector(seed)

    def need(
        self, round_id: int, transfer: int = 0, seqs: Sequence[int] = (), run_id: int = RUN, client_id: int = 0
    ) -> None:
        self.downlink.on_request(client_id, ModelRequest(run_id, round_id, transfer, list(seqs)), self.group)

    def join(self, client_id: int, memory: str, holds: int = -1) -> None:
        """A client is there, and says that it reads this memory, and which round's model it holds."""
        hello = Hello(PROTOCOL, DIM, 0, True, SESSION, "idle", -1, holds, "", -1, memory)
        self.members.answer_hello(Identity(client_id, 1), hello, next(_numbers), now_s=0.0, next_round=1)


def random_vector(seed: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def new_members(memory: str = "") -> ClientRegistry:
    return ClientRegistry(
        ExpectedModel(DIM, 0), session=SESSION, dead_after_s=1e9, duplicate_after_s=1.0, memory=memory
    )


def codec_of(name: str) -> Codec:
    return codecs.get(name, **({"density": 0.05} if name in ("s4", "sq8") else {}))


def publisher_of(
    bus: FakeBus, compute: ComputeThread, codec: Codec, members: ClientRegistry, weights: Tensor
) -> ModelPublisher:
    state = SimpleNamespace(
        broadcast=lambda: None,
        run_id=RUN,
        weights=weights,
        held=None if codec.lossless else weights.clone(),
        model=SimpleNamespace(frozen=0, frozen_dim=0, buffers=BufferLayout()),
        buffer_block=lambda: b"",
        names=ClientNames(),
    )
    identity, journal = Identity(CONTROLLER, SESSION), History(None, "controller")
    context = RunContext(bus, identity, compute, FederatedConfig(), state, journal)  # type: ignore[arg-type]
    return ModelPublisher(context, codec, members)


@contextlib.asynccontextmanager
async def scene_of(name: str = "fp32") -> AsyncIterator[Scene]:
    bus, weights, codec = FakeBus(), random_vector(0), codec_of(name)
    chunks = partial(frames.chunk_count, chunk_bytes=CHUNK_BYTES)
    with ComputeThread("downlink-test") as compute, mock.patch.object(downlink_module, "chunk_count", chunks):
        async with asyncio.TaskGroup() as group:
            members = new_members(bus.memory.here)
            downlink = publisher_of(bus, compute, codec, members, weights)
            yield Scene(bus, downlink, members, weights, group)


def run_with(test: Callable[[Scene], Coroutine[Any, Any, None]], name: str = "fp32") -> None:
    async def main() -> None:
        async with asyncio.timeout(20.0), scene_of(name) as scene:
            await test(scene)

    asyncio.run(main())


def new_copy() -> ModelReplica:
    copy = ModelReplica(DIM, max_bytes=8 * DIM + 4096)
    copy.start(RUN, SESSION)
    return copy


def hear(copy: ModelReplica, *messages: Sent) -> None:
    for message in messages:
        for blob in message.blobs:
            complete = copy.feed(blob)
            if complete is not None:
                copy.adopt(complete[0], copy.decode(*complete))


def assert_holds(copy: ModelReplica, round_id: int, model: Tensor) -> None:
    assert copy.round_id == round_id
    assert copy.vector is not None
    assert torch.equal(copy.vector, model)


def look(copy: ModelReplica, said: ModelAvailable) -> bool:
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
