"""How the gradients of all ranks become one step of the optimizer: what the dense way and DGC have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gradbus.runtime.choices import EXCHANGES
from gradbus.runtime.collectives import CollectiveHandle
from gradbus.runtime.errors import CheckpointError, ConfigError

MAX_NAME_CHARS = 100
MAX_OPTIONS_CHARS = 10_000  # ranks send them to each other when they meet


@dataclass(frozen=True, slots=True, eq=False)
class OwnState:
    """State of one rank that the others do not have: ``tensors`` by name, and plain data."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


class Exchange(Protocol):
    """One step after the other; every method is for the thread that computes.

    exchange.begin(step, active)
    backward of all batches but the last
    exchange.enable_overlap(finite)
    backward of the last one
    handles = exchange.send(has_data=True)
    skipped_by = exchange.decode([await handle for handle in handles])
    if skipped_by is None:
        exchange.apply()
    """

    @property
    def name(self) -> str:
        """What logs, checkpoints and reports call it: ``dense``, ``dgc``, or a name of its own."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What must be equal on all ranks, and stay so over a resume, as plain data (JSON). It may be empty."""

    @property
    def density(self) -> float:
        """Share of the gradient's entries that is sent."""

    @property
    def in_flight(self) -> Sequence[CollectiveHandle[Any]]:
        """What this step has started: to be cancelled when it fails."""

    def start_epoch(self, epoch: int) -> None:
        """Before the first step of an epoch, or the first one after a resume."""

    def begin(self, step: int, active: int) -> None:
        """Gradients are zero or None. ``active``: ranks that have data in this step: the mean is over these."""

    def enable_overlap(self, finite: Tensor | None = None) -> None:
        """The next backward pass is the last one of this step.

        Args:
            finite: bool, a scalar on the device of the parameters: no loss of this step was NaN or infinite on this
                rank. Where it is false all ranks must skip the step, so the exchange sends something that says so. It
                need not be read before the backward pass is done, which would wait for the device.
        """

    def send(self, *, has_data: bool) -> Sequence[CollectiveHandle[Any]]:
        """Send what has not been sent yet. ``has_data``: there was a backward pass on this rank."""

    @property
    def own_is_finite(self) -> bool:
        """Whether this rank's own gradients of the step were finite; True where it is not known."""

    def decode(self, results: Sequence[Any]) -> tuple[int, ...] | None:
        """Make the mean the gradient of the parameters, and return None; or take the step back.

        Where NaN or infinity is in the loss or the gradients of any rank all ranks take it back: momentum, and what is
        kept for later steps, are as before it. The answer must follow from what is equal on all ranks. It is the ranks
        that were not finite, and empty if the messages do not tell which these were.
        """

    def apply(self) -> None:
        """Change the parameters."""

    def shared_state(self) -> dict[str, Tensor]:
        """What is equal on all ranks, by name, not copied."""

    def load_shared_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse. Raises CheckpointError: it does not fit."""

    def own_state(self) -> OwnState:
        """What is this rank's alone, not copied."""

    def load_own_state(self, state: OwnState) -> None:
        """The inverse. Raises CheckpointError: it does not fit."""

    def close(self) -> None:
        """Let go of the parameters."""


@dataclass(frozen=True, slots=True)
class ExchangeLabel:
    """Which exchange a rank uses: ranks compare it when they meet, and with their checkpoint.

    Attributes:
        name: of the exchange. options: JSON text, with sorted keys.
    """

    name: str
    options: str

    @classmethod
    def of(cls, exchange: Exchange, configured: Mapping[str, Any] | None = None) -> Self:
        """Ask the exchange.

        A class of the user's that inherits one of our names is called by its class: what it sends may differ.

        Args:
            configured: its options from the configuration, where it reports none itself.

        Raises:
            ConfigError: the name or the options are none that can be compared.
        """
        kind = type(exchange)
        called = f"{kind.__module__}:{kind.__qualname__}"
        name, options = getattr(exchange, "name", None), getattr(exchange, "options", {}) or configured or {}
        if name is None or EXCHANGES.table.get(name, kind) is not kind:
            name = called
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise ConfigError(f"{called}.name must be text of 1 to {MAX_NAME_CHARS} printable characters, got {name!r}")
        try:
            text = json.dumps(options, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{called}.options must be a dictionary of plain data, as JSON has it: {error}. Give numbers, text, "
                f"lists"
            ) from None
        if not isinstance(options, Mapping) or len(text) > MAX_OPTIONS_CHARS:
            raise ConfigError(
                f"{called}.options must be a dictionary of at most {MAX_OPTIONS_CHARS} characters as JSON, "
                f"got {type(options).__name__} of {len(text)}"
            )
        return cls(name, text)

    def __str__(self) -> str:
        return self.name if self.options == "{}" else f"{self.name} {self.options}"


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """The state of an optimizer with one group, as ``optimizer/KEY/PARAMETER``, not copied."""
    tensors = {}
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):  # SGD without momentum remembers a None
                tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the state of the optimizer by copies of these tensors; what is named otherwise is left to others.

    Raises:
        CheckpointError: a tensor for a parameter that is not there, or of another shape or type.
    """
    parameters = dict(zip(names, optimizer.param_groups[0]["params"], strict=True))
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        kind, _, rest = full_name.partition("/")
        key, _, name = rest.partition("/")
        if kind != "optimizer":
            continue
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != tensor.shape or parameter.dtype != tensor.dtype:
            here = None if parameter is None else f"{tuple(parameter.shape)} of {parameter.dtype}"
            raise CheckpointError(
                f"state of the optimizer: {key} of {name!r} is {tuple(tensor.shape)} of {tensor.dtype}, here {here}"
            )
        optimizer.state[parameter][key] = tensor.detach().to(parameter.device, copy=True)
