"""Exchanges of gradients in a script of one's own: the newest, and those whose results are still to be applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import Step
from gradbus.runtime.errors import ConfigError

Gradient = torch.futures.Future[Tensor]
"""A bucket, for DistributedDataParallel."""


@dataclass(slots=True, eq=False)
class GradientRun:
    """One exchange of gradients.

    Attributes:
        epoch: of its step. loss: that this rank has reported for the step before.
        is_whole: whether all of it has been exchanged. is_finite: on all ranks. error: in which it has ended.
        counts: whether the algorithm has committed it; it is concluded when this is decided.
        is_applied: whether the optimizers have stepped since.
        tensors: where it is applied later, the means that have come of it, by name. ended: when all this is known.
        own: where weights are predicted, the gradients of this rank, by name.
        unexchanged: the names of parameters that this rank trains although their gradients are not exchanged. refusal:
            the error of all ranks, if some rank does.
    """

    epoch: int = 0
    loss: float | None = None
    step: Step | None = None
    is_whole: bool = False
    is_finite: bool = True
    error: BaseException | None = None
    counts: bool = False
    is_concluded: bool = False
    is_applied: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ended: Future[None] = field(default_factory=Future)
    own: dict[str, Tensor] = field(default_factory=dict)
    unexchanged: Sequence[str] = ()
    refusal: ConfigError | None = None


class GradientRuns:
    """The exchanges of a model, one for each backward pass.

    Attributes:
        newest: the one that began last. due: the one whose results the gradients get, with a delay; None: there was
            none yet.
        waiting: those whose results have not been applied yet, oldest first.
        begun: how many have begun here.
    """

    def __init__(self, delay_steps: int) -> None:
        """``delay_steps``: after how many steps a result is applied."""
        self._delay_steps = delay_steps
        self.newest = GradientRun(is_concluded=True, is_applied=True)
        self.due: GradientRun | None = None
        self.waiting: deque[GradientRun] = deque()
        self.begun = 0

    def begin(self, run: GradientRun) -> None:
        """Make this the newest one."""
        self.newest = run
        self.begun += 1
        self.waiting.append(run)
        self.due = self.waiting.popleft() if len(self.waiting) > self._delay_steps else None

    def restore(self, waiting: Iterable[GradientRun]) -> None:
        """Go on with these results of a saved state, which wait to be applied, oldest first."""
        self.newest = GradientRun(is_concluded=True, is_applied=True)
        self.due = None
        self.waiting = deque(waiting)

    @property
    def applied(self) -> GradientRun | None:
        """Return the exchange whose results the gradients hold, all of which is known; None: there was none yet."""
        return self.due if self._delay_steps else self.newest


def deliver(
    given: Gradient, flat: Tensor, into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], job: Future[None]
) -> None:
    """Give a bucket to DDP. ``into``: views of it, which get these tensors first."""
    error = job.exception()
    if error is not None:
        given.set_exception(error)  # type: ignore[arg-type]  # raised by backward()
        return
    for name, gradient in into.items():
        gradient.copy_(tensors[name])
    given.set_result(flat)
