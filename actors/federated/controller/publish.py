"""Publishing of the global model: in full or as a compressed difference, resent where it is missing.

Clients of this machine that read the controller's memory find it there, once for all of them. Frames are sent only if
there are other clients, or none yet, and to clients that request them, unless they are on the way (:mod:`.resending`).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbus.actors.federated.controller.clients import ClientRegistry
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.resending import RESEND_FRAMES, RESEND_TIMES, OnTheWay, ResendQueue
from gradbus.actors.federated.controller.state import RunContext
from gradbus.codecs import Codec, NonFiniteError, add_into, residual_step
from gradbus.codecs.base import l2_norm
from gradbus.codecs.registry import TABLE
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SHARED_BYTES, SharedPayload
from gradbus.runtime.testing.journal import model_name
from gradbus.runtime.user_errors import user_error
from gradbus.runtime.wire.control import FROZEN_ROUND, ModelAvailable, ModelRequest
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind, chunk_count
from gradbus.runtime.wire.messages import ModelBlob

RETAIN_BYTES = 64 << 20  # a model of up to this size is also kept by DDS for clients that come later
RESEND_PAUSE_S = 0.25  # requests for the whole model within this time are answered together

log = get_logger("controller")


@dataclass(slots=True, eq=False)
class _OutgoingModel:
    """A model as it is sent.

    ``shared``: a copy in shared memory for the clients of this machine, once there is one. ``sharing``, ``signing``:
    held while it is made and announced, and while it is signed, as requests may come meanwhile.
    """

    key: FrameKey
    payload: Any
    flags: int = int(Flags.NONE)
    shared: SharedPayload | None = None
    sharing: asyncio.Lock = field(default_factory=asyncio.Lock)
    signing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def size(self) -> int:
        return self.payload.nbytes if isinstance(self.payload, np.ndarray) else len(self.payload)

    @property
    def frames(self) -> int:
        return chunk_count(self.size)


class ModelPublisher:
    """Publishes models. With a lossy codec it sends ``codec(weights - held)``, where ``held`` is the clients' model so
    far; the residual stays in ``weights - held`` and is sent later.

    Attributes:
        held: float32, shape (D,): the model that the clients hold; the base of their updates. With a lossless codec
            this *is* the weights.
        num_broadcast: number of values behind the model.
        notified: number of clients that were last sent the model's place in memory.
        residual_norm: L2 norm of the residual of the newest message; 0 with a lossless codec.
        queue: requests of clients.
    """

    def __init__(self, context: RunContext, codec: Codec, registry: ClientRegistry) -> None:
        state, bus = context.state, context.bus
        self._context = context
        self._codec = codec
        self._registry = registry
        self._weights = state.weights
        self.held = self._weights if state.held is None else state.held
        self._frozen: _OutgoingModel | None = None
        self._candidate: _OutgoingModel | None = None  # sent to whoever requests it, and to nobody else
        self._is_last = False  # no later model follows the present one
        self._held_crc32 = 0
        self.residual_norm = 0.0
        self._transfer = 0
        self._round_id = -1
        self._current: _OutgoingModel | None = None  # sent last, for repairs
        self._full: _OutgoingModel | None = None
        self._earlier: list[tuple[int, SharedPayload]] = []  # by round: models that a client may be about to read
        self.notified = 0
        self._full_sent_s = float("-inf")
        self._on_the_way = OnTheWay(bus)
        self.queue = ResendQueue()
        self._wanted_in_memory = False
        self._resending: asyncio.Task[None] | None = None
        broadcast = state.broadcast()
        self.num_broadcast = 0 if broadcast is None else broadcast.numel()
        self._buffers = state.model.buffers
        self._message_bytes = 4 * (self._weights.numel() + self.num_broadcast) + self._buffers.max_bytes
        frames = chunk_count(self._message_bytes)
        bus.open_writer(ModelBlob, retained_samples=frames if self._message_bytes <= RETAIN_BYTES else 1)

    @property
    def frozen_hash(self) -> int:
        """Hash of the values that are not sent; 0: there are none."""
        return self._context.state.model.frozen

    @property
    def held_apart(self) -> Tensor | None:
        """The clients' model, where it is not the weights and has to be saved with them."""
        return None if self.held is self._weights else self.held

    async def publish_full(self, round_id: int) -> int:
        """Send the clients' model after this round, in full. Returns its bytes."""
        self._round_id = round_id
        self._current = self._full = self._full_message(self._next_key())
        return await self.publish()

    def bytes_down(self, size: int, asked: Collection[int] | None) -> dict[str, int]:
        """Bytes of models that clients get for a round, as a report has them.

        Args:
            size: of one. asked: those that fetch it; None: all do.
        """
        if asked is None:
            shared = size * min(self.notified, self._registry.sharing)
            return {"bytes_down": size * max(1, len(self._registry)), "bytes_down_shared": shared}
        sharing = sum(map(self._registry.shares_memory, asked)) if self.notified else 0
        return {"bytes_down": size * len(asked), "bytes_down_shared": size * sharing}

    async def prepare(self, round_id: int) -> int:
        """Make the message that brings the clients to the model after this round, in shared memory, too, if clients
        read it there. Returns its bytes."""
        self._round_id = round_id
        self._full = None
        is_full, share, history = self.held_apart is None, self._registry.sharing > 0, self._context.history
        if not is_full or share or history.keeps_payloads or self._buffers:
            self._current = await self._context.compute.run(self._make_message, self._next_key(), share)
        else:
            self._current = self._full_message(self._next_key())
        if is_full:
            self._full = self._current
        return self._current.size

    def _make_message(self, key: FrameKey, share: bool) -> _OutgoingModel:
        """Make the message on the compute thread."""
        if self.held_apart is None:
            message = self._full_message(key, share=share)
        else:
            difference = self._next_difference() + self._context.state.buffer_block()
            message = _OutgoingModel(key, difference, int(Flags.DELTA))
            if self._context.history.on:
                self._held_crc32 = zlib.crc32(self.held.numpy().data)
        self._context.history.keep(model_name(self._context.run_id, self._round_id), message.payload)
        if share and message.shared is None and message.size >= SHARED_BYTES:
            message.shared = self._context.bus.memory.put(message.payload)
        return message

    def note_commit(self, report: RoundReport) -> None:
        """Note a durable round, and the clients' model after it."""
        self._context.history.note(
            "committed",
            round=report.round_id,
            clients=list(report.clients),
            num_samples=report.num_samples,
            crc32=report.weights_crc32,
            outcome=report.outcome,
            attempt=report.attempt,
            dropped=dict(report.dropped),
            held_crc32=report.weights_crc32 if self.held_apart is None else self._held_crc32,
        )

    async def publish(self) -> int:
        """Send the prepared message to all clients. Returns its bytes."""
        message = self._current
        assert message is not None, "prepare() comes first"
        self.notified = self._registry.sharing if await self._share(message) else 0
        self._hide_earlier()
        if not 0 < self.notified == len(self._registry):
            if message is self._full:
                self._full_sent_s = time.monotonic()
            with self._on_the_way.sending({member.client_id: member.incarnation for member in self._registry}):
                await self._send(message)
        return message.size

    async def _share(self, message: _OutgoingModel) -> bool:
        """Announce the message's place in shared memory. False: no client reads it there."""
        await self._sign(message)
        async with message.sharing:
            if message.shared is None and message.size >= SHARED_BYTES and self._registry.sharing:
                message.shared = await self._context.compute.run(self._context.bus.memory.put, message.payload)
            if message.shared is not None:
                await self._announce(message, message.shared)
            return message.shared is not None

    async def _announce(self, message: _OutgoingModel, sealed: SharedPayload) -> None:
        key, is_delta = message.key, bool(message.flags)
        await self._context.publish(
            ModelAvailable(key.job, key.round_id, key.transfer, is_delta, message.size, sealed.place, key.name)
        )

    async def announce_memory_for(self, client_id: int) -> None:
        """Send a new client that reads memory the place of the model."""
        full = self._full
        if full is not None and full.shared is not None and self._registry.shares_memory(client_id):
            await self._announce(full, full.shared)

    def _full_message(self, key: FrameKey, *, share: bool = False) -> _OutgoingModel:
        """Return the clients' model in full. ``share``: joined in shared memory, where more follows it."""
        # Headerless float32, as the original format has it: a view on the weights, without a copy, unless more follows.
        values = np.asarray(self.held.numpy(), dtype="<f4")
        if (broadcast := self._context.state.broadcast()) is not None:
            values = np.concatenate([values, np.asarray(broadcast.numpy(), dtype="<f4")])
        if self._buffers:
            block = np.frombuffer(self._context.state.buffer_block(), np.uint8)
            if share and (shared := self._context.bus.memory.put(values, block)) is not None:
                return _OutgoingModel(key, shared.payload, shared=shared)
            return _OutgoingModel(key, np.concatenate([values.view(np.uint8), block]))
        return _OutgoingModel(key, values)

    def _next_key(self) -> FrameKey:
        self._transfer += 1
        run_id, incarnation = self._context.run_id, self._context.identity.incarnation
        return FrameKey(Kind.MODEL, run_id, self._round_id, CONTROLLER, incarnation, self._transfer)

    @torch.no_grad()
    def _next_difference(self) -> bytes:
        """Encode what the clients lack. Raises ConfigError: a codec of the user's cannot do so: no restart helps."""
        try:
            payload, residual = residual_step(self._weights - self.held, None, self._codec)
            self.residual_norm = l2_norm(residual)
            add_into(self.held, payload, (type(self._codec),))
        except Exception as error:
            if type(self._codec) in TABLE.values() or isinstance(error, NonFiniteError):
                raise
            raise ConfigError(
                f"federated.downlink_codec: the codec {self._codec.name} cannot send the model: {user_error(error)}. "
                f"gradbus.testing.check_codec tests it"
            ) from error
        return payload

    async def _sign(self, message: _OutgoingModel) -> None:
        """Sign the message, where models are signed. Its signature is the name of its frames."""
        access_policy = self._context.bus.access_policy
        async with message.signing:
            if access_policy.signs_models and not message.key.name:
                name = await self._context.compute.run(
                    access_policy.sign_model, message.key, message.flags, message.payload
                )
                message.key = message.key._replace(name=name)

    async def _send(self, message: _OutgoingModel, only: Sequence[int] | None = None) -> None:
        await self._sign(message)
        try:
            await self._context.bus.send_model(message.key, message.payload, flags=message.flags, only=only)
        finally:
            self._on_the_way.note_sent()

    def on_request(self, client_id: int, need: ModelRequest, group: asyncio.TaskGroup) -> None:
        """A client misses the model or parts of it. The answer goes to all, as others may miss the same."""
        if need.run_id != self._context.run_id:
            return
        if need.round_id == FROZEN_ROUND:
            self._on_frozen_request(client_id, need)
        elif self._candidate is not None and need.round_id == self._candidate.key.round_id:
            self._enqueue(
                client_id, self._candidate, need.seqs if need.transfer == self._candidate.key.transfer else ()
            )
        elif self._current is not None and self._answers(need.round_id):
            self._on_model_request(client_id, need)
        if (self.queue or self._wanted_in_memory) and (self._resending is None or self._resending.done()):
            self._resending = group.create_task(self._resend(), name="resend-model")

    def _answers(self, round_id: int) -> bool:
        """Return whether a client that requests the model after this round gets the present one.

        Who requests an earlier one will request the present one as soon as it has the command for that. After the last
        round no command comes: a client may know of none, as of a site that was started again and has skipped rounds.
        """
        return round_id == self._round_id or (self._is_last and 0 <= round_id < self._round_id)

    def note_last(self) -> None:
        """Note that the run is over: the present model is its last one."""
        self._is_last = True

    def offer(self, round_id: int, payload: memoryview) -> None:
        """Send this model to clients that request it, until :meth:`withdraw`. ``round_id``: one of CANDIDATE_ROUNDS;
        ``payload``: float32, shape (D,), little-endian."""
        self.queue.asked.clear()  # the quota is for each model
        self._candidate = _OutgoingModel(self._next_key()._replace(round_id=round_id), payload)

    async def withdraw(self) -> None:
        """Send the offered model no more. Returns when nothing reads it."""
        self._candidate = None
        self.queue.clear()
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.wait([self._resending], timeout=5.0)

    def _on_frozen_request(self, client_id: int, need: ModelRequest) -> None:
        """A client lacks the frozen parameters."""
        model = self._context.state.model
        if not model.frozen_dim:
            return
        if self._frozen is None:
            key = self._next_key()._replace(round_id=FROZEN_ROUND)
            self._frozen = _OutgoingModel(key, np.asarray(model.read_frozen().numpy(), dtype="<f4"))
        self._enqueue(client_id, self._frozen, need.seqs if need.transfer == self._frozen.key.transfer else ())

    def _is_on_the_way_to(self, client_id: int) -> bool:
        """Return whether a client gets what was sent last, as frames."""
        if self._registry.shares_memory(client_id):
            return False
        return self._on_the_way.is_on_the_way_to(client_id, self._registry.incarnation_of(client_id))

    def _on_model_request(self, client_id: int, need: ModelRequest) -> None:
        if self._is_on_the_way_to(client_id):
            return
        known = self._message(need.transfer)
        if need.seqs and known is not None:
            self._enqueue(client_id, known, need.seqs)
        elif not need.seqs and time.monotonic() - self._full_sent_s > RESEND_PAUSE_S:
            if self._full is None:
                self._full = self._full_message(self._next_key())
            if self._registry.shares_memory(client_id):
                self._wanted_in_memory = True
            else:
                self._enqueue(client_id, self._full, ())

    def _enqueue(self, client_id: int, message: _OutgoingModel, seqs: Sequence[int]) -> None:
        """Queue these frames of a message, or all where none are named, within the client's quota."""
        frames = chunk_count(self._message_bytes) + (0 if self._frozen is None else self._frozen.frames)
        quota = max(RESEND_TIMES * frames, RESEND_FRAMES)
        wanted = [seq for seq in seqs if 0 <= seq < message.frames] if seqs else range(message.frames)
        if self.queue.request(client_id, message.key.transfer, wanted, quota):
            return
        if (had := self.queue.mark_exhausted(client_id, quota)) is not None:  # logged once
            log.warning(
                "model requested too often", **self._context.client_facts(client_id), round=self._round_id, frames=had
            )

    def _message(self, transfer: int) -> _OutgoingModel | None:
        messages = (self._current, self._full, self._frozen, self._candidate)
        return next((message for message in messages if message is not None and message.key.transfer == transfer), None)

    async def _resend(self) -> None:
        """Send missing frames, one message at a time: requests that come meanwhile are answered together."""
        while self.queue or self._wanted_in_memory:
            if self._wanted_in_memory:
                self._wanted_in_memory = False
                await self._share_full()
                continue
            transfer, seqs = self.queue.begin()
            message = self._message(transfer)
            if message is None:
                continue
            is_full = message is self._full and len(seqs) == message.frames
            try:
                if is_full:
                    self._full_sent_s = float("inf")  # a client that requests all of it meanwhile is getting it
                await self._send(message, None if is_full else sorted(seqs))
            except BusError as error:
                log.warning("model not resent", reason=str(error))
            finally:
                self.queue.done()
                if is_full:
                    self._full_sent_s = time.monotonic()

    async def _share_full(self) -> None:
        full = self._full
        try:
            if full is not None and not await self._share(full):
                self.queue.want(full.key.transfer, range(full.frames))
        except BusError as error:
            log.warning("model not announced", reason=str(error))

    async def quiesce(self) -> None:
        """Stop resending, as the weights are about to change. Returns when nothing reads them any more. Until the next
        message is prepared, requests are not answered."""
        self._hide_earlier()
        self._earlier += [(self._round_id, shared) for shared in self._shared()]
        self._current = self._full = None
        self._wanted_in_memory = False
        if self._resending is not None:  # else nothing of the model was requested
            self.queue.clear()
            self._resending.cancel()
            await asyncio.wait([self._resending], timeout=5.0)

    def _shared(self) -> set[SharedPayload]:
        """The newest model's copies in memory."""
        return {m.shared for m in (self._current, self._full) if m is not None and m.shared is not None}

    def _hide_earlier(self) -> None:
        """Release earlier models that all clients which read memory hold, and those before the last two: where others
        make up the quorum, a slow client has a round's time to read its model."""
        earlier, self._earlier = self._earlier, []
        for round_id, sealed in earlier:
            if round_id <= self._round_id - 2 or (round_id < self._round_id and self._registry.all_hold(round_id)):
                sealed.hide()
            else:
                self._earlier.append((round_id, sealed))

    def close(self) -> None:
        """Release all memory, at the end of the run."""
        for sealed in (*self._shared(), *(sealed for _, sealed in self._earlier)):
            sealed.hide()
