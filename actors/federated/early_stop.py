"""When a run ends before its last round: by patience, or because a callback says so. Pure: reports in, a verdict out.

A callback is any object with some of these methods, called on the compute thread of the Controller; those but the last
may return True, which ends the run: its clients end gracefully, as after all rounds.

    on_round(round_id: int)             before the command of a round
    on_report(report: RoundReport)      after each round: it is committed, published and, where that is due, evaluated
    on_end(reports: list[RoundReport])  after the last one; not if the run fails
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gradbus.actors.federated.report import RoundReport
from gradbus.runtime.config.federated import OF_CLIENTS, EarlyStopSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

MAX_NAMED = 8  # metrics in a line of the log

log = get_logger("controller")

METHODS = ("on_round", "on_report", "on_end")


def evaluated_metric(report: RoundReport, metric: str, key: str, least_answered: float = 0.0) -> float | None:
    """The metric of this name in a round's report; None: the evaluation that finds it was not made, or too few clients
    have found it, which is logged: what clients send, or do not send, ends no run. ``key``: of the setting that names
    it. ``least_answered``: share of the asked clients that is enough.

    Raises:
        ConfigError: this controller's own evaluation was made, and lacks it.
    """
    if metric.startswith(OF_CLIENTS):
        return _of_clients(report, metric, key, least_answered)
    if report.eval_loss is None:
        return None
    named = report.named()
    if metric not in named:
        known = ", ".join(name for name in named if not name.startswith(OF_CLIENTS))
        raise ConfigError(f"{key}: the evaluation has no {metric!r}; it has {known}")
    return named[metric]


def _of_clients(report: RoundReport, metric: str, key: str, least_answered: float) -> float | None:
    by_clients = report.by_clients
    if not by_clients.asked:
        return None
    found = by_clients.named(least_answered).get(metric)
    if found is None:
        log.warning(
            "too few clients have found the metric", setting=key, metric=metric, round=report.round_id,
            asked=by_clients.asked,
            answered=by_clients.answered, needed=f"{least_answered:.0%} of those asked",
            found=list(by_clients.named())[:MAX_NAMED], effect="this evaluation counts as none",
        )  # fmt: skip
    return found


class EarlyStop:
    """Follows the evaluations of a run, those before a resume included.

    Attributes:
        reason: why the run ends now; empty: it goes on.
        best_round: the round with the best evaluation so far; 0: there was none.
    """

    def __init__(
        self, settings: EarlyStopSettings, callbacks: Sequence[Any], history: Iterable[RoundReport] = (), *,
        least_answered: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin after the rounds of ``history``. ``least_answered``: share of the asked clients that has to have found
        a metric of clients. Raises ConfigError: a callback has none of the methods."""
        for callback in callbacks:
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise ConfigError(f"callback {callback!r}: expected an object with some of {', '.join(METHODS)}")
        self._settings = settings
        self._least_answered = least_answered
        self._callbacks = callbacks
        self._best: float | None = None
        self._waited = 0
        self._newest = 0  # round whose evaluation is noted
        self.best_round = 0
        self.reason = ""
        for report in history:
            self.evaluated(report)

    def may_begin(self, round_id: int) -> bool:
        """Whether a round is to be commanded, as it is next."""
        if not self.reason:
            self._call("on_round", round_id)
        return not self.reason

    def round_done(self, report: RoundReport) -> None:
        """A round is done. Raises ConfigError: the controller's evaluation lacks the metric."""
        self.evaluated(report)
        self._call("on_report", report)

    def run_ended(self, reports: list[RoundReport]) -> None:
        """The run has ended gracefully."""
        for callback in self._callbacks:
            if (method := getattr(callback, "on_end", None)) is not None:
                method(reports)

    def _call(self, name: str, argument: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if method is not None and method(argument) is True and not self.reason:
                self.reason = f"{type(callback).__name__}.{name} has ended the run"

    def evaluated(self, report: RoundReport) -> None:
        """Note the evaluation of a round, once, where it has one: also of the last round before a resume, which is
        evaluated after it. Raises ConfigError: it lacks the metric."""
        patience, metric = self._settings.patience, self._settings.metric
        if patience is None or report.round_id <= self._newest:
            return
        value = evaluated_metric(report, metric, "federated.early_stop.metric", self._least_answered)
        if value is None:
            return
        self._newest = report.round_id
        better = value if self._settings.mode == "max" else -value
        if self._best is None or better > self._best + self._settings.min_delta:  # NaN is not
            self._best, self._waited, self.best_round = better, 0, report.round_id
            return
        self._waited += 1
        if self._waited >= patience:
            self.reason = f"{metric} is no better than in round {self.best_round} after {patience} evaluations"
