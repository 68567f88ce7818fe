"""The model that a task builds, checked before anything is done with it."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.user_errors import place_of


def build_model(task: Any) -> nn.Module:
    """Return the module that ``task.build_model()`` returns. Raises ConfigError: it returns something else."""
    model = task.build_model()
    if isinstance(model, nn.Module):
        return model
    own = getattr(task, "__dict__", {}).get("__wrapped__", task)  # the task that another one wraps
    place = place_of(own.build_model)
    where = f" ({place})" if place else ""
    what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise ConfigError(
        f"build_model of {type(own).__name__}{where} has returned {what}: expected a "
        f"torch.nn.Module. Return the module itself, neither its class nor its state_dict"
    )
