"""When a run ends before its last round: by patience, or because a callback says so.

A callback is any object with some of these methods, called on the compute thread of the Controller; those but the last
may return True, which ends the run after the round: its clients end gracefully, as after all rounds.

    on_round(round_id: int)             before the command of a round
    on_update(update: Facts)            an update counts: its client, samples, loss and metrics; of a site, its sum
    on_aggregate(report: RoundReport)   the new model is computed, and neither committed nor published nor evaluated yet
    on_evaluation(report: RoundReport)  after a round whose model was evaluated, by the Controller or by clients
    on_report(report: RoundReport)      after each round: it is committed, published and, where that is due, evaluated
    on_end(reports: list[RoundReport])  after the last one; not if the run fails

A round that a crash has cut off before its commit is done again, and so are its calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from gradbus.actors.aggregation.updates import Facts
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.runtime.callbacks import Callbacks, CallbackWait
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import OF_CLIENTS, EarlyStopSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.nearest import nearest

P = ParamSpec("P")
T = TypeVar("T")

MAX_NAMED = 8  # metrics in a line of the log

log = get_logger("controller")


def evaluated_metric(
    report: RoundReport, metric: str, key: str, least_answered: float = 0.0, *, is_of_resumed: bool = False
) -> float | None:
    """The metric of this name in a round's report; None: the evaluation that finds it was not made, or too few clients
    have found it, which is logged: what clients send, or do not send, ends no run. ``key``: of the setting that names
    it. ``least_answered``: share of the asked clients that is enough. ``is_of_resumed``: the round was before a resume.

    Raises:
        ConfigError: this controller's own evaluation was made, and lacks it.
    """
    if metric.startswith(OF_CLIENTS):
        return _of_clients(report, metric, key, least_answered)
    if report.eval_loss is None:
        return None
    named = report.named()
    if metric not in named:
        known = [name for name in named if not name.startswith(OF_CLIENTS)]
        of_round, changed = "", ""
        if is_of_resumed:
            of_round = f" of round {report.round_id}, before the run was resumed,"
            changed = (
                ": the setting has changed since, or what the task evaluates. Name a metric that it has, set "
                "federated.early_stop.patience to null, or begin a new run in another federated.checkpoint.dir"
            )
        raise ConfigError(
            f"{key}: the evaluation{of_round} has no {metric!r}{changed}; it has {with_nearest(metric, known)}"
        )
    return named[metric]


def with_nearest(metric: str, known: Sequence[str]) -> str:
    """The metrics that there are, for an error about one that there is not, and which of them may be meant."""
    near = nearest(metric, known)
    return ", ".join(known) + (f". Did you mean {near}?" if near else "")


def _of_clients(report: RoundReport, metric: str, key: str, least_answered: float) -> float | None:
    by_clients = report.by_clients
    if not by_clients.asked:
        return None
    found = by_clients.named(least_answered).get(metric)
    if found is None:
        log.warning(
            "too few clients have found the metric",
            setting=key,
            metric=metric,
            round=report.round_id,
            asked=by_clients.asked,
            answered=by_clients.answered,
            needed=f"{least_answered:.0%} of those asked",
            found=list(by_clients.named())[:MAX_NAMED],
            effect="this evaluation counts as none",
        )
    return found


class RunCallbacks:
    """Calls the callbacks of a run on its compute thread, and waits for them.

    Attributes:
        stop: whose methods call them.
    """

    def __init__(self, compute: ComputeThread, callbacks: Callbacks, stop: EarlyStop) -> None:
        self._compute = compute
        self._callbacks = callbacks
        self._wait = CallbackWait(callbacks)
        self.stop = stop

    def have(self, method: str) -> bool:
        """Return whether a callback has this method."""
        return self._callbacks.have(method)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that calls callbacks, such as :meth:`EarlyStop.call_on_aggregate`. Raises CallbackFailed;
        CallbackTimeout: the run has ended, and one does not return."""
        return await self._wait.wait(self._compute.run(function, *args, **kwargs))

    def run_has_ended(self) -> None:
        """From now on, each callback has a limited time."""
        self._wait.run_has_ended()


class EarlyStop:
    """Follows the evaluations of a run, those before a resume included. Pure: reports in, a verdict out.

    Attributes:
        reason: why the run ends now; empty: it goes on.
        best_round: the round with the best evaluation so far; 0: there was none.
    """

    def __init__(
        self,
        settings: EarlyStopSettings,
        callbacks: Callbacks,
        history: Iterable[RoundReport] = (),
        *,
        least_answered: float = 0.0,
    ) -> None:
        """Begin after the rounds of ``history``. ``least_answered``: share of the asked clients that has to have found
        a metric of clients."""
        self._settings = settings
        self._least_answered = least_answered
        self._callbacks = callbacks
        self._best: float | None = None
        self._waited = 0
        self._newest = 0  # round whose evaluation is noted
        self.best_round = 0
        self.reason = ""
        for report in history:
            self.note(report, is_of_resumed=True)

    def end(self, reason: str) -> None:
        """End the run after this round, unless it ends already. ``reason``: empty: it goes on."""
        self.reason = self.reason or reason

    def call_on_round(self, round_id: int) -> bool:
        """Call the callbacks before a round, unless the run ends already. Returns whether it is to be commanded."""
        if not self.reason:
            self._call("on_round", round_id)
        return not self.reason

    def run_update_callbacks(self, updates: Iterable[Facts]) -> None:
        """Call the callbacks for updates that count in the open round."""
        for update in updates:
            self._call("on_update", update)

    def call_on_aggregate(self, report: RoundReport) -> None:
        """Call the callbacks for the new model of a round."""
        self._call("on_aggregate", report)

    def note_round(self, report: RoundReport) -> None:
        """Note that a round is done, and call the callbacks. Raises ConfigError: the controller's evaluation lacks the
        metric."""
        self.note(report)
        if report.eval_loss is not None or report.by_clients.asked:
            self.call_on_evaluation(report)
        self._call("on_report", report)

    def call_on_end(self, reports: list[RoundReport]) -> None:
        """Call the callbacks at the graceful end of the run."""
        self._call("on_end", reports)

    def _call(self, method: str, argument: Any) -> None:
        """Raises CallbackFailed: one has raised an exception."""
        ending = self._callbacks.call(method, argument)
        if ending and not self.reason:
            self.reason = f"{ending[0]}.{method} has ended the run"

    def call_on_evaluation(self, report: RoundReport) -> None:
        """Call the callbacks once the model of a round was evaluated by all that evaluate it: also of the last round
        before a resume."""
        self._call("on_evaluation", report)

    def note(self, report: RoundReport, *, is_of_resumed: bool = False) -> None:
        """Note the evaluation of a round, once, where it has one. ``is_of_resumed``: it was before a resume. Raises
        ConfigError: it lacks the metric."""
        patience, metric = self._settings.patience, self._settings.metric
        if patience is None or report.round_id <= self._newest:
            return
        value = evaluated_metric(
            report, metric, "federated.early_stop.metric", self._least_answered, is_of_resumed=is_of_resumed
        )
        if value is None:
            return
        self._newest = report.round_id
        better = value if self._settings.mode == "max" else -value
        is_best = self._best is None or better > self._best + self._settings.min_delta
        if is_best and math.isfinite(value):  # else nothing would be better than a first one that is NaN
            self._best, self._waited, self.best_round = better, 0, report.round_id
            return
        self._waited += 1
        if self._waited >= patience:
            self.reason = (
                f"{metric} is no better than in round {self.best_round} after {patience} evaluations"
                if self.best_round
                else f"{metric} was not finite in {patience} evaluations"
            )
