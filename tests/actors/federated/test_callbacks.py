"""Callbacks of a controller: when they are called, what they get, how they end a run, and which are refused."""

from __future__ import annotations

import functools
import gc
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from dds_domains import new_domain
from patience import until
from pydantic import TypeAdapter
from secure_runs import Moving, Run

import gradbus
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.report import figures as draw
from gradbus.commands.report import style
from gradbus.commands.report.scalars import Scalars, round_values
from gradbus.commands.run.live import rounds_table
from gradbus.commands.rundir.reading import report_in
from gradbus.models import NoopTask
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.callbacks import Callbacks
from gradbus.runtime.errors import CallbackFailed, ConfigError


class Measured(NoopTask):
    """Reports metrics of training, and an evaluation."""

    def __init__(self) -> None:
        super().__init__(100, delta="constant")

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        super().train(model, **arguments)
        client_id = arguments["client_id"]
        return TrainResult(10 + 10 * client_id, 1.0 + client_id, metrics={"f1": 0.25 * (1 + client_id)})

    def evaluate(self, model: Any) -> EvalResult:
        return EvalResult(None, 0.5, 10)


class Follower:
    """Writes down its calls."""

    made: ClassVar[list[Follower]] = []

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        Follower.made.append(self)

    def _note(self, what: str, argument: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((what, argument))

    def on_round(self, round_id: int) -> None:
        self._note("round", round_id)

    def on_update(self, update: Any) -> None:
        self._note("update", update)

    def on_aggregate(self, report: Any) -> None:
        self._note("aggregate", report)

    def on_evaluation(self, report: Any) -> None:
        self._note("evaluation", report)

    def on_report(self, report: Any) -> None:
        self._note("report", report)

    def on_end(self, reports: Any) -> None:
        self._note("end", reports)


def simulated(task: Any, number: int = 2, given: tuple[Any, ...] = (), **rules: Any) -> gradbus.SimulationResult:
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1)
    config = gradbus.FederatedConfig(**{"rounds": 3, **rules})
    return gradbus.simulate(task, number, config=config, options=options, callbacks=given)


def test_callbacks_follow_rounds_updates_models_and_evaluations_on_the_compute_thread() -> None:
    follower = Follower()
    result = simulated(Measured(), given=(follower,), eval_every=2)
    a_round = ["round", "update", "update", "aggregate"]
    expected = [*a_round, "report", *a_round, "evaluation", "report", *a_round, "evaluation", "report", "end"]
    assert [what for what, _ in follower.calls] == expected
    assert follower.threads == {"gradbus-controller_0"}
    updates = [update for what, update in follower.calls if what == "update"][:2]
    assert {(one.client_id, one.round_id, one.num_samples, one.loss) for one in updates} == {
        (0, 1, 10, 1),
        (1, 1, 20, 2),
    }
    assert {one.metrics["f1"] for one in updates} == {0.25, 0.5}
    aggregate = next(report for what, report in follower.calls if what == "aggregate")
    assert (aggregate.round_id, aggregate.clients, aggregate.eval_loss) == (1, (0, 1), None)
    assert aggregate.weights_crc32 == result.rounds[0].weights_crc32


def test_callbacks_of_the_configuration_are_made_by_the_controller() -> None:
    Follower.made.clear()
    simulated(Measured(), rounds=1, callbacks=[f"{__name__}:Follower"])
    assert [what for what, _ in Follower.made[0].calls][-2:] == ["report", "end"]


def test_a_masked_update_is_told_of_once_its_attempt_has_come_to_a_sum() -> None:
    follower = Follower()
    run = Run(range(3))
    run.make_controller = functools.partial(gradbus.Controller, callbacks=[follower])
    run()
    assert [what for what, _ in follower.calls] == ["round", *["update"] * 3, "aggregate", "report", "end"]


