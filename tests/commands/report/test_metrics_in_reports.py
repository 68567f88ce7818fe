"""Reports of tasks without an accuracy, of clients that have evaluated, and tables of local models as pictures."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.figure
import pytest

from gradbus.actors.federated.controller.evaluation import ClientEvaluation, ClientMetric, CrossSite, CrossSiteRow
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.report import compare, style
from gradbus.commands.report import figures as draw
from gradbus.commands.report.metric_parts import metric_columns, newest_quality, quality_name
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.commands.rundir.reading import RunFiles, read_run


def run_of(name: str, *rmse: float, **more: float) -> RunFiles:
    rounds = tuple(
        RoundReport(round_id=number, loss=value, eval_loss=value, metrics={"rmse": value, **more}, bytes_up=1000)
        for number, value in enumerate(rmse, start=1)
    )
    return RunFiles(path=Path(name), kind="federated", config={}, summary={}, rounds=rounds)


def test_runs_without_accuracy_are_compared_by_the_metrics_of_their_tasks() -> None:
    runs = [run_of("a", 4.0, 2.0), run_of("b", 4.0, 3.0, r2=0.5)]
    (numbers,) = compare.page_of(runs).sections[0].tables
    shown = {row[0]: row[1:] for row in numbers.rows}
    assert shown["rmse"] == ["2.0000", "3.0000", "1.5"]
    assert shown["r2"][1] == "0.5000"
    assert shown["test loss"] == ["2.0000", "3.0000", "1.5"]
    with style.drawing():
        figure = draw.draw_curves(
            [draw.curve_of_rounds(run.rounds, style.nth_look(0, "a")) for run in runs], counted="round", sent="sent"
        )
    assert figure is not None
    assert figure.axes[0].get_ylabel() == "rmse"
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[4.0, 2.0], [4.0, 3.0]]


def test_an_accuracy_goes_before_other_metrics() -> None:
    reports = [RoundReport(round_id=1, accuracy=0.5, metrics={"f1": 0.25})]
    assert (quality_name(reports), newest_quality(reports)) == ("Accuracy", "50.00 %")
    assert newest_quality(run_of("a", 2.0).rounds) == "rmse 2.0000"
    assert newest_quality([]) == "-"


def test_a_table_has_no_more_columns_of_metrics_than_it_can_show_and_those_of_most_rounds() -> None:
    of_rounds = [{f"made up {number}": 0.0, "f1": 0.5} for number in range(100)]
    shown = [one.head.strip() for one in metric_columns(of_rounds)]
    assert len(shown) == 32
    assert shown[0] == "f1"


def test_what_clients_find_is_drawn_as_mean_and_median_in_their_range() -> None:
    one = {"loss": ClientMetric(mean=2.0, median=1.5, min=1.0, max=4.0, clients=3)}
    reports = [
        RoundReport(round_id=number, by_clients=ClientEvaluation(asked=3, answered=3, metrics=one)) for number in (2, 4)
    ]
    with style.drawing():
        figure = draw.draw_client_metrics([RoundReport(round_id=1), *reports])
        assert draw.draw_client_metrics([RoundReport(round_id=1)]) is None
    assert figure is not None
    (axes,) = figure.axes
    lines = [line.get_xydata().tolist() for line in axes.lines]  # type: ignore[union-attr]
    assert lines == [[[2.0, 2.0], [4.0, 2.0]], [[2.0, 1.5], [4.0, 1.5]]]
    assert (axes.collections[0].get_datalim(axes.transData).ymin, axes.dataLim.ymax) == (1.0, 4.0)


TABLE = CrossSite(
    round_id=3,
    clients=(0, 7),
    rows=(
        CrossSiteRow(model=None, results={0: {"loss": 1.0}, 7: {"loss": 2.0, "=1+1": 0.5}}, num_samples={0: 10, 7: 20}),
        CrossSiteRow(model=0, results={0: {"loss": 0.5}}, num_samples={0: 10}, missing={7: "client lost"}),
        CrossSiteRow(model=7, failure="@not shown"),
    ),
)


def test_a_table_of_local_models_is_drawn_with_gaps_where_there_is_no_result() -> None:
    with style.drawing():
        figure = draw.draw_cross_site(TABLE, "loss")
        assert draw.draw_cross_site(TABLE, "rmse") is None
    assert isinstance(figure, matplotlib.figure.Figure)
    axes = figure.axes[0]
    values = axes.images[0].get_array()
    assert values is not None
    assert [[None if math.isnan(cell) else cell for cell in row] for row in values.filled(math.nan).tolist()] == [
        [1.0, 2.0],
        [0.5, None],
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["global", "0"]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "0.5"]


def test_no_text_of_a_client_becomes_a_formula_of_a_spreadsheet(tmp_path: Path) -> None:
    with ControllerDirectory(tmp_path) as run:
        run.write_cross_site(TABLE)
        run.write_config({"federated": {}})
    lines = (tmp_path / "cross_site.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "model,client,samples,loss,'=1+1,missing"
    assert lines[-1] == "7,7,,,,'@not shown"
    assert lines[4] == "0,7,,,,client lost"
    assert read_run(tmp_path).cross_site == TABLE


@pytest.mark.parametrize("text", ["[]", '{"round_id": "x"}', "{"])
def test_a_table_that_cannot_be_read_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    with ControllerDirectory(tmp_path) as run:
        run.write_config({"federated": {}})
    (tmp_path / "cross_site.json").write_text(text, encoding="utf-8")
    found = read_run(tmp_path)
    assert found.cross_site is None
    assert any("cross_site.json cannot be read" in sentence for sentence in found.missing)
