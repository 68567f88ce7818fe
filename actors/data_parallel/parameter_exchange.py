"""One exchange of weights, and the agreement of all ranks on whether its result counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.data_parallel.mean_loss import MeanLoss, summed
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.live_weights import apply_result, take_back
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.collectives.programs import ProgramRuns


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """What holds for all exchanges of a run.

    Attributes:
        algorithm: what the ranks do with their weights. loss: the mean loss of the ranks.
        agrees_on_loss: the loss is agreed on with the exchange; else before it, if at all.
        waits_for_all: no result is applied before all ranks have agreed that it counts.
        commits_late: what the algorithm remembers of an exchange is committed when its result is applied.
    """

    algorithm: Algorithm
    loss: MeanLoss
    agrees_on_loss: bool
    waits_for_all: bool
    commits_late: bool


@dataclass(frozen=True, slots=True, eq=False)
class WeightCopy:
    """The weights that are exchanged.

    Attributes:
        bucket: a copy of them, which the exchange replaces by its result. before: another one; None: it is not late.
    """

    bucket: TensorBucket
    before: Tensor | None


class ParameterExchange:
    """The exchange of the weights of one step.

    Attributes:
        step: after which, or during which, they are exchanged. programs: of the exchange.
        has_result: set when it is known whether the result is finite on this rank, or the exchange has ended.
        counts: whether the result counts on all ranks, once the exchange has ended. is_diverged: whether some rank has
            announced that it has skipped too many steps in a row.
    """

    def __init__(
        self,
        step: TrainingStep,
        programs: ProgramRuns,
        rules: ExchangeRules,
        copy: WeightCopy,
        *,
        as_begun: Step | None,
        is_diverging: bool,
    ) -> None:
        """
        Args:
            as_begun: the step as the algorithm sees it; None: as it is when the programs begin, which may be later.
            is_diverging: this rank has skipped as many steps in a row as it may, which the exchange tells the others.
        """
        self.step = step
        self.programs = programs
        self.has_result = asyncio.Event()
        self.counts = self.is_diverged = False
        self._loop = asyncio.get_running_loop()
        self._rules = rules
        self._copy: WeightCopy | None = copy  # until it is applied
        self._as_begun = as_begun
        self._is_diverging = is_diverging
        self._is_finite = False  # the result, on this rank
        self._verdict: Tensor | None = None  # shape (2,): how many had no finite result, and how many are diverging
        self._staged: Mapping[tuple[str, str], Tensor] | None = None  # of the algorithm, to be committed late
        self._change: Tensor | None = None  # of the weights, by a result that may have to be taken back

    @property
    def algorithm(self) -> Algorithm:
        """Return what the ranks do with their weights."""
        return self._rules.algorithm

    def start(self) -> bool:
        """Start the programs. Returns whether they go on."""
        assert self._copy is not None
        self.programs.start("weights", self._exchange(self._copy.bucket))
        self.programs.all_sent()
        return self._goes_on(self.programs.goes_on)

    def resume(self, results: Sequence[Any]) -> bool:
        """Go on to the next phase. Returns whether there is one. ``results``: of the handles of ``programs``."""
        return self._goes_on(self.programs.resume(results))

    def _goes_on(self, goes_on: bool) -> bool:
        if not goes_on:
            self.conclude()
        return goes_on

    def _exchange(self, weights: TensorBucket) -> Program[None]:
        """Exchange, then agree whether the result is finite everywhere."""
        rules = self._rules
        if rules.agrees_on_loss:
            status = rules.loss.status_of(self.step)
            yield from summed(status, "loss")
            rules.loss.note(status)
        self._as_begun = self._as_begun or rules.loss.step_with(self.step)
        yield from rules.algorithm.exchange(weights, self._as_begun)
        self._is_finite = are_finite([weights.flat])
        del weights  # as large as the model: it is let go when it is applied
        if not rules.waits_for_all:
            self._loop.call_soon_threadsafe(self.has_result.set)
        verdict = torch.tensor([float(not self._is_finite), float(self._is_diverging)])
        yield from summed(verdict, "result")
        self._verdict = verdict

    def conclude(self) -> None:
        """End the exchange, all of whose programs have ended: it counts, or not, as all ranks have agreed."""
        if self._verdict is None:
            return  # it was cancelled
        self.counts, self.is_diverged = not self._verdict[0], bool(self._verdict[1])
        if self.counts and self._rules.commits_late:
            self._staged = self.algorithm.memory.take_staged()
        else:
            (self.algorithm.commit if self.counts else self.algorithm.roll_back)()

    # On the compute thread

    def apply(self, live: Mapping[str, Tensor]) -> bool:
        """Have the result change the weights. Returns False, and changes nothing: there is no finite one.

        The copy of the weights is let go.
        """
        copy, self._copy = self._copy, None
        assert copy is not None
        if self._staged is not None:
            self.algorithm.memory.commit_taken(self._staged)
            self._staged = None
        waits_for_all = self._rules.waits_for_all
        if not (self.counts if waits_for_all else self._is_finite):
            return False
        assert self._as_begun is not None
        change = apply_result(live, self.algorithm, self._as_begun, copy.bucket.flat, copy.before)
        self._change = None if waits_for_all else change
        return True

    def forget_change(self) -> None:
        """Let go of what need not be taken back, if the exchange has ended and counts."""
        self._change = self._change if not self.counts else None

    def take_back(self, live: Mapping[str, Tensor]) -> None:
        """Undo what the result has changed in the weights, if anything."""
        if self._change is not None:
            take_back(live, self._change)
