"""A client's training rule: a hook around the gradients and the steps of whatever optimizer its task uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradbus.runtime.choices import CLIENT_RULES, Choice, Options
from gradbus.runtime.errors import ConfigError


class ClientRule:
    """Training as the task does it, with nothing added.

    A rule of your own is a class like this one, with ``Options`` and a constructor that takes them as keywords. It is
    made anew for each round. All methods are called on the client's compute thread.
    """

    choice: ClassVar[str] = "plain"
    Options: ClassVar[type[BaseModel]] = Options

    def begin(self, model: nn.Module) -> None:
        """The module holds the global model, and training is about to begin."""

    def before_step(self, model: nn.Module) -> None:
        """The gradients of a step are there: change them here."""

    def after_step(self, model: nn.Module) -> None:
        """The optimizer has changed the parameters."""

    @contextlib.contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Call the methods above while the model is trained in this context.

        Raises:
            ValueError: no optimizer of torch made a step, so that the rule had no effect.
        """
        if type(self) is ClientRule:
            yield
            return
        steps = 0

        def trains(optimizer: Optimizer) -> bool:  # other clients of this process have optimizers of their own
            owned = {id(parameter) for parameter in model.parameters()}
            return any(id(p) in owned for group in optimizer.param_groups for p in group["params"])

        def before(optimizer: Optimizer, *_: Any) -> None:
            if trains(optimizer):
                self.before_step(model)

        def after(optimizer: Optimizer, *_: Any) -> None:
            nonlocal steps
            if trains(optimizer):
                steps += 1
                self.after_step(model)

        self.begin(model)
        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if not steps:
            raise ValueError(
                f"the training rule {type(self).__name__} had no effect: no optimizer of torch made a step. Train with "
                f"one, or set federated.training.rule=plain"
            )


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
