"""The commands of docs/virtual-clients.md as real processes, beside clients that are processes of their own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_commands import Forked
from fresh_shells import command_lines, write_mnist
from patience import until
from ports import kept_ports

from gradbus.actors.federated.controller.combinations import check_choices
from gradbus.actors.virtual.simulation import SimulationOptions
from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.files import ControllerFile
from gradbus.commands.run import virtual
from gradbus.commands.run.demo import DemoOptions, plan
from gradbus.runtime.config.federated import FederatedConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def variables(tmp_path: Path, domain: int) -> dict[str, str]:
    write_mnist(tmp_path / "data")
    return {"GRADBUS_DATA": str(tmp_path / "data"), "GRADBUS_BUS__DOMAIN": str(domain)}


def run_all(commands: Sequence[Sequence[str]], root: Path, variables: dict[str, str]) -> None:
    """Run them at once; all end well."""
    running = [Forked(words, root, variables) for words in commands]
    try:
        for process in running:
            out, errors = process.communicate(timeout=100.0)
            assert process.returncode == 0, out + errors
    finally:
        for process in running:
            process.kill()


def weights(folder: Path) -> list[int]:
    return [json.loads(line)["weights_crc32"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_virtual_clients_hosts_and_processes_make_the_same_models(
    root: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    lines = [shlex.split(line)[1:] for line in command_lines((root / "docs/virtual-clients.md").read_text("utf-8"))]
    virtual, controller, *hosts, on_a_cluster, on_ray = (
        words for words in lines if words[0] in ("virtual", "controller", "host")
    )
    assert [words[0] for words in hosts] == ["host", "host"]
    assert on_a_cluster[:-2] == virtual  # its options are those of the host
    assert on_a_cluster[-2] == "--ray"
    hosts[1] = on_ray
    assert on_ray[-2:] == ["--ray", "local"]
    few = ["--set", "federated.rounds=2", "--set", "federated.training.subset_size=8", "--no-live"]
    few += ["--set", "federated.codec=sq8"]
    whole = ["--set", "federated.selection.fraction=1", "--set", "federated.clients.num=3"]
    whole += ["--set", "federated.clients.min=3"]  # the host on Ray comes last, as a cluster starts for it

    virtual[virtual.index("--clients") + 1], virtual[virtual.index("--fraction") + 1] = "3", "1"
    virtual += ["--processes", "1"]
    for words, ids in zip(hosts, ("0-1", "2"), strict=True):
        words[words.index("--ids") + 1] = ids
        words += ["--processes", "1"]
    clients = [["client", "experiments/configs/client.conf.json", "--id", str(number)] for number in range(3)]

    runs = {"virtual": [[*virtual, *few]], "hosts": [[*controller, *few, *whole], *hosts]}
    runs["processes"] = [[*controller, *few, *whole], *clients]
    commands = []
    for name, (first, *others) in runs.items():
        own = ["--set", f"bus.job={name}", "--set", "task.model=gradbus.models:mnist_mlp"]
        commands.append([*first, "--run-dir", str(tmp_path / name), *own])
        commands += [[*words, *own] for words in others]
    run_all(commands, root, variables)

    found = [weights(tmp_path / name) for name in runs]
    assert found == [found[0]] * 3
    assert len(set(found[0])) == 2


def test_ids_that_are_none_are_refused_in_one_line(root: Path, variables: dict[str, str]) -> None:
    process = Forked(["host", "experiments/configs/client.conf.json", "--ids", "5-3"], root, variables)
    _, errors = process.communicate()
    assert process.returncode == ExitCode.CONFIG
    assert errors.strip() == "gradbus host: --ids: ids '5-3': expected an ascending range up to 2147483647"


def test_a_run_of_virtual_clients_has_trackers(invoke: Any, root: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    file = root / "experiments" / "configs" / "controller.conf.json"
    refused = invoke("virtual", file, "--clients", "2", "--tensorboard", tmp_path / "taken")
    assert refused.code == ExitCode.CONFIG
    assert "--tensorboard" in refused.err


def test_processes_that_train_have_no_port_of_their_run_open(
    fork: Callable[..., Forked], domain: int, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    few = {"train": 200, "test": 20}
    task = {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": few, "threads": 1}
    rules = {"rounds": 100_000, "training": {"subset_size": 64}}
    file.write_text(json.dumps({"bus": {"job": "ports", "domain": domain}, "task": task, "federated": rules}))

    with kept_ports(1) as (port,):
        process = fork(
            "virtual", file, "--clients", 2, "--processes", 1, "--metrics-port", port, "--run-dir", tmp_path / "run"
        )
        own = psutil.Process(process.pid)

        def listens(one: psutil.Process) -> bool:
            return any(found.laddr.port == port for found in one.net_connections("tcp"))

        until(lambda: listens(own) and len(own.children(recursive=True)) == 2, timeout_s=60.0)
        template, trains = own.children(recursive=True)
        assert not listens(template)
        assert not listens(trains)


@pytest.mark.parametrize("full", [True, False])
def test_a_whole_traceback_is_asked_of_the_processes_that_train(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(virtual.Hosted, "start", lambda *given: asked.append(given[3].full_traceback))
    monkeypatch.setattr(virtual, "check_first_round", lambda *_: None)
    virtual.VirtualClients(3, None, SimulationOptions(processes=1), full).open_pool(
        ControllerFile(), check_choices(FederatedConfig()), tmp_path
    )
    assert asked == [full]


def test_a_demo_has_its_files_where_its_settings_say_unless_the_option_says_otherwise(tmp_path: Path) -> None:
    settings = (f"run_dir={tmp_path / 'set'}",)
    assert plan(DemoOptions(data="glyphs", overrides=settings)).run_dir == tmp_path / "set"
    own = plan(DemoOptions(data="glyphs", overrides=settings, run_dir=tmp_path / "own"))
    assert own.run_dir == own.controller.run_dir == tmp_path / "own"


def test_the_clients_of_the_command_line_count_before_the_settings_are_checked(
    invoke: Any, root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "two.json"
    file.write_text(json.dumps({"federated": {"clients": {"num": 2, "min": 2}}}), "utf-8")
    more = ["--set", "federated.clients.min=5", "--set", "federated.clients.kind=sites"]
    refused = invoke("virtual", file, "--clients", "5", *more)
    assert "belong to one controller" in refused.err  # of sites, and not that 5 are more than the 2 of the file
    refused = invoke("virtual", file, "--clients", "4", *more)
    assert "min (5) is more than num (4)" in refused.err
