"""The client of a script: a Client whose task has the script train, on the script's own thread and model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gradbus.actors.federated.client import Client
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.handover import RoundHandover, ScriptResult, TrainingRound
from gradbus.actors.federated.updates_out import EncodedUpdate
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.logs import get_logger
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import TrainCmd

LAST_MODEL_S = 1.5  # for which the end of a run waits for its last model; the controller waits 2 s for its clients

log = get_logger("client")


class HandoverTask:
    """The task of a script: its model, which is trained by the script.

    The module is the script's own and no copy of it, so that training rules see the steps of its optimizers.
    """

    def __init__(self, model: nn.Module, handover: RoundHandover) -> None:
        self.model = model
        self._handover = handover

    def build_model(self) -> nn.Module:
        """Return the model of the script."""
        return self.model

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Do nothing: the script has its data."""

    def train(  # noqa: PLR0913 - the signature of a task
        self, model: nn.Module, *, client_id: int, round_id: int, epochs: int, lr: float, seed: int, subset_size: int,
        should_stop: Callable[[], bool], steps: int = 0,
    ) -> ScriptResult:  # fmt: skip
        """Have the script train. Raises ScriptLeft: it has left its client."""
        offered = TrainingRound(
            round_id=round_id, epochs=epochs, lr=lr, steps=steps, seed=seed, subset_size=subset_size
        )  # fmt: skip
        return self._handover.train(offered, should_stop)

    def evaluate(self, model: nn.Module) -> None:
        """Return None: the controller evaluates with a task of its own."""


class NotWanted(Exception):
    """The round is over before the script has asked for it."""


class HandoverClient(Client):
    """Takes part in a run for a script, which trains whenever it comes to it."""

    def __init__(
        self, bus: Bus, task: HandoverTask, handover: RoundHandover, *, client_id: int | None, name: str,
        config: ClientConfig,
    ) -> None:  # fmt: skip
        super().__init__(bus, task, client_id=client_id, name=name, config=config)
        self._handover = handover
        self._is_unwanted = False

    def wake(self) -> None:
        """Look again at whether the script waits for a round."""
        self._changed.set()

    def note_failure(self, error: Exception) -> None:
        """Take the error of the script as the reason why this client leaves."""
        self._leaving = f"failed: {self._early_failures.summary(error)}"

    def load_last_model(self) -> None:
        """Load the newest global model that has arrived, on the script's thread, once this client has ended."""
        replica = self._models.replica
        if replica.vector is not None:
            self._model.hold(replica.vector, self._model.buffers.unpack(replica.buffers))

    def _on_controller(self, session: int, body: Any, group: TaskGroup) -> None:
        try:
            super()._on_controller(session, body, group)
        except Exception:  # what ends this client: the script may train for long, and is not waited for
            self._handover.end()
            raise

    async def _work(self, group: TaskGroup) -> None:
        await super()._work(group)
        await self._fetch_last_model()

    async def _fetch_last_model(self) -> None:
        """Fetch the model that the run has ended with, if this client has taken part, within ``LAST_MODEL_S``."""
        current = self._session
        welcome, command = current.welcome, current.command
        if welcome is None or command is None or not self._rounds:
            return
        try:
            async with asyncio.timeout(LAST_MODEL_S):
                await self._models.fetch_round(welcome, command.round_id, lambda: False)
        except TimeoutError:  # BarrierTimeout among them
            log.warning(
                "the last model has not arrived", **self._facts, round=command.round_id, waited_s=LAST_MODEL_S,
                effect="the model of the script holds an earlier round", remedy="the controller's checkpoint has it",
            )  # fmt: skip

    def _flat_model(self) -> FlatModel:
        return FlatModel(self._task.build_model())  # which cannot be built again

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor, group: TaskGroup) -> None:
        before = self._rounds
        try:
            await super()._train_and_send(welcome, command, base, group)
        finally:
            self._handover.answer(self._rounds > before)

    async def _make_update(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> EncodedUpdate:
        self._is_unwanted = not await self._wait_for_script(command)
        if self._is_unwanted:
            raise NotWanted(f"round {command.round_id} is not wanted any more")
        return await super()._make_update(welcome, command, base)

    async def _wait_for_script(self, command: TrainCmd) -> bool:
        """Wait until the script has done with the model; whether the round is still wanted then."""
        current, session = self._session, self._session.incarnation
        while not self._handover.claim():
            self._changed.clear()
            is_same = session == current.incarnation and not current.superseded(command)
            if not is_same or not current.takes_part(self.client_id, command):
                return False
            if self._handover.claim():
                break
            await self._wait(self._config.controller_timeout_s)
        return True

    def _is_called_off(self) -> bool:
        return self._is_unwanted or super()._is_called_off()
