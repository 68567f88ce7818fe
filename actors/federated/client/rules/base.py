"""A client's training rule: what it adds to the training of a task, whatever optimizer that uses.

A rule is made anew for each round, and keeps nothing itself: what it begins with comes in :class:`RoundStart`, and what
it leaves goes out in :class:`RoundEnd`. So a round that is done again gives the same update again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradbus.runtime.choices import CLIENT_RULES, Choice, Options
from gradbus.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundStart:
    """Holds what a rule begins a round with.

    Attributes:
        round_id, lr: of the command.
        model: the module, which holds the global model.
        base: float32, shape (D,): the exchanged part of that.
        parameters: trained parameters of the module, each with its place in ``base``.
        broadcast: float32, shape (E,): what the strategy sends behind the model; empty: nothing.
        state: tensors that this rule has left in the last round of this client that counts; empty in its first one.
        local_loss: the mean loss of the module, as it is, on this client's data. Raises ConfigError: the task has none.
    """

    round_id: int
    lr: float
    model: nn.Module
    base: Tensor
    parameters: Sequence[tuple[nn.Parameter, slice]]
    broadcast: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    state: Mapping[str, Tensor] = field(default_factory=dict)
    local_loss: Callable[[], float]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundEnd:
    """Holds what a rule leaves at the end of a round.

    Attributes:
        sections: vectors, float32, that are sent beside the model's, by name and in the order of ``Strategy.sections``.
        metrics: numbers that are announced with the update, by name.
        state: tensors that are kept at this client if the update counts.
    """

    sections: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PersonalTraining:
    """Tells how a rule trains a model that stays at the client.

    Attributes:
        rule: what it adds to the steps. Its :class:`RoundStart` has the global model as ``base``, and no state.
        epochs, lr: in place of those of the round; 0: these.
    """

    rule: ClientRule
    epochs: int = 0
    lr: float = 0.0


StepHooks = tuple[Callable[[Optimizer], None], Callable[[Optimizer], None]]
"""What is called before and after a step of any optimizer of this process."""


class _ProcessHooks:
    """The one pair of hooks of this process, which calls those of all trainings that are under way.

    torch goes over its table of hooks in each step of each optimizer. A training that put its own there, and took them
    out, would change that table in the midst of a step of another client's thread, which then fails. So the pair is
    registered once, by the first training that has hooks, and stays: a process without one, such as a data-parallel
    worker's, has none. If no other library has hooks, torch's table is empty until then, and a thread goes over an
    empty one in a single step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: tuple[StepHooks, ...] = ()  # a new one for each change: threads go over the old one meanwhile
        self._is_registered = False

    @contextlib.contextmanager
    def added(self, hooks: StepHooks) -> Iterator[None]:
        """Call these, too, until the block ends."""
        with self._lock:
            if not self._is_registered:
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)
                self._is_registered = True
            self._added = (*self._added, hooks)
        try:
            yield
        finally:
            with self._lock:
                left = list(self._added)
                left.remove(hooks)
                self._added = tuple(left)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Call those before a step. ``args`` begins with the optimizer.

        Where the step is given a closure, the gradients are there only when that has been called, which LBFGS does
        several times: they are called behind it then. Lightning makes all its steps in this way.
        """
        added = self._added
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not added:
            for before, _after in added:
                before(optimizer)
            return None

        def evaluate() -> Any:
            loss = closure()
            for before, _after in added:
                before(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for _before, after in self._added:
            after(optimizer)


_hooks = _ProcessHooks()


@contextlib.contextmanager
def after_steps_of(model: nn.Module, call: Callable[[], object]) -> Iterator[None]:
    """Call this after each step, by any optimizer of torch, that trains parameters of the model in this context."""

    def after(optimizer: Optimizer) -> None:
        own = set(map(id, model.parameters()))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            call()

    with _hooks.added((lambda optimizer: None, after)):
        yield


@contextlib.contextmanager
def _gradients_of(model: nn.Module, stepped: set[int]) -> Iterator[None]:
    """Hide the gradients of all parameters but these: of several optimizers each has a step of its own, in which theirs
    are changed."""
    others = [(parameter, parameter.grad) for parameter in model.parameters() if id(parameter) not in stepped]
    for parameter, _ in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in others:
            parameter.grad = gradient


class ClientRule:
    """Training as the task does it, with nothing added.

    A rule of your own is a class like this one, with ``Options`` and a constructor that takes them as keywords. It is
    made anew for each round. All methods are called on the client's compute thread.

    Attributes:
        sections: names of the sections that it makes beside the model's. metrics: of the metrics that it announces.
        steps: of the optimizer so far; of several, those of the parameters that have had most.
        steps_of: the same of each parameter, by its ``id``.
    """

    choice: ClassVar[str] = "plain"
    Options: ClassVar[type[BaseModel]] = Options
    sections: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()
    steps: int = 0
    steps_of: dict[int, int]

    def start(self, begin: RoundStart) -> None:
        """The module holds the global model, and training is about to begin."""

    def loss_term(self, model: nn.Module) -> Tensor | None:
        """A scalar that is added to the loss of each step, by its gradient; None: nothing."""
        return None

    def personal(self) -> PersonalTraining | None:
        """Return how to train one more model, which stays at this client from round to round, in each round before the
        global one is trained; None: there is none."""
        return None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make the first step of a round."""

    def before_step(self, model: nn.Module) -> None:
        """The gradients of a step are there, that of :meth:`loss_term` included: change them here. Parameters that
        another optimizer steps have none meanwhile."""

    def after_step(self, model: nn.Module) -> None:
        """The optimizer has changed the parameters."""

    def finish(self, local: Tensor) -> RoundEnd:
        """Training is done. ``local``: float32, shape (D,), the exchanged part of the model now. It is not changed."""
        return RoundEnd()

    @contextlib.contextmanager
    def attached(self, begin: RoundStart) -> Iterator[None]:
        """Call the methods above, but for :meth:`finish`, while the model is trained in this context.

        Raises:
            ValueError: no optimizer of torch made a step, so that the rule had no effect.
        """
        model, own = begin.model, set(map(id, begin.model.parameters()))

        seen: set[int] = set()

        def trained_by(optimizer: Optimizer) -> set[int]:  # other clients of this process have optimizers of their own
            parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if own.isdisjoint(parameters):  # the training function may have replaced some
                own.update(map(id, model.parameters()))
            return parameters & own

        def before(optimizer: Optimizer) -> None:
            if stepped := trained_by(optimizer):
                if id(optimizer) not in seen:
                    seen.add(id(optimizer))
                    self.check_optimizer(optimizer)
                with _gradients_of(model, stepped):
                    self._add_loss_term(model)
                    self.before_step(model)

        def after(optimizer: Optimizer) -> None:
            if stepped := trained_by(optimizer):
                self.steps_of.update({one: self.steps_of.get(one, 0) + 1 for one in stepped})
                self.steps = max(self.steps, *(self.steps_of[one] for one in stepped))
                self.after_step(model)

        self.steps, self.steps_of = 0, {}
        self.start(begin)
        with _hooks.added((before, after)):
            yield
        if not self.steps and type(self) is not ClientRule:
            raise ValueError(
                f"the training rule {type(self).__name__} had no effect: no optimizer of torch made a step. Train with "
                f"one, or set federated.training.rule=plain"
            )

    def _add_loss_term(self, model: nn.Module) -> None:
        if type(self).loss_term is ClientRule.loss_term:
            return
        with torch.enable_grad():
            term = self.loss_term(model)
            if term is None:
                return
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter, gradient in zip(trained, torch.autograd.grad(term, trained, allow_unused=True), strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def make_rule(name: str, options: Mapping[str, Any], *, allowed: str) -> ClientRule:
    """The rule that the controller has chosen.

    Args:
        name, options: from the controller. allowed: the rule of its own that this client's configuration names.

    Raises:
        ConfigError: it is not built in, and not the allowed one, which alone is imported; or its options are wrong.
    """
    if name not in CLIENT_RULES.table and name != allowed:
        raise ConfigError(
            f"the controller chose the training rule {name[:200]!r}, which this client does not allow: it has "
            f"{', '.join(CLIENT_RULES.table)}, and its client.rule is {allowed!r}. Nothing that a peer names is "
            f"imported: set client.rule to it, where you have it"
        )
    rule: ClientRule = CLIENT_RULES.make(Choice.model_validate({**options, "name": name}))
    return rule
