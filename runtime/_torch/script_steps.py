"""The steps of a script of one's own: what it has reported of them, and which calls of its optimizers make one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import Step
from gradbus.runtime.logs import get_logger
from gradbus.torch.algorithm_programs import AlgorithmPrograms
from gradbus.torch.cpu_copies import are_finite_on_the_mesh
from gradbus.torch.weight_exchange import WeightExchange

log = get_logger("torch")


@dataclass(slots=True, eq=False)
class ScriptProgress:
    """Counts the steps of a script, and keeps what it reports for the next one.

    Attributes:
        number: of steps that count; where weights are exchanged, of all.
        epoch: that the script has begun, from 0; -1: it has reported none.
        reported: the loss of this rank's batch; None: it has reported none.
        has_newer_loss: whether a step has counted since the ranks agreed on the loss.
        skipped: number of steps, and of exchanges of weights, that were skipped.
    """

    number: int = 0
    epoch: int = -1
    reported: float | None = None
    has_newer_loss: bool = False
    skipped: int = 0

    def count(self) -> None:
        """Count a step whose gradients were exchanged."""
        self.number += 1
        self.has_newer_loss = True

    def skip(self, reason: str, step: int | None = None) -> None:
        """Count a step that is skipped, and log why. ``step``: its number; None: the one that begins."""
        self.skipped += 1
        log.warning("step skipped", step=self.number if step is None else step, reason=reason)


class WeightSteps:
    """Finds the steps of a script whose weights are exchanged: each of its optimizers steps once, in whatever order.

    Attributes:
        exchange: of the weights, which begins and ends with each step.
    """

    def __init__(
        self,
        exchange: WeightExchange,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, Tensor],
        progress: ScriptProgress,
        programs: AlgorithmPrograms,
        *,
        knows_loss: bool,
    ) -> None:
        """
        Args:
            optimizers: that change the parameters.
            knows_loss: the loss that the ranks have agreed on is that of the step before. False: an exchange that is on
                its way may change it meanwhile.
        """
        self.exchange = exchange
        self._optimizers = optimizers
        self._parameters = parameters
        self._progress = progress
        self._programs = programs
        self._knows_loss = knows_loss
        self._is_new_pass = True  # what the optimizers do next is another step
        self._stepped: set[int] = set()  # those that have stepped since the pass began

    def start_pass(self) -> None:
        """Note that a forward or backward pass begins: what the optimizers do next is another step."""
        self._is_new_pass = True

    def start_forward(self) -> None:
        """Note that a forward pass begins: weights are exchanged before it, also if only some of the optimizers have
        stepped."""
        if self._stepped:
            self._end()
        self.start_pass()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a step if this optimizer is the first one to make it."""
        if id(optimizer) in self._stepped:  # another one has been left out, and this is the next step
            self._end()
        if self._is_new_pass:  # else of several optimizers another one was first
            self._begin()
            self._is_new_pass = False

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step if this optimizer was the last one to make it: the weights are those after all of them."""
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._end()

    def _begin(self) -> None:
        """A rank whose gradients are not finite skips its step alone. All steps are counted: when the next exchange is
        due goes by their number."""
        progress, programs = self._progress, self._programs
        loss = programs.loss if self._knows_loss else math.nan
        step = Step(progress.number, max(0, progress.epoch), programs.place.world, loss)
        progress.number += 1
        self.exchange.begin_step(step, progress.reported)
        if not are_finite_on_the_mesh(one.grad for one in self._parameters.values() if one.grad is not None):
            progress.skip("a gradient is not finite")
            drop_gradients(self._parameters)

    def _end(self) -> None:
        """The next step begins whether or not the model itself is called: a loss may be a method of it."""
        self._stepped.clear()
        self._is_new_pass = True
        self.exchange.end_step(self._progress.reported)


def drop_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Have all optimizers pass over these parameters."""
    for parameter in parameters.values():
        parameter.grad = None
