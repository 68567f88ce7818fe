"""The global model on its way to the clients: in full or as a compressed difference, resent where it is missing.

Clients of this machine that say they read the controller's memory find it there, once for all of them, and are told
where. Frames go out only if there are others, or nobody yet. Whoever does not get at it asks, and gets frames.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbus.actors.aggregation.clipping import l2_norm
from gradbus.actors.federated.clients import Members
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.report import RoundReport
from gradbus.codecs import Codec, add_into, residual_step
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.shared_payload import SHARED_BYTES, Sealed
from gradbus.runtime.testing.journal import History, model_name
from gradbus.runtime.wire.control import FROZEN_ROUND, ModelHere, NeedModel
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind, chunk_count
from gradbus.runtime.wire.messages import Identity, ModelBlob

RETAIN_BYTES = 64 << 20  # a model of up to this size is also kept by DDS for clients that come later
RESEND_PAUSE_S = 0.25  # requests for the whole model that come within this time are answered together
# What one client may have sent again of one round's model, for it goes to all: so many times the model, and of a small
# one so many frames. Who loses a third of all frames needs the model one and a half times.
RESEND_TIMES, RESEND_FRAMES = 8, 256

log = get_logger("controller")


@dataclass(slots=True, eq=False)
class _Message:
    """A model as it is sent. ``sealed``: a copy in memory for the clients of this machine, once there is one.
    ``sharing``: held while it is made and told of, for somebody may ask meanwhile. ``signing``: while it is signed."""

    key: FrameKey
    payload: Any
    flags: int = int(Flags.NONE)
    sealed: Sealed | None = None
    sharing: asyncio.Lock = field(default_factory=asyncio.Lock)
    signing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def size(self) -> int:
        return self.payload.nbytes if isinstance(self.payload, np.ndarray) else len(self.payload)

    @property
    def frames(self) -> int:
        return chunk_count(self.size)


class Downlink:
    """Publishes models. With a lossy codec it sends ``codec(weights - held)``, where ``held`` is what the clients have
    after what they were sent so far; what a message did not say stays in ``weights - held`` and is said later.

    Attributes:
        held: float32, shape (D,): the model that the clients hold; the base of their updates. With a lossless codec
            this *is* the weights.
        told: how many clients were last told where the model lies in memory.
        residual_norm: L2 norm of what the newest message did not say; 0 with a lossless codec.
    """

    def __init__(
        self, bus: Bus, identity: Identity, compute: ComputeThread, codec: Codec, members: Members, *, run_id: int,
        weights: Tensor, held: Tensor | None = None, history: History | None = None, frozen: FlatModel | None = None,
    ) -> None:  # fmt: skip
        """``frozen``: the model, of which some parameters do not travel but to clients whose own are others."""
        self._frozen_model = frozen if frozen is not None and frozen.frozen_dim else None
        self._frozen: _Message | None = None
        self._bus = bus
        self._members = members
        self._identity = identity
        self._compute = compute
        self._codec = codec
        self._run_id = run_id
        self._history = history or History(None, "controller")
        self._held_crc32 = 0
        self._weights = weights
        self.held = weights if held is None else held
        self.residual_norm = 0.0
        self._transfer = 0
        self._round_id = -1
        self._current: _Message | None = None  # what was sent last, for repairs
        self._full: _Message | None = None
        self._earlier: list[tuple[int, Sealed]] = []  # by round: models that some client may be about to read
        self.told = 0
        self._full_sent_s = float("-inf")
        self._wanted: dict[int, set[int]] = {}  # transfer -> frames that somebody misses; empty: all of them
        self._wanted_in_memory = False
        self._sending: tuple[int, set[int]] | None = None  # transfer and frames that are being sent again
        self._asked: Counter[int] = Counter()  # client -> frames that it has had sent again, of this round's model
        self._resending: asyncio.Task[None] | None = None
        frames = chunk_count(weights.numel() * 4)
        retained = frames if weights.numel() * 4 <= RETAIN_BYTES else 1
        bus.open_writer(ModelBlob, retained_samples=retained)

    @property
    def frozen_hash(self) -> int:
        """Of the values that do not travel; 0: there are none."""
        return 0 if self._frozen_model is None else self._frozen_model.frozen

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
            self._current = _Message(self._next_key(), payload, int(Flags.DELTA))
        if self._history.keeps_payloads or (self._history.on and self.held_apart is not None):
            await self._compute.run(self._keep, self._current.payload)
        return self._current.size

    def _keep(self, payload: Any) -> None:
        if self.held_apart is not None:
            self._held_crc32 = zlib.crc32(self.held.numpy().data)
        self._history.keep(model_name(self._run_id, self._round_id), payload)

    def note_commit(self, report: RoundReport) -> None:
        """The round is durable: note what it has come to, and what clients will hold after it."""
        self._history.note(
            "committed", round=report.round_id, clients=list(report.clients), num_samples=report.num_samples,
            crc32=report.weights_crc32, outcome=report.outcome, attempt=report.attempt, dropped=dict(report.dropped),
            held_crc32=report.weights_crc32 if self.held_apart is None else self._held_crc32,
        )  # fmt: skip

    async def publish(self) -> int:
        """Send the prepared message to all clients. Returns its bytes."""
        message = self._current
        assert message is not None, "prepare() comes first"
        self.told = self._members.sharing if await self._share(message) else 0
        self._hide_earlier()
        if not 0 < self.told == len(self._members):
            if message is self._full:
                self._full_sent_s = time.monotonic()
            await self._send(message)
        return message.size

    async def _share(self, message: _Message) -> bool:
        """Whether the clients that can read it in memory have been told where it lies: there are some."""
        await self._sign(message)
        async with message.sharing:
            if message.sealed is None and message.size >= SHARED_BYTES and self._members.sharing:
                message.sealed = await self._compute.run(self._bus.memory.put, message.payload)
            if message.sealed is not None:
                await self._tell(message, message.sealed)
            return message.sealed is not None

    async def _tell(self, message: _Message, sealed: Sealed) -> None:
        key = message.key
        await self._bus.publish(
            self._identity,
            ModelHere(key.job, key.round_id, key.transfer, bool(message.flags), message.size, sealed.place, key.name),
        )

    async def welcome(self, client_id: int) -> None:
        """A client has come: if it reads memory, tell it of the model that lies there."""
        full = self._full
        if full is not None and full.sealed is not None and self._members.shares_memory(client_id):
            await self._tell(full, full.sealed)

    def _full_message(self) -> _Message:
        # Headerless float32, as the original format has it: a view on the weights, without a copy.
        return _Message(self._next_key(), np.asarray(self.held.numpy(), dtype="<f4"))

    def _next_key(self) -> FrameKey:
        self._transfer += 1
        return FrameKey(
            Kind.MODEL, self._run_id, self._round_id, CONTROLLER, self._identity.incarnation, self._transfer
        )

    @torch.no_grad()
    def _next_difference(self) -> bytes:
        payload, owed = residual_step(self._weights - self.held, None, self._codec)
        self.residual_norm = l2_norm(owed)
        add_into(self.held, payload)
        return payload

    async def _sign(self, message: _Message) -> None:
        """Where models are signed, nobody gets one that is not. Its signature is the name of its frames."""
        standing = self._bus.standing
        async with message.signing:
            if standing.signs_models and not message.key.name:
                name = await self._compute.run(standing.sign_model, message.key, message.flags, message.payload)
                message.key = message.key._replace(name=name)

    async def _send(self, message: _Message, only: Sequence[int] | None = None) -> None:
        await self._sign(message)
        await self._bus.send_model(message.key, message.payload, flags=message.flags, only=only)

    def on_need(self, client_id: int, need: NeedModel, group: asyncio.TaskGroup) -> None:
        """A client misses the model or parts of it. Answers go to all: others may miss the same."""
        if need.run_id != self._run_id:
            return
        if need.round_id == FROZEN_ROUND:
            self._on_frozen_need(client_id, need)
        elif need.round_id == self._round_id and self._current is not None:  # else it will ask for the newer one
            self._on_model_need(client_id, need)
        if (self._wanted or self._wanted_in_memory) and (self._resending is None or self._resending.done()):
            self._resending = group.create_task(self._resend(), name="resend-model")

    def _on_frozen_need(self, client_id: int, need: NeedModel) -> None:
        """A client lacks what does not travel with the rounds: as a rule once, in full."""
        if self._frozen_model is None:
            return
        if self._frozen is None:
            key = self._next_key()._replace(round_id=FROZEN_ROUND)
            self._frozen = _Message(key, np.asarray(self._frozen_model.read_frozen().numpy(), dtype="<f4"))
        transfer, frames = self._frozen.key.transfer, self._frozen.frames
        missing = set(need.seqs) if need.transfer == transfer else set()
        wanted = {seq for seq in missing if 0 <= seq < frames} or set(range(frames))
        wanted -= self._on_their_way(transfer)
        if wanted and self._may_ask(client_id, len(wanted)):
            self._wanted.setdefault(transfer, set()).update(wanted)

    def _on_model_need(self, client_id: int, need: NeedModel) -> None:
        known = self._message(need.transfer)
        if need.seqs and known is not None:
            wanted = self._wanted.get(need.transfer)
            if wanted is None or wanted:  # else all of it is wanted already
                seqs = {seq for seq in need.seqs if 0 <= seq < known.frames} - self._on_their_way(need.transfer)
                if seqs and self._may_ask(client_id, len(seqs)):
                    self._wanted.setdefault(need.transfer, set()).update(seqs)
        elif not need.seqs and time.monotonic() - self._full_sent_s > RESEND_PAUSE_S:
            if self._full is None:
                self._full = self._full_message()
            if self._members.shares_memory(client_id):
                self._wanted_in_memory = True
            elif self._wanted.get(self._full.key.transfer) != set() and self._may_ask(client_id, self._full.frames):
                self._wanted[self._full.key.transfer] = set()

    def _on_their_way(self, transfer: int) -> set[int]:
        """Frames that are wanted already, or being sent again just now: to ask for them changes nothing, and a client
        does so again and again while they come slowly."""
        again = self._sending[1] if self._sending is not None and self._sending[0] == transfer else set()
        return again | self._wanted.get(transfer, set())

    def _may_ask(self, client_id: int, frames: int) -> bool:
        """Whether this client may have so many more frames sent again, of this round's model: no client by itself keeps
        the way to the others full. Who has had all that it may waits for the next model."""
        full = chunk_count(self.held.numel() * 4) + (0 if self._frozen is None else self._frozen.frames)
        most = max(RESEND_TIMES * full, RESEND_FRAMES)
        before = self._asked[client_id]
        if before + frames > most:
            if before < most:
                self._asked[client_id] = most  # told once
                log.warning("model asked for too often", client=client_id, round=self._round_id, frames=before)
            return False
        self._asked[client_id] += frames
        return True

    def _message(self, transfer: int) -> _Message | None:
        messages = (self._current, self._full, self._frozen)
        return next((message for message in messages if message is not None and message.key.transfer == transfer), None)

    async def _resend(self) -> None:
        """Send what is missed, one message at a time: requests that come meanwhile are answered together."""
        while self._wanted or self._wanted_in_memory:
            if self._wanted_in_memory:
                self._wanted_in_memory = False
                await self._share_full()
                continue
            transfer, seqs = self._wanted.popitem()
            message = self._message(transfer)
            if message is None:
                continue
            try:
                self._sending = transfer, seqs or set(range(message.frames))
                if seqs:
                    await self._send(message, sorted(seqs))
                else:
                    self._full_sent_s = float("inf")  # whoever asks for all of it meanwhile is getting it
                    await self._send(message)
            except BusError as error:
                log.warning("model not resent", reason=str(error))
            finally:
                self._sending = None
                if not seqs:
                    self._full_sent_s = time.monotonic()

    async def _share_full(self) -> None:
        full = self._full
        try:
            if full is not None and not await self._share(full):
                self._wanted[full.key.transfer] = set()
        except BusError as error:
            log.warning("model not told of", reason=str(error))

    async def quiesce(self) -> None:
        """Stop resending: the weights are about to change. Returns when nothing reads them any more.

        Until the next message is prepared, requests go unanswered: what was sent last is changing under it.
        """
        self._hide_earlier()
        self._earlier += [(self._round_id, sealed) for sealed in self._shared()]
        self._current = self._full = None
        self._asked.clear()
        self._wanted_in_memory = False
        self._wanted.clear()
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.wait([self._resending], timeout=5.0)

    def _shared(self) -> set[Sealed]:
        """What lies in memory of the newest model."""
        return {m.sealed for m in (self._current, self._full) if m is not None and m.sealed is not None}

    def _hide_earlier(self) -> None:
        """Give back the models before the newest one that all who read memory hold, and those before the last two: a
        client that is told of one while others make up the quorum still has a round's time to read it."""
        earlier, self._earlier = self._earlier, []
        for round_id, sealed in earlier:
            if round_id <= self._round_id - 2 or (round_id < self._round_id and self._members.have_read(round_id)):
                sealed.hide()
            else:
                self._earlier.append((round_id, sealed))

    def close(self) -> None:
        """The run is over: give back what lies in memory."""
        for sealed in (*self._shared(), *(sealed for _, sealed in self._earlier)):
            sealed.hide()
