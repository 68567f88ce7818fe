"""The rounds of a federated run within the loop of a trainer that knows nothing of them.

A trainer calls :meth:`FederatedRounds.begin` before its first batch, counts batches, steps and epochs, and asks
:meth:`FederatedRounds.is_due` at the end of each step and epoch. Where that is so, :meth:`FederatedRounds.advance`
sends what was trained and receives the next global model. This is the loop of a script::

    while fed.receive(model):
        train(...)
        fed.send(model, ...)

turned inside out: the first ``receive`` is in ``begin``, each later one directly behind its ``send``. So a trainer can
be stopped when the run has ended, before it begins another epoch, and what it validates or saves between two rounds is
the global model.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradbus.actors.federated.client.handover import TrainingRound
from gradbus.actors.federated.client.script_client import ScriptClient
from gradbus.actors.trainers.ranks import Ranks, Turn
from gradbus.actors.trainers.round_counts import RoundCounts, distinct_samples
from gradbus.runtime.errors import ConfigError, GradbusError, OutOfTurn
from gradbus.runtime.logs import get_logger

LAST_ROUND_S = 600.0  # for which a trainer that has come to its own end waits for the end of its last round
_LOOK_S = 0.5  # how often a wait for a round looks whether the trainer is to end

log = get_logger("client")

OptimizerState = Literal["keep", "reset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLength:
    """Tells how long a client trains in a round. Zeros: as the controller asks, steps where it names them, else epochs.

    Attributes:
        epochs: of the trainer. steps: of its optimizer; of both at most one.
    """

    epochs: int = 0
    steps: int = 0

    @classmethod
    def of_arguments(cls, every_n_epochs: int | None, every_n_steps: int | None) -> RoundLength:
        """Read it from the arguments of a callback. Raises ConfigError: both are given, or one is less than 1."""
        given = {"every_n_epochs": every_n_epochs, "every_n_steps": every_n_steps}
        named = {name: value for name, value in given.items() if value is not None}
        if len(named) > 1:
            raise ConfigError("every_n_epochs and every_n_steps are both given: a round ends by one of them")
        for name, value in named.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of 1 or more, got {value!r}")
        return cls(epochs=every_n_epochs or 0, steps=every_n_steps or 0)

    def is_reached(self, steps: int, epochs: int, asked: TrainingRound) -> bool:
        """Return whether a round with so many steps and epochs is over."""
        if self.steps or self.epochs:
            return steps >= self.steps > 0 or epochs >= self.epochs > 0
        return steps >= asked.steps if asked.steps else epochs >= asked.epochs


class FederatedRounds:
    """Follows the rounds of one run at a time for a trainer. All methods are for the trainer's thread.

    Attributes:
        sent: updates since :meth:`begin` that count, of this process.
        has_ended: whether the run has ended.
        is_interrupted: returns whether the trainer is to end as soon as it can, so that no round is waited for.
    """

    def __init__(
        self,
        open_client: Callable[[], ScriptClient],
        length: RoundLength,
        optimizer_state: OptimizerState = "keep",
        metrics: Sequence[str] | None = None,
    ) -> None:
        """No run yet.

        Args:
            open_client: returns a client that has not been entered; it is called by rank 0 alone, once for each run.
            length: of a round.
            optimizer_state: whether optimizers keep their state over the rounds, or begin each with that of the first.
            metrics: names of those that are sent; None: all numbers that the trainer has.

        Raises:
            ConfigError: ``optimizer_state`` is neither.
        """
        if optimizer_state not in ("keep", "reset"):
            raise ConfigError(f"optimizer_state must be 'keep' or 'reset', got {optimizer_state!r}")
        self._open_client = open_client
        self._length = length
        self._resets = optimizer_state == "reset"
        self._metrics = None if metrics is None else frozenset(metrics)
        self._client: ScriptClient | None = None
        self._ranks = Ranks()
        self._round: TrainingRound | None = None
        self._optimizers: list[tuple[Optimizer, dict[Tensor, Any]]] = []
        self._first_step = 0
        self.is_interrupted: Callable[[], bool] = lambda: False
        self.counts = RoundCounts()
        self.sent = 0
        self.has_ended = False

    @property
    def round(self) -> TrainingRound:
        """Return what the controller asks for in this round. Raises OutOfTurn: there is none."""
        if self._round is None:
            raise OutOfTurn("there is no round now: the first one begins when the trainer does")
        return self._round

    @property
    def is_running(self) -> bool:
        """Whether there is a round that is trained."""
        return self._round is not None

    def begin(self, model: nn.Module, optimizers: Iterable[Optimizer], *, step: int, ranks: Ranks) -> bool:
        """Join the run and load its model.

        Args:
            model: on its device. optimizers: of the trainer.
            step: optimizer steps that the trainer has made so far. ranks: that train together.

        Returns:
            False: the run has ended already.

        Raises:
            ConfigError: the model is spread over the ranks. And what :meth:`.ScriptClient.receive` raises.
        """
        self.leave()
        check_whole(model)
        self._ranks, self.sent, self.has_ended = ranks, 0, False
        self._optimizers = [(one, _fresh_state(one)) for one in optimizers] if self._resets else []
        self.counts = RoundCounts()

        def join() -> Turn:
            self._client = self._open_client().__enter__()
            return self._receive(model, None)

        try:
            return self._take(ranks.lead(join, model), step)
        except BaseException as error:
            self.leave(error)
            raise

    def is_due(self, step: int) -> bool:
        """Return whether the round ends here, after so many steps of the trainer; it has trained in it."""
        steps = step - self._first_step
        if self._round is None or not self.counts.batches:
            return False
        return self._length.is_reached(steps, self.counts.epochs, self._round)

    @property
    def is_unwanted(self) -> bool:
        """Whether this round is over without this client, so that the next one is to be received now. Of several ranks
        none knows that before the end of its round."""
        alone = self._client is not None and self._ranks.world == 1
        return alone and self._round is not None and self._client is not None and self._client.should_stop

    def advance(
        self,
        model: nn.Module,
        metrics: Mapping[str, Any],
        *,
        step: int,
        dataset: int | None = None,
        loss: float | None = None,
        is_last: bool = False,
    ) -> bool:
        """Send what was trained in this round, unless it is unwanted, and load the model of the next one.

        Args:
            metrics: that the trainer knows; those that are single numbers are sent. step: as of :meth:`is_due`.
            dataset: samples in all; None: unknown. loss: mean training loss, in place of what was counted.
            is_last: the trainer ends by itself now, so that the next round is not waited for without a limit.

        Returns:
            Whether there is a next round. The trainer is to stop otherwise.
        """
        samples, epoch, total, weight = self._ranks.add(self.counts.totals(), model)
        loss = total / weight if loss is None and weight else loss
        distinct = distinct_samples(int(samples), int(epoch), self.counts.epochs, dataset)
        named = numbers_of(metrics, self._metrics)

        def send_and_receive() -> Turn:
            assert self._client is not None
            if not self._client.should_stop:
                self.sent += self._client.send(model, samples=distinct, loss=loss, metrics=named)
            return self._receive(model, LAST_ROUND_S if is_last else None)

        return self._take(self._ranks.lead(send_and_receive, model), step)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run, if it has one. ``error``: why."""
        client, self._client, self._round = self._client, None, None
        self._optimizers = []
        if client is not None:
            client.__exit__(None if error is None else type(error), error, None)

    def abandon(self) -> None:
        """Leave the run without waiting for anything, on any thread."""
        client, self._client, self._round = self._client, None, None
        if client is not None:
            client.abandon()

    def stop(self, remedy: str) -> None:
        """Leave the run because the trainer has come to an end. If that is before the run's, log it, with what to do
        about it."""
        client, was_running = self._client, self._client is not None and not self.has_ended
        self.leave()
        if was_running and client is not None:
            log.warning(
                "the trainer has ended before the run",
                client=client.client_id,
                job=client.job,
                rounds=self.sent,
                effect="the client has left, and the run goes on without it",
                remedy=remedy,
            )

    def _receive(self, model: nn.Module, timeout_s: float | None) -> Turn:
        assert self._client is not None
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return Turn(self._client.round if self._client.receive(model, timeout_s=_LOOK_S) else None)
            except TimeoutError as error:
                if isinstance(error, GradbusError):  # there is no controller
                    raise
                if self.is_interrupted() or time.monotonic() >= until_s:
                    return Turn(None, str(error))

    def _take(self, turn: Turn, step: int) -> bool:
        self._round, self.has_ended = turn.round, turn.round is None and not turn.why
        self._first_step = step
        self.counts.start()
        for optimizer, state in self._optimizers if turn.round is not None else ():
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
        return turn.round is not None


