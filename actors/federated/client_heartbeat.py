"""A client's heartbeat: Hello, with all that the controller has to know of it."""

from __future__ import annotations

import contextlib

from gradbus.actors.federated.client_status import Phase
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.model_replica import ModelCopy
from gradbus.actors.federated.session import LISTENED_S, Orders
from gradbus.actors.federated.shared_model_reader import ModelMemory
from gradbus.actors.federated.update_sender import REPEAT_AFTER_S, Delivery
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BarrierTimeout, BusError
from gradbus.runtime.wire.control import PROTOCOL, Hello, Leave
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, ModelBlob, TrainCmd, process_name


class Greeting:
    """Says that a client lives, what it does, and what it holds; and that it leaves.

    Attributes:
        prepared: the task has loaded its data: from then on the client may be ready.
    """

    def __init__(
        self, bus: Bus, identity: Identity, orders: Orders, phase: Phase, delivery: Delivery, *, model: FlatModel,
        copy: ModelCopy, memory: ModelMemory,
    ) -> None:  # fmt: skip
        """All that it tells of."""
        self._bus = bus
        self._identity = identity
        self._orders = orders
        self._phase = phase
        self._delivery = delivery
        self._model = model
        self._copy = copy
        self._memory = memory
        self._left = False  # it has said Leave, or is about to
        self.prepared = False

    async def hello(self) -> None:
        """Say it now."""
        if self._left:
            return  # the controller would take it for one that has come back
        orders = self._orders
        ready = self.prepared and self._bus.matched_readers(ClientUpdate) > 0
        ready = ready and min(self._bus.matched_writers(kind) for kind in (TrainCmd, ModelBlob)) > 0
        phase, phase_s = self._phase.said(self._delivery.phase)
        hello = Hello(
            protocol=PROTOCOL, dim=self._model.everything[0], layout=self._model.everything[1], ready=ready,
            session=orders.session if orders.welcome is not None else 0, phase=phase, phase_s=phase_s,
            round_id=orders.command.round_id if orders.command is not None else -1, model_round=self._copy.round_id,
            host=process_name(), memory=self._memory.here,
            next_round=-1 if orders.from_round is None else orders.from_round,
            trained_dim=self._model.trained[0], trained_layout=self._model.trained[1],
        )  # fmt: skip
        with contextlib.suppress(BusError):  # said again with the next heartbeat
            await self._bus.publish(self._identity, hello)
            if orders.failure is not None:
                await self._bus.publish(self._identity, orders.failure)

    async def beat(self) -> None:
        """Say it again and again, at once when something about the matching changes. Runs until cancelled."""
        while True:
            await self.hello()
            welcome = self._orders.welcome
            heartbeat_s = welcome.heartbeat_s if welcome is not None else REPEAT_AFTER_S
            self._orders.listen(max(LISTENED_S, 2 * heartbeat_s))
            seen = self._matching()
            with contextlib.suppress(BarrierTimeout):
                await self._bus.matched(lambda: self._matching() != seen, timeout_s=heartbeat_s)  # noqa: B023 - awaited here

    def _matching(self) -> tuple[int, ...]:
        bus = self._bus
        return bus.matched_readers(ClientUpdate), *map(bus.matched_writers, (TrainCmd, ModelBlob, Control))

    async def leave(self, reason: str) -> None:
        """The client goes: its last word."""
        self._left = True
        with contextlib.suppress(BusError):
            await self._bus.publish(self._identity, Leave(reason))
