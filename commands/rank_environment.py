"""The rank of this process and the number of ranks, from options, configuration or environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gradbus.runtime.errors import ConfigError

MAX_WORLD = 1024
_HOW = (
    "Give --rank and --world, or RANK and WORLD in the environment, or start all ranks with 'gradbus run -n N', srun "
    "or mpirun"
)


class RankPlace(NamedTuple):
    """``rank`` is in 0 .. ``world`` - 1."""

    rank: int
    world: int


def find_place(
    *,
    rank: int | None = None,
    world: int | None = None,
    file_rank: int | None = None,
    file_world: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> RankPlace:
    """From, strong to weak: options, the configuration file, GRADBUS_RANK and GRADBUS_WORLD, RANK and WORLD_SIZE
    (torchrun's) or WORLD. Raises ConfigError: one of them is missing, is no number, or out of range.
    """
    variables = os.environ if environment is None else environment
    found_world = _world(world, file_world, variables)
    found_rank = _first("rank", rank, file_rank, ("GRADBUS_RANK", "RANK"), variables)
    if not 0 <= found_rank.value < found_world.value:
        expected = f"0 to {found_world.value - 1}, for world is {found_world}" if found_world.value > 1 else "0"
        raise ConfigError(f"rank must be {expected}; got {found_rank}. {_HOW}")
    return RankPlace(found_rank.value, found_world.value)


def find_world(
    *, world: int | None = None, file_world: int | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """The number of ranks alone, from the same places. Raises ConfigError."""
    return _world(world, file_world, os.environ if environment is None else environment).value


def _world(world: int | None, file_world: int | None, variables: Mapping[str, str]) -> _Found:
    found = _first("world", world, file_world, ("GRADBUS_WORLD", "WORLD_SIZE", "WORLD"), variables)
    if not 1 <= found.value <= MAX_WORLD:
        raise ConfigError(f"world must be 1 to {MAX_WORLD}, got {found}. {_HOW}")
    return found


def find_number(
    *, rank: int | None = None, file_rank: int | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """The number of a process that joins an elastic run, from where :func:`find_place` has the rank.

    Raises ConfigError: there is none, or it is out of range."""
    variables = os.environ if environment is None else environment
    found = _first("rank", rank, file_rank, ("GRADBUS_RANK", "RANK"), variables)
    if not 0 <= found.value < MAX_WORLD:
        raise ConfigError(f"rank must be 0 to {MAX_WORLD - 1}; got {found}. {_HOW}")
    return found.value


class _Found(NamedTuple):
    value: int
    where: str

    def __str__(self) -> str:
        return f"{self.value} ({self.where})"


def _first(
    name: str, option: int | None, in_file: int | None, names: Iterable[str], environment: Mapping[str, str]
) -> _Found:
    if option is not None:
        return _Found(option, f"--{name}")
    if in_file is not None:
        return _Found(in_file, "the configuration")
    for variable in names:
        text = environment.get(variable, "").strip()
        if text:
            try:
                return _Found(int(text), f"${variable}")
            except ValueError:
                raise ConfigError(f"${variable} must be a whole number, got {text!r}. {_HOW}") from None
    raise ConfigError(f"no {name} is given. {_HOW}")
