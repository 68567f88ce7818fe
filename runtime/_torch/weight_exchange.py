"""The exchange of weights in a script of one's own: each rank's optimizers take its own gradients.

A rank applies a result that is finite on itself. Whether it counts, as all ranks have one, is agreed on while training
goes on; what does not count is taken back before the next exchange. So all ranks do, after the same step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket, bucket_of
from gradbus.runtime.algorithms.live_weights import apply_result, restart, take_back
from gradbus.runtime.logs import get_logger
from gradbus.torch.algorithm_programs import AlgorithmPrograms
from gradbus.torch.cpu_copies import CpuCopies, ShardHolders

log = get_logger("torch")


@dataclass(slots=True, eq=False)
class _Exchange:
    """One exchange.

    Attributes:
        step: as the algorithm was told of it. is_finite: whether the result is finite on this rank and on those that
            hold the other shards of its model. began_finite: the same of their own weights.
        counts: whether the result is finite on all ranks, and the algorithm has committed it.
        tensors: the ``result``, and where it is applied later what the weights were, ``before``; then the ``change``
            that was made of them.
        unexchanged: the names of parameters that this rank trains although they are not exchanged.
        exchanged: when the result is there. ended: when it is known whether it counts.
    """

    step: Step
    is_finite: bool = True
    counts: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)
    exchanged: Future[None] = field(default_factory=Future)
    ended: Future[None] = field(default_factory=Future)
    began_finite: bool = True
    unexchanged: Sequence[str] = ()


class WeightExchange:
    """Exchanges the weights of a rank by an algorithm of scope ``weights``, and applies the results.

    An error in which an exchange has ended is raised by the call that applies its result, or would settle it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        programs: AlgorithmPrograms,
        parameters: Mapping[str, Tensor] | CpuCopies,
        delay_steps: int,
        on_skipped: Callable[[str, int], object],
        holders: ShardHolders,
        find_unexchanged: Callable[[], Sequence[str]],
    ) -> None:
        """
        Args:
            parameters: that are trained, by name; copies of them, where they are not float32 on the CPU.
            delay_steps: after how many steps a result is applied.
            on_skipped: called with the reason and the step of an exchange that all ranks take back.
            holders: of the shards of the model.
            find_unexchanged: returns the names of parameters that this rank trains although they are not exchanged. If
                there are any when an exchange is made, it does not count, and all ranks raise an error.
        """
        self._algorithm, self._programs = algorithm, programs
        self._parameters, self._delay_steps = parameters, delay_steps
        self._on_skipped = on_skipped
        self.holders = holders
        self._find_unexchanged = find_unexchanged
        self._has_warned = False
        self._step = Step(0)  # the newest
        self._is_due = False  # whether there is an exchange after the optimizers' steps
        self._waiting: deque[_Exchange] = deque()  # those whose results have not been applied yet, oldest first
        self._unsettled: deque[_Exchange] = deque()  # applied, perhaps to be taken back
        self._restarted = 0  # the step of the newest restart: exchanges of steps before it began with older weights
        programs.call(algorithm.begin, bucket_of(self._read()))

    def begin_step(self, step: Step, loss: float | None) -> None:
        """The first optimizer is about to step. ``loss``: that this rank has reported."""
        if not self._has_warned and (names := self._find_unexchanged()):  # the next exchange may be far away
            self._has_warned = True
            log.warning(
                "trained, but not exchanged: the next exchange is an error", parameter=names[0], step=step.number
            )
        self._step, self._is_due = step, self._algorithm.is_due(step)
        for one in self._unsettled:
            if one.ended.done() and one.counts:
                one.tensors = {}  # they are not to be taken back, and the next exchange may be far away
        if self._algorithm.overlaps and not self._delay_steps:
            self._exchange_if_due(loss)

    def end_step(self, loss: float | None) -> None:
        """All optimizers have stepped."""
        if not self._exchange_if_due(loss) and self._delay_steps:
            self._apply(self._step.number - self._delay_steps)

    def _read(self) -> Mapping[str, Tensor]:
        return self._parameters.read() if isinstance(self._parameters, CpuCopies) else self._parameters

    @contextmanager
    def edit_weights(self) -> Iterator[Mapping[str, Tensor]]:
        """The weights of this rank, float32 on the CPU, by name. What is changed in them is in the parameters then."""
        if not isinstance(self._parameters, CpuCopies):
            yield self._parameters
            return
        with self._parameters.edit() as weights:
            yield weights

    def drain(self) -> None:
        """Apply what still waits, and take back what does not count."""
        self._apply(None)
        self._settle()

    def state(self) -> list[dict[str, Any]]:
        """Take back what does not count. Returns the exchanges that still wait to be applied, when they have ended."""
        self._settle()
        for one in self._waiting:
            one.ended.result()
        return [
            {
                "number": one.step.number,
                "epoch": one.step.epoch,
                "active": one.step.active,
                "loss": one.step.loss,
                "counts": one.counts,
                "tensors": one.tensors,
                "began_finite": one.began_finite or one.step.number < self._restarted,
            }
            for one in self._waiting
        ]

    def check(self, waiting: Iterable[Mapping[str, Any]]) -> None:
        """Raises ValueError: these are not what :meth:`state` returns."""
        for saved in waiting:
            if saved["counts"] and saved["tensors"].keys() != {"before", "result"}:
                raise ValueError(
                    f"saved state of with_algorithm: late weights as {sorted(saved['tensors'])}, from another version"
                )

    def load(self, waiting: Iterable[Mapping[str, Any]], steps: int) -> None:
        """The inverse of :meth:`state`, after so many steps."""
        self._step, self._restarted, self.holders.counted = Step(steps - 1), 0, 0
        self._waiting.clear()
        self._unsettled.clear()
        for saved in waiting:
            tensors = {name: tensor.clone() for name, tensor in saved["tensors"].items()}
            # What states of older versions lack.
            older: dict[str, Any] = {"epoch": 0, "active": 1, "loss": math.nan, "began_finite": True}
            epoch, active, loss, began_finite = (saved.get(key, value) for key, value in older.items())
            one = _Exchange(Step(saved["number"], epoch, active, loss), saved["counts"], saved["counts"], tensors)
            one.began_finite = began_finite
            one.exchanged.set_result(None)
            one.ended.set_result(None)
            self._waiting.append(one)

    def _exchange_if_due(self, loss: float | None) -> bool:
        """Exchange weights: now, or with a delay while the next steps are computed. Returns whether it was due.

        An error of the exchange before is raised when this one was made: another rank may know nothing of it, and makes
        this one in any case.
        """
        if not self._is_due:
            return False
        self._is_due = False
        step, errors = self._step, list[Exception]()
        if self._delay_steps:
            _note_error(errors, self._apply, step.number - self._delay_steps)
        _note_error(errors, self._settle)
        one, bucket = _Exchange(step, unexchanged=self._find_unexchanged()), bucket_of(self._read())
        self._programs.submit(self._exchange, one, loss, bucket)
        self._waiting.append(one)  # now that it will end
        if not self._delay_steps:
            _note_error(errors, self._apply, step.number)
        if errors:
            raise errors[0]  # the others mostly follow from it
        return True

    @torch.no_grad()
    def _exchange(self, one: _Exchange, loss: float | None, bucket: TensorBucket) -> None:
        """Exchange, then agree whether it counts: whether the result is finite on each rank, and none has failed.
        ``exchanged`` is set before that, as soon as the result is there. The ranks that hold the shards of one model
        agree first, so that all others learn the same of each shard, and last, on what they have learnt of each.
        Whatever fails here, all agreements are made, as backends match calls by their order. On the thread of the
        programs."""
        try:
            try:
                counts = self._exchange_and_agree(one, loss, bucket)
            except Exception:
                with suppress(Exception):  # the error above is the cause, and is raised
                    self.holders.agree(False)
                raise
            (one.counts,) = self.holders.agree(counts)
            self.holders.counted += one.counts
            # Before it is known to have ended: what is read then is of after it.
            (self._algorithm.commit if one.counts else self._algorithm.roll_back)()
            one.ended.set_result(None)
        except BaseException as error:
            if not one.counts:
                self._algorithm.roll_back()
            for future in (one.exchanged, one.ended):
                if not future.done():
                    future.set_exception(error)

    def _exchange_and_agree(self, one: _Exchange, loss: float | None, bucket: TensorBucket) -> bool:
        """Whether the result is finite, and none has failed, on all ranks that exchange this shard, and on the holders
        of each of their models."""
        own = are_finite([bucket.flat])
        try:
            try:
                before = bucket.flat.clone() if self._delay_steps else None
                self._run_program(one, loss, bucket)
            except Exception:
                with suppress(Exception):
                    self.holders.agree(False, own)
                raise
            one.is_finite, one.began_finite = self.holders.agree(are_finite([bucket.flat]), own)
        except Exception:
            with suppress(Exception):
                self._agree(False, one.unexchanged)
            raise
        if one.is_finite:
            one.tensors = {"result": bucket.flat} | ({} if before is None else {"before": before})
        one.exchanged.set_result(None)
        return self._agree(one.is_finite, one.unexchanged)

    def _run_program(self, one: _Exchange, loss: float | None, bucket: TensorBucket) -> None:
        if self._algorithm.needs_loss:
            self._programs.agree_on_loss(loss)
            if self._delay_steps or not self._algorithm.overlaps:  # else in a run it would not be known yet
                one.step = dataclasses.replace(one.step, loss=self._programs.loss)
        self._programs.run(self._algorithm.exchange(bucket, one.step))

    def _agree(self, is_finite: bool, unexchanged: Sequence[str]) -> bool:
        """Return whether the exchange counts. Raises ConfigError, on all ranks: one trains what is not exchanged."""
        if self.all_are(is_finite and not unexchanged):
            return True
        if (error := self._programs.refusal(unexchanged)) is not None:
            raise error
        return False

    def all_are(self, is_finite: bool) -> bool:
        """Return whether it is true on every rank that exchanges this shard that its weights are finite."""
        return bool(self._programs.all_reduce("finite", torch.tensor([float(is_finite)]), "min"))

    def _apply(self, until: int | None) -> None:
        """Apply the results of the exchanges of steps up to this one; None: of all. One that is not finite on this rank
        is dropped; whether the others are finite on all ranks may not be known yet, see :meth:`_settle`. Where own
        weights were not finite, those of the last exchange take their place: else no exchange would count any more.
        Once for all exchanges that had begun by then: what has been trained since is kept."""
        while self._waiting and (until is None or self._waiting[0].step.number <= until):
            one = self._waiting.popleft()
            one.exchanged.result()
            if one.is_finite:
                result, before = one.tensors["result"], one.tensors.get("before")
                with self.edit_weights() as weights:
                    change = apply_result(weights, self._algorithm, one.step, result, before)
                one.tensors = {"change": change}
            elif not one.began_finite and one.step.number >= self._restarted:
                self._restart()
            self._unsettled.append(one)

    def _settle(self) -> None:
        """Take back what was applied of exchanges that do not count. Over a distant link nobody is to wait for what all
        say of an exchange, so this is called before the next one, and where weights have to be final."""
        while self._unsettled:
            one = self._unsettled.popleft()
            try:
                one.ended.result()
            finally:
                if not one.counts:
                    if "change" in one.tensors:
                        with self.edit_weights() as weights:
                            take_back(weights, one.tensors["change"])
                    reason = "an exchange of weights has failed on some rank, or its result is not finite"
                    self._on_skipped(reason, one.step.number)

    def _restart(self) -> None:
        self._restarted = self._step.number  # whose own exchange begins after this
        with self.edit_weights() as weights:
            is_back = restart(weights, lambda flat: self._programs.call(self._algorithm.weights_of_joiner, flat))
        if is_back:
            log.warning("weights are not finite: back to those of the last exchange", step=self._step.number + 1)


def _note_error(errors: list[Exception], function: Callable[..., object], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception as error:
        errors.append(error)
