"""From the configuration to an algorithm at work: made, and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from gradbus.runtime.algorithms.base import ALGORITHMS, Algorithm, Place
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.staging import check_devices
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import ConfigError

MAX_NAME_CHARS = 256  # as in settings, where a class may be named by its place
MAX_OPTIONS_CHARS = 10_000  # ranks send them to each other when they meet

MakeAlgorithm = Callable[[Place], Algorithm]


@dataclass(frozen=True, slots=True)
class AlgorithmLabel:
    """Which algorithm a rank uses: ranks compare it when they meet, and with their checkpoint.

    Attributes:
        name: of the algorithm. options: all of them, as plain data. changed: those that are not as by default.
        may_change: options that a resumed run may have others of.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    may_change: frozenset[str] = frozenset()

    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """Return the label of an algorithm.

        A class of the user's that inherits a built-in name is named by its class: what it does may differ.

        Raises:
            ConfigError: its name or options are none that can be compared.
        """
        kind = type(algorithm)
        called = f"{kind.__module__}:{kind.__qualname__}"
        name = getattr(kind, "choice", called)
        if ALGORITHMS.table.get(name, kind) is not kind:
            name = called
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            hint = ". Give the class a short name of its own, as choice" if name == called else ""
            raise ConfigError(
                f"{called if hint else called + '.choice'} must be text of 1 to {MAX_NAME_CHARS} printable characters, "
                f"got {name!r}{hint}"
            )
        options = algorithm.options.model_dump(mode="json")
        if (size := len(json.dumps(options))) > MAX_OPTIONS_CHARS:
            raise ConfigError(
                f"{called}: the options are {size} characters of JSON, at most {MAX_OPTIONS_CHARS} can be"
            )
        changed = algorithm.options.model_dump(mode="json", exclude_defaults=True)
        return cls(name, options, changed, kind.may_change)

    @property
    def kept(self) -> dict[str, Any]:
        """Return the settings that a resumed run must have as well, by their keys."""
        options = {key: value for key, value in self.options.items() if key not in self.may_change}
        return {"algorithm": self.name, **{f"algorithm.{key}": value for key, value in options.items()}}

    def __str__(self) -> str:
        return f"{self.name} {json.dumps(self.changed, sort_keys=True)}" if self.changed else self.name


def place_in(group: Group) -> Place:
    """Return where this rank is among those of a group, and on which hosts they are."""
    return Place(group.rank, group.world, tuple(member.node for member in group.members))


def start_algorithm(
    config: DataParallelConfig, place: Place, trained: Mapping[str, Tensor], make: MakeAlgorithm
) -> tuple[Algorithm, AlgorithmLabel]:
    """An algorithm that can work with these parameters, and its label.

    Raises:
        ConfigError: it cannot, with the reason.
    """
    algorithm = make(place)
    algorithm.may_give_up = config.elastic.is_on
    label = AlgorithmLabel.of(algorithm)
    check_devices(label.name, trained)
    if algorithm.scope == "step" and len({(p.dtype, p.device) for p in trained.values()}) > 1:
        raise ConfigError(f"{label.name} exchanges all gradients in one piece: the model has several dtypes or devices")
    if config.elastic.is_on:
        _check_elastic(algorithm, label, algorithm.check_delay(config.delay_steps))
    return algorithm, label


def _check_elastic(algorithm: Algorithm, label: AlgorithmLabel, delay_steps: int) -> None:
    """Before the algorithm is asked what it needs of the ranks, of which none is known yet. Raises ConfigError."""
    leaves_no_trace = (  # when a late exchange is dropped: a loss that was agreed on, say, is known by then
        algorithm.scope == "weights" and not algorithm.needs_loss and type(algorithm).commit is Algorithm.commit
    )
    for fault, what in (
        (not algorithm.is_elastic, "keeps what is of certain ranks, or of late exchanges"),
        (delay_steps > 0 and not algorithm.can_drop_late, "applies steps late (delay_steps)"),
        (
            delay_steps > 0 and not leaves_no_trace,
            "has can_drop_late, and exchanges no weights, needs the loss or has its own commit",
        ),
        (algorithm.in_network is not None, "adds up in the network"),
        (algorithm.by_hosts, "adds up by hosts or a topology, which are those of a fixed world"),
    ):
        if fault:
            raise ConfigError(f"{label}: it {what}, and ranks cannot come and go then. Set elastic.min_world=0")
