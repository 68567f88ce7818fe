"""Bytes of a federated run: what the clients have sent is what rounds.jsonl, summary.json and the last line say, also
of a run that was resumed. Real processes over DDS, as from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

DIM = 5000
CLIENTS = 3
Start = Callable[..., Any]

MODES: dict[str, dict[str, Any]] = {
    "in shared memory": {},
    "over DDS": {"bus": {"shared_memory": False}},
    "compressed": {"bus": {"shared_memory": False}, "federated": {"codec": "sq8", "downlink_codec": "q8"}},
    "secure aggregation": {"bus": {"shared_memory": False}, "federated": {"secure_aggregation": {"enabled": True}}},
    "virtual clients": {"bus": {"shared_memory": False}, "virtual": True},
}


def write(path: Path, domain: int, mode: dict[str, Any], **more: Any) -> Path:
    """A configuration of a controller or a client."""
    task = {"task": "gradbus.models:NoopTask", "task_options": {"dim": DIM, "delta": "seeded"}}
    bus = {"domain": domain, "job": "rounds", **mode.get("bus", {})}
    path.write_text(json.dumps({"bus": bus, "task": task, **more}))
    return path


def run(fork: Start, folder: Path, domain: int, mode: dict[str, Any], *, rounds: int = 3) -> tuple[str, list[Any]]:
    """A controller and its clients to their end. Returns what it has printed, and the last events of the clients."""
    rules = {"rounds": rounds, "clients": {"num": CLIENTS, "min": CLIENTS}, **mode.get("federated", {})}
    controller = write(folder / "controller.json", domain, mode, federated=rules)
    own = {"client": {"least_members": CLIENTS}} if "secure_aggregation" in rules else {}
    client = write(folder / "client.json", domain, mode, **own)
    running = [fork("controller", controller, "--run-dir", "run", "--no-live")]
    if mode.get("virtual"):
        running.append(fork("host", client, "--ids", f"0-{CLIENTS - 1}", "--processes", 1))
    else:
        running += [fork("client", client, "--id", number) for number in range(CLIENTS)]
    outputs = [process.communicate(timeout=100) for process in running]
    events = []
    for _, err in outputs[1:]:
        events += [json.loads(line) for line in err.splitlines() if '"client done"' in line or '"clients done"' in line]
    assert [process.returncode for process in running] == [0] * len(running), outputs
    return outputs[0][0], events


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "rounds.jsonl").read_text().splitlines()]


def check(folder: Path, told: str) -> dict[str, Any]:
    """The summary against its rounds, and the last line."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    of_rounds = rows(folder)
    for name in ("bytes_up", "bytes_down", "bytes_up_shared", "bytes_down_shared"):
        assert summary[name] == sum(row[name] for row in of_rounds)
    last = told.strip().splitlines()[-1]
    shown = re.search(r"up ([\d.]+) kB, down ([\d.]+) kB", last)
    assert shown, last
    assert [float(text) for text in shown.groups()] == [
        pytest.approx(summary[name] / 1e3, rel=0.01) for name in ("bytes_up", "bytes_down")
    ]
    return dict(summary)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_up_of_the_summary_are_those_that_the_clients_have_sent(
    fork: Start, domain: int, tmp_path: Path, mode: str
) -> None:
    told, clients = run(fork, tmp_path, domain, MODES[mode])
    summary = check(tmp_path, told)
    assert sum(client["bytes_up"] for client in clients) == summary["bytes_up"]
    if MODES[mode].get("federated") is None:
        assert summary["bytes_down"] == 3 * CLIENTS * 4 * DIM, "a model a round and client, whatever has carried it"


def test_a_round_that_was_committed_just_before_the_controller_died_has_its_bytes_after_a_resume(
    fork: Start, domain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = MODES["over DDS"]
    rules = {"rounds": 3, "clients": {"num": CLIENTS, "min": CLIENTS}}
    controller = write(tmp_path / "controller.json", domain, mode, federated=rules)
    client = write(tmp_path / "client.json", domain, mode)
    clients = [fork("client", client, "--id", number) for number in range(CLIENTS)]
    command = ("controller", controller, "--run-dir", "run", "--no-live")
    monkeypatch.setenv("GRADBUS_FAIL_AT", "controller/after_commit_before_publish:2")
    killed = fork(*command)
    killed.communicate(timeout=60)
    assert killed.returncode
    assert [row["round_id"] for row in rows(tmp_path)] == [1]
    monkeypatch.delenv("GRADBUS_FAIL_AT")
    again = fork(*command)
    told, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    for process in clients:
        process.communicate(timeout=60)
    summary = check(tmp_path, told)
    assert [row["bytes_down"] for row in rows(tmp_path)] == [CLIENTS * 4 * DIM] * 3
    assert summary["bytes_up"] == sum(row["bytes_up"] for row in rows(tmp_path)) > 3 * CLIENTS * 4 * DIM
