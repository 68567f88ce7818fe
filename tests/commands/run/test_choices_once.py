"""What the settings of a run name is found, checked and made once on the way from the command to the first round."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gradbus.actors.aggregation.strategies import FedAvg, FedAvgM
from gradbus.actors.federated.controller import combinations
from gradbus.commands.files import ClientFile, ControllerFile
from gradbus.commands.run.federated import run_client, run_controller
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.selectors import ClientFacts, Draw, Selector

pytestmark = pytest.mark.slow
TASK = {"task": "golden_task:GoldenTask", "threads": 1}
made: Counter[str] = Counter()


class CountedSelector(Selector):
    """Selects the first clients, and counts its objects."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        made["selector"] += 1

    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        return [one.client_id for one in ready[:count]]


class CountedStrategy(FedAvg):
    """Counts its objects, and how often it is asked whether it fits the settings."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        made["strategy"] += 1

    def check(self, config: FederatedConfig) -> None:
        made["check of the strategy"] += 1

    def broadcast(self) -> Tensor | None:
        return None


def test_a_run_makes_its_selector_strategy_and_codecs_once(
    domain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.clear()
    make_codecs = combinations.make_codecs

    def counted(config: FederatedConfig) -> Any:
        made["codecs"] += 1
        return make_codecs(config)

    monkeypatch.setattr(combinations, "make_codecs", counted)
    own = {"strategy": f"{__name__}:CountedStrategy", "selection": f"{__name__}:CountedSelector"}
    asyncio.run(two_rounds(domain, tmp_path / "run", own))
    assert made == {"selector": 1, "strategy": 1, "check of the strategy": 1, "codecs": 1}


def test_a_run_makes_a_built_in_strategy_once(domain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    make = FedAvgM.__init__

    def counted(self: FedAvgM, dim: int, **options: Any) -> None:
        made["strategy"] += 1
        make(self, dim, **options)

    monkeypatch.setattr(FedAvgM, "__init__", counted)
    asyncio.run(two_rounds(domain, tmp_path / "run", {"strategy": "fedavgm"}))
    assert made == {"strategy": 1}


async def two_rounds(domain: int, path: Path, choices: dict[str, str]) -> None:
    """Run a controller and a client as their commands do."""
    bus, rules = {"job": "once", "domain": domain}, {"rounds": 2, "clients": {"num": 1, "min": 1}, **choices}
    controller = ControllerFile.model_validate({"bus": bus, "task": TASK, "federated": rules})
    client = ClientFile.model_validate({"bus": bus, "task": TASK})
    with ControllerDirectory(path) as run:
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            group.create_task(run_controller(controller, run))
            group.create_task(run_client(client, 0))


def test_a_second_run_with_the_same_choices_makes_a_strategy_of_its_own() -> None:
    choices = combinations.check_combination(FederatedConfig(strategy="fedavgm"))  # type: ignore[arg-type]
    first, second = choices.take_strategy(3), choices.take_strategy(3)
    assert isinstance(first, FedAvgM)
    assert isinstance(second, FedAvgM)
    assert first is not second


def test_a_built_in_strategy_is_found_to_fit_the_other_choices_before_a_model_is_there() -> None:
    choices = combinations.check_combination(FederatedConfig())
    assert choices.fits_strategy
    assert not combinations.check_choices(FederatedConfig()).fits_strategy
    assert not combinations.check_combination(
        FederatedConfig(strategy=f"{__name__}:CountedStrategy")  # type: ignore[arg-type]
    ).fits_strategy
