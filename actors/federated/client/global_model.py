"""A client's replica of the global model, updated from frames or from the controller's shared memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradbus.actors.aggregation.merged_buffers import split
from gradbus.actors.federated.chosen_codecs import max_model_bytes
from gradbus.codecs import Codec, CodecError, add_into, parse
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import PayloadMemory, SharedMemoryFault, is_here, read
from gradbus.runtime.testing.journal import Probe, no_probe
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.channels import CHANNELS
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.control import CANDIDATE_ROUNDS, FROZEN_ROUND, ModelAvailable
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import ModelBlob

log = get_logger("client")
MAX_BROADCAST = 2  # times the model: what a controller may send behind it
WARN_EVERY_S = 10.0  # about models that the controller has not published


ModelKind = Literal["round", "frozen", "candidate"]


def kind_of_model(round_id: int) -> ModelKind:
    """Return what the number of a model's round says of it: a model of a round, what no round changes, or a model that
    is only evaluated."""
    if round_id in CANDIDATE_ROUNDS:
        return "candidate"
    return "frozen" if round_id == FROZEN_ROUND else "round"


class DecodedModel(NamedTuple):
    """Holds a model as it was sent. ``vector``: float32, with what follows the model for the training rule.
    ``buffers``: the block of the merged buffers that follows these, without its end."""

    vector: Tensor
    buffers: bytes = b""


class ModelReplica:
    """The newest global model of one start of a controller that has arrived.

    Attributes:
        round_id: the round after which this was the model; -1: there is none yet.
        vector: float32, shape (D,). A new object for each model, as training may still use the old one.
        broadcast: float32, shape (E,): what came behind it, for the training rule.
        buffers: the block of the merged buffers that are not as they were built; see
            :mod:`gradbus.actors.aggregation.merged_buffers`.
        progress_s: when the last new frame came.
    """

    def __init__(
        self,
        dim: int,
        *,
        max_bytes: int | None = None,
        probe: Probe | None = None,
        access_policy: AccessPolicy | None = None,
        kind: ModelKind = "round",
        own: Sequence[type[Codec]] = (),
    ) -> None:
        """``max_bytes``: the longest a message can be; None: that of a sparse one with raw indices, 8 bytes an element,
        and a header. ``kind``: of models that it takes.
        ``own``: codecs that are not built in, in which they may come.
        ``probe``: records the models. ``access_policy``: checks their signatures."""
        self._probe = probe or no_probe()
        self._access_policy = access_policy or AccessPolicy()
        self._dim = dim
        self._limit = max_bytes
        self._max_bytes = max_model_bytes(dim) if max_bytes is None else max_bytes
        self._kind = kind
        self._own = own
        self._assembler = Assembler()
        self._keys: dict[FrameKey, int] = {}  # transfers on their way in, with their flags
        self._in_memory: set[FrameKey] = set()  # those of them that are read where the controller has them
        self._run_id = self._session = 0
        self.round_id = -1
        self.vector: Tensor | None = None
        self._num_broadcast = 0
        self._buffer_bytes = 0
        self.buffers = b""
        self.broadcast = torch.empty(0, dtype=torch.float32)
        self.progress_s = time.monotonic()
        self.dropped = 0
        self._warned_s = float("-inf")

    def start(
        self, run_id: int, session: int, dim: int | None = None, broadcast: int = 0, *, buffer_bytes: int = 0
    ) -> None:
        """Follow this start of the controller of a run from now on: another one may make another model of a round.

        Drops the model so far.

        Args:
            session: the incarnation of that start.
            dim: values of its models; None: as before. broadcast: values behind them.
            buffer_bytes: the longest block of merged buffers that may end one; 0: none does.
        """
        self._buffer_bytes, self.buffers = buffer_bytes, b""
        self._session = session
        self._run_id, self._num_broadcast = run_id, min(broadcast, MAX_BROADCAST * (dim or self._dim))
        self.broadcast = torch.empty(0, dtype=torch.float32)
        if dim is not None:
            self._dim = dim
            longest = max_model_bytes(dim + self._num_broadcast) + buffer_bytes
            self._max_bytes = longest if self._limit is None else self._limit
        self.round_id, self.vector = -1, None
        self._forget(lambda key: True)

    def feed(self, message: ModelBlob) -> tuple[FrameKey, memoryview] | None:
        """Take a frame. Returns a complete transfer and its payload, for :meth:`decode` and :meth:`adopt`."""
        frame, key = message.frame, message.frame.key
        known = key in self._keys
        if key in self._in_memory or not self._follow(key, frame.flags, frame.total_bytes):
            return None
        if not known:  # one that is complete, and is being decoded, does not begin anew
            self._assembler.expect(key, max_bytes=self._max_bytes)
        try:
            verdict = self._assembler.feed(frame)
        except FrameError as error:
            self._drop(error)
            if key.name and error.reason == "mismatch":  # either may be forged: it begins anew
                self._forget(lambda known: known == key)
            return None
        if verdict is Verdict.REPEATED:
            return None
        self.progress_s = time.monotonic()
        return (key, self._assembler.take(key)) if verdict is Verdict.COMPLETE else None

    def expect(self, key: FrameKey, flags: int, total_bytes: int) -> bool:
        """Whether this model is to be read in the controller's memory, for :meth:`decode` and :meth:`adopt`; its frames
        are then ignored."""
        if total_bytes > self._max_bytes or key in self._in_memory:
            return False
        if not self._follow(key, flags, total_bytes):
            return False
        self._assembler.forget(key)
        self._in_memory.add(key)
        self.progress_s = time.monotonic()
        return True

    def give_up(self, key: FrameKey) -> bool:
        """A model cannot be read in memory. Whether it was still wanted, and has to be requested."""
        wanted = key in self._keys
        self._forget(lambda known: known == key)
        if wanted:
            self.progress_s = float("-inf")
        return wanted

    def _follow(self, key: FrameKey, flags: int, total_bytes: int) -> bool:
        """Whether this transfer is followed; if not, that begins, where it is of use."""
        if key in self._keys:
            return True
        if kind_of_model(key.round_id) != self._kind:
            return False
        if (key.job, key.incarnation) != (self._run_id, self._session):
            return False
        if key.round_id <= self.round_id or not self._useful(flags, key.round_id):
            return False
        newest = max((known.round_id for known in self._keys), default=-1)
        if key.round_id < newest or not self._is_published(key, flags, total_bytes):
            return False
        self._forget(lambda known: known.round_id < key.round_id)  # at most the newest model is being collected,
        if len(self._keys) >= 2:  # in full and as a difference
            self._forget(lambda known: known.transfer == min(k.transfer for k in self._keys))
        self._keys[key] = flags
        return True

    def _is_published(self, key: FrameKey, flags: int, total_bytes: int) -> bool:
        """Whether the controller has signed the model, where models are signed."""
        try:
            self._access_policy.check_model_signature(key, flags, total_bytes)
        except FrameError as error:
            self._drop(error)
            return False
        return True

    def _drop(self, error: FrameError) -> None:
        self.dropped += 1
        if time.monotonic() > self._warned_s + WARN_EVERY_S:  # forged ones may be many
            self._warned_s = time.monotonic()
            log.warning("model frame dropped", reason=error.reason, detail=str(error))

    def _useful(self, flags: int, round_id: int) -> bool:
        return not flags & Flags.DELTA or round_id == self.round_id + 1

    def decode(self, key: FrameKey, payload: memoryview) -> DecodedModel | None:
        """Decode a payload; None: it is of no use. For the compute thread; changes nothing."""
        model = self._decode(key, payload)
        if model is not None and self._probe.history.on:
            self._probe.note(
                "decoded",
                run=f"{key.job:016x}",
                session=key.incarnation,
                round=key.round_id,
                transfer=key.transfer,
                crc32=self._probe.history.checksum(model.vector[: self._dim].numpy().data),
            )
        return model

    def _decode(self, key: FrameKey, payload: memoryview) -> DecodedModel | None:
        flags, base, block = self._keys.get(key), self.vector, memoryview(b"")
        try:
            if key.name:  # the signature of what was followed
                from gradbus.runtime.security.identity.controller_signatures import check_payload

                check_payload(key, payload)
            if flags is None:
                return None
            if self._buffer_bytes:
                payload, block = split(payload)
            if not flags & Flags.DELTA:
                return DecodedModel(_dense(payload, self._dim + self._num_broadcast, self._own), bytes(block))
            if base is None or self._num_broadcast:
                return None
            vector = base.clone()
            add_into(vector, payload, self._own)
        except (CodecError, FrameError) as error:
            log.warning("model dropped", round=key.round_id, reason=str(error))
            return None
        return DecodedModel(vector, bytes(block))

    def adopt(self, key: FrameKey, model: DecodedModel | None) -> bool:
        """Take a decoded model. False: it is of no use, or a newer model or another run has come meanwhile."""
        flags = self._keys.pop(key, None)
        self._in_memory.discard(key)
        if flags is None or model is None or key.round_id <= self.round_id or not self._useful(flags, key.round_id):
            return False
        self.vector, self.broadcast = model.vector[: self._dim], model.vector[self._dim :]
        self.buffers, self.round_id = model.buffers, key.round_id
        self._forget(lambda known: known.round_id <= self.round_id)
        return True

    def missing(self, round_id: int) -> tuple[int, list[int]]:
        """Return what to request for the model of this round: transfer and numbers of frames; no numbers: all of it."""
        for key in self._keys:
            if key.round_id == round_id:
                seqs = self._assembler.missing(key)
                if seqs:
                    return key.transfer, list(seqs)
        return 0, []

    def _forget(self, which: object) -> None:
        for key in [key for key in self._keys if which(key)]:  # type: ignore[operator]
            self._assembler.forget(key)
            self._in_memory.discard(key)
            del self._keys[key]


def _dense(payload: memoryview, dim: int, own: Sequence[type[Codec]]) -> Tensor:
    """The vector of a full model; for float32 the received bytes themselves, without a copy."""
    parsed = parse(payload, expected_dim=dim, own=own)
    if parsed.is_delta or parsed.is_sparse:
        raise CodecError(f"a full model in a {parsed.codec} message of a difference: expected dense weights")
    if parsed.codec == "fp32" and parsed.version == 1:
        return torch.frombuffer(payload, dtype=torch.float32)
    vector = torch.empty(dim, dtype=torch.float32)
    for block in parsed.blocks():
        vector[block.start : block.start + block.values.numel()] = block.values  # type: ignore[union-attr]
    return vector


LAST_READ_S = 1.0  # so long the end of the run waits for reading the last model
READ_TRIES = 3  # so often a model is requested that is not where it was announced


class SharedModelReader:
    """Reads models in the controller's memory, for as long as that works.

    Attributes:
        here: the machine whose memory this client reads, for its Hello; empty: none.
    """

    def __init__(self, memory: PayloadMemory, copy: ModelReplica, thread: ComputeThread, client_id: int) -> None:
        """``copy``: the replica to update. ``thread``: where memory is opened and decoded."""
        self._memory = memory
        self._copy = copy
        self._thread = thread
        self._client_id = client_id
        self._missed: tuple[FrameKey, int] | None = None  # what was last not there, and how often
        self._ended = False
        self._newest: tuple[int, ModelAvailable] | None = None  # by the session: what was announced last
        self._reading: set[asyncio.Task[None]] = set()
        self.here = memory.here

    def start(self) -> None:
        """Try again with another controller, or another start of it."""
        self.here, self._missed, self._newest = self._memory.here, None, None

    def put_off(self, session: int, notice: ModelAvailable) -> None:
        """Note a model that may be wanted later."""
        self._newest = session, notice

    def expect_newest(self) -> tuple[FrameKey, ModelAvailable] | None:
        """Return what was put off last, and its key, if it is to be read in memory now."""
        newest, self._newest = self._newest, None
        key = None if newest is None else self.expect(*newest)
        return None if newest is None or key is None else (key, newest[1])

    def end(self) -> None:
        """The run is over, and the controller releases its memory."""
        self._ended = True

    def note(self, reading: asyncio.Task[None]) -> None:
        """Note a task that reads a model."""
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def settle(self) -> None:
        """Wait for running reads, at most LAST_READ_S."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=LAST_READ_S)

    def expect(self, session: int, notice: ModelAvailable) -> FrameKey | None:
        """The key of the announced model, if it is to be read in memory."""
        flags = Flags.DELTA if notice.delta else Flags.NONE
        key = FrameKey(
            Kind.MODEL, notice.run_id, notice.round_id, CONTROLLER, session, notice.transfer, notice.signature
        )
        wanted = self.here and is_here(notice.memory) and self._copy.expect(key, int(flags), notice.total_bytes)
        return key if wanted else None

    async def take(self, key: FrameKey, notice: ModelAvailable) -> None:
        """Bring the replica to that model. Where that fails, it has to be requested, if it is still wanted.

        It may be gone, for a newer one or with the controller, and the next one can be read all the same. If memory
        cannot be opened from here, or the same model is gone again and again, no other is read that way, which is
        logged.
        """
        try:
            model = await self._thread.run(self._load, key, notice)
        except SharedMemoryFault as error:
            if self._copy.give_up(key) and self.here and not self._ended and not self._worth_asking(key, error):
                self.here = ""
                log.warning(
                    "no shared memory",
                    client=self._client_id,
                    of="the controller",
                    reason=str(error),
                    effect="models go over DDS",
                )
        else:
            self._memory.read_bytes[CHANNELS[ModelBlob].name] += notice.total_bytes
            self._copy.adopt(key, model)

    def _load(self, key: FrameKey, notice: ModelAvailable) -> DecodedModel | None:
        return self._copy.decode(key, read(notice.memory, notice.total_bytes))

    def _worth_asking(self, key: FrameKey, error: SharedMemoryFault) -> bool:
        """Whether this model may yet be found in memory: it is gone, but not for the third time."""
        tries = 1 + (self._missed[1] if self._missed is not None and self._missed[0] == key else 0)
        self._missed = key, tries
        return _is_gone(error) and tries < READ_TRIES


def _is_gone(error: SharedMemoryFault) -> bool:
    """Whether the file has been closed. If not, the system denies it to this process."""
    cause = error.__cause__ or error.__context__
    return not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError | ProcessLookupError)
