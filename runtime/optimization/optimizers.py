"""Optimizers: all classes of torch.optim that make a step from gradients, by their names in lower case; or the user's.

    parallel.optimizer = {"name": "adamw", "lr": 0.001, "weight_decay": 0.01}

Options are those of the constructor, with its defaults, types and names; ``sgd`` has defaults of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, cast

import torch
from pydantic import BaseModel, Field, create_model, model_validator
from torch import Tensor
from torch.optim import Optimizer

from gradbus.runtime.choices import Choice, Choices, Options
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.optimization.signatures import NeedsCode, options_model

# Not for training by configuration: autograd through the step, and graphs of CUDA.
_SKIPPED = frozenset({"differentiable", "capturable"})
_Positive = Annotated[float, Field(gt=0)]

LIBRARY, BASE = "torch.optim", Optimizer
UNFIT = {
    "lbfgs": "its step computes the loss several times, and the ranks exchange gradients once a step",
    "sparseadam": "it takes sparse gradients alone, and the ranks exchange dense ones",
}


class OptimizerOptions(Options):
    """Options that every optimizer has."""

    clip_norm: _Positive | None = None
    """Largest norm of the gradient of a step. With dgc each rank clips its own at clip_norm / sqrt(world). null: no
    clipping."""


class ClientOptimizerOptions(Options):
    """Options that every optimizer of federated clients has."""

    lr: _Positive | None = None
    """Learning rate, in place of `federated.training.lr`."""
    clip_norm: _Positive | None = None
    """Largest norm of the gradient of a step. null: no clipping."""


class SgdOptions(OptimizerOptions):
    """Options of ``sgd``."""

    lr: _Positive = 0.05
    """Learning rate. The others have one, too, whose default is that of the class."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum."""
    dampening: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a gradient that does not enter the momentum."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay."""

    @model_validator(mode="after")
    def _consistent(self) -> SgdOptions:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov=true needs momentum > 0 and dampening 0")
        return self


class ClippingOptions(Options):
    """Options beside the optimizer of the task."""

    clip_norm: _Positive | None = None
    """Largest norm of the gradient of a step. With dgc each rank clips its own at clip_norm / sqrt(world). null: no
    clipping."""


class TaskOptimizer:
    """The optimizer that the task makes."""

    choice: ClassVar[str] = "task"


def classes() -> dict[str, type[Any]]:
    """Those of torch.optim by name."""
    found = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    return {name: kind for name, kind in found.items() if name not in UNFIT}


@functools.cache
def options_of(kind: type[Any], common: type[BaseModel]) -> type[BaseModel]:
    """The model of the options of a class. Raises ConfigError: it needs something that is no option."""
    if kind is TaskOptimizer:
        return ClippingOptions if common is OptimizerOptions else Options  # clients do all by themselves
    if kind is torch.optim.SGD:
        theirs: Any = {name: (field.annotation, field) for name, field in common.model_fields.items()}
        model: type[BaseModel] = create_model("SGD", __base__=SgdOptions, **theirs)
        return model
    try:
        return options_model(kind, common, skipped=_SKIPPED, optional=())
    except NeedsCode as error:
        raise ConfigError(f"{error}: let the task make it, as make_optimizer(model)") from None


def check_optimizer(kind: type[Any], origin: str) -> None:
    """Refuse a class whose step takes more than gradients, whoever names or makes it.

    Args:
        origin: where it is from, for the error.

    Raises:
        ConfigError: with the reason.
    """
    for one in kind.__mro__:
        if one.__module__.startswith(f"{LIBRARY}.") and (reason := UNFIT.get(one.__name__.lower())) is not None:
            raise ConfigError(f"{origin}: {kind.__name__} cannot be used: {reason}")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{origin}: {kind.__name__} computes the loss in its step, which is not supported")


def make_optimizer(
    choices: Choices[Any],
    choice: Choice,
    parameters: Iterable[Tensor],
    *,
    checked: BaseModel | None = None,
    lr: float | None = None,
) -> Optimizer:
    """The optimizer that a setting names; ``clip_norm`` is left to its driver.

    Args:
        parameters: those that are trained, in the order of the model.
        checked: the options of the choice, from a caller that has checked them.
        lr: learning rate in place of that of the options.

    Raises:
        ConfigError: there is no such class, or it does not take these options or parameters.
    """
    kind = choices.find(choice.name)
    checked = choices.checked(choice) if checked is None else checked
    options = {name: getattr(checked, name) for name in type(checked).model_fields if name != "clip_norm"}
    if lr is not None and "lr" in options:
        options["lr"] = lr
    check_optimizer(kind, choices.key)
    try:
        return cast("Optimizer", kind(list(parameters), **options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{choices.key}: {kind.__name__} refuses: {error}") from None
