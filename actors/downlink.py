"""The global model on its way to the clients: in full or as a compressed difference, resent where it is missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs import Codec, CodecError, DenseBlock, parse, residual_step
from gradbus.runtime.bus import Bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.control import NeedModel
from gradbus.runtime.errors import BusError
from gradbus.runtime.frames import CONTROLLER, Flags, FrameKey, Kind, chunk_count
from gradbus.runtime.logs import get_logger
from gradbus.runtime.messages import Identity, ModelBlob

RETAIN_BYTES = 64 << 20  # a model of up to this size is also kept by DDS for clients that come later
RESEND_PAUSE_S = 0.25  # requests for the whole model that come within this time are answered together

log = get_logger("controller")


class Downlink:
    """Publishes models. With a lossy codec it sends ``codec(weights - held)``, where ``held`` is what the clients have
    after what they were sent so far; what a message did not say stays in ``weights - held`` and is said later.

    Attributes:
        held: float32, shape (D,): the model that the clients hold; the base of their updates. With a lossless codec
            this *is* the weights.
    """

    def __init__(
        self, bus: Bus, identity: Identity, compute: ComputeThread, codec: Codec, *, run_id: int, weights: Tensor,
        held: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._bus = bus
        self._identity = identity
        self._compute = compute
        self._codec = codec
        self._run_id = run_id
        self._weights = weights
        self.held = weights if held is None else held
        self._transfer = 0
        self._round_id = -1
        self._current: tuple[FrameKey, Any, int] | None = None  # what was sent last, for repairs
        self._full: tuple[FrameKey, Any, int] | None = None
        self._full_sent_s = float("-inf")
        self._wanted: dict[int, set[int]] = {}  # transfer -> frames that somebody misses; empty: all of them
        self._resending: asyncio.Task[None] | None = None
        frames = chunk_count(weights.numel() * 4)
        retained = frames if weights.numel() * 4 <= RETAIN_BYTES else 1
        bus.open_writer(ModelBlob, retained_samples=retained)

    @property
    def held_apart(self) -> Tensor | None:
        """What the clients hold, where that is not the weights: it has to be kept with them."""
        return None if self.held is self._weights else self.held

    async def publish_full(self, round_id: int) -> int:
        """Send what the clients should hold after this round, in full. Returns its bytes."""
        self._round_id = round_id
        self._current = self._full = self._full_message()
        return await self.publish()

    async def prepare(self, round_id: int) -> int:
        """Make the message that brings the clients to the model after this round. Returns its bytes."""
        self._round_id = round_id
        self._full = None
        if self.held_apart is None:
            self._current = self._full = self._full_message()
        else:
            payload = await self._compute.run(self._next_difference)
            self._current = (self._next_key(), payload, int(Flags.DELTA))
        return _size(self._current[1])

    async def publish(self) -> int:
        """Send the prepared message to all clients. Returns its bytes."""
        assert self._current is not None, "prepare() comes first"
        if self._current is self._full:
            self._full_sent_s = time.monotonic()
        return await self._send(self._current)

    def _full_message(self) -> tuple[FrameKey, Any, int]:
        # Headerless float32, as the original format has it: a view on the weights, without a copy.
        return self._next_key(), np.asarray(self.held.numpy(), dtype="<f4"), int(Flags.NONE)

    def _next_key(self) -> FrameKey:
        self._transfer += 1
        return FrameKey(
            Kind.MODEL, self._run_id, self._round_id, CONTROLLER, self._identity.incarnation, self._transfer
        )

    @torch.no_grad()
    def _next_difference(self) -> bytes:
        payload, _ = residual_step(self._weights - self.held, None, self._codec)
        add_into(self.held, payload)
        return payload

    async def _send(self, message: tuple[FrameKey, Any, int], only: Sequence[int] | None = None) -> int:
        key, payload, flags = message
        await self._bus.send_model(key, payload, flags=flags, only=only)
        return _size(payload)

    def on_need(self, need: NeedModel, group: asyncio.TaskGroup) -> None:
        """A client misses the model or parts of it. Answers go to all: others may miss the same."""
        if need.run_id != self._run_id or need.round_id != self._round_id or self._current is None:
            return  # it will ask for the newer one
        known = next((m for m in (self._current, self._full) if m is not None and m[0].transfer == need.transfer), None)
        if need.seqs and known is not None:
            wanted = self._wanted.setdefault(need.transfer, set(need.seqs))
            if wanted:  # else all of it is wanted already
                wanted.update(need.seqs)
        elif not need.seqs and time.monotonic() - self._full_sent_s > RESEND_PAUSE_S:
            if self._full is None:
                self._full = self._full_message()
            self._wanted[self._full[0].transfer] = set()
        if self._wanted and (self._resending is None or self._resending.done()):
            self._resending = group.create_task(self._resend(), name="resend-model")

    async def _resend(self) -> None:
        """Send what is missed, one message at a time: requests that come meanwhile are answered together."""
        while self._wanted:
            transfer, seqs = self._wanted.popitem()
            message = next(
                (m for m in (self._current, self._full) if m is not None and m[0].transfer == transfer), None
            )
            if message is None:
                continue
            try:
                if seqs:
                    await self._send(message, sorted(seqs))
                else:
                    self._full_sent_s = float("inf")  # whoever asks for all of it meanwhile is getting it
                    await self._send(message)
            except BusError as error:
                log.warning("model not resent", reason=str(error))
            finally:
                if not seqs:
                    self._full_sent_s = time.monotonic()

    async def quiesce(self) -> None:
        """Stop resending: the weights are about to change. Returns when nothing reads them any more.

        Until the next message is prepared, requests go unanswered: what was sent last is changing under it.
        """
        self._current = self._full = None
        self._wanted.clear()
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.wait([self._resending], timeout=5.0)


def _size(payload: Any) -> int:
    return payload.nbytes if isinstance(payload, np.ndarray) else len(payload)


@torch.no_grad()
def add_into(vector: Tensor, payload: Any) -> None:
    """``vector += decode(payload)``, block by block; the same operations on every node, so that copies stay bit-equal.

    Raises:
        CodecError: bad bytes; the vector is as it was.
    """
    parsed = parse(payload, expected_dim=vector.numel())
    if not parsed.is_delta:
        raise CodecError(f"a difference is expected, this {parsed.codec} message holds weights")
    for block in parsed.blocks(30 * 1024):
        if isinstance(block, DenseBlock):
            vector[block.start : block.start + block.values.numel()] += block.values
        else:
            vector[block.indices] += block.values
