"""docs/torch.md says what the code does, and its examples run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import python_blocks, rows, section
from ports import kept_ports
from torch.distributed import ReduceOp
from torch_node import play

import gradbus.torch
from gradbus.runtime.bus import background
from gradbus.runtime.collectives.objects import MAX_OBJECT_BYTES
from gradbus.runtime.config.bus import BusSettings, default_job
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.torch import hooks
from gradbus.torch.backend import STALL_VARIABLE, STALL_WARNING_S
from gradbus.torch.functions import OPS
from gradbus.torch.register import OLDEST


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "torch.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_examples_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    blocks = python_blocks(page)
    paths = [str(tmp_path / f"train{number}.py") for number in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        own = block.replace('"dds://0/job1"', '"dds://" + os.environ["GRADBUS_BUS__DOMAIN"] + "/job1"')
        Path(path).write_text(own, encoding="utf-8")
    with kept_ports(len(paths)) as ports:
        results = play("document_scenes", "examples", paths=paths, ports=ports)
    told = re.findall(r"^\$ torchrun .*\n((?:rank .*\n)+)```", page, re.MULTILINE)
    trained = [printed for printed in map("".join, zip(*results, strict=True)) if printed.startswith("rank")]
    assert trained == told
    assert len(told) == 2
    (compressed,) = [printed for printed in results[0] if "in place of" in printed]
    sent, dense = map(int, re.findall(r"\d+", compressed))
    assert 0 < 10 * sent < dense
    assert [printed for of_rank in results for printed in of_rank if " on rank " in printed] == [
        "16 on rank 0\n",
        "16 on rank 1\n",
    ]


def test_the_settings_are_those_of_the_code(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {name.strip("`"): default.strip("`") for name, default, _ in rows(section(page, "How to start"), "variable")}
    assert told.keys() == {f"GRADBUS_BUS__{name.upper()}" for name in BusSettings.model_fields}
    for name, default in told.items():
        if default:
            monkeypatch.setenv(name, default.replace("default-USER", default_job()))
    assert background.settings_from_environment() == BusSettings()
    (peers,) = re.findall(r"PEERS='(.*?)'", page)
    monkeypatch.setenv("GRADBUS_BUS__PEERS", peers)
    assert background.settings_from_environment().peers == ("192.0.2.10", "192.0.2.11")
    leases = [NetworkConfig(profile=profile).effective_lease_s for profile in ("loopback", "network")]
    assert "{:g} s with `loopback`, {:g} s with `network`".format(*leases) in page


def test_every_function_for_those_who_come_from_horovod_is_told_of(page: str) -> None:
    table = rows(section(page, "For those who come from Horovod"), "Horovod")
    told = {name for row in table for name in re.findall(r"`(\w+)(?:\(.*?\))?`", row[1])}
    assert set(gradbus.torch.__all__) - told == {"Handle", "register", "AlgorithmHook", "with_algorithm", "DiLoCo"}
    (ops,) = [row for row in table if "hvd.Average" in row[0]]
    assert re.findall(r'"(\w+)"', ops[2]) == list(OPS)
    assert [getattr(gradbus.torch, name) for name in re.findall(r"`(\w+)`", ops[1])] == list(OPS)


def test_names_and_numbers_are_those_of_the_code(page: str) -> None:
    hook_rows = rows(section(page, "Fewer bytes: hooks for DDP"), "hook")
    named = {cell.strip("`") for row in hook_rows for cell in row[:2]}
    assert named == set(hooks.__all__)
    for name in re.findall(r"`([A-Z_]+)`", page[page.index("Every `ReduceOp`") :].partition("\n\n")[0]):
        assert hasattr(ReduceOp, name), name
    assert "torch {}.{} or newer".format(*OLDEST) in page
    assert f"longer than {STALL_WARNING_S:g} s" in page
    assert f"`{STALL_VARIABLE}`" in page
    assert f"at most {MAX_OBJECT_BYTES >> 20} MiB" in page


def test_every_link_leads_somewhere(root: Path, page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page):
        linked = (root / "docs" / target).read_text(encoding="utf-8") if target else page
        titles = {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", linked, re.M)
        }
        assert not anchor or anchor in titles, (target, anchor)
    assert "(docs/torch.md)" in (root / "README.md").read_text(encoding="utf-8")
