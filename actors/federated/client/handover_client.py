"""The client of a script: a Client whose task has the script train, on the script's own thread and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.client_observer import ClientObserver
from gradbus.actors.federated.client.client_rounds import Outbox
from gradbus.actors.federated.client.client_run import ClientRun, Prepared
from gradbus.actors.federated.client.handover import RoundHandover, ScriptResult, TrainingRound
from gradbus.actors.federated.client.pacing import ScriptBudget
from gradbus.actors.federated.client.session import ClientContext
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import TrainCmd


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
        self,
        model: nn.Module,
        *,
        client_id: int,
        round_id: int,
        epochs: int,
        lr: float,
        seed: int,
        subset_size: int,
        should_stop: Callable[[], bool],
        steps: int = 0,
    ) -> ScriptResult:
        """Have the script train. Raises ScriptLeft: it has left its client."""
        offered = TrainingRound(
            round_id=round_id, epochs=epochs, lr=lr, steps=steps, seed=seed, subset_size=subset_size
        )
        return self._handover.train(offered, should_stop)

    def evaluate(self, model: nn.Module) -> None:
        """Return None: the controller evaluates with a task of its own."""


class NotWanted(Exception):
    """The round is over before the script has asked for it."""


class HandoverClient(Client):
    """Takes part in a run for a script, which trains whenever it comes to it."""

    _budget_kind = ScriptBudget

    def __init__(
        self,
        bus: Bus,
        task: HandoverTask,
        handover: RoundHandover,
        *,
        client_id: int | None,
        name: str,
        config: ClientConfig,
        callbacks: Sequence[Any] = (),
    ) -> None:
        super().__init__(bus, task, client_id=client_id, name=name, config=config, callbacks=callbacks)
        self._handover = handover

    def wake(self) -> None:
        """Look again at whether the script waits for a round."""
        self._changed.set()

    def note_failure(self, error: Exception) -> None:
        """Take the error of the script as the reason why this client leaves."""
        self._failures.leave_with(error)

    def _make_model(self) -> FlatModel:
        return FlatModel(self._task.build_model())  # which cannot be built again

    def _make_run(self, context: ClientContext, prepared: Prepared) -> HandoverRun:
        return HandoverRun(context, prepared, self._outbox, self._observer, self._handover)

    def load_newest(self) -> int:
        """Load the newest global model into the script's own, once the client has ended. Called on the thread of the
        script. Returns its round; -1: none has arrived."""
        if (newest := self._observer.newest) is None:
            return -1
        model = self._run.model
        model.arrange(Sharing.of_welcome(newest.welcome))  # no round may have done so: the run was over before
        model.hold(newest.vector, model.buffers.unpack(newest.buffers))
        return newest.round_id


class HandoverRun(ClientRun):
    """The part of a script's client in a run."""

    def __init__(
        self,
        context: ClientContext,
        prepared: Prepared,
        outbox: Outbox,
        observer: ClientObserver,
        handover: RoundHandover,
    ) -> None:
        super().__init__(context, prepared, outbox, observer)
        self._handover = handover
        self._is_unwanted = False

    def _on_controller(self, session: int, body: Any) -> None:
        try:
            super()._on_controller(session, body)
        except Exception:  # what ends this client: the script may train for long, and is not waited for
            self._handover.end()
            raise

    def _wants_last_model(self, welcome: Welcome) -> bool:
        return self.summary.rounds > 0 or super()._wants_last_model(welcome)

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> None:
        before = self.summary.rounds
        try:
            await super()._train_and_send(welcome, command, base)
        finally:
            self._handover.answer(self.summary.rounds > before)

    async def _make_update(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> EncodedUpdate:
        self._is_unwanted = not await self._wait_for_script(command)
        if self._is_unwanted:
            raise NotWanted(f"round {command.round_id} is not wanted any more")
        return await super()._make_update(welcome, command, base)

    async def _wait_for_script(self, command: TrainCmd) -> bool:
        """Wait until the script has done with the model; whether the round is still wanted then."""
        context, current, session = self._context, self._session, self._session.incarnation
        while not self._handover.claim():
            self._changed.clear()
            is_same = session == current.incarnation and not current.is_superseded(command)
            if not is_same or self._status.is_paused or not current.may_take_part(context.client_id, command):
                return False
            if self._handover.claim():
                break
            await self._wait(context.config.controller_timeout_s)
        return True

    def _is_called_off(self) -> bool:
        return self._is_unwanted or super()._is_called_off()
