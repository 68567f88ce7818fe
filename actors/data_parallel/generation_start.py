"""Where the ranks of a new generation go on, and which of them gets its state from whom: decided from what all have
said of themselves, so equally on all of them. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from gradbus.actors.data_parallel.replicas import check_equal, check_equal_layouts, describe_layout
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.control import PROTOCOL
from gradbus.runtime.wire.frames import VERSION

# What ranks of one generation that stand at the same step have in common of a position; the rest is each one's own.
POSITION_FIELDS = (
    "step", "epoch", "epoch_step", "epoch_batches", "skipped", "skipped_in_row", "skipped_exchanges",
    "ended_exchanges", "mean_loss",
)  # fmt: skip
# Ranks that were lost at the end of an epoch may stand at one step, but in two epochs, with the same state.
_PLACE = ("synced", "step", "ended_exchanges", "epoch")


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """Where a generation goes on.

    Attributes:
        source: a rank that has the newest state. has_state: whether any has the state of the run; else the run begins.
        is_apart: whether some rank stands elsewhere than ``source``.
        sends_to: of each rank that sends its state those that get it, see :func:`assign_donors`.
        schedule_steps: of the run, as ``source`` has them; 0: it has none yet.
        is_stopped: callbacks have ended the run. has_callbacks: some rank has callbacks.
    """

    source: int
    has_state: bool
    is_apart: bool
    sends_to: Mapping[int, Sequence[int]]
    schedule_steps: int
    is_stopped: bool
    has_callbacks: bool

    @classmethod
    def of(cls, hellos: Sequence[Mapping[str, Any]], numbers: Sequence[int], generation: int) -> Self:
        """Decide from the hellos of all ranks.

        Args:
            numbers: of their processes, by rank.

        Raises:
            ConfigError: processes do not fit together.
            CollectiveError: steps were made, and no rank has the state of the run.
        """
        _check_equal(hellos)
        places = [tuple(hello[name] for name in _PLACE) for hello in hellos]
        newest = max(places)
        source, has_state = places.index(newest), newest[0] >= 0
        # A step takes all ranks of a generation, each with a state: while process 0, which may have had a checkpoint to
        # go on from, is there from the first one on and has none, no step was made.
        if not has_state and not any(hello["begins"] for hello in hellos):
            raise CollectiveError(
                f"no rank of generation {generation} has the state of the run: go on from a checkpoint, all ranks anew"
            )
        behind = [rank for rank, place in enumerate(places) if place[:-1] != newest[:-1]] if has_state else []
        return cls(
            source,
            has_state,
            any(place != newest for place in places),
            assign_donors(len(hellos), behind, [hello["broken"] for hello in hellos], numbers),
            hellos[source]["schedule_steps"],
            # A vote that some have counted counts for all; ranks of another past may know of others.
            any(hello["is_stopped"] for hello in hellos if hello["synced"] == newest[0]),
            any(hello["callbacks"] for hello in hellos),
        )


def _check_equal(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError: processes of a generation do not fit together."""
    check_equal("settings", [hello["settings"] for hello in hellos])
    check_equal(
        "data",
        [hello["data"] for hello in hellos],
        hint="Start all processes with the same data set, its options included, and the same batch size",
    )
    check_equal_layouts([hello["layout"] for hello in hellos])


def assign_donors(
    world: int, behind: Sequence[int], broken: Sequence[Sequence[int]], numbers: Sequence[int]
) -> dict[int, list[int]]:
    """Return for each rank that sends its state the ranks that get it: each gets it from another one, as far as there
    are.

    Args:
        behind: the ranks that lack the state.
        broken: of each rank the numbers of processes whose copies were broken: others are asked first.
        numbers: of the processes, by rank.
    """
    donors = [rank for rank in range(world) if rank not in behind]
    sends_to: dict[int, list[int]] = {}
    for index, rank in enumerate(behind):
        order = donors[index % len(donors) :] + donors[: index % len(donors)]
        sends_to.setdefault(min(order, key=lambda donor: broken[rank].count(numbers[donor])), []).append(rank)
    return sends_to


def equal_traits(model: nn.Module, settings: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, int]:
    """Return what must be equal on all members of a group, as hashes.

    Args:
        settings: those that ranks share. data: facts of the data.
    """
    return {
        "model": _hash(describe_layout(model)),
        "settings": _hash(settings),
        # What ranks send one another as plain data is of no version of the protocol: a rank of before a field was
        # added would fail all ranks that look for it.
        "data": _hash(data),
        "version": _hash([PROTOCOL, VERSION, POSITION_FIELDS]),
    }


def _hash(value: Any) -> int:
    """64 bits of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
