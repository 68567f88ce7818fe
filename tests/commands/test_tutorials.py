"""The tutorials run as they are written: their files, their commands, and the figures that they show."""

from __future__ import annotations

import json
import re
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from doc_pages import fenced_blocks, rows, section
from forked_commands import Commands
from ports import kept_ports
from torch_node import play

from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # two runs each


def page_of(root: Path, name: str) -> str:
    return (root / "docs" / name).read_text(encoding="utf-8")


def save_files(page: str, folder: Path) -> list[Path]:
    """Every block of code that a reader is told to save, under the name that stands just before it."""
    saved = []
    for name, block in re.findall(r"as\s`([\w.]+)`[^`]*?:\n\n```(?:python|json)\n(.*?)^```", page, re.M | re.S):
        saved.append(folder / name)
        saved[-1].write_text(block, encoding="utf-8")
    return saved


def commands(block: str) -> list[list[str]]:
    """The words of each line, without ``gradbus``."""
    lines = [shlex.split(line) for line in block.splitlines()]
    assert all(line[0] == "gradbus" for line in lines), lines
    return [line[1:] for line in lines]


def run_together(page: str, title: str, folder: Path, domain: int) -> list[str]:
    """What the commands of a section print, each in a process of its own."""
    with Commands(folder, domain) as started:
        for arguments in commands(fenced_blocks(section(page, title), "sh")[0]):
            started.start(arguments)
        return started.outputs()


def reports_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


# -- federated ---------------------------------------------------------------------------------------------------------


def test_the_federated_tutorial_trains_and_says_how_well(root: Path, tmp_path: Path, domain: int) -> None:
    page = page_of(root, "tutorial-federated.md")
    assert [path.name for path in save_files(page, tmp_path)] == ["bearings.py", "controller.json", "client.json"]

    printed, *_ = run_together(page, "3. Run it", tmp_path, domain)
    reports = reports_of(tmp_path / "run", "rounds.jsonl")
    assert [report["clients"] for report in reports] == [[0, 1]] * 8
    (told,) = fenced_blocks(section(page, "3. Run it"), "")
    shown = {int(number): float(share) for number, share in re.findall(r"^ +(\d) +2/2 .*?([\d.]+) %", told, re.M)}
    assert shown.keys() == {1, 2, 8}
    assert {number: 100 * reports[number - 1]["accuracy"] for number in shown} == pytest.approx(shown, abs=1.0)
    assert printed.splitlines()[-1].startswith("done: 8 rounds, accuracy ")
    for name in re.findall(r"`([\w./-]+)`", section(page, "3. Run it").partition("`run/` has")[2]):
        assert (tmp_path / "run" / name).exists(), name

    run_together(page, "5. Fewer bytes, more to see", tmp_path, domain)
    fewer = reports_of(tmp_path / "run-sq8", "rounds.jsonl")
    assert 2 * sum(report["bytes_up"] for report in fewer) < sum(report["bytes_up"] for report in reports)
    assert list((tmp_path / "scalars").glob("events.out.tfevents.*"))


def test_the_clients_of_the_federated_tutorial_need_each_other(root: Path, tmp_path: Path, domain: int) -> None:
    """What the page claims of one client alone, with the task of the page; no network is needed for that."""
    page = page_of(root, "tutorial-federated.md")
    source, *_ = save_files(page, tmp_path)
    names: dict[str, Any] = {}
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), names)  # noqa: S102 - the code of the page
    alone = []
    for client_id in (0, 1):
        task = names["Bearings"]()
        task.prepare(client_id, 2)
        model = task.build_model()
        for round_id in range(1, 9):
            task.train(
                model,
                client_id=client_id,
                round_id=round_id,
                epochs=1,
                lr=0.005,
                seed=0,
                subset_size=0,
                should_stop=lambda: False,
            )
        alone.append(100 * task.evaluate(model).accuracy)
    (told,) = re.findall(r"alone ends at (\d+) and (\d+) %", " ".join(page.split()))
    assert alone == pytest.approx(list(map(float, told)), abs=1.5)


def test_the_configurations_that_are_not_run_are_right_as_well(root: Path, tmp_path: Path) -> None:
    page = page_of(root, "tutorial-federated.md")
    (block,) = fenced_blocks(section(page, "On several machines"), "json")
    (tmp_path / "several.json").write_text(block, encoding="utf-8")
    for kind in (ControllerFile, ClientFile):
        assert load(kind, tmp_path / "several.json").bus.peers == ("192.0.2.10", "192.0.2.11")
    for kind, setting, default in (
        (ControllerFile, "federated.clients.dead_after_s", "30 s"),
        (ClientFile, "client.controller_timeout_s", "10 minutes"),
    ):
        value = attrgetter(setting)(kind())
        assert default in (f"{value:g} s", f"{value / 60:g} minutes")
        assert re.search(rf"{default}[^|]*\(`{setting}`\)", page)


# -- data parallel -----------------------------------------------------------------------------------------------------


def test_the_data_parallel_tutorial_trains_dense_and_by_dgc(root: Path, tmp_path: Path, domain: int) -> None:
    """As ``gradbus run`` starts them: one ``gradbus worker`` per rank (``test_worker_command`` runs the launcher)."""
    page = page_of(root, "tutorial-data-parallel.md")
    names = [path.name for path in save_files(page, tmp_path)]
    assert names == ["recordings.py", "recordings.json", "train.py"]
    told = {name.strip("`"): cells for name, *cells in rows(section(page, "4. Fewer bytes: DGC"), "")}
    for title, job in (("3. Run it", "dense"), ("4. Fewer bytes: DGC", "dgc")):
        ((verb, *rest),) = commands(fenced_blocks(section(page, title), "sh")[0])
        assert (verb, rest[:3]) == ("run", ["-n", "2", "--"])
        with Commands(tmp_path, domain) as started:
            for rank in ("0", "1"):
                started.start(
                    ["worker", "--rank", rank, "--world", "2", "--no-live", *rest[3:], "--set", f"bus.job={job}"]
                )
            assert "done: 3 epochs, 150 steps" in started.outputs()[0]
        last = reports_of(tmp_path / job, "epochs.jsonl")[-1]
        accuracy, sent = told[job]
        assert 100 * last["accuracy"] == pytest.approx(float(accuracy.removesuffix(" %")), abs=1.0)
        assert last["bytes_out_per_step"] == pytest.approx(as_bytes(sent), rel=0.03)
    assert list((tmp_path / "scalars").glob("events.out.tfevents.*"))
    assert load(WorkerFile, tmp_path / "recordings.json").parallel.optimizer.options["momentum"] == 0.9


def as_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


def test_the_script_for_torch_runs_on_two_ranks(root: Path, tmp_path: Path) -> None:
    page = page_of(root, "tutorial-data-parallel.md")
    *_, script = save_files(page, tmp_path)
    with kept_ports(1) as ports:
        first, second = play("document_scenes", "examples", paths=[str(script)], ports=ports)
    (told,) = re.findall(r"^accuracy ([\d.]+) %$", page, re.M)
    (shown,) = re.findall(r"^accuracy ([\d.]+) %$", first[0], re.M)
    assert float(shown) == pytest.approx(float(told), abs=1.0)
    assert second == [""]
