"""Where the ranks of a run stand: the host, rack and rail of each, from a JSON file.

    {"ranks": [{"host": "a", "rack": "left", "rail": 0}, {"host": "a", "rack": "left", "rail": 1}, ...]}

One entry for each rank, in their order. ``rack`` and ``rail`` may be left out, for all ranks together. Options hold the
content, not the name of the file, so that ranks with other files are told so before the first step.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json

MAX_RANKS = 1 << 16
_MAX_FILE_BYTES = 1 << 24

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class RankPosition(BaseModel):
    """Where one rank stands.

    Attributes:
        host: its machine. rack: of the host. rail: which of the networks between hosts it is on, 0 .. n - 1 for the n
            ranks of a host. By default ranks of a host are on rails in their order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: _Name
    rack: _Name | None = None
    rail: Annotated[int, Field(ge=0, lt=MAX_RANKS)] | None = None


class Topology(BaseModel):
    """Where all ranks stand. May be given as the name of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: Annotated[tuple[RankPosition, ...], Field(min_length=1, max_length=MAX_RANKS)]
    """Of each rank, in their order."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        path = Path(value)
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"topology file {path}: larger than {_MAX_FILE_BYTES} bytes")
            return parse_json(path.read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"topology file {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"topology file {path}: {error}") from None

    @model_validator(mode="after")
    def _fits_together(self) -> Topology:
        for key in ("rack", "rail"):
            without = [rank for rank, one in enumerate(self.ranks) if getattr(one, key) is None]
            if 0 < len(without) < len(self.ranks):
                raise ValueError(f"rank {without[0]} has no {key}, others have: give it to all ranks, or to none")
        racks: dict[str, tuple[int, str | None]] = {}
        rails: dict[str, Counter[int | None]] = {}
        for rank, one in enumerate(self.ranks):
            first, rack = racks.setdefault(one.host, (rank, one.rack))
            if rack != one.rack:
                raise ValueError(
                    f"host {one.host!r} is in rack {rack!r} at rank {first}, and in rack {one.rack!r} at rank {rank}"
                )
            rails.setdefault(one.host, Counter())[one.rail] += 1
        for host, found in rails.items():
            if None not in found and sorted(found.elements(), key=lambda rail: rail or 0) != list(range(found.total())):
                raise ValueError(
                    f"host {host!r} has ranks on the rails {sorted(found.elements(), key=lambda rail: rail or 0)}, "
                    f"expected 0 to {found.total() - 1}, each once"
                )
        return self

    def check_world(self, world: int) -> None:
        """Raise ConfigError where this is not about as many ranks."""
        if len(self.ranks) != world:
            raise ConfigError(f"the topology has {len(self.ranks)} ranks, expected {world}, as many as the run")

    @cached_property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The host of each rank; then, where they are given, the rack of each."""
        hosts = tuple(one.host for one in self.ranks)
        racks = tuple(one.rack for one in self.ranks if one.rack is not None)
        return (hosts, racks) if racks else (hosts,)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ranks by rail."""
        return tuple(sorted(range(len(self.ranks)), key=lambda rank: (self.ranks[rank].rail or 0, rank)))


TopologyFile = Annotated[Topology, WithJsonSchema({"type": ["string", "object"]})]
"""As an option of an algorithm: the name of a file, or its content."""