def numbers_of(metrics: Mapping[str, Any], names: frozenset[str] | None) -> dict[str, float]:
    """Return the metrics with these names that are single numbers. ``names``: None for all."""
    found = {}
    for name, value in metrics.items():
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and (names is None or name in names):
            found[name] = float(value)
    return found


def check_whole(model: nn.Module) -> None:
    """Raises ConfigError: the parameters are spread over several ranks, so that no rank has the whole model."""
    for name, parameter in model.named_parameters():
        is_sharded = (
            isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") or hasattr(parameter, "_fsdp_flattened")
        )
        if is_sharded:
            raise ConfigError(
                f"the parameter {name!r} is spread over several ranks, as with FSDP, DeepSpeed or tensor parallelism: "
                f"no rank has the whole model to exchange. Train on one device, or with DistributedDataParallel"
            )


def _fresh_state(optimizer: Optimizer) -> dict[Tensor, Any]:
    """The state that the optimizer has before its first step, as Adagrad; of one that has made steps, as after the
    trainer has resumed, none."""
    state = dict(optimizer.state)
    has_stepped = any(float(one.get("step", 1)) > 0 for one in state.values() if isinstance(one, dict))
    return {} if has_stepped else _copied(state)


def _copied(state: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
    """The state with copies of its values, for the same parameters."""
    return {
        parameter: {key: _copy(value) for key, value in values.items()} if isinstance(values, Mapping) else values
        for parameter, values in state.items()
    }


@torch.no_grad()
def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
