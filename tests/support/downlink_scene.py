"""A downlink with a bus that only keeps what is sent, and clients that hear it frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.downlink import Downlink
from gradbus.actors.model_copy import ModelCopy
from gradbus.codecs import Codec
from gradbus.runtime import frames
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.control import NeedModel
from gradbus.runtime.errors import BusError
from gradbus.runtime.frames import CONTROLLER, FrameKey
from gradbus.runtime.messages import Identity, ModelBlob

RUN, DIM, CHUNK_BYTES = 0xABC, 3000, 1024
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
        self.sent: list[Sent] = []
        self.writers: list[tuple[type, int]] = []
        self.started = 0
        self.open = asyncio.Event()
        self.open.set()
        self.error: BusError | None = None
        self.news = asyncio.Event()

    def open_writer(self, kind: type, *, retained_samples: int = 1) -> None:
        self.writers.append((kind, retained_samples))

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

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.news.clear()
                await self.news.wait()


@dataclass
class Scene:
    bus: FakeBus
    downlink: Downlink
    weights: Tensor
    group: asyncio.TaskGroup

    def train(self, seed: int) -> None:
        self.weights += 0.01 * random_vector(seed)

    def need(self, round_id: int, transfer: int = 0, seqs: Sequence[int] = (), run_id: int = RUN) -> None:
        self.downlink.on_need(NeedModel(run_id, round_id, transfer, list(seqs)), self.group)


def random_vector(seed: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def codec_of(name: str) -> Codec:
    return codecs.get(name, **({"density": 0.05} if name in ("s4", "sq8") else {}))


@contextlib.asynccontextmanager
async def scene_of(name: str = "fp32") -> AsyncIterator[Scene]:
    bus, weights, codec = FakeBus(), random_vector(0), codec_of(name)
    with ComputeThread("downlink-test") as compute:
        async with asyncio.TaskGroup() as group:
            downlink = Downlink(
                bus, Identity(CONTROLLER, 1), compute, codec, run_id=RUN, weights=weights,  # type: ignore[arg-type]
                held=None if codec.lossless else weights.clone(),
            )  # fmt: skip
            yield Scene(bus, downlink, weights, group)


def run_with(test: Callable[[Scene], Coroutine[Any, Any, None]], name: str = "fp32") -> None:
    async def main() -> None:
        async with asyncio.timeout(20.0), scene_of(name) as scene:
            await test(scene)

    asyncio.run(main())


def new_copy() -> ModelCopy:
    copy = ModelCopy(DIM, max_bytes=8 * DIM + 4096)
    copy.start(RUN)
    return copy


def hear(copy: ModelCopy, *messages: Sent) -> None:
    for message in messages:
        for blob in message.blobs:
            complete = copy.feed(blob)
            if complete is not None:
                copy.adopt(complete[0], copy.decode(*complete))


def assert_holds(copy: ModelCopy, round_id: int, model: Tensor) -> None:
    assert copy.round_id == round_id
    assert copy.vector is not None
    assert torch.equal(copy.vector, model)
