"""The state of an optimizer, and of a schedule that has one, as tensors by name: for checkpoints and other ranks.

Tensors of the state are ``optimizer/KEY/PARAMETER``. What else it has is in one tensor, ``optimizer-json``, the bytes
of a JSON text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.json_text import parse_json

_JSON = "optimizer-json"
_INNER = "_schedulers"  # the states of those that a SequentialLR or ChainedScheduler has
_MAX_JSON_BYTES = 64 << 20
_ABSENT = object()


def check_parameters(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> None:
    """Raises ValueError: it steps other parameters than these, or leaves out some."""
    known = {id(parameter): name for name, parameter in trained.items()}
    found = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    if strange := [tuple(parameter.shape) for parameter in found if id(parameter) not in known]:
        raise ValueError(f"the optimizer steps parameters that the model does not train, of shapes {strange[:5]}")
    stepped = {id(parameter) for parameter in found}
    if missing := [name for name, parameter in trained.items() if id(parameter) not in stepped]:
        raise ValueError(f"the optimizer lacks {', '.join(missing[:5])}: freeze what it should not train")


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the settings of each group, such as learning rates, as plain data where they can be."""
    return [
        {
            key: copy.deepcopy(_plain(value)) if _in_json(_plain(value)) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def state_tensors(
    optimizer: Optimizer,
    trained: Mapping[str, Tensor],
    schedule: LRScheduler | None = None,
    *,
    made: Sequence[Mapping[str, Any]] | None = None,
    skipped: Collection[str] = (),
    origin: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The state by name, tensors not copied.

    Args:
        trained: the parameters by name.
        schedule: whose state to save, too, as far as JSON can hold it; the rest stays as it is made. All settings of
            the groups are saved with it.
        made: :func:`group_settings` when the optimizer was made; what differs from these is saved. None: nothing.
        skipped: settings of the groups that follow from the step, and are not saved.
        origin: what the optimizer is, see :func:`load_state`.

    Raises:
        CheckpointError: there is something in the state, or a setting that has changed, which cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for _, name, parameter in _parameters(optimizer, trained):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
            elif value is not None:
                plain.setdefault("state", {}).setdefault(name, {})[key] = _saved(
                    optimizer, f"{key} of {name!r}", _plain(value)
                )
    if made is not None:
        groups, everything = group_settings(optimizer), schedule is not None
        before = [*made, *[{}] * (len(groups) - len(made))]  # a group may have been added
        found = [
            {
                key: _saved(optimizer, f"{key} of group {number}", value)
                for key, value in group.items()
                if key not in skipped and (_differs(value, old.get(key, _ABSENT)) or (everything and _in_json(value)))
            }
            for number, (group, old) in enumerate(zip(groups, before, strict=False))
        ]
        if any(found):
            plain["groups"] = found
    if origin:
        plain["origin"] = list(origin)
    if schedule is not None:
        plain["schedule"] = _kept(schedule.state_dict())
    if plain:
        tensors[_JSON] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    return tensors


def load_state(
    optimizer: Optimizer,
    trained: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    schedule: LRScheduler | None = None,
    *,
    origin: Sequence[str] = (),
) -> None:
    """Replace the state by copies of these tensors; what is named otherwise is left to others.

    Args:
        origin: what the optimizer is: where it is from, and its class.

    Raises:
        ConfigError: it is the state of another optimizer.
        CheckpointError: a tensor for a parameter that is not there, or of another shape or type.
    """
    plain = _read_json(tensors.get(_JSON))
    if (before := plain.get("origin", list(origin))) != list(origin):
        raise ConfigError(
            f"the state was saved with the optimizer {before!r:.300}, here it is {list(origin)!r}. Go on with the same "
            f"on all ranks, or choose another checkpoint.dir"
        )
    numbers = {name: number for number, name, _ in _parameters(optimizer, trained)}
    scalars = plain.get("state", {})
    if unknown := scalars.keys() - numbers.keys():
        raise CheckpointError(f"state of the optimizer: there is no parameter {sorted(unknown)[0]!r:.100}")
    state: dict[int, dict[str, Any]] = {numbers[name]: dict(values) for name, values in scalars.items()}
    for full_name, tensor in tensors.items():
        kind, _, rest = full_name.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            _check(optimizer, key, name, tensor, trained.get(name) if name in numbers else None)
            state.setdefault(numbers[name], {})[key] = tensor.detach().clone()
    current = optimizer.state_dict()["param_groups"]
    groups = plain.get("groups", [{}] * len(current))
    if not isinstance(groups, list) or [type(one) for one in groups] != [dict] * len(current):
        raise CheckpointError(f"state of the optimizer: expected {len(current)} groups, got {groups!r:.100}")
    for group, saved in zip(current, groups, strict=True):
        group.update({key: _like(group.get(key), value) for key, value in saved.items() if key != "params"})
    try:
        optimizer.load_state_dict({"state": state, "param_groups": current})
        if schedule is not None and "schedule" in plain:
            schedule.load_state_dict(_over(schedule.state_dict(), plain["schedule"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"state of the optimizer: {type(optimizer).__name__} refuses it: {error}") from None


def _kept(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold of a schedule's state. What it cannot, as the milestones of a MultiStepLR, is part of how it
    was made; and one such value must not take the places of all inner schedules with it."""
    kept = {key: value for key, value in schedule.items() if key != _INNER and _in_json(value)}
    return kept | ({_INNER: [_kept(one) for one in schedule[_INNER]]} if _INNER in schedule else {})


def _over(made: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a schedule as it was made, with what was saved of it."""
    found = {**made, **saved}
    if _INNER in made and _INNER in saved:
        found[_INNER] = [_over(*pair) for pair in zip(made[_INNER], saved[_INNER], strict=True)]
    return found


def _parameters(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Those that are trained: their number in ``state_dict``, name, and themselves."""
    names = {id(parameter): name for name, parameter in trained.items()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(listed):
        if id(parameter) in names:
            yield number, names[id(parameter)], parameter


def _check(optimizer: Optimizer, key: str, name: str, tensor: Tensor, parameter: Tensor | None) -> None:
    """State is as large as its parameter, a number, or, as Adafactor's, a sum over some of its dimensions."""
    if parameter is not None and type(optimizer).__module__.partition(".")[0] != "torch":
        return  # of others nothing is known
    if parameter is not None:
        ends = list(zip(reversed(tensor.shape), reversed(parameter.shape), strict=False))
        fits = tensor.ndim <= parameter.ndim and all(mine in (1, whole) for mine, whole in ends)
        if fits and (tensor.ndim == 0 or tensor.dtype == parameter.dtype):
            return
    here = None if parameter is None else f"{tuple(parameter.shape)} of {parameter.dtype}"
    raise CheckpointError(
        f"state of the optimizer: {key} of {name!r} is {tuple(tensor.shape)} of {tensor.dtype}, here {here}"
    )


def _read_json(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    try:
        if tensor.dtype != torch.uint8 or tensor.ndim != 1 or tensor.numel() > _MAX_JSON_BYTES:
            raise ValueError(f"{tuple(tensor.shape)} of {tensor.dtype}")
        read = parse_json(bytes(tensor.cpu().numpy()).decode())
        if not isinstance(read, dict) or not isinstance(read.get("state", {}), dict):
            raise ValueError("expected an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"state of the optimizer: {_JSON} cannot be read: {error}") from None
    return read


def _plain(value: Any) -> Any:
    """A number of torch or numpy as one of Python."""
    return value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value


def _differs(value: Any, before: Any) -> bool:
    if value is before:
        return False
    try:
        return type(value) is not type(before) or bool(value != before)
    except (RuntimeError, ValueError):  # tensors of several entries, arrays
        return True


def _saved(optimizer: Optimizer, what: str, value: Any) -> Any:
    """The value, if it can be saved."""
    if _in_json(value):
        return value
    raise CheckpointError(
        f"state of the optimizer: {what} of {type(optimizer).__name__} is a {type(value).__name__}, which cannot be "
        f"saved: {value!r:.100}. Tensors by parameter, finite numbers, texts, and lists of these can"
    )


def _in_json(value: Any) -> bool:
    """Whether it comes back from JSON as it was, but for tuples, which become lists."""
    try:
        return bool(parse_json(json.dumps(value)) == (list(value) if isinstance(value, tuple) else value))
    except (TypeError, ValueError):
        return False


def _like(before: Any, value: Any) -> Any:
    if isinstance(before, Tensor) and isinstance(value, int | float):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
