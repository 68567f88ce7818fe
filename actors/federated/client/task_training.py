"""The training of a round at its client: the task's ``train`` on the module, with the rule of the run, within the
budget, and what it must leave as it was. On the compute thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradbus.actors.federated.client.client_optimizer import optimizer_argument, steps_argument, takes_round
from gradbus.actors.federated.client.client_state import OF_OPTIMIZER, OF_OWN_OPTIMIZER, OF_RULE
from gradbus.actors.federated.client.kept_optimizer import KeptOptimizer
from gradbus.actors.federated.client.packets_out import RoundPackets
from gradbus.actors.federated.client.round_inputs import RoundInputs, RoundPlan
from gradbus.actors.federated.client.rules.base import RoundStart, after_steps_of
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.own_tensors import OWN_MODEL, PERSONAL, named, part_of, without
from gradbus.actors.federated.protocol import NON_FINITE_LOSS, NON_FINITE_MODEL
from gradbus.actors.federated.task import FederatedTask, TrainOutcome, implementation
from gradbus.actors.federated.task_results import NonFiniteResult, NothingToTrain, as_floats, described, sendable
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.user_errors import WrongResult
from gradbus.runtime.wire.frames import FrameKey, Kind

MUCH_OVERTIME_S = 1.0
SHARE_OF_OWN_MODEL = 0.5  # of the time of a round, for the model that a rule keeps at this client

log = get_logger("client")


class Trained(NamedTuple):
    """Holds what the training of a round has left, beside the module.

    Attributes:
        outcome: what the task has returned. packets: of its update; None: it has made none.
        optimizer: the state of an optimizer that is kept, by the names of kept tensors.
    """

    outcome: TrainOutcome
    packets: RoundPackets | None
    optimizer: dict[str, Tensor]


class TaskTraining:
    """Trains the module of one client by its task."""

    def __init__(self, task: FederatedTask, model: FlatModel, client_id: int) -> None:
        self._task = task
        self._model = model
        self._client_id = client_id
        self._buffers_before: dict[str, Tensor] = {}  # of the newest training
        self._warned_of_budget: set[str] = set()

    def load_data(self, num_clients: int) -> None:
        """Have the task load its data. ``num_clients``: of the run; 0: unknown."""
        self._task.prepare(self._client_id, num_clients)

    def train(self, plan: RoundPlan, kept: Mapping[str, Tensor], key: FrameKey) -> Trained:
        """Train from the global model, with what this client keeps of its own.

        Args:
            kept: the state of this client before the round. key: of the frames of the update.

        Raises:
            NothingToTrain: the task says so, or there was no time. WrongResult: it has returned what cannot be used.
                And what it raises.
        """
        self._begin(plan.inputs, kept)
        plan.paced.limit_to(1.0)
        leave = not plan.is_in_one_piece(self._model)
        return self._run(plan, kept, partial(plan.open_packets, self._model, key, leave=leave))

    def train_own(self, plan: RoundPlan, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the model that the rule keeps at this client, if it keeps one. Returns what is kept of it. The module
        has any values then. Raises as :meth:`train`, and NonFiniteResult."""
        how = plan.rule.personal()
        if how is None:
            return {}
        command = plan.inputs.command
        command = replace(command, epochs=how.epochs or command.epochs, lr=how.lr or command.lr)
        self._begin(plan.inputs, kept)
        plan.paced.limit_to(SHARE_OF_OWN_MODEL)
        if before := part_of(kept, OWN_MODEL):
            self._model.write_own(before)
        # As a plain round, with nothing behind the model and no state: these are of the rule that keeps this one.
        inputs = replace(plan.inputs, command=command, broadcast=torch.empty(0, dtype=torch.float32))
        plan = replace(plan, inputs=inputs, rule=how.rule)
        key = FrameKey(Kind.UPDATE, 0, command.round_id, 0, 0)
        open_packets = partial(plan.open_packets, self._model, key, leave=False)
        trained = self._run(plan, without(kept, OF_RULE), open_packets, OF_OWN_OPTIMIZER)
        self._model.check_frozen()
        try:
            self._check_loss(trained.outcome.loss)
            return {**named(OWN_MODEL, checked_finite(self._model.read_own())), **trained.optimizer}
        except NonFiniteResult as error:  # it concerns this client alone, and no update of the global model
            log.warning(
                "the client's own model has diverged",
                client=self._client_id,
                round=command.round_id,
                reason=str(error),
                effect="it stays as it was before this round",
                remedy="lower own_lr",
            )
            before_it = {name: one for name, one in kept.items() if name.startswith(OF_OWN_OPTIMIZER)}
            return {**named(OWN_MODEL, before), **before_it}

    def check_trained(self, plan: RoundPlan, outcome: TrainOutcome) -> None:
        """Log, once, what training has changed and is not exchanged.

        Raises:
            NonFiniteResult: the loss is not finite. ValueError: it made another number of steps than was asked for, or
                has changed a frozen parameter.
        """
        self._check_loss(outcome.loss)
        if (made := plan.rule.steps) != plan.steps and plan.steps:
            self._check_time(plan, made)
            raise ValueError(f"training made {made} optimizer steps, the controller asked for {plan.steps}")
        self._model.check_frozen()
        self._model.unexchanged.warn(self._client_id, plan.inputs.welcome)

    def pack_changed_buffers(self) -> bytes:
        """Return the block of the merged buffers that training has changed; b"": the model has none."""
        layout = self._model.buffers
        if not layout.buffers:
            return b""
        return layout.pack(layout.changes(self._buffers_before, self._model.read_buffers()))

    def _begin(self, inputs: RoundInputs, kept: Mapping[str, Tensor]) -> None:
        """Set the module to the global model, with what this client keeps of its own."""
        self._model.write(inputs.base)
        self._model.write_personal(part_of(kept, PERSONAL))
        self._model.write_buffers(self._model.buffers.unpack(inputs.buffers))
        self._buffers_before = self._model.read_buffers()
        self._model.unexchanged.begin(self._model.module, self._model.sharing)

    def _run(
        self,
        plan: RoundPlan,
        kept: Mapping[str, Tensor],
        open_packets: Callable[[], RoundPackets],
        optimizer_part: str = OF_OPTIMIZER,
    ) -> Trained:
        """Train the module as it is, by the task and with the rule. ``optimizer_part``: with what the names of a kept
        optimizer's state begin."""
        command, rule, inputs = plan.inputs.command, plan.rule, plan.inputs
        made, optimizer = optimizer_argument(self._task, plan.optimizer, command.lr), None
        if plan.keeps_optimizer and made:
            optimizer = made["make_optimizer"] = KeptOptimizer(made["make_optimizer"], part_of(kept, optimizer_part))
        own: dict[str, Any] = {**made, **steps_argument(self._task, plan.steps)}
        packets: RoundPackets | None = None
        if takes_round(self._task):
            packets = own["round"] = open_packets()
        begin = RoundStart(
            round_id=command.round_id,
            lr=command.lr,
            model=self._model.module,
            base=inputs.base,
            parameters=self._model.parameters(),
            broadcast=inputs.broadcast,
            local_loss=self._local_loss,
            state=part_of(kept, OF_RULE),
        )
        with rule.attached(begin), self._paced_steps(plan):
            try:
                outcome: TrainOutcome = self._task.train(
                    self._model.module,
                    client_id=self._client_id,
                    round_id=plan.number,
                    epochs=command.epochs,
                    lr=command.lr,
                    seed=command.seed,
                    subset_size=command.subset_size,
                    should_stop=plan.paced.should_stop,
                    **own,
                )
            except Exception as error:
                if not plan.paced.is_out_of_time:
                    raise
                outcome = self._outcome_so_far(plan, error)
            if packets is None and getattr(outcome, "parts", None) is not None:
                packets = open_packets()
            if packets is not None:
                outcome = packets.complete(outcome, plan.paced.should_stop)
            check_counts(self._task, outcome)  # before the rule misses the steps of a training that there was not
            self._check_module()
        packets = packets if packets is not None and packets.count else None
        return Trained(outcome, packets, {} if optimizer is None else named(optimizer_part, optimizer.state()))

    def _local_loss(self) -> float:
        """The loss of the module on this client's data. Raises ConfigError: the task has no such method."""
        found: Callable[..., float] | None = getattr(self._task, "local_loss", None)
        if found is None:
            raise ConfigError(
                f"the training rule needs the loss before training: give {type(self._task).__name__} a method "
                f"local_loss(model, client_id=...) that returns the mean loss on the data of that client"
            )
        with torch.no_grad():
            return float(found(self._model.module, client_id=self._client_id))

    def _check_module(self) -> None:
        """Raises WrongResult: training has left a module whose tensors cannot be exchanged."""
        if difference := self._model.misfit:
            raise WrongResult(
                f"training has changed the tensors of the model: {difference}. They are exchanged by name and shape. "
                f"Undo the change before train returns (prune.remove, remove_parametrizations), or make it in "
                f"build_model, on all nodes",
                implementation(self._task, "train"),
            )

    def _check_loss(self, loss: float | None) -> None:
        """Raises NonFiniteResult: it is not finite."""
        if loss is None or math.isfinite(loss):
            return
        is_finite = bool(torch.isfinite(self._model.read()).all())
        also = "the model is finite" if is_finite else "and the model is not finite either"
        raise NonFiniteResult(
            NON_FINITE_LOSS,
            f"training ended with a loss of {float(loss)}; {also}. Its update is not sent. Look at the data, and lower "
            f"the learning rate; a task without a loss returns None",
        )

    # The budget

    @contextlib.contextmanager
    def _paced_steps(self, plan: RoundPlan) -> Iterator[None]:
        """Keep the budget after each step of an optimizer, too, as training need not ask whether to stop."""
        if plan.inputs.pacer is None:
            yield
            return
        with after_steps_of(self._model.module, plan.paced.pause):
            yield
        if (over_s := plan.paced.overtime_s) > MUCH_OVERTIME_S and not plan.paced.is_out_of_time:
            self._warn_of_budget(
                plan,
                "training took longer than its budget",
                seconds_over=round(over_s, 1),
                remedy="let train ask should_stop() between two batches",
            )

    def _outcome_so_far(self, plan: RoundPlan, error: Exception) -> TrainOutcome:
        """What training has done that has ended with this error, as its time is over. Raises NothingToTrain: it has
        kept nothing."""
        outcome: TrainOutcome | None = getattr(error, "result", None)
        if outcome is None:
            self._warn_of_budget(
                plan,
                "nothing was trained within the budget",
                error=f"{type(error).__name__}: {error}",
                effect="this client sits the round out",
                remedy="raise client.budget.seconds_per_round; let train return what it has done once should_stop() is "
                "true",
            )
            raise NothingToTrain from error
        return outcome

    def _check_time(self, plan: RoundPlan, made: int) -> None:
        """Raises NothingToTrain: there was no time for the steps of a round that counts them."""
        if plan.paced.is_out_of_time:
            self._warn_of_budget(
                plan,
                "too few steps within the budget",
                steps=made,
                asked=plan.steps,
                effect="this client sits the round out",
                remedy="raise client.budget.seconds_per_round, or set federated.training.epochs in place of steps",
            )
            raise NothingToTrain

    def _warn_of_budget(self, plan: RoundPlan, event: str, **facts: Any) -> None:
        """Log, once each, that a training does not fit its budget."""
        if event not in self._warned_of_budget:
            self._warned_of_budget.add(event)
            log.warning(event, client=self._client_id, round=plan.number, **facts)