def test_metrics_of_trainings_are_averaged_over_samples_and_kept_of_each_client() -> None:
    result = simulated(Measured(), rounds=2, eval_every=0)
    for report in result.rounds:
        assert report.train_metrics == {"f1": (10 * 0.25 + 20 * 0.5) / 30}
        assert [(one.loss, one.metrics) for one in report.timeline] == [(1.0, {"f1": 0.25}), (2.0, {"f1": 0.5})]
        assert round_values(report)["train/f1"] == report.train_metrics["f1"]
        again = report_in(json.dumps(report.to_json()), TypeAdapter(RoundReport))
        assert (again.train_metrics, again.timeline[1].metrics) == (report.train_metrics, {"f1": 0.5})
    with style.drawing():
        figure = draw.draw_client_training(result.rounds)
        assert draw.draw_client_training([RoundReport(round_id=1)]) is None
    assert figure is not None
    shown = [[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes]  # type: ignore[union-attr]
    loss, f1 = (10 * 1 + 20 * 2) / 30, result.rounds[0].train_metrics["f1"]
    assert shown == [
        [[[1, 1], [2, 1]], [[1, 2], [2, 2]], [[1, loss], [2, loss]]],
        [[[1, 0.25], [2, 0.25]], [[1, 0.5], [2, 0.5]], [[1, f1], [2, f1]]],
    ]
    header = [str(column.header) for column in rounds_table(result.rounds).columns]
    assert header[header.index("loss") + 1] == "f1 in training"
    assert "f1 in training" not in [str(column.header) for column in rounds_table(result.rounds, width=40).columns]


@pytest.mark.parametrize(("metrics", "text"), [({"f1": "much"}, "cannot be read"), ([1.0], "cannot be read")])
def test_metrics_of_a_training_that_are_no_numbers_are_an_error_of_the_task(metrics: Any, text: str) -> None:
    class Wrong(Measured):
        def train(self, model: Any, **arguments: Any) -> TrainResult:
            return TrainResult(super().train(model, **arguments).num_samples, 1.0, metrics=metrics)

    with pytest.raises(gradbus.GradbusError, match=text):
        simulated(Wrong(), rounds=1)


def test_more_metrics_than_a_message_holds_are_cut_and_non_finite_ones_left_out() -> None:
    class Many(Measured):
        def train(self, model: Any, **arguments: Any) -> TrainResult:
            known = {f"m{number:02}": math.nan if number == 1 else number for number in range(40)}
            return TrainResult(super().train(model, **arguments).num_samples, 1.0, metrics=known)

    (report,) = simulated(Many(), rounds=1, eval_every=0).rounds
    assert report.train_metrics == {f"m{number:02}": number for number in range(33) if number != 1}
    assert [len(one.metrics) for one in report.timeline] == [8, 8]


def test_what_happens_while_a_callback_runs_ends_the_round_at_once() -> None:
    called = threading.Event()

    class FailingLate(Moving):
        def train(self, model: Any, *, client_id: int, **arguments: Any) -> TrainResult:
            if client_id == 1:
                assert called.wait(20.0)
                raise ValueError("no data")
            return super().train(model, client_id=client_id, **arguments)

    class Slow:
        def on_update(self, update: Any) -> None:
            called.set()
            until(lambda: controllers[0].progress.expected == 1)  # the controller knows of the failure

    controllers: list[gradbus.Controller] = []

    def make(*arguments: Any) -> gradbus.Controller:
        controllers.append(gradbus.Controller(*arguments, callbacks=[Slow()]))
        return controllers[0]

    # Without a cap by the median, for which the first update would wait for the other one.
    run = Run(range(2), secure=False, clients={"min": 1}, round={"timeout_s": 12.0}, limits={"cap_samples": None})
    run.task, run.make_controller = FailingLate(), make
    (report,) = run().progress.reports
    assert report.clients == (0,)
    assert report.seconds < 11.0


@pytest.mark.parametrize("method", ["on_update", "on_aggregate", "on_evaluation"])
def test_a_callback_ends_the_run_after_the_round(method: str) -> None:
    ending = type("Ending", (), {method: lambda self, what: what.round_id == 2})()
    assert len(simulated(Measured(), given=(ending,)).rounds) == 2


@pytest.mark.parametrize("method", ["on_round", "on_update", "on_aggregate", "on_evaluation", "on_report"])
def test_an_exception_ends_the_run_with_the_name_of_the_callback(method: str) -> None:
    def fails(self: Any, what: Any) -> None:
        raise KeyError("no such column")

    with pytest.raises(CallbackFailed, match=f"Broken: {method} raised KeyError"):
        simulated(Measured(), given=(type("Broken", (), {method: fails})(),))


@pytest.mark.parametrize("section", ["federated", "parallel"])
def test_a_method_that_nothing_calls_is_refused_with_the_nearest_name(section: str) -> None:
    misspelt = type("Misspelt", (), {"on_evalution": lambda self, report: None, "on_end": lambda self, what: None})()
    with pytest.raises(
        ConfigError, match=r"Misspelt: nothing calls its method on_evalution. Did you mean on_evaluation"
    ):
        Callbacks(section, [misspelt], [])


class Shows:
    """Each of its methods is right; the cases below replace one."""

    def on_model(self, round_id: int, model: Any) -> None: ...

    def on_report(self, report: Any) -> None: ...


async def _shows(self: Any, round_id: int, model: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Shows(), r"callbacks: expected a list of objects, got one Shows: write callbacks=\[...\]"),
        ([Shows], r"callbacks: Shows is a class, expected an object: write Shows\(\)"),
        ([type("Waits", (), {"on_model": _shows})()], "Waits: on_model is an async function, expected a plain one"),
        (
            [type("Short", (), {"on_model": lambda self, model: None})()],
            r"Short: on_model takes \(model\), and is called with \(round_id, model\): too many positional arguments",
        ),
        ([type("Long", (), {"on_report": lambda self, one, two: None})()], "Long: on_report .* argument: 'two'"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_the_run(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Callbacks("client", given, [])


def test_a_callback_may_take_more_than_it_is_given_and_be_made_of_static_methods() -> None:
    class Static:
        @staticmethod
        def on_model(*arguments: Any, **options: Any) -> None: ...

    class Optional:
        def on_report(self, report: Any, more: int = 0) -> None: ...

    assert Callbacks("client", [Shows(), Static, Optional()], [])


def test_one_object_may_follow_both_kinds_of_runs() -> None:
    both = type("Both", (), {"on_epoch": lambda self, report: None, "on_report": lambda self, report: None})()
    for section in ("federated", "parallel"):
        assert Callbacks(section, [both], [])


def test_trackers_of_a_program_of_ones_own_are_callbacks() -> None:
    class Recorder:
        name, where = "recorder", "memory"

        def __init__(self) -> None:
            self.written: list[tuple[int, float]] = []

        def open(self, first: int | None) -> None:
            assert first == 1

        def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
            self.written.append((step, values["loss/train"]))

        def close(self) -> None:
            self.written.append((0, 0.0))

    recorder = Recorder()
    with Scalars(recorder) as scalars:
        result = simulated(Measured(), given=(scalars,))
    assert recorder.written == [*((one.round_id, one.loss) for one in result.rounds), (0, 0.0)]


@pytest.mark.parametrize(("metric", "hint"), [("rmse", ""), ("accuracy", ""), ("evalloss", ". Did you mean eval_loss")])
def test_a_metric_that_no_evaluation_has_is_refused_before_a_client_trains(metric: str, hint: str) -> None:
    task = Measured()
    task.train = lambda *_, **__: pytest.fail("a client has trained")  # type: ignore[method-assign, misc]
    with pytest.raises(
        ConfigError, match=f"early_stop.metric: the evaluation has no '{metric}'; it has eval_loss{hint}"
    ):
        simulated(task, early_stop={"patience": 1, "metric": metric})
    task.evaluate = lambda model: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ConfigError, match="evaluate of the task has returned None"):
        simulated(task, early_stop={"patience": 1, "metric": metric})
    gc.collect()  # which warns of a channel that is left open to a training process that was being started


def test_an_evaluation_that_a_crash_cut_off_is_told_of_once_after_the_resume_with_what_clients_found(
    tmp_path: Path,
) -> None:
    class Evaluated(Measured):
        fails = True

        def evaluate(self, model: Any) -> EvalResult:
            if self.fails:
                raise RuntimeError("no memory for it")
            return super().evaluate(model)

        def evaluate_local(self, model: Any, *, client_id: int) -> EvalResult:
            return EvalResult(None, 1.0, 10)

    settings = {"rounds": 2, "evaluation": {"every": 1}, "checkpoint": {"dir": str(tmp_path / "state")}}
    with pytest.raises(Exception, match="no memory for it"):
        simulated(Evaluated(), **settings)
    task, follower = Evaluated(), Follower()
    task.fails = False
    simulated(task, given=(follower,), **settings)
    found = [report for what, report in follower.calls if what == "evaluation"]
    assert [report.round_id for report in found] == [1, 2]
    assert [(report.eval_loss, report.by_clients.answered) for report in found] == [(0.5, 2)] * 2
