"""Which seeds are run, how one is run again, and what came of many. Loads nothing of gradbus."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fault_simulation.flavours import FLAVOURS

MEMORY, ZENOH = "memory", "zenoh"  # transports
SMALL = (3, 6)  # clients and rounds
SEEDS_A_DAY = 20_000
_TREE_SEEDS = 1 << 31  # first seeds that a tree may have


@dataclass(slots=True)
class Totals:
    """What came of some seeds. ``failed``: the commands that replay those in which something does not hold."""

    seeds: int = 0
    faults: int = 0
    callbacks: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    failed: list[str] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        """Add those of other seeds."""
        self.seeds += other.seeds
        self.faults += other.faults
        self.callbacks += other.callbacks
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.failed += other.failed

    def to_json(self) -> dict[str, object]:
        """Return them as plain data."""
        return asdict(self)


def replay_command(
    seed: int,
    flavour: str,
    size: tuple[int, int] = SMALL,
    keep: Collection[int] | None = None,
    planted: str = "",
    transport: str = MEMORY,
) -> str:
    """Return the command that runs one seed again."""
    over = "" if transport == MEMORY else f" TRANSPORT={transport}"
    kept = "" if keep is None else f" KEEP={','.join(map(str, sorted(keep))) or 'none'}"
    sized = "" if size == SMALL else f" SIZE={size[0]}x{size[1]}"
    plant = f' PLANT="{planted}"' if planted else ""
    return f"make simulate-faults SEED={seed} FLAVOUR={flavour}{over}{sized}{kept}{plant}"


def parse_size(text: str) -> tuple[int, int]:
    """Return clients and rounds of a text such as ``3x6``. Raises ValueError: it is none."""
    clients, _, rounds = text.partition("x")
    if not (clients.isdigit() and rounds.isdigit() and int(clients) >= 3 and int(rounds) >= 1):
        raise ValueError(f"size {text!r}: expected clients and rounds such as 3x6, with at least 3 clients")
    return int(clients), int(rounds)


def first_seed(root: Path, first: str = "tree") -> tuple[int, str]:
    """Return the first seed, and where it is from, in words.

    Args:
        first: a number; ``tree``: the same tree always runs the same seeds; ``today``: each day has its own.

    Raises:
        ValueError: it is something else.
    """
    if first == "today":
        day = datetime.datetime.now(datetime.UTC).date()
        return day.toordinal() * SEEDS_A_DAY, f"of {day.isoformat()}"
    if first != "tree":
        return int(first), "as given"
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD^{tree}"], cwd=root, capture_output=True, text=True, check=True, timeout=30
        )
        tree = told.stdout.strip()
        return int(tree[:12], 16) % _TREE_SEEDS, f"of the tree {tree[:12]}"
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0, "as git knows no tree here"


def check_flavour(name: str) -> str:
    """Return the name of a flavour. Raises ValueError: there is none of this name."""
    if name != "any" and name not in FLAVOURS:
        raise ValueError(f"no flavour {name!r}: expected any, {', '.join(FLAVOURS)}")
    return name
