"""The configurations and the Python of the pages on federated runs, each run small or at least loaded.

Their commands are those of ``test_documented_commands.py``, the tutorials those of ``test_tutorials.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from doc_pages import fenced_blocks, python_blocks, rows, section
from fresh_shells import write_mnist
from torch import nn

import gradbus
from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.actors.virtual.simulation import choices_of
from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile, load
from gradbus.models import ClassificationTask, Dataset, DataSplit
from gradbus.runtime.choices import STRATEGIES

pytestmark = pytest.mark.slow

PAGES = {
    "asynchronous.md": 3, "evaluation.md": 4, "partitions.md": 2, "personal.md": 5, "privacy.md": 2,
    "secure-aggregation.md": 2, "selection.md": 2, "trees.md": 3,
}  # fmt: skip
"""Blocks of JSON of each."""
ELSEWHERE = {
    "operations.md": 1,  # tests/commands/test_operations_page.py
    "own-codec.md": 2,  # tests/actors/test_own_codec.py
    "parameter-server.md": 1,
    "security.md": 1,
    "trainers.md": 1,  # tests/actors/trainers/test_lightning_callback.py
    "tutorial-data-parallel.md": 1,  # tests/commands/test_tutorials.py, and its next line
    "tutorial-federated.md": 3,
    "wan.md": 2,  # tests/commands/test_over_links.py
}


def blocks_of(root: Path, page: str) -> list[str]:
    return fenced_blocks((root / "docs" / page).read_text(encoding="utf-8"), "json")


def test_every_configuration_in_the_documents_is_known_to_a_test(root: Path) -> None:
    found = {
        path.name: len(fenced_blocks(path.read_text(encoding="utf-8"), "json")) for path in (root / "docs").glob("*.md")
    }
    assert {name: count for name, count in found.items() if count} == PAGES | ELSEWHERE


def configurations(root: Path, page: str, folder: Path) -> list[ControllerFile]:
    """Those of controllers on a page. Those of clients beside them are loaded alone."""
    found = []
    for number, block in enumerate(blocks_of(root, page)):
        path = folder / f"{number}.json"
        path.write_text(block, encoding="utf-8")
        if "client" in json.loads(block):
            load(ClientFile, path)
        else:
            found.append(load(ControllerFile, path))
    return found


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_configurations_of_a_page_are_those_of_a_run_that_starts(root: Path, page: str, tmp_path: Path) -> None:
    for file in configurations(root, page, tmp_path):
        check_combination(file.federated)


def test_the_other_configurations_are_right_as_well(root: Path, tmp_path: Path) -> None:
    for page in ("operations.md", "parameter-server.md", "security.md"):
        (block,) = blocks_of(root, page)
        (tmp_path / "file.json").write_text(block, encoding="utf-8")
        load(WorkerFile if page == "parameter-server.md" else ControllerFile, tmp_path / "file.json")


def tiny_task() -> ClassificationTask:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(260, 4, generator=generator), torch.arange(260) % 2
    return ClassificationTask(lambda: nn.Linear(4, 2), DataSplit(Dataset("noise", images, labels)), batch_size=2)


def simulated(config: gradbus.FederatedConfig, clients: int, folder: Path) -> gradbus.SimulationResult:
    """A run of two rounds."""
    config = choices_of(config, clients, None).config.replaced("rounds", 2).replaced("eval_every", 0)
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1, state_dir=folder / "clients")
    return gradbus.simulate(tiny_task(), clients, config=config, options=options)


@pytest.mark.parametrize("page", ["asynchronous.md", "privacy.md", "selection.md"])
def test_the_synchronous_configurations_of_a_page_train(root: Path, page: str, tmp_path: Path) -> None:
    """Those of asynchronous rounds are run by tests/actors/federated/test_asynchronous.py."""
    synchronous = [file for file in configurations(root, page, tmp_path) if file.federated.mode == "synchronous"]
    assert synchronous
    for number, file in enumerate(synchronous):
        many = "count" in file.federated.selection.options
        result = simulated(file.federated, 130 if many else 4, tmp_path / str(number))
        # With `fraction` a tenth of four, and one at least; of 130 that are asked, the first 100 end the round.
        expected = 100 if many else 1 if "fraction" in file.federated.selection.options else 4
        assert [report.updates for report in result.rounds] == [expected] * 2


def test_the_selector_of_the_page_on_selection_chooses(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = python_blocks((root / "docs" / "selection.md").read_text(encoding="utf-8"))
    (tmp_path / "own_selectors.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = gradbus.FederatedConfig(selection={"name": "own_selectors:NewestFirst", "count": 2})
    assert [report.clients for report in simulated(config, 5, tmp_path).rounds] == [(3, 4)] * 2


def test_the_call_of_the_page_on_virtual_clients_trains(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer clients, images and rounds, in a DDS domain of its own."""
    write_mnist(tmp_path)
    monkeypatch.setenv("GRADBUS_DATA", str(tmp_path))
    first, on_ray = python_blocks((root / "docs" / "virtual-clients.md").read_text(encoding="utf-8"))
    for said, meant in (
        ("10_000, fraction=0.01,", f"20, fraction=0.1, options=gradbus.SimulationOptions(domain={new_domain()}),"),
        ("rounds=20", "rounds=2"),
    ):
        assert said in first
        first = first.replace(said, meant)
    names: dict[str, Any] = {}
    exec(first, names)  # noqa: S102 - the code of the page
    assert "2 rounds of 20 clients, 4 trainings" in capsys.readouterr().out
    options, call = on_ray.splitlines()
    exec(options, names)  # noqa: S102 - the code of the page
    assert names["options"].pool == "ray"
    assert call.startswith("result = gradbus.simulate(task, ")  # tests/actors/test_ray_pool.py has such calls


def test_the_site_of_the_page_on_trees_can_be_made(root: Path) -> None:
    (block,) = python_blocks((root / "docs" / "trees.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102 - the code of the page; tests/actors/test_trees.py runs sites
    assert callable(names["site"])


def test_the_table_for_those_who_come_from_flower_names_choices_and_settings_that_are_there(root: Path) -> None:
    page = (root / "docs" / "flower.md").read_text(encoding="utf-8")
    table = rows(section(page, "Runs of gradbus's own"), "Flower")
    told = " ".join(cells[-1] for cells in table)
    settings = set(re.findall(r"`((?:federated|client)\.[a-z_.]+)", told))
    known = (root / "docs" / "settings.md").read_text(encoding="utf-8")
    assert len(settings) > 12
    assert {name for name in settings if name not in known} == set()
    by_flower = {
        name: cells[-1] for cells in table for name in re.findall(r"`(Fed\w+|Q?Fed\w+|\w*Krum|Bulyan)`", cells[0])
    }
    for name, choices in by_flower.items():
        if "Xgb" not in name and name != "FedProx":
            assert set(re.findall(r"`([a-z_]+)`", choices)) & set(STRATEGIES.table), name
    assert {"FedAvg", "Bulyan", "QFedAvg", "FedProx"} <= by_flower.keys()