def checked_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, which would be kept for good. Raises NonFiniteResult: one is not finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteResult(
                NON_FINITE_MODEL,
                f"training made {name!r}, which stays at this client, non-finite. Lower the learning rate",
            )
    return tensors


def check_counts(task: object, outcome: TrainOutcome) -> None:
    """Check the number of samples and the loss that a training has returned.

    Raises:
        WrongResult: they are not numbers, or there are no samples. NothingToTrain: the task says so.
    """
    try:
        _ = int(outcome.num_samples), None if outcome.loss is None else float(outcome.loss)
    except Exception as error:
        raise WrongResult(
            f"train has returned {described(outcome)}: expected an object with num_samples, an integer, and loss, "
            f"a number or None, such as gradbus.models.TrainResult(num_samples=..., loss=...) ({error})",
            implementation(task, "train"),
        ) from None
    if int(outcome.num_samples) == 0 and outcome.loss is None:
        raise NothingToTrain
    if int(outcome.num_samples) < 1:
        raise WrongResult(
            f"train has returned num_samples={outcome.num_samples} and loss={outcome.loss}: expected at least one "
            f"sample. If there was nothing to train, return gradbus.models.TrainResult.nothing()",
            implementation(task, "train"),
        )


def metrics_of(task: object, outcome: TrainOutcome, others: int) -> dict[str, float]:
    """Return the metrics of a training that go out beside ``others`` of its rule. Raises WrongResult: they cannot be
    read."""
    found = getattr(outcome, "metrics", None)
    if found is None or (type(found) is dict and not found):  # as a rule
        return {}
    try:
        return sendable(as_floats(found), others)
    except Exception as error:
        raise WrongResult(
            f"train has returned metrics that cannot be read ({error}): expected a mapping of names to single numbers",
            implementation(task, "train"),
        ) from error
