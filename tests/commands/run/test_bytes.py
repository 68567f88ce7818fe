"""Bytes of a run, in every mode: those of summary.json are those of the profile, and what one rank has sent the other
has received. Real processes over DDS, as from the command line."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import until
from shard_commands import read_until_epoch, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

VALUES = 32 * 32 + 32 + 32 + 1  # of the model
STEPS = 4  # of an epoch
WORLD = 2
Start = Callable[..., Any]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ddp": {"name": "dense"},
    "compressed": {"name": "dgc", "density": 0.1},
    "in-network": {"name": "fixed-point", "route": "ra-ina", "block_elems": 64, "window_groups": 16},
    "gossip": {"name": "decentralized"},
    "local-sgd": {"name": "local-sgd", "steps": 3},
}


def write(folder: Path, domain: int, **parallel: Any) -> Path:
    """A configuration, with the task beside it."""
    path = folder / "counted.json"
    servers = parallel.pop("servers", 0)
    slow_s = parallel.pop("slow_s", 0.0)
    settings = {
        "bus": {"domain": domain, "job": "counted"},
        "task": write_task(folder, "counted", inputs=32, width=32, batches=STEPS, more_each_rank=0, slow_s=slow_s),
        "parallel": {"epochs": 2, "profile": {"window_steps": 2}, "timeouts": {"join_s": 100}, **parallel},
        "parameter_server": {"servers": servers},
    }
    path.write_text(json.dumps(settings))
    return path


def workers(fork: Start, config: Path, *more: Any, folders: tuple[str, ...] = ("run", "run")) -> list[Any]:
    return [
        fork("worker", config, "--run-dir", folder, "--rank", rank, "--world", WORLD, *more)
        for rank, folder in enumerate(folders)
    ]


def ended(processes: list[Any]) -> list[str]:
    """What each has printed, when all have ended well."""
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


def starts(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The lines of each start in the file of a profile."""
    found: list[dict[str, Any]] = []
    for text in path.read_text().split("\n")[:-1]:  # the last one may be half written
        line = json.loads(text)
        if line["kind"] == "start" and found:
            yield found
            found = []
        found.append(line)
    yield found


def profiled(path: Path) -> tuple[int, int]:
    """Bytes out and in of all starts, in steps and outside of them: added up here, not by what is tested."""
    amounts = [0.0, 0.0]
    for lines in starts(path):
        last = lines[-1]
        steps = [line["mean"] for line in lines if line["kind"] == "window" for _ in range(line["steps"])]
        for at, name in enumerate(("bytes_out", "bytes_in")):
            amounts[at] += sum(step.get(name, 0) for step in steps) + last.get("outside", {}).get(name, 0)
            if last["kind"] == "summary":
                assert last["total"].get(name, 0) == pytest.approx(sum(step.get(name, 0) for step in steps), abs=1)
    return round(amounts[0]), round(amounts[1])


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def check(folder: Path, told: str) -> dict[str, Any]:
    """The summary of rank 0 against its profile, the table of it in the summary, and the last line."""
    summary = summary_of(folder)
    exchanged = summary["bytes_out"], summary["bytes_in"]
    assert exchanged == profiled(folder / "profile-rank-0.jsonl")
    profile = summary["profiles"][0]
    for amount, name in zip(exchanged, ("bytes_out", "bytes_in"), strict=True):
        assert amount == sum(profile[part].get(name, 0) for part in ("total", "outside", "earlier"))
    last = told.strip().splitlines()[-1]
    shown = [shown_bytes(text) for text in re.search(r"sent (.*?), received (.*?) by", last).groups()]  # type: ignore[union-attr]
    assert shown == [pytest.approx(amount, rel=0.01) for amount in exchanged], last
    return summary


