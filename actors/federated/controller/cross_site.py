"""Cross-site evaluation, on the controller's side: each client's local model on the data of all clients.

One local model after the other comes to the controller, as an update does, and goes to the clients, as a model does; no
more than one is in memory at a time. A client that has not agreed keeps its model, and its row has the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.clients import ClientRegistry
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.evaluation import LATE, LOST, MAX_REASON_CHARS, CrossSite, CrossSiteRow
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.uploads import REPEATED, UNEXPECTED, IncomingUpload, RequestedUpload, Uploads
from gradbus.actors.federated.protocol import PAUSED
from gradbus.runtime.errors import BusError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here, read
from gradbus.runtime.wire.control import (
    CANDIDATE_ROUNDS,
    Body,
    EvaluationResult,
    LocalModelRequest,
    UploadRequest,
)
from gradbus.runtime.wire.messages import ClientUpdate

MAX_LATE = 2  # deadlines that one client may miss in a row before it is asked no more
NOT_WANTED = "this model is not wanted now"
WRONG_SIZE = "its model has another size than the global one"
NOT_FINITE = "its model is not finite"

log = get_logger("controller")


@dataclass(slots=True, eq=False)
class _Wanted:
    """The local model that is fetched. ``upload``: once its client offers it. ``failure``: why it will not come."""

    client_id: int
    incarnation: int
    round_id: int
    upload: IncomingUpload | None = None
    failure: str = ""

    @property
    def payload(self) -> memoryview | None:
        return None if self.upload is None else self.upload.payload


class LocalModelReceiver:
    """Receives local models, one at a time. All methods are called on the loop."""

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        current_round: CurrentRound,
        *,
        dim: int,
    ) -> None:
        """``current_round``: wakes whoever waits. ``dim``: of the model."""
        self._context = context
        self._registry = registry
        self._num_bytes = 4 * dim
        self._current_round = current_round
        self._uploads: Uploads[IncomingUpload] = Uploads(self._send)
        self._wanted: _Wanted | None = None

    async def fetch(self, client_id: int, round_id: int) -> memoryview | str:
        """The local model of a client, float32 in D values, or why there is none. ``round_id``: of the upload."""
        incarnation = self._registry.incarnation_of(client_id)
        if incarnation is None:
            return LOST
        if client_id in self._registry.paused_ids():
            return PAUSED
        wanted = self._wanted = _Wanted(client_id, incarnation, round_id)
        try:
            is_here = await self._arrived(wanted)
        finally:
            self._wanted = None
            if wanted.upload is not None:
                self._uploads.drop(wanted.upload.key)
        if not is_here or wanted.upload is None or wanted.payload is None:
            return wanted.failure or LATE
        await self._send(wanted.upload.source.receipt())
        finite = await self._context.compute.run(_is_finite, wanted.payload)
        return wanted.payload if finite else NOT_FINITE

    async def _arrived(self, wanted: _Wanted) -> bool:
        """Request it until it is here; False: it will not come, or not in time."""
        config, client_id = self._context.config, wanted.client_id
        repeat_s = time.monotonic()
        deadline_s = repeat_s + config.evaluation.timeout_s
        while wanted.payload is None and not wanted.failure and (now_s := time.monotonic()) < deadline_s:
            here = self._registry.taking_part(self._context.state.round_id + 1)
            if client_id not in here or self._registry.get(client_id, wanted.incarnation) is None:
                wanted.failure = PAUSED if client_id in self._registry.paused_ids() else LOST
                return False
            if wanted.upload is None and now_s >= repeat_s:
                repeat_s = now_s + config.clients.heartbeat_s
                await self._send(
                    LocalModelRequest(client_id, wanted.incarnation, self._context.run_id, wanted.round_id)
                )
            if wanted.upload is not None and wanted.upload.in_memory:
                await self._read(wanted.upload, deadline_s - now_s)
            stalled = await self._uploads.repair()
            if wanted.upload in stalled:
                wanted.upload = None  # its client offers it again
            if wanted.payload is None and not wanted.failure:  # something may have come meanwhile
                await self._current_round.sleep_until(min(deadline_s, now_s + 2 * self._uploads.repair_period_s))
        return wanted.payload is not None and not wanted.failure

    async def _read(self, upload: IncomingUpload, timeout_s: float) -> None:
        """Take a model where it lies in its client's memory, or have it sent. Not where messages are handled: they
        would wait for the thread, too."""
        request = upload.request
        try:
            async with asyncio.timeout(timeout_s):
                upload.hold(await self._context.compute.run(read, request.memory, request.total_bytes))
        except TimeoutError:
            pass  # the deadline is over, which its caller sees
        except SharedMemoryFault as error:  # it is sent, like one of another machine
            log.warning("no shared memory", **self._context.client_facts(upload.source.client_id), reason=str(error))
            upload.fall_back_to_frames()
            if self._wanted is not None and self._wanted.upload is upload:  # else its client offers another one
                await self._uploads.grant(upload)

    async def on_request(self, client_id: int, incarnation: int, request: UploadRequest) -> None:
        """A client offers its local model."""
        wanted, source = self._wanted, RequestedUpload(client_id, incarnation, request)
        if (
            wanted is None
            or source[:2] != (wanted.client_id, wanted.incarnation)
            or (request.round_id != wanted.round_id)
        ):
            await self._send(source.receipt(NOT_WANTED))
            return
        if request.run_id != self._context.run_id or request.total_bytes != self._num_bytes:
            wanted.failure = WRONG_SIZE
            await self._send(source.receipt(WRONG_SIZE))
            self._current_round.notify()
            return
        if wanted.upload is not None and wanted.upload.source.repeats(source):
            return
        if wanted.upload is not None:
            self._uploads.drop(wanted.upload.key)
        in_memory = bool(self._context.bus.memory.here) and is_here(request.memory)
        wanted.upload = IncomingUpload(source, time.monotonic(), in_memory)
        if in_memory:
            self._current_round.notify()  # and it is read
        else:
            await self._uploads.grant(wanted.upload)

    async def on_frame(self, message: ClientUpdate) -> None:
        """A frame of a local model."""
        try:
            if self._uploads.feed(message) is not None:
                self._current_round.notify()
        except FrameError as error:
            if error.reason not in (UNEXPECTED, REPEATED):  # which any network may bring
                log.warning(
                    "frame of a local model dropped",
                    **self._context.client_facts(message.client_id),
                    reason=error.reason,
                )

    def on_result(self, client_id: int, result: EvaluationResult) -> None:
        """A client says why it does not show its model."""
        wanted = self._wanted
        if result.run_id != self._context.run_id:
            return
        if wanted is not None and (client_id, result.round_id) == (wanted.client_id, wanted.round_id):
            wanted.failure = result.failure[:MAX_REASON_CHARS] or LATE
            self._current_round.notify()

    async def _send(self, body: Body) -> None:
        with contextlib.suppress(BusError):  # the client, or this controller, repeats its request
            await self._context.publish(body)


def _is_finite(payload: memoryview) -> bool:
    return bool(np.isfinite(np.frombuffer(payload, dtype="<f4")).all())


class CrossSiteEvaluation:
    """Fills the table of a cross-site evaluation, row by row."""

    def __init__(
        self, context: RunContext, publisher: ModelPublisher, evaluator: ClientEvaluator, models: LocalModelReceiver
    ) -> None:
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
                write = log.info if payload == PAUSED else log.warning
                write("local model not evaluated", **self._context.client_facts(client_id), reason=payload)
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
        return (
            row
            if not gone
            else CrossSiteRow(
                model=model,
                results=row.results,
                num_samples=row.num_samples,
                missing=dict(sorted({**row.missing, **gone}.items())),
            )
        )

    def _note_late(self, failures: dict[int, str], asked: Collection[int]) -> None:
        for client_id in asked:
            self._late[client_id] = self._late[client_id] + 1 if failures.get(client_id) == LATE else 0
