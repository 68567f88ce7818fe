"""Real processes of a data-parallel run, for tests: started here, ended by their ids. See :mod:`federation`."""

from __future__ import annotations

import itertools
import os
from contextlib import AbstractContextManager
from typing import Any

import ddp_node
import warm
from dds_domains import new_domain
from federation import Node

_numbers = itertools.count()


class Ranks(AbstractContextManager["Ranks"]):
    """Starts the ranks of one run, and ends those that are left."""

    def __init__(
        self, world: int, *, samples: int = 256, batch_size: int = 16, lease_s: float = 1.0, **config: Any
    ) -> None:  # fmt: skip
        """``lease_s``: who is silent for so long is taken for dead."""
        self._common = {
            "job": f"ddp-{os.getpid()}-{next(_numbers)}", "domain": new_domain(), "world": world,
            "samples": samples, "batch_size": batch_size, "lease_s": lease_s, "config": config,
        }  # fmt: skip
        self._world = world
        self._nodes: list[Node] = []

    def start(self, **of_ranks: dict[str, Any]) -> list[Node]:
        """All ranks; ``rank_1={"die_at": 5, "lease_s": 4.0}`` is for one of them."""
        nodes = [self._start(rank, of_ranks.get(f"rank_{rank}", {})) for rank in range(self._world)]
        self._nodes += nodes
        return nodes

    def _start(self, rank: int, spec: dict[str, Any]) -> Node:
        process, _, events = warm.fork_that_tells(ddp_node.run_forked, {**self._common, "rank": rank, **spec})
        return Node(process, events)

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.end()
