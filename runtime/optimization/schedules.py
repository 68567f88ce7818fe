"""Schedules of the learning rate: the classes of torch.optim.lr_scheduler that are functions of the step alone.

    parallel.schedule = {"name": "cosine", "warmup_steps": 100}

Options are those of the constructor. What says how long the schedule is (``T_max``, ``total_steps``, ``total_iters``)
is the length of the run where it is not given, and ``max_lr`` the learning rate of the optimizer.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from gradbus.runtime.choices import Choice, Choices, Options
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.optimization.signatures import NeedsCode, options_model

LIBRARY, BASE = "torch.optim.lr_scheduler", LRScheduler
UNFIT = {
    "reduce-on-plateau": "it follows the loss, which a schedule is not told here; change the rate in a callback",
}
_SHORTER = {
    "CosineAnnealingLR": "cosine", "CosineAnnealingWarmRestarts": "cosine-restarts",
    "ReduceLROnPlateau": "reduce-on-plateau",
}  # fmt: skip
_LENGTHS = ("T_max", "total_steps", "total_iters")
_SKIPPED = frozenset({"last_epoch", "epochs", "steps_per_epoch"})
SET_BY_SCHEDULES = ("lr", "momentum", "betas")  # by schedules of torch


class ScheduleOptions(Options):
    """Options that every schedule has."""

    per: Literal["step", "epoch"] = "step"
    """What the schedule counts: steps of the optimizer, or epochs."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps over which the learning rate rises from 0 in a line: it is multiplied by step /
    warmup_steps, while the schedule itself goes on."""


class RoundScheduleOptions(Options):
    """Options that every schedule of a federated run has."""

    warmup_rounds: Annotated[int, Field(ge=0)] = 0
    """Number of first rounds over which the learning rate rises from 0 in a line: it is multiplied by round /
    warmup_rounds, while the schedule itself goes on."""


class Fixed(LRScheduler):
    """The learning rate stays as it is, but for the warm-up."""

    choice: ClassVar[str] = "fixed"

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def classes() -> dict[str, type[LRScheduler]]:
    """Those of torch that a configuration can make, by name: ``MultiStepLR`` is ``multi-step``."""
    found = {}
    for name, kind in vars(lr_scheduler).items():
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and name[0] != "_" and kind is not LRScheduler:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removesuffix("LR")).lower()
            found[_SHORTER.get(name, words)] = kind
    return {name: kind for name, kind in found.items() if name not in UNFIT and _is_plain(kind)}


def _is_plain(kind: Any) -> bool:
    try:
        options_of(kind, ScheduleOptions)
    except ConfigError:
        return False
    return next(iter(inspect.signature(kind).parameters)) == "optimizer"  # else it is made of other schedules


@functools.cache
def options_of(kind: type[Any], common: type[BaseModel]) -> type[BaseModel]:
    """The model of the options of a class. Raises ConfigError: it needs functions or other schedules."""
    filled = ("max_lr", *(() if kind is lr_scheduler.ConstantLR else _LENGTHS))
    try:
        return options_model(kind, common, skipped=_SKIPPED, optional=filled)
    except NeedsCode as error:
        raise ConfigError(f"{error}: let the task make it, as make_schedule(optimizer)") from None


def check_schedule(kind: type[Any], origin: str) -> None:
    """Refuse a class whose step needs more than to be called, whoever names or makes it.

    Args:
        origin: where it is from, for the error.

    Raises:
        ConfigError: with the reason.
    """
    if issubclass(kind, lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(f"{origin}: {kind.__name__} cannot be used: {UNFIT['reduce-on-plateau']}")
    if not callable(getattr(kind, "step", None)):
        raise ConfigError(f"{origin}: expected a schedule with a method step, got a {kind.__name__}")


class _Rates(Optimizer):
    """The settings of an optimizer's groups apart from it, so that a warm-up does not change what a schedule reads."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
        super().__init__([{**group, "params": [torch.zeros(())]} for group in groups], dict(defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Schedules expect one before each of theirs."""


class Schedule:
    """A schedule that is a function of the step: where it stands needs no saving."""

    def __init__(self, choices: Choices[Any], choice: Choice, optimizer: Optimizer, *, steps: int, epochs: int) -> None:
        """Set the optimizer's groups to the values of step 0.

        Args:
            optimizer: whose groups it changes. steps, epochs: length of the run.

        Raises:
            ConfigError: there is no such schedule, or it does not take these options or this optimizer.
        """
        kind, options = choices.find(choice.name), choices.options(choice)
        check_schedule(kind, choices.key)
        self._per = options.pop("per", "step")
        self._warmup = max(options.pop("warmup_steps", 0), options.pop("warmup_rounds", 0))
        length = max(1, steps if self._per == "step" else epochs)
        for name in _LENGTHS:
            if name in options and options[name] is None:
                options[name] = length
        if "max_lr" in options and options["max_lr"] is None:
            options["max_lr"] = [group["lr"] for group in optimizer.param_groups]
        # Beyond its end one-cycle is an error, and cosine rises again: the last rate stays.
        self._end = min([length - 1, *(options[name] - 1 for name in ("total_steps",) if options.get(name))])
        self._optimizer = optimizer
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        self._rates = _Rates(groups, optimizer.defaults)
        try:
            self._scheduler = kind(self._rates, **options)
        except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            raise ConfigError(f"{choices.key}: {kind.__name__} refuses: {error}") from None
        self._at = 0
        self.go_to(0, 0)

    @property
    def cycles_momentum(self) -> bool:
        """Whether it changes momentum or betas, too."""
        return bool(getattr(self._scheduler, "cycle_momentum", False))

    def go_to(self, step: int, epoch: int) -> None:
        """Set the optimizer's groups to the values for this step of this epoch, both from 0. It never goes back."""
        target = min(step if self._per == "step" else epoch, self._end)
        while self._at < target:
            self._rates.step()
            self._scheduler.step()
            self._at += 1
        factor = min(1.0, (step + 1) / self._warmup) if self._warmup else 1.0
        for group, rates in zip(self._optimizer.param_groups, self._rates.param_groups, strict=True):
            for key in SET_BY_SCHEDULES:
                if key in rates:
                    group[key] = rates[key] * factor if key == "lr" else rates[key]


class RoundRates:
    """The learning rate of each round of a federated run."""

    def __init__(self, choices: Choices[Any], choice: Choice, lr: float, rounds: int) -> None:
        """Raises ConfigError: there is no such schedule, or it does not take these options."""
        self._lr = lr
        self._schedule: Schedule | None = None
        if choice == choices.default:
            return  # the first optimizer of a process imports the compiler of PyTorch, which takes seconds
        self._rates = _Rates([{"lr": lr, "momentum": 0.9}], {"lr": lr, "momentum": 0.9})
        self._schedule = Schedule(choices, choice, self._rates, steps=rounds, epochs=rounds)

    def at(self, round_id: int) -> float:
        """The rate of this round, from 1; rounds may be left out, but not gone back to."""
        if self._schedule is None:
            return self._lr
        self._schedule.go_to(round_id - 1, round_id - 1)
        return float(self._rates.param_groups[0]["lr"])
