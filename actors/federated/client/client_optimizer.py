"""The optimizer that the controller names for its clients, as a task gets it: a function of the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradbus.actors.federated.task import implementation
from gradbus.runtime.choices import CLIENT_OPTIMIZERS, Choice
from gradbus.runtime.config.federated import IN_TERMS
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.optimization.optimizers import make_optimizer

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
_PREFIX = "optimizer."
_TERMS = "training."


def split_terms(sent: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the training rule and the optimizer, and those that say how a round is counted: see
    :meth:`gradbus.runtime.config.federated.TrainingSettings.sent_terms`. Raises ConfigError: they cannot be."""
    terms = {key.removeprefix(_TERMS): value for key, value in sent.items() if key.startswith(_TERMS)}
    for key in terms.keys() & IN_TERMS.keys():
        try:
            IN_TERMS[key].validate_python(terms[key], strict=True)
        except ValueError:
            raise ConfigError(f"the controller has sent {key} as {terms[key]!r:.100}, which cannot be") from None
    return {key: value for key, value in sent.items() if not key.startswith(_TERMS)}, terms


def split_options(sent: Mapping[str, Any]) -> tuple[dict[str, Any], Choice | None]:
    """The options of the training rule, and the optimizer; None: the task makes its own.

    Args:
        sent: as :meth:`gradbus.runtime.config.federated.TrainingSettings.sent_options` makes them.

    Raises:
        ConfigError: they name no optimizer that is built in, or options that it does not have.
    """
    rule = {key: value for key, value in sent.items() if not key.startswith(_PREFIX)}
    given = {key.removeprefix(_PREFIX): value for key, value in sent.items() if key.startswith(_PREFIX)}
    if not given:
        return rule, None
    table = CLIENT_OPTIMIZERS
    try:
        fields = table.options_of(str(given.get("name"))).model_fields
        for key, value in given.items():
            if key in fields and isinstance(value, str) and fields[key].annotation is not str:
                given[key] = parse_json(value)
        return rule, Choice.model_validate(table.check(given))
    except ValueError as error:
        raise ConfigError(f"the controller chose an optimizer that this client cannot make: {error}") from None


def optimizer_argument(task: Any, choice: Choice | None, lr: float) -> dict[str, MakeOptimizer]:
    """Return what ``task.train`` is called with beside the command: ``make_optimizer``, where the controller names one.

    Raises:
        ConfigError: the task's ``train`` does not take it.
    """
    if choice is None:
        return {}
    if not _train_takes(task, "make_optimizer"):
        raise ConfigError(
            f"federated.training.optimizer is {choice.name!r}, but {_train_of(task)} makes its own: let "
            f"it take make_optimizer, a function from parameters to an optimizer, or set the optimizer to 'task'"
        )
    return {"make_optimizer": partial(_make, choice, lr)}


def steps_argument(task: Any, steps: int) -> dict[str, int]:
    """Return what ``task.train`` is called with beside the command: ``steps``, where rounds are counted in them, else
    0.

    Raises:
        ConfigError: the task's ``train`` does not take it.
    """
    if not steps:
        return {}
    if not _train_takes(task, "steps"):
        raise ConfigError(
            f"federated.training.steps is {steps}, but {_train_of(task)} counts epochs: let it take "
            f"steps, the number of optimizer steps to make, or set federated.training.epochs"
        )
    return {"steps": steps}


def takes_round(task: Any) -> bool:
    """Whether the function that trains has an argument ``round``: ``train`` of the task, or its ``train_fn``. One that
    takes any keyword is not meant: it may hand them on to a function that does not."""
    try:
        return "round" in inspect.signature(implementation(task, "train")).parameters and takes(task.train, "round")
    except (TypeError, ValueError):  # of a builtin nothing is known
        return False


def _train_takes(task: Any, name: str) -> bool:
    """Whether ``train`` of a task, and the function behind it, have a keyword argument of this name."""
    return takes(task.train, name) and takes(implementation(task, "train"), name)


def _train_of(task: Any) -> str:
    """Return the name of the function that trains, for errors."""
    found = implementation(task, "train")
    owner = getattr(found, "__self__", None)
    if owner is not None:
        return f"train of {type(owner).__name__}"
    return f"train_fn {getattr(found, '__qualname__', type(found).__name__)}"


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin nothing is known
        return True
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _make(choice: Choice, lr: float, parameters: Iterable[Tensor]) -> Optimizer:
    parameters = list(parameters)
    options: Any = CLIENT_OPTIMIZERS.checked(choice)
    optimizer = make_optimizer(CLIENT_OPTIMIZERS, choice, parameters, checked=options, lr=lr)
    limit = options.clip_norm
    if limit is not None:

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(parameters, limit)

        optimizer.register_step_pre_hook(clip)
    return optimizer
