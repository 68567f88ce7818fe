"""The commands of docs/privacy.md as real processes: what a run has spent, and its end once the budget is spent."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_commands import Forked
from fresh_shells import command_lines, write_mnist
from patience import until
from ports import free_port

from gradbus.runtime.checkpoint import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")

# Three clients, and noise with which the budget lasts for some of the rounds.
FEW = {"clients.num": 3, "clients.min": 3, "rounds": 40, "privacy.noise_multiplier": 4.0, "privacy.epsilon": 1.8}


def test_epsilon_is_told_while_a_run_goes_on_and_its_processes_end_well_once_the_budget_is_spent(
    root: Path, tmp_path: Path, domain: int, monkeypatch: pytest.MonkeyPatch, fork: Callable[..., Forked]
) -> None:
    write_mnist(tmp_path / "data")
    monkeypatch.setenv("GRADBUS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("GRADBUS_BUS__DOMAIN", str(domain))
    monkeypatch.setenv("GRADBUS_BUS__JOB", "private")
    lines = [shlex.split(line) for line in command_lines((root / "docs" / "privacy.md").read_text(encoding="utf-8"))]
    make, host = (words for words in lines if words[0] == "make" or words[1] == "host")
    controller_file, client_file = root / make[-1].removeprefix("CONFIG="), root / host[2]
    run, port = tmp_path / "run", free_port()

    few = [part for key, value in FEW.items() for part in ("--set", f"federated.{key}={value}")]
    command = ("controller", controller_file, "--run-dir", run, "--no-live", *few)
    controller = fork(*command, "--metrics-port", port)
    until(lambda: controller.poll() is not None or epsilon_and_budget(port) == (0.0, 1.8), timeout_s=60.0)
    status = fork("status", "private")
    out, errors = status.communicate(timeout=60.0)
    assert "  privacy: epsilon 0 of 1.8 spent" in out, out + errors

    clients = [fork("host", client_file, "--ids", "0-1", "--processes", 1), fork("client", client_file, "--id", 2)]
    for process in (*clients, controller):
        out, errors = process.communicate(timeout=100.0)
        assert process.returncode == 0, out + errors

    reports = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    assert 1 <= len(reports) < FEW["rounds"]
    assert reports[-1]["epsilon"] <= 1.8
    assert summary["outcome"] == "done"
    assert re.match(r"the privacy budget is spent: epsilon is 1\.\d+ after \d+ rounds", summary["ended_early"])
    kept = CheckpointStore.to_read(run / "state").load_newest()
    assert kept is not None
    assert kept.round_id == reports[-1]["round_id"]
    assert zlib.crc32(kept.tensors["weights"].numpy().data) == reports[-1]["weights_crc32"]

    again = fork(*command)  # the budget is spent: it waits for nobody, and nothing is released
    out, errors = again.communicate(timeout=60.0)
    assert again.returncode == 0, out + errors
    assert len((run / "rounds.jsonl").read_text().splitlines()) == len(reports)


def epsilon_and_budget(port: int) -> tuple[float, ...]:
    """As Prometheus reads them; empty: nobody listens yet, or the run does not know them yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return ()
    found = dict(re.findall(r"^gradbus_(epsilon|epsilon_budget)\{.*\} (\S+)$", text, re.MULTILINE))
    return tuple(float(found[name]) for name in ("epsilon", "epsilon_budget") if name in found)
