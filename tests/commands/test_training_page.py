"""docs/training.md: its examples run, and its regression learns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import succeeded, train
from dds_domains import new_domain
from doc_pages import python_blocks

import gradbus
from gradbus.models import NoopTask
from gradbus.runtime.config.data_parallel import DataParallelConfig


@pytest.fixture(scope="module")
def names(root: Path) -> dict[str, Any]:
    """What the blocks define, all in one namespace."""
    defined: dict[str, Any] = {}
    for block in python_blocks((root / "docs" / "training.md").read_text(encoding="utf-8")):
        exec(compile(block, "docs/training.md", "exec"), defined)  # noqa: S102 - the page of this repository
    return defined


def test_the_settings_of_the_examples_are_right(names: dict[str, Any]) -> None:
    assert names["clients"].training.schedule.name == "step"
    assert names["ranks"].schedule.options == {"warmup_steps": 100}


def test_the_regression_of_the_page_learns_as_its_callback_looks_on(names: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    patience = names["Patience"]()
    config = DataParallelConfig(epochs=20, optimizer={"name": "adamw", "lr": 0.01}, schedule="one-cycle")
    outcomes = succeeded(train(names["Sines"](), names["Sines"](), configs=[config] * 2, callbacks=[[patience], []]))
    first, last = outcomes[0].reports[0], outcomes[0].reports[-1]
    assert last.metrics["rmse"] < 0.5 * first.metrics["rmse"]
    assert last.train_metrics["train rmse"] == pytest.approx(last.loss**0.5, rel=1e-4)
    assert patience.best <= last.loss


def test_the_callback_of_a_controller_on_the_page_follows_its_clients(names: dict[str, Any]) -> None:
    follow = names["FollowClients"]()
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1)
    config = gradbus.FederatedConfig(rounds=5, eval_every=0)
    result = gradbus.simulate(NoopTask(10), 2, config=config, options=options, callbacks=[follow])
    assert {client_id: len(losses) for client_id, losses in follow.losses.items()} == {0: 1, 1: 1}
    assert len(result.rounds) == 1  # this task has a loss of 0


def test_the_program_of_the_page_runs(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADBUS_BUS__INTERFACE", "loopback")
    asyncio.run(names["train"](0, 1))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split()[0].isdigit()]
    assert [int(line.split()[0]) for line in lines][-1] == 19
