"""The pieces of the command line, one by one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradbus.commands.buses import elastic_bus
from gradbus.commands.cli.options import add_current_directory_to_path
from gradbus.commands.doctor.local_bus import LocalMeasurement
from gradbus.commands.doctor.machine import Finding, Severity, machine
from gradbus.commands.doctor.report import judge
from gradbus.commands.doctor.timeouts import JobTimeouts, job_of, timeouts
from gradbus.commands.exit_codes import ExitCode, exit_code_of
from gradbus.commands.run.demo import DemoOptions, plan
from gradbus.commands.rundir import versions
from gradbus.experiments.bench import results
from gradbus.runtime import errors
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.fast_paths import LOOPBACK


@pytest.mark.parametrize("cores", [{3}, {0, 2, 5}])
def test_cores_are_those_that_this_process_may_use(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert versions.machine()["cores"] == results.machine()["cores"] == len(cores)
    assert plan(DemoOptions(data="glyphs")).controller.task.threads == len(cores)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("federated.strategy=fedagv", "did you mean 'fedavg'"),
        ("federated.training.rule=prox", "there is no training rule 'prox'"),
        ("federated.strategy.beta=1", "there is no such option; 'fedavg' has none"),
        ("federated.strategy=no.such.module:Own", "there is no module 'no'"),
    ],
)
def test_a_demo_with_a_strategy_or_rule_that_does_not_exist_is_refused_before_anything_starts(
    override: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.ConfigError, match=re.escape(text)):
        plan(DemoOptions(data="glyphs", run_dir=tmp_path / "run", overrides=(override,)))
    assert not (tmp_path / "run").exists()


def test_every_error_of_a_run_has_its_own_exit_code() -> None:
    codes = {
        errors.ConfigError("x"): 2,
        errors.BarrierTimeout("x", missing=(), ready=0, needed=1, timeout_s=1.0): 4,
        errors.RoundTimeout(1, 0, 1, 3): 5,
        errors.CheckpointError("x"): 6,
        errors.JoinRefused("x"): 7,
        errors.ControllerReplaced("x", 1, 2, ""): 16,
        errors.BusClosed("x"): 8,
        errors.WriteTimeout("x", 1.0): 8,
        errors.TrainingFailed("x"): 13,
        errors.GradbusError("x"): 1,
    }
    assert {error: exit_code_of(error) for error in codes} == codes
    assert ExitCode.NO_DATA == 3


def test_the_current_directory_is_imported_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    add_current_directory_to_path()
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    assert "" not in sys.path


def test_help_loads_neither_torch_nor_dds() -> None:
    code = (
        "import sys; from gradbus.commands.cli.main import app; import typer.main; typer.main.get_command(app);"
        "print([name for name in ('torch', 'cyclonedds', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"


OBJECTS = """
import gc
from gradbus.commands.lifecycle import run_loop
loaded = len(gc.get_objects())
async def main():
    print(gc.get_freeze_count() >= loaded, len(gc.get_objects()) < loaded / 10)
run_loop(main)
"""


def test_the_garbage_collector_does_not_walk_over_what_was_loaded_before_the_loop() -> None:
    done = subprocess.run([sys.executable, "-c", OBJECTS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True True\n"


CYCLES = """
import weakref
from gradbus.__main__ import main as command
from gradbus.commands.cli import main as cli
from gradbus.commands.lifecycle import run_loop

class Large:
    def __init__(self):
        self.own = self

async def main():
    first = weakref.ref(Large())
    for _ in range(5_000):
        Large()
    print(first() is None)

cli.main = lambda: run_loop(main)
command()
"""


def test_what_a_cycle_holds_while_a_command_runs_is_collected_as_soon_as_in_any_other_program() -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


STUBBORN = """
import asyncio
from gradbus.commands.lifecycle import before_abort, guard, run_loop
async def main():
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            print("asked", flush=True)
before_abort.append(lambda: print("last words", flush=True))
guard("stubborn", lambda: run_loop(main))
"""


def test_the_second_ctrl_c_ends_what_does_not_heed_the_first() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    try:
        assert process.communicate(timeout=30)[0] == "last words\n"
    finally:
        process.kill()
    assert process.returncode == 130


@pytest.mark.usefixtures("network_by_document")
def test_the_doctor_shows_the_timeouts_of_a_configuration_with_its_lease_and_its_wait(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[bus]\nlease_s = 70.0\n[task]\nmodel = "mlp"\n[parallel.elastic]\nmin_world = 2\nwait_s = 200.0\n',
        encoding="utf-8",
    )
    (finding,) = timeouts(job_of(path))
    assert (finding.name, finding.severity) == ("timeouts of ranks", Severity.ADVICE)
    assert finding.value == "lease 70 s, join 60 s, collective 60 s, commit 600 s, wait 200 s"
    assert finding.cure.startswith("bus.lease_s (70 s) is longer than parallel.timeouts.join_s (60 s)")
    assert [one.name for one in timeouts(JobTimeouts())] == ["timeouts of ranks", "timeouts of rounds"]


@pytest.mark.parametrize(
    ("bus", "min_world", "lease_s"),
    [
        ('network = "network"', 2, "4"),
        ('network = "network"', 0, "10"),
        ('network = "network"\nlease_s = 6.0', 2, "6"),
        ('network = "loopback"', 2, "60"),
    ],
    ids=["elastic", "of a fixed world", "given", "loopback"],
)
@pytest.mark.usefixtures("network_by_document")
def test_a_rank_of_an_elastic_run_has_a_short_lease_on_a_network_unless_one_is_given(
    bus: str, min_world: int, lease_s: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[bus]\n{bus}\n[parallel.elastic]\nmin_world = {min_world}\n", encoding="utf-8")
    (finding,) = timeouts(job_of(path))
    assert f"lease {lease_s} s" in finding.value


def test_on_one_machine_no_lease_counts_whatever_the_profile() -> None:
    for profile in ("loopback", "network"):
        job = JobTimeouts.model_validate({"bus": {"network": profile}, "parallel": {"elastic": {"min_world": 2}}})
        assert "lease" not in timeouts(job)[0].value
        assert elastic_bus(job.bus).lease_s is None


def test_the_doctor_advises_to_name_an_interface_only_where_no_other_machine_is_reached(
    request: pytest.FixtureRequest,
) -> None:
    def of_the_network() -> Finding:
        (found,) = [one for one in machine(BusSettings(network="network")) if one.name == "network"]
        return found

    assert of_the_network().cure.startswith(f"interface {LOOPBACK} reaches this machine only")
    request.getfixturevalue("network_by_document")
    assert of_the_network().severity is Severity.OK


def test_the_doctor_names_the_ports_when_nobody_is_found() -> None:
    findings = judge(LocalMeasurement(fast_path=True), BusSettings(domain=3))
    assert findings[-1].severity is Severity.BAD
    assert "let UDP ports 8160-8399 through the firewall" in findings[-1].cure
