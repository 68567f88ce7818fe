"""The example tasks: each runs by the configuration in its docstring, learns, and is judged by metrics of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gradbus
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ControllerFile, load
from gradbus.experiments.examples.tabular_classification import auc, f1

CLIENTS = 3


def documented(name: str, folder: Path) -> ControllerFile:
    """The configuration in the docstring of an example."""
    text = importlib.import_module(f"gradbus.experiments.examples.{name}").__doc__ or ""
    found = re.search(r"^    \{.*?^$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    path = folder / f"{name}.json"
    path.write_text(found[0], encoding="utf-8")
    assert json.loads(found[0])["task"]["task"].startswith(f"gradbus.experiments.examples.{name}:")
    return load(ControllerFile, path)


@pytest.mark.parametrize(
    ("name", "rounds", "metrics"),
    [
        ("tabular_regression", 4, {"rmse": -1, "r2": 1}),
        ("tabular_classification", 4, {"auc": 1, "f1": 1}),
        ("segmentation", 4, {"iou": 1}),
        ("federated_text", 2, {"perplexity": -1}),
    ],
)
def test_an_example_learns_by_its_own_metrics(
    name: str, rounds: int, metrics: dict[str, int], tmp_path: Path, domain: int
) -> None:
    file = documented(name, tmp_path)
    config = file.federated.replaced("rounds", rounds).replaced("clients.num", CLIENTS).replaced("evaluation.every", 1)
    config = config.replaced("clients.dead_after_s", 30.0).replaced("checkpoint.dir", tmp_path / "state")
    if config.training.steps:
        config = config.replaced("training.steps", 15)

    async def run() -> list[gradbus.RoundReport]:
        async with gradbus.connect(name, domain=domain) as bus, asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(gradbus.Client(bus, ConfiguredTask(file.task), client_id=number).run())
            return [report async for report in gradbus.Controller(bus, ConfiguredTask(file.task), config).rounds()]

    first, *_, last = reports = asyncio.run(run())
    assert len(reports) == rounds
    assert all(report.accuracy is None and report.by_clients.answered == CLIENTS for report in reports)
    assert last.eval_loss is not None
    assert first.eval_loss is not None
    assert last.eval_loss < first.eval_loss
    for metric, sign in metrics.items():
        assert sign * last.metrics[metric] >= sign * first.metrics[metric], metric
        assert {metric, "loss"} <= last.by_clients.metrics.keys()
    if config.checkpoint.keep_best is not None:
        assert (tmp_path / "state" / "best").is_dir()


def test_equal_arguments_make_equal_models_and_data() -> None:
    spec = "gradbus.experiments.examples.segmentation:Segmentation"
    tasks: list[Any] = [ConfiguredTask(ControllerFile(task={"task": spec}).task) for _ in range(2)]  # type: ignore[arg-type]
    states = [task.build_model().state_dict() for task in tasks]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    model = tasks[0].build_model()
    assert tasks[0].evaluate_local(model, client_id=1) == tasks[1].evaluate_local(model, client_id=1)
    assert tasks[0].evaluate_local(model, client_id=1) != tasks[1].evaluate_local(model, client_id=0)


def test_the_metrics_of_rare_cases_are_those_of_the_books() -> None:
    scores, targets = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(scores, targets) == 0.75
    assert auc(torch.zeros(4), targets) == 0.5
    said, true = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert f1(said, true) == 0.5
    assert f1(torch.zeros(4, dtype=torch.bool), true) == 0.0
