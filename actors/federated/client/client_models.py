"""The models that a client holds, and how it gets one that it lacks.

Models come by themselves as they are published, as frames or in the controller's memory. One that is needed and does
not come is requested. A client that is not chosen for each round receives them only while it needs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from torch import Tensor

from gradbus.actors.federated.client.global_model import ModelReplica, SharedModelReader, kind_of_model
from gradbus.actors.federated.client.session import ClientContext, listen
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.named_model import ArrivedModel
from gradbus.actors.federated.model.sharing import Shape
from gradbus.actors.federated.request_patience import RequestPatience
from gradbus.codecs import Codec
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import (
    FETCHING_PHASE,
    FROZEN_ROUND,
    EvaluationRequest,
    ModelAvailable,
    ModelRequest,
    Welcome,
)
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import Message, ModelBlob

FIRST_MODEL_S = 1.0  # so long a reader that was just made may take to be found, and to be sent what is kept for it

log = get_logger("client")


class ModelFollower(Protocol):
    """Is given the models of a client, on the loop."""

    @property
    def follows_models(self) -> bool:
        """Return whether it needs each of them, also those of rounds in which the client takes no part."""

    def queue_model(self, model: ArrivedModel) -> None:
        """Take a model after a round; it may be the one that it has had last."""


class FrozenParameters(Protocol):
    """Takes the parameters that no round changes. Both methods are called on a compute thread."""

    def lacks_frozen(self, welcome: Welcome) -> bool:
        """Return whether the model needs the frozen parameters of the Controller."""

    def take_frozen(self, welcome: Welcome, vector: Tensor) -> None:
        """Put them into its model."""


class ClientModels:
    """The models of one client. All methods are called on the loop.

    Attributes:
        replica: the newest model after a round. shape: of what the present run exchanges.
    """

    def __init__(
        self,
        context: ClientContext,
        model: FlatModel,
        frozen: FrozenParameters,
        own: Sequence[type[Codec]],
        *,
        wait: Callable[[float], Awaitable[None]],
        follower: ModelFollower | None = None,
    ) -> None:
        """No models yet.

        Args:
            model: says how many values models have, before a controller says more.
            frozen: takes what no round changes. own: codecs that are not built in, in which models may come.
            wait: waits until something has changed, at most for so many seconds; raises BarrierTimeout.
            follower: is given each model after a round; None: nobody follows them.
        """
        self._context = context
        self._name = f"client-{context.client_id}"
        self._frozen_parameters = frozen
        self._frozen_known = (0, 0)  # session and hash of frozen parameters that are in the model
        self.shape = Shape(dim=model.dim, layout=model.layout, frozen_dim=model.frozen_dim)
        self._wait = wait
        self._follower = follower
        self._decode = ComputeThread(f"{self._name}-decode")  # a model may come while the old one still trains
        policy, memory = context.bus.access_policy, context.bus.memory
        self.replica = ModelReplica(model.dim, probe=context.probe, access_policy=policy, own=own)
        self._frozen = ModelReplica(model.frozen_dim, access_policy=policy, kind="frozen")
        self._candidate = ModelReplica(model.dim, access_policy=policy, kind="candidate", own=own)
        self._memory = SharedModelReader(memory, self.replica, self._decode, context.client_id)
        self._receiving: asyncio.Task[None] | None = None
        self._group = context.group
        self._patience = RequestPatience()

    @property
    def memory_here(self) -> str:
        """The machine whose memory this client reads models from; empty: none."""
        return self._memory.here

    def start(self, welcome: Welcome, shape: Shape, buffer_bytes: int) -> None:
        """Follow another controller, or another start of it. Drops the models so far. ``buffer_bytes``: the longest
        block of merged buffers that may end one; 0: none does."""
        self.receive(self.receives_all(welcome))
        self.shape = shape
        session = self._context.session.incarnation
        self.replica.start(welcome.run_id, session, shape.dim, welcome.broadcast, buffer_bytes=buffer_bytes)
        self._frozen.start(0, 0)  # followed only once it is needed
        self._candidate.start(0, 0)
        self._memory.start()

    def end(self) -> None:
        """The run is over, and the controller releases its memory."""
        self._memory.end()

    async def settle(self) -> None:
        """Wait for running reads, for a second at most."""
        await self._memory.settle()

    def close(self) -> None:
        """End the thread. What it does is finished."""
        self._decode.close()

    # What comes by itself

    def receive(self, wanted: bool) -> None:
        """Receive models from now on, or not any more."""
        if wanted and self._receiving is None:
            inbox = self._context.bus.subscribe(ModelBlob, passing=True)
            self._receiving = self._group.create_task(listen(inbox, self._on_message), name=f"{self._name}-models")
            self._receiving.add_done_callback(lambda _: inbox.close())
        elif not wanted and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _on_message(self, message: Message) -> None:
        if not isinstance(message, ModelBlob):
            return
        kind = kind_of_model(message.round_id)
        replica = {"round": self.replica, "frozen": self._frozen, "candidate": self._candidate}[kind]
        before_s = replica.progress_s
        complete = replica.feed(message)
        if replica.progress_s != before_s:
            self._patience.note_frame(replica.progress_s)
        if complete is not None:
            self._group.create_task(self._adopt(*complete, replica), name=f"{self._name}-model")

    async def _adopt(self, key: FrameKey, payload: memoryview, replica: ModelReplica) -> None:
        if replica.adopt(key, await self._decode.run(replica.decode, key, payload)):
            self._note_adopted(replica)

    def on_notice(self, session: int, notice: ModelAvailable) -> None:
        """A model can be read in memory: that is done now, or when it is needed."""
        if self._receiving is None:
            self._memory.put_off(session, notice)
        elif (key := self._memory.expect(session, notice)) is not None:
            self._memory.note(self._group.create_task(self._read(key, notice), name=f"{self._name}-model"))

    async def _read(self, key: FrameKey, notice: ModelAvailable) -> None:
        await self._memory.take(key, notice)
        self._note_adopted(self.replica)
        if not self._memory.here:
            await self._context.heartbeat.send_hello()  # so that it is not counted on

    def _note_adopted(self, replica: ModelReplica) -> None:
        vector, welcome = replica.vector, self._context.session.welcome
        if self._follower is not None and replica is self.replica and vector is not None and welcome is not None:
            self._follower.queue_model(ArrivedModel(replica.round_id, vector, replica.buffers, welcome))
        self._context.changed.set()

    def receives_all(self, welcome: Welcome) -> bool:
        """Whether models come by themselves, also those of rounds in which this client takes no part."""
        return not welcome.fetch_models or (self._follower is not None and self._follower.follows_models)

    # What is needed

    async def fetch_round(self, welcome: Welcome, round_id: int, superseded: Callable[[], bool]) -> None:
        """Fetch the model after this round, or a later one, until it is here or superseded."""
        if self.receives_all(welcome):
            await self.fetch(welcome, self.replica, round_id, superseded)
            return
        if (newest := self._memory.expect_newest()) is not None:
            await self._read(*newest)
            if self.replica.round_id >= round_id:
                return
        self.receive(True)
        try:
            await self.fetch(welcome, self.replica, round_id, superseded, first_after_s=FIRST_MODEL_S)
        finally:
            self.receive(False)

    async def lacks_frozen(self, welcome: Welcome) -> bool:
        """Return whether this client needs the Controller's frozen parameters. Each Welcome decides it once, and each
        failure of the task again."""
        key = (self._context.session.incarnation, welcome.frozen)
        if welcome.frozen and key != self._frozen_known:
            if await self._context.compute.run(self._frozen_parameters.lacks_frozen, welcome):
                return True
            self._frozen_known = key
        return False

    def check_frozen_again(self) -> None:
        """Have :meth:`lacks_frozen` look again: what the task did to the module may have changed them."""
        self._frozen_known = (0, 0)

    async def fetch_frozen(self, welcome: Welcome) -> None:
        """Fetch the controller's frozen parameters, and put them into the model."""
        session = self._context.session
        incarnation = session.incarnation
        self.receive(True)
        self._frozen.start(welcome.run_id, incarnation, self.shape.frozen_dim)
        await self.fetch(
            welcome, self._frozen, FROZEN_ROUND, lambda: not session.is_current(incarnation), first_after_s=0.0
        )
        self.receive(self.receives_all(welcome))
        vector = self._frozen.vector
        if vector is not None:
            await self._context.compute.run(self._frozen_parameters.take_frozen, welcome, vector)
            self._frozen.start(0, 0)  # it is in the model: a second copy is of no use
            log.info(
                "frozen parameters taken from the controller", client=self._context.client_id, values=vector.numel()
            )

    async def fetch_evaluated(self, welcome: Welcome, request: EvaluationRequest) -> Tensor | None:
        """Fetch the model of a request to evaluate, float32, shape (D,); None: it is no longer wanted."""
        session, round_id = self._context.session, request.round_id
        incarnation = session.incarnation

        def superseded() -> bool:
            return not session.wants_result(request, incarnation)

        if await self.lacks_frozen(welcome):
            await self.fetch_frozen(welcome)
        if kind_of_model(round_id) == "candidate":
            return await self._fetch_candidate(welcome, round_id, superseded)
        if self.replica.round_id < round_id:
            await self.fetch_round(welcome, round_id, superseded)
        return self.replica.vector if self.replica.round_id == round_id else None

    async def _fetch_candidate(self, welcome: Welcome, round_id: int, superseded: Callable[[], bool]) -> Tensor | None:
        """Fetch a model that is only evaluated. None: it is no longer wanted."""
        self.receive(True)
        try:
            self._candidate.start(welcome.run_id, self._context.session.incarnation, self.shape.dim)
            await self.fetch(welcome, self._candidate, round_id, superseded, first_after_s=0.0)
            return self._candidate.vector if self._candidate.round_id == round_id else None
        finally:
            self._candidate.start(0, 0)
            self.receive(self.receives_all(welcome))

    async def fetch(
        self,
        welcome: Welcome,
        replica: ModelReplica,
        round_id: int,
        superseded: Callable[[], bool],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Wait until the replica has the model of this round, or that is superseded, and request it while nothing of
        it arrives, for the first time after so many seconds (0: it is sent on request only; None: as frames have been
        late so far). Raises BarrierTimeout: no controller for too long."""
        context, patience = self._context, self._patience
        context.status.set(FETCHING_PHASE)
        patience.begin(time.monotonic(), first_after_s)
        while replica.round_id < round_id and not superseded():
            context.changed.clear()
            if (due_in_s := patience.due_in_s(time.monotonic())) <= 0:
                patience.note_request(time.monotonic())
                transfer, seqs = replica.missing(round_id)
                with contextlib.suppress(BusError):
                    await context.publish(ModelRequest(welcome.run_id, round_id, transfer, seqs))
            else:
                await self._wait(due_in_s)
        patience.end()
        context.status.set("idle")