def shown_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_bytes_of_the_summary_are_those_of_the_profile_and_of_the_other_rank(
    fork: Start, domain: int, tmp_path: Path, mode: str
) -> None:
    config = write(tmp_path, domain, algorithm=ALGORITHMS[mode])
    others = []
    if mode == "in-network":
        aggregator = tmp_path / "aggregator.json"
        settings = {"world": WORLD, "slots": 64, "block_elems": 64, "retransmit_s": 0.05}
        aggregator.write_text(json.dumps({"bus": {"domain": domain, "job": "counted"}, "aggregator": settings}))
        others = [fork("aggregator", aggregator)]
    told = ended(workers(fork, config))
    for other in others:
        other.send_signal(signal.SIGINT)
        other.communicate(timeout=30)
    summary = check(tmp_path / "run", told[0])
    sent, received = zip(*(profiled(tmp_path / "run" / f"profile-rank-{rank}.jsonl") for rank in range(2)), strict=True)
    if mode == "in-network":
        assert min(*sent, *received) > 2 * STEPS * 4 * VALUES, "as integers of 4 bytes, to and from the aggregator"
    else:
        assert sent == received[::-1]
    if mode == "ddp":
        assert summary["profiles"][0]["total"]["bytes_out"] == 2 * STEPS * 4 * VALUES


def test_bytes_of_a_run_with_parameter_servers(fork: Start, domain: int, tmp_path: Path) -> None:
    config = write(tmp_path, domain, servers=2)
    servers = [fork("parameter-server", config, "--run-dir", "run", "--index", at, "--world", WORLD) for at in range(2)]
    told = ended([*workers(fork, config), *servers])
    summary = check(tmp_path / "run", told[0])
    assert min(summary["bytes_out"], summary["bytes_in"]) > 2 * STEPS * 4 * VALUES


def test_bytes_of_an_elastic_run_are_those_of_all_generations(fork: Start, domain: int, tmp_path: Path) -> None:
    config = write(tmp_path, domain, elastic={"min_world": 1}, epochs=300, slow_s=0.05)
    one, other = workers(fork, config)
    read_until_epoch(one, 2)
    other.send_signal(signal.SIGKILL)
    other.communicate(timeout=60)
    of_other = tmp_path / "run" / "profile-rank-1.jsonl"
    killed = profiled(of_other)
    joined = fork("worker", config, "--run-dir", "run", "--rank", 1, "--join")
    until(lambda: [len(lines) > 2 for lines in starts(of_other)] == [True, True])  # each has windows
    joined.send_signal(signal.SIGTERM)  # leaves; the generation that is left sends nothing
    ended([joined])
    *_, (*_, last) = starts(of_other)
    assert tuple(last["earlier"].values()) == killed
    assert min(killed) > 0
    lines = (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()
    in_epochs = sum(json.loads(line)["bytes_out_per_step"] for line in lines)
    one.send_signal(signal.SIGTERM)
    out, err = one.communicate(timeout=60)
    assert one.returncode == 0, err
    summary = check(tmp_path / "run", out)
    assert summary["generations"] >= 4, "both, one alone, both again, one alone"
    assert summary["bytes_out"] > in_epochs > 0


def test_bytes_of_a_resumed_run_have_those_of_the_starts_before(fork: Start, domain: int, tmp_path: Path) -> None:
    config = write(tmp_path, domain, epochs=1000, slow_s=0.02)
    killed = workers(fork, config)
    read_until_epoch(killed[0], 3)
    for worker in killed:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=30)
    done = json.loads((tmp_path / "run" / "epochs.jsonl").read_text().splitlines()[-1])["epoch"] + 1
    first = profiled(tmp_path / "run" / "profile-rank-0.jsonl")
    assert first[0] >= done * STEPS * 4 * VALUES
    for more in (1, 2):
        before = profiled(tmp_path / "run" / "profile-rank-0.jsonl")
        told = ended(workers(fork, config, "--set", f"parallel.epochs={done + more}"))
        summary = check(tmp_path / "run", told[0])
        assert summary["bytes_out"] > before[0] > 0
        assert summary["bytes_in"] > before[1] > 0
    assert summary["epochs"] == done + 2


def test_a_run_that_begins_anew_in_a_folder_has_no_bytes_of_another_run(
    fork: Start, domain: int, tmp_path: Path
) -> None:
    config = write(tmp_path, domain, checkpoint={"dir": str(tmp_path / "first")})
    first = check(tmp_path / "run", ended(workers(fork, config))[0])
    config = write(tmp_path, domain, checkpoint={"dir": str(tmp_path / "second")})
    ended(workers(fork, config))
    assert summary_of(tmp_path / "run")["bytes_out"] == pytest.approx(first["bytes_out"], rel=0.05)
