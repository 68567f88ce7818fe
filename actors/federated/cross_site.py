"""Cross-site evaluation, on the controller's side: each client's local model on the data of all clients.

One local model after the other comes to the controller, as an update does, and goes to the clients, as a model does; no
more than one is in memory at a time. A client that has not agreed keeps its model, and its row has the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gradbus.actors.federated.client_evaluation import ClientEvaluator
from gradbus.actors.federated.clients import ClientRegistry
from gradbus.actors.federated.evaluation import LATE, LOST, MAX_REASON_CHARS, CrossSite, CrossSiteRow
from gradbus.actors.federated.publish import ModelPublisher
from gradbus.actors.federated.state import RunContext
from gradbus.runtime.errors import BusError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here
from gradbus.runtime.shm.shared_payload import read
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.control import (
    CANDIDATE_ROUNDS,
    Body,
    EvaluationResult,
    Grant,
    LocalModelRequest,
    Receipt,
    RetransmitRequest,
    UploadRequest,
)
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate

REPAIR_AFTER_S = 0.3  # without a new frame, request those that are missing
MAX_LATE = 2  # deadlines that one client may miss in a row before it is asked no more
NOT_WANTED = "this model is not wanted now"
WRONG_SIZE = "its model has another size than the global one"
NOT_FINITE = "its model is not finite"

log = get_logger("controller")


@dataclass(slots=True, eq=False)
class _Upload:
    """A local model that is on its way. ``payload``: once it is complete; ``failure``: why it will not come."""

    client_id: int
    incarnation: int
    round_id: int
    request: UploadRequest | None = None
    payload: memoryview | None = None
    failure: str = ""
    progress_s: float = 0.0

    @property
    def key(self) -> FrameKey | None:
        request = self.request
        return None if request is None else FrameKey(
            Kind.UPDATE, request.run_id, self.round_id, self.client_id, self.incarnation, request.transfer
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        return self.payload is not None or bool(self.failure)


class LocalModelReceiver:
    """Receives local models, one at a time. All methods are called on the loop."""

    def __init__(
        self, context: RunContext, registry: ClientRegistry, *, dim: int,
        sleep_until: Callable[[float], Awaitable[None]], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """``dim``: of the model. ``sleep_until`` waits for ``changed``, or until that time."""
        self._context = context
        self._registry = registry
        self._num_bytes = 4 * dim
        self._sleep_until = sleep_until
        self._changed = changed
        self._assembler = Assembler()
        self._open: _Upload | None = None

    async def fetch(self, client_id: int, round_id: int) -> memoryview | str:
        """The local model of a client, float32 in D values, or why there is none. ``round_id``: of the upload."""
        incarnation = self._registry.incarnation_of(client_id)
        if incarnation is None:
            return LOST
        config = self._context.config
        upload = self._open = _Upload(client_id, incarnation, round_id)
        now_s = time.monotonic()
        deadline_s, repeat_s = now_s + config.evaluation.timeout_s, now_s
        try:
            while not upload.is_over and (now_s := time.monotonic()) < deadline_s:
                here = self._registry.taking_part(self._context.state.round_id + 1)
                if client_id not in here or self._registry.get(client_id, incarnation) is None:
                    return LOST
                if upload.request is None and now_s >= repeat_s:
                    repeat_s = now_s + config.clients.heartbeat_s
                    await self._send(LocalModelRequest(client_id, incarnation, self._context.run_id, round_id))
                await self._repair(upload, now_s)
                if not upload.is_over:  # something may have come meanwhile
                    await self._sleep_until(min(deadline_s, now_s + REPAIR_AFTER_S))
        finally:
            self._open = None
            if upload.key is not None:
                self._assembler.forget(upload.key)
        if upload.payload is None:
            return upload.failure or LATE
        finite = await self._context.compute.run(_is_finite, upload.payload)
        return upload.payload if finite else NOT_FINITE

    async def on_request(self, client_id: int, incarnation: int, request: UploadRequest) -> None:
        """A client offers its local model."""
        upload = self._open
        mine = (client_id, incarnation, request.round_id)
        if upload is None or mine != (upload.client_id, upload.incarnation, upload.round_id):
            await self._receipt(client_id, incarnation, request, NOT_WANTED)
            return
        if request.run_id != self._context.run_id or request.total_bytes != self._num_bytes:
            upload.failure = WRONG_SIZE
            await self._receipt(client_id, incarnation, request, WRONG_SIZE)
            self._changed()
            return
        if upload.payload is not None:
            await self._receipt(client_id, incarnation, request)
            return
        if upload.request is None or upload.request.transfer != request.transfer:
            if upload.key is not None:
                self._assembler.forget(upload.key)
            upload.request, upload.progress_s = request, time.monotonic()
            if self._context.bus.memory.here and is_here(request.memory):
                try:
                    payload = await self._context.compute.run(read, request.memory, request.total_bytes)
                except SharedMemoryFault as error:  # it is sent, like one of another machine
                    log.warning("no shared memory", client=client_id, reason=str(error))
                else:
                    await self._complete(upload, payload)
                    return
            if upload is self._open and upload.key is not None:
                self._assembler.expect(upload.key, max_bytes=self._num_bytes)
        await self._send(Grant(client_id, incarnation, request.round_id, request.transfer))

    async def on_frame(self, message: ClientUpdate) -> None:
        """A frame of a local model."""
        upload, frame = self._open, message.frame
        if upload is None or upload.is_over or frame.key != upload.key or frame.total_bytes != self._num_bytes:
            return
        try:
            verdict = self._assembler.feed(frame)
        except FrameError as error:
            log.warning("frame of a local model dropped", client=upload.client_id, reason=error.reason)
            return
        if verdict is not Verdict.REPEATED:
            upload.progress_s = time.monotonic()
        if verdict is Verdict.COMPLETE:
            await self._complete(upload, self._assembler.take(frame.key))

    async def _complete(self, upload: _Upload, payload: memoryview) -> None:
        upload.payload = payload
        if upload.request is not None:
            await self._receipt(upload.client_id, upload.incarnation, upload.request)
        self._changed()

    def on_result(self, client_id: int, result: EvaluationResult) -> None:
        """A client says why it does not show its model."""
        upload = self._open
        if result.run_id != self._context.run_id:
            return
        if upload is not None and (client_id, result.round_id) == (upload.client_id, upload.round_id):
            upload.failure = result.failure[:MAX_REASON_CHARS] or LATE
            self._changed()

    async def _repair(self, upload: _Upload, now_s: float) -> None:
        request, key = upload.request, upload.key
        if request is None or key is None or upload.is_over or now_s - upload.progress_s < REPAIR_AFTER_S:
            return
        me, missing = (upload.client_id, upload.incarnation), self._assembler.missing(key)
        upload.progress_s = now_s
        if missing is None:  # nothing of it has come: the grant may be lost
            await self._send(Grant(*me, upload.round_id, request.transfer))
        elif missing:
            await self._send(RetransmitRequest(*me, upload.round_id, request.transfer, list(missing)))

    async def _receipt(self, client_id: int, incarnation: int, request: UploadRequest, why: str = "") -> None:
        await self._send(
            Receipt(client_id, incarnation, request.run_id, request.round_id, request.transfer, not why, why)
        )

    async def _send(self, body: Body) -> None:
        with contextlib.suppress(BusError):  # the client, or this controller, repeats its request
            await self._context.publish(body)


def _is_finite(payload: memoryview) -> bool:
    return bool(np.isfinite(np.frombuffer(payload, dtype="<f4")).all())


class CrossSiteEvaluation:
    """Fills the table of a cross-site evaluation, row by row."""

    def __init__(
        self, context: RunContext, publisher: ModelPublisher, evaluator: ClientEvaluator, models: LocalModelReceiver
    ) -> None:  # fmt: skip
        self._context = context
        self._publisher = publisher
        self._evaluator = evaluator
        self._models = models
        self._late: Counter[int] = Counter()  # deadlines that each client has missed in a row

    async def run(self) -> CrossSite:
        """The global model and the local ones, each on the data of all clients that are here. A client that is lost
        has no further results, and nobody waits for it."""
        clients = self._evaluator.ready()
        limit = self._context.config.evaluation.cross_site_models
        rows = [await self._row(None, self._context.state.round_id, clients)]
        for client_id, round_id in zip(clients[:limit], CANDIDATE_ROUNDS, strict=False):
            # One that has just missed a deadline would cost another one here.
            payload = LATE if self._late[client_id] else await self._models.fetch(client_id, round_id)
            if isinstance(payload, str):
                log.warning("local model not evaluated", client=client_id, reason=payload)
                rows.append(CrossSiteRow(model=client_id, failure=payload))
                continue
            self._publisher.offer(round_id, payload)
            del payload
            try:
                rows.append(await self._row(client_id, round_id, clients))
            finally:
                await self._publisher.withdraw()
        return CrossSite(round_id=self._context.state.round_id, clients=tuple(clients), rows=tuple(rows))

    async def _row(self, model: int | None, round_id: int, clients: Sequence[int]) -> CrossSiteRow:
        asked = [client_id for client_id in clients if self._late[client_id] < MAX_LATE]
        found = await self._evaluator.evaluate(round_id, asked)
        self._note_late(found.failures, asked)
        row = found.row(model)
        gone = dict.fromkeys(set(clients).difference(asked), LATE)
        return row if not gone else CrossSiteRow(
            model=model, results=row.results, num_samples=row.num_samples,
            missing=dict(sorted({**row.missing, **gone}.items())),
        )  # fmt: skip

    def _note_late(self, failures: dict[int, str], asked: Collection[int]) -> None:
        for client_id in asked:
            self._late[client_id] = self._late[client_id] + 1 if failures.get(client_id) == LATE else 0
