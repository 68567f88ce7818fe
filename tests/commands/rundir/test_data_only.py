"""A run directory is data: to look at one runs nothing that it names, as an audit hook sees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import audited_commands
import golden_runs
import pytest
from audited_commands import Outcome
from dds_domains import new_domain

from gradbus.runtime.testing.journal import weights_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(320)]

STORED = Path(__file__).resolve().parents[2] / "golden" / "directories"
RUNS = [*golden_runs.FEDERATED, *golden_runs.PARALLEL]
RAN = "somebody-else-s-code-ran"
EVIL = f"import pathlib\npathlib.Path({RAN!r}).touch()\n"
SHELL = {"task": None, "model": "os:system", "model_options": {"command": f"touch {RAN}"}}
MODULE = {"task": "evil_module:Task", "data": "evil_module:data", "train_fn": "evil_module:train"}


def hostile(run: Path, to: Path, task: dict[str, Any]) -> Path:
    """A run directory with code beside its files, and a configuration that names it wherever one can be named."""
    shutil.copytree(run, to)
    for name in ("evil_module.py", "sitecustomize.py", "torch.py", "gradbus.py", "golden_task.py"):
        (to / name).write_text(EVIL)
    config = json.loads((to / "config.json").read_text())
    if "federated" in config:
        config["task"] |= task
        config["federated"] |= {"strategy": {"name": "evil_module:S"}, "selection": {"name": "evil_module:S"}}
        config["federated"]["training"] |= {"rule": {"name": "evil_module:R"}, "schedule": {"name": "evil_module:S"}}
    else:
        config["task"] |= {key: value for key, value in task.items() if key != "train_fn"}
        config["parallel"] |= {key: {"name": "evil_module:A"} for key in ("algorithm", "optimizer", "schedule")}
    (to / "config.json").write_text(json.dumps(config))
    for journal in (to / "history").glob("controller.jsonl"):
        _name_a_strategy(journal)
    return to


def _name_a_strategy(journal: Path) -> None:
    """Have a journal with payloads say that its rounds are of somebody's own strategy, for `check` to compute again."""
    opening, *events = (json.loads(line) for line in journal.read_text().splitlines())
    opening["federated"]["strategy"] = {"name": "evil_module:Strategy"}
    journal.write_text("".join(json.dumps(event) + "\n" for event in (opening, *events)))
    payloads = journal.parent / "payloads"
    payloads.mkdir()
    (payloads / weights_name(int(opening["run"], 16), opening["round"])).write_bytes(bytes(4 * opening["dim"]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """How each command on each directory ended, by its arguments."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "evil_module.py").write_text(EVIL)
    commands: list[list[str]] = []
    for version in sorted(path.name for path in STORED.iterdir() if path.is_dir()):
        shutil.copytree(STORED / version, folder / version)
        runs = [f"{version}/{name}" for name in RUNS]
        runs += [
            str(hostile(folder / version / name, folder / version / f"{name}-{kind}", task).relative_to(folder))
            for name in RUNS
            for kind, task in (("shell", SHELL), ("module", MODULE))
        ]
        commands += [["export", run] for run in runs]
        commands += [["report", run] for run in runs if run.endswith("-module")]  # each with all figures, twice
        commands += [["check", run] for run in runs if "/servers" not in run]  # which keep no journal
        commands += [["export", f"{version}/federated-module", "--best", "--format", "torch"]]
        commands += [["export", f"{version}/personal-shell", "--client", f"{version}/personal-clients/client-0"]]
        commands += [["dashboard", version]]
        listen = ["--domain", str(new_domain()), "--timeout", "0.5", "--seconds", "0.5"]
        commands += [["status", "--config", f"{version}/{name}-module/config.json", *listen] for name in RUNS]
    assert not (folder / RAN).exists()
    found = audited(folder, commands)
    assert not (folder / RAN).exists()
    return found


def audited(folder: Path, commands: list[list[str]]) -> dict[str, Outcome]:
    process = subprocess.run(
        [sys.executable, "-P", audited_commands.__file__],
        input=json.dumps(commands),
        cwd=folder,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ""},
    )
    return {" ".join(one["arguments"]): Outcome(**one) for one in json.loads(process.stdout)}


def test_no_command_that_looks_at_a_run_runs_what_the_run_names(outcomes: dict[str, Outcome]) -> None:
    assert {name: one.violations for name, one in outcomes.items() if one.violations} == {}


def test_each_of_them_does_its_work(outcomes: dict[str, Outcome]) -> None:
    not_found = 4  # no such job is running
    codes = {name: (one.code, one.text) for name, one in outcomes.items() if one.code not in (0, not_found)}
    assert codes == {}
    assert {name.split()[0] for name, one in outcomes.items() if one.code == not_found} == {"status"}
    count = 3 * len(RUNS)  # stored ones, and two hostile copies of each
    pages = [one.text for name, one in outcomes.items() if name.startswith("dashboard")]
    assert set(pages) == {f"{2 + 2 * count} pages, {count} figures\n"}


@pytest.mark.parametrize(("task", "event"), [(SHELL, f"os.system: (b'touch {RAN}',)"), (MODULE, "import: evil_module")])
def test_with_trust_it_runs_and_the_audit_sees_it(tmp_path: Path, task: dict[str, Any], event: str) -> None:
    """Which shows that the audit sees what the other commands do not do."""
    run = hostile(STORED / "0.1.0" / "ranks", tmp_path / "run", task)
    config = json.loads((run / "config.json").read_text())
    config["parallel"] = {}
    (run / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil_module.py").write_text(EVIL)
    (outcome,) = audited(tmp_path, [["export", "run", "--trust"]]).values()
    assert event in outcome.violations
    assert (tmp_path / RAN).exists()
