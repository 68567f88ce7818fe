"""The quality of a run's models: what their Controller finds on its own data, and what its clients find on theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.early_stop import MAX_NAMED, evaluated_metric, with_nearest
from gradbus.actors.federated.controller.evaluation import MAX_NAMES
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.federated.task_results import as_floats, unreadable
from gradbus.runtime.config.federated import OF_CLIENTS, FederatedConfig, split_metric
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import check_task
from gradbus.runtime.not_finite import warn_not_finite
from gradbus.runtime.tasks import TaskGroup, single_error

_NAMED = 5  # tensors in a text

log = get_logger("controller")


def personal_of(model: FlatModel) -> list[str]:
    """Names of the tensors that a Controller lacks to evaluate a model."""
    return [spec.name for spec in model.personal if spec.is_inexact]


def check_controller_task(call: str, task: FederatedTask, config: FederatedConfig, *, evaluates: bool) -> None:
    """Check that a task has what a Controller calls. Raises WrongArgument.

    Args:
        call: as of :func:`~gradbus.runtime.misuse.check_task`.
        evaluates: it has whole models, and evaluates them where ``eval_every`` is set.
    """
    methods = ("build_model", "evaluate") if evaluates and config.eval_every else ("build_model",)
    check_task(call, task, methods, "gradbus.actors.FederatedTask", unless={"evaluate": "federated.eval_every to 0"})


def check_evaluation(config: FederatedConfig, model: FlatModel) -> None:
    """Log which tensors are personal. Raises ConfigError: the run is to end by an evaluation that there is not."""
    if not (names := personal_of(model)):
        return
    for key, metric in _deciding_metrics(config, of_clients=False).items():
        raise ConfigError(
            f"{key}: {metric!r} is of an evaluation by this controller, which has no whole model: "
            f"{', '.join(names[:_NAMED])} are personal (federated.share). Take one that the clients find with "
            f"their own, such as {OF_CLIENTS}loss, with federated.evaluation.every"
        )
    log.info(
        "personal tensors",
        tensors=len(names),
        first=names[:_NAMED],
        shared_values=model.dim,
        effect="they stay at the clients, which alone can evaluate the model (federated.evaluation)",
    )


def _deciding_metrics(config: FederatedConfig, *, of_clients: bool) -> dict[str, str]:
    """The metrics that decide something, by the keys of their settings: those that clients find, or those of
    evaluations by the Controller."""
    stop, best = config.early_stop, config.checkpoint.keep_best
    named = {
        "federated.early_stop.metric": stop.metric if stop.patience is not None else "",
        "federated.checkpoint.keep_best": best or "",
    }
    return {key: metric for key, metric in named.items() if metric and metric.startswith(OF_CLIENTS) == of_clients}


class ModelEvaluation:
    """Evaluates the models of a run. What it returns is of a report, by the names of its fields; empty: nothing is due,
    or the task has no evaluation."""

    def __init__(
        self,
        context: RunContext,
        task: FederatedTask,
        model: FlatModel,
        evaluator: ClientEvaluator | None,
        progress: Progress,
    ) -> None:
        """``model``: it holds what was evaluated last. ``evaluator``: asks the clients; None: they evaluate nothing."""
        self._context = context
        self._task = task
        self._model = model
        self._evaluator = evaluator
        self._progress = progress
        self._has_whole_model = not personal_of(model)

    def _is_due(self, round_id: int) -> bool:
        every, last = self._context.config.eval_every, self._context.config.rounds
        return bool(every) and self._has_whole_model and (round_id % every == 0 or round_id == last)

    async def try_own_metrics(self, reports: Sequence[RoundReport]) -> None:
        """Evaluate the present model where a setting names a metric of the task, so that a name that is wrong is known
        before clients train; or find all of them in one of ``reports``, the rounds before a resume.

        Raises:
            ConfigError: the evaluation has none of this name.
        """
        named = _deciding_metrics(self._context.config, of_clients=False)
        if set(named.values()) - {"eval_loss"}:  # which each evaluation has
            if any(set(named.values()) <= one.named().keys() for one in reports):
                return
            found = RoundReport(round_id=0, **await self._context.compute.run(self._evaluate))
            for key, metric in named.items():
                if found.eval_loss is None:
                    raise ConfigError(
                        f"{key}: {metric!r} is of an evaluation by this controller, and evaluate of the task has "
                        f"returned None. Take a metric of clients, such as {OF_CLIENTS}loss, with "
                        f"federated.evaluation.every"
                    )
                evaluated_metric(found, metric, key)

    async def try_client_metrics(self, reports: Sequence[RoundReport]) -> None:
        """Have clients evaluate the present model where a setting names a metric of theirs that no evaluation of
        ``reports``, the rounds before a resume, has: a name that is wrong is known before they train.

        All that are ready are asked, not those alone that are drawn for an evaluation.

        Raises:
            ConfigError: more than half of them have answered, and as many as ``evaluation.least_answered`` asks for,
                and none has found one of this name. One client that has found it is enough to go on; one that has
                not ends no run, unless `clients.num` says that there is no other. After a resume it is so only where
                clients have evaluated before: what a model that is trained has no finite number for may be right.
        """
        config = self._context.config
        named = _deciding_metrics(config, of_clients=True)
        names = {split_metric(metric)[0] for metric in named.values()} - {"loss"}  # which each evaluation has
        names.difference_update(*(report.by_clients.metrics for report in reports))
        if not names:
            return
        assert self._evaluator is not None, "settings that name a metric of clients have them evaluate"
        self._progress.phase = "evaluating"
        found = await self._evaluator.evaluate_present(names)
        answered, asked = len(found.results), len(found.asked)
        may_end = not reports or any(report.by_clients.asked for report in reports)
        least = max(asked // 2 + 1, config.evaluation.least_answered * asked, 1 if config.clients.num == 1 else 2)
        for key, metric in named.items():
            name, over_clients = split_metric(metric)
            if name in names - found.names:
                end = over_clients and f".{over_clients}"
                known = [f"{OF_CLIENTS}{one}{end}" for one in sorted(found.names)[:MAX_NAMES]]
                if not (known and may_end) or answered < least:
                    log.warning(
                        "metric not found by clients",
                        setting=key,
                        metric=metric,
                        asked=asked,
                        answered=answered,
                        found=known[:MAX_NAMED],
                        effect="the run goes on: it is not known that no client ever finds it",
                    )
                    continue
                raise ConfigError(
                    f"{key}: none of the {answered} clients that have evaluated the model has found a finite "
                    f"{metric!r}; they have found {with_nearest(metric, known)}"
                )

    async def evaluate_round(self, round_id: int) -> dict[str, Any]:
        """Evaluate the present weights by this Controller, and by the clients at the same time, where that is due."""
        evaluator = self._evaluator
        if evaluator is None or not evaluator.is_due(round_id):
            return await self._by_controller(round_id)
        self._progress.phase = "evaluating"
        try:
            async with TaskGroup() as group:
                clients = group.create_task(evaluator.evaluate_round(round_id), name="evaluation-by-clients")
                found = await self._by_controller(round_id)
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        return {**found, "by_clients": clients.result()}

    async def _by_controller(self, round_id: int) -> dict[str, Any]:
        if not self._is_due(round_id):
            return {}
        self._progress.phase = "evaluating"
        found = await self._context.compute.run(self._evaluate)
        warn_not_finite(log, {**found, **found.get("metrics", {})}, round=round_id)
        return found

    def _evaluate(self) -> dict[str, Any]:
        state = self._context.state
        self._model.hold(state.weights, state.buffers)
        found = self._task.evaluate(self._model.module)
        if found is None:
            return {}
        try:
            figures = as_floats({"accuracy": found.accuracy, "eval_loss": found.loss})
            metrics = as_floats(getattr(found, "metrics", None))
        except Exception as error:
            raise unreadable(self._task, "evaluate", found, error) from None
        return {"accuracy": figures.get("accuracy"), "eval_loss": figures.get("eval_loss"), "metrics": metrics}

    async def complete_newest(self, reports: Sequence[RoundReport]) -> RoundReport | None:
        """Return the newest report with what this Controller finds: the round before a crash was committed, but may not
        have been evaluated. None: nothing was missing."""
        last = _newest(reports)
        return (
            None
            if last is None or last.eval_loss is not None
            else self._amended(last, await self._by_controller(last.round_id))
        )

    async def complete_newest_by_clients(self, reports: Sequence[RoundReport]) -> RoundReport | None:
        """Return the same with what the clients find, once they are here."""
        last, evaluator = _newest(reports), self._evaluator
        if evaluator is None or last is None or last.by_clients.asked or not evaluator.is_due(last.round_id):
            return None
        self._progress.phase = "evaluating"
        return self._amended(last, {"by_clients": await evaluator.evaluate_round(last.round_id)})

    def _amended(self, last: RoundReport, found: dict[str, Any]) -> RoundReport | None:
        if not found:
            return None
        report = self._context.state.amend(last, **found)
        self._progress.amend(report)
        return report


def _newest(reports: Sequence[RoundReport]) -> RoundReport | None:
    return reports[-1] if reports else None
