"""Ranks of one job as processes, for tests: forked from the warm server, ended by their ids. See :mod:`warm`."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
from collections.abc import Callable
from typing import Any, Self

import warm
from dds_domains import new_domain
from federation import Node

_numbers = itertools.count()


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Starts the ranks of one job, and kills those that are left at the end.

    Attributes:
        place: job and DDS domain, which no other test has.
    """

    def __init__(self, entry: Callable[[dict[str, Any], Any], None], world: int, **common: Any) -> None:
        """``entry``: runs in each process, as ``entry(spec, pipe)``. ``common``: what stands in the spec of all, beside
        ``rank``, ``world`` and ``place``."""
        self.place: dict[str, Any] = {"job": f"ranks-{os.getpid()}-{next(_numbers)}", "domain": new_domain()}
        self._entry = entry
        self._common = {"world": world, "place": self.place, **common}
        self._nodes: list[tuple[Node, Any]] = []

    def start(self, rank: int, **own: Any) -> Node:
        """Start one rank; ``own`` is for this one alone."""
        spec = {**self._common, "rank": rank, **own}
        process, ours, events = warm.fork_that_tells(self._entry, spec, both_ways=True)
        node = Node(process, events)
        self._nodes.append((node, ours))
        return node

    def start_all(self, **of_ranks: dict[str, Any]) -> list[Node]:
        """Start all ranks; ``rank_1={...}`` is for one of them."""
        return [self.start(rank, **of_ranks.get(f"rank_{rank}", {})) for rank in range(self._common["world"])]

    @property
    def nodes(self) -> list[Node]:
        """All that were started, in that order."""
        return [node for node, _ in self._nodes]

    def tell(self, rank: int) -> None:
        """Send a word to a rank that waits for one, the rank that was started as number ``rank``."""
        self._nodes[rank][1].send("go on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node, pipe in self._nodes:
            node.end()
            with contextlib.suppress(queue.Empty):  # the reader of its events ends with the last one
                while node.incoming.get(timeout=1.0) is not None:
                    pass
            pipe.close()
