"""The programs of one algorithm in a script of one's own, and what its ranks agree on beside them."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, ReduceOp, Request, bytes_out
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.torch.observed import observed
from gradbus.torch.programs import queue_of
from gradbus.torch.unexchanged import refusal

R = TypeVar("R")


class AlgorithmPrograms:
    """Runs them on the thread of a :class:`~.programs.ProgramQueue`, where all that the algorithm keeps is changed.

    Attributes:
        place: of this rank among the others.
        bytes_out: that this rank has sent, as the shortest way of each request needs.
        loss: the mean over the ranks, as they have agreed on it last; NaN before.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """On all ranks of the group at the same time. None: the default group."""
        self._queue = queue_of(process_group)
        self.bytes_out, self.loss = 0, math.nan
        hosts = tuple(str(host) for host in self._gathered(socket.gethostname()))
        self.place = Place(self._queue.rank, self._queue.world, hosts)

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Call a function on the thread of the programs, after all that was queued before."""
        return self._queue.submit(function, *arguments)

    def call(self, function: Callable[..., R], *arguments: Any) -> R:
        """The same. Returns its result."""
        return observed.while_waiting(self.submit(function, *arguments).result)

    def compare(self, own: Mapping[str, str]) -> None:
        """On all ranks at the same time: whether these settings are equal on all of them. A rank that cannot go on has
        one alone, ``refused``: the reason.

        Raises:
            ConfigError: another rank refuses, or has others.
        """
        found = self._gathered(own)
        if "refused" in own:
            return
        for rank, other in enumerate(found):
            if "refused" in other:
                raise ConfigError(f"with_algorithm: rank {rank} refuses: {other['refused']}")
            for key in found[0]:
                if other.get(key) != found[0][key]:
                    raise ConfigError(
                        f"with_algorithm: all ranks need the same {key}: rank 0 has {found[0][key]:.300}, "
                        f"rank {rank} {other.get(key)!s:.300}"
                    )

    def _gathered(self, own: Any) -> list[Any]:
        """Plain data of all ranks, in rank order."""
        return self.call(self._queue.run, _gather("settings", own))

    # On the thread of the programs

    def run(self, program: Program[R]) -> R:
        """Run a program to its end. Returns what it returns."""
        return self._queue.run(program, self._count)

    def _count(self, request: Request) -> None:
        self.bytes_out += bytes_out(request, self.place.rank, self.place.world)

    def all_reduce(self, name: str, own: Tensor, op: ReduceOp = "sum") -> Tensor:
        """A program of one request."""

        def reduce() -> Program[Tensor]:
            reduced: Tensor = yield AllReduce(name, own, op)
            return reduced

        return self.run(reduce())

    def refusal(self, unexchanged: Sequence[str]) -> ConfigError | None:
        """Return the error that all ranks raise if some rank trains what is not exchanged. For an exchange whose result
        is not finite, or not used, on all ranks. ``unexchanged``: the names on this rank."""
        found = [[str(name) for name in names] for names in self.run(_gather("unexchanged", list(unexchanged)))]
        return refusal(found) if any(found) else None

    def agree_on_loss(self, own: float | None) -> None:
        """Make ``loss`` the mean of the ranks' losses that are finite. ``own``: None: this rank has reported none.

        Raises:
            RuntimeError: some rank has reported none.
        """
        is_finite = own is not None and math.isfinite(own)
        status = torch.tensor([own if is_finite else 0.0, is_finite, own is None], dtype=torch.float64)
        loss, count, missing = self.all_reduce("loss", status).tolist()
        if missing:
            raise RuntimeError(
                f"with_algorithm: the algorithm needs the loss, and {missing:.0f} ranks have not reported theirs: call "
                f"hook.report_loss(loss) after backward()"
            )
        self.loss = float(loss / count) if count else math.nan

    def set_loss(self, loss: float) -> None:
        """Go on with the loss of a saved state, equal on all ranks."""
        self.loss = loss


def _gather(name: str, own: Any) -> Program[list[Any]]:
    """Plain data of all ranks, in rank order."""
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    found: list[Tensor] = yield AllGather(name, text)
    return [parse_json(bytes(one.numpy()).decode()) for one in found]
