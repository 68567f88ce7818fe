"""The soak's parts: who is struck, in an order of the seed's, and what is made of what it has left."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from soak import nemesis as nemesis_module
from soak.nemesis import KINDS, Nemesis
from soak.processes import SoakProcess, links_of, make_processes, pools_of
from soak.summary import page, recoveries, summarise

from gradbus.commands.buses import check
from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile, load
from gradbus.commands.history.reader import read_history
from gradbus.commands.lab.namespaces import Host
from gradbus.runtime.transport.dds import network

RUN = "00000000000000aa"


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def strikes(path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What a nemesis without partitions notes in ten minutes, and the signals that it sends."""
    clock, sent = Clock(), list[str]()
    monkeypatch.setattr(nemesis_module, "time", clock)
    monkeypatch.setattr(SoakProcess, "send", lambda self, number: sent.append(f"{self.name} {number.name}"))
    path.mkdir()
    processes = make_processes(path, clients=8, ranks=3, hosts=None)
    nemesis = Nemesis(processes, seed=seed, far=None, log=path / "nemesis.jsonl")
    for _ in range(2400):
        clock.now_s += 0.25
        nemesis.turn()
    nemesis.rest()
    processes.end()
    return [json.loads(line) for line in (path / "nemesis.jsonl").read_text().splitlines()], sent


def test_what_crosses_a_link_in_a_soak_is_sealed_else_nothing_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "check_interface", lambda name: None)  # theirs are made with the namespaces
    processes = make_processes(
        tmp_path, clients=8, ranks=3, hosts=(Host("a", "va", "10.0.0.1"), Host("b", "vb", "10.0.0.2"))
    )
    processes.end()
    for member, kind in (
        (processes.controller, ControllerFile),
        (processes.clients[0], ClientFile),
        (processes.ranks[0], WorkerFile),
    ):
        check(load(kind, Path(member.arguments[1])).bus)


@pytest.mark.parametrize("hosts", [None, (Host("a", "va", "10.0.0.1"), Host("b", "vb", "10.0.0.2"))])
def test_a_soak_over_zenoh_has_everybody_dial_a_relay_with_tls_and_kills_it_too(
    hosts: tuple[Host, Host] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sent = Clock(), list[str]()
    monkeypatch.setattr(nemesis_module, "time", clock)
    monkeypatch.setattr(SoakProcess, "send", lambda self, number: sent.append(f"{self.name} {number.name}"))
    processes = make_processes(tmp_path, clients=8, ranks=3, hosts=hosts, transport="zenoh")
    assert processes.relay is not None
    listens = processes.relay.arguments[processes.relay.arguments.index("--listen") + 1]
    for member, kind in (
        (processes.controller, ControllerFile),
        (processes.clients[0], ClientFile),
        (processes.ranks[0], WorkerFile),
    ):
        settings = load(kind, Path(member.arguments[1])).bus
        check(settings)
        assert settings.connect == (listens,)
        assert settings.tls_ca is not None
        assert settings.tls_ca.exists()
    nemesis = Nemesis(processes, seed=3, far=None, log=tmp_path / "nemesis.jsonl")
    for _ in range(800):
        clock.now_s += 0.25
        nemesis.turn()
    processes.end()
    assert "relay SIGKILL" in sent


def test_a_sample_names_the_pools_of_a_processs_threads(tmp_path: Path) -> None:
    for thread, name in (("1", "python"), ("2", "rx-0"), ("3", "rx-1"), ("4", "pt_autograd_0"), ("5", "acc-12")):
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "comm").write_text(name + "\n")
    assert pools_of(tmp_path, ["1", "2", "3", "4", "5", "6"]) == ["acc", "pt_autograd", "python", "rx"]  # 6 has ended
    own = Path("/proc/self")
    assert pools_of(own, [str(threading.get_native_id())])


def test_the_links_of_a_relay_are_the_connections_that_are_open_at_its_port(tmp_path: Path) -> None:
    """One is open, one closed by the other end, one is of the port on the other side, and one listens."""
    (tmp_path / "net").mkdir()
    rows = ("0100007F:1D18 0100007F:C001 01", "0100007F:1D18 0100007F:C002 08", "0100007F:C001 0100007F:1D18 01")
    lines = [
        f"{number:4}: {row} 00000000:00000000" for number, row in enumerate((*rows, "0100007F:1D18 00000000:0000 0A"))
    ]
    (tmp_path / "net" / "tcp").write_text("\n".join(["  sl  local_address rem_address   st", *lines]) + "\n")
    assert links_of(tmp_path, 7448) == 1


def test_a_soak_is_calm_while_all_clients_are_in_the_newest_round_and_all_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SoakProcess, "running", property(lambda self: self.name not in dead))
    processes = make_processes(tmp_path, clients=2, ranks=2, hosts=None)
    rounds, dead = tmp_path / "federated" / "rounds.jsonl", set[str]()

    def is_calm_with(lines: str, age_s: float = -60.0) -> bool:
        rounds.write_text(lines)
        os.utime(rounds, (time.time() - age_s,) * 2)
        return processes.is_calm()

    assert is_calm_with('{"clients": [0]}\n{"clients": [0, 1]}\n{"clie')
    assert not is_calm_with('{"clients": [0, 1]}\n{"clients": [0]}\n')
    assert not is_calm_with('{"clients": [0, 1]}\n', age_s=8.0)  # the controller has been dead since then
    dead.add("rank-1")
    assert not is_calm_with('{"clients": [0, 1]}\n')
    processes.end()


@pytest.mark.parametrize(("calm_from_s", "strikes_at_s"), [(0.0, 8.0), (20.0, 20.0), (1000.0, 38.0)])
def test_a_fault_waits_until_all_are_back_after_the_last_one_but_not_for_good(
    calm_from_s: float, strikes_at_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, struck = Clock(), list[float]()
    begin_s = clock.now_s
    monkeypatch.setattr(nemesis_module, "time", clock)
    monkeypatch.setattr(SoakProcess, "send", lambda self, number: struck.append(clock.now_s - begin_s))
    processes = make_processes(tmp_path, clients=8, ranks=3, hosts=None)
    nemesis = Nemesis(
        processes,
        seed=3,
        far=None,
        log=tmp_path / "nemesis.jsonl",
        is_calm=lambda: clock.now_s - begin_s >= calm_from_s,
    )
    while not struck:
        clock.now_s += 0.25
        nemesis.turn()
    processes.end()
    assert struck == [strikes_at_s]


def test_the_first_partition_of_a_long_soak_is_longer_than_dds_remembers_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, links = Clock(), list[tuple[float, bool]]()
    monkeypatch.setattr(nemesis_module, "time", clock)
    monkeypatch.setattr(SoakProcess, "send", lambda self, number: None)
    monkeypatch.setattr(nemesis_module, "set_link", lambda host, up: links.append((clock.now_s, up)))
    processes = make_processes(tmp_path, clients=8, ranks=3, hosts=None)
    far = Host("far", "veth", "10.0.0.2")
    nemesis = Nemesis(processes, seed=3, far=far, log=tmp_path / "nemesis.jsonl", with_long=True)
    while len(links) < 4:
        clock.now_s += 0.25
        nemesis.turn()
    processes.end()
    (cut, _), (mended, up), (cut_again, _), (mended_again, _) = links
    assert up
    assert 90.0 <= mended - cut < 91.0
    assert mended_again - cut_again < 10.0
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "nemesis.jsonl").read_text().splitlines()]
    assert [kind for kind in kinds if "partition" in kind] == ["long partition"] * 2 + ["partition"] * 2


def test_every_kind_of_fault_comes_again_and_again_and_ends_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, sent = strikes(tmp_path / "one", monkeypatch, seed=3)
    begun = [event["kind"] for event in noted if event["event"] == "begins"]
    assert set(begun[:5]) == set(begun[5:10]) == set(KINDS) - {"partition", "kill relay"}
    stopped = [line.split()[0] for line in sent if "SIGSTOP" in line]
    assert stopped == [line.split()[0] for line in sent if "SIGCONT" in line][: len(stopped)]
    lasting = [event for event in noted if event["kind"] in ("stop client", "sick client")]
    assert [event["event"] for event in lasting] == ["begins", "ends"] * (len(lasting) // 2)
    assert not [line for line in sent if line.startswith(("client-0 SIGK", "client-1 SIGK"))]  # they are watched
    again, _ = strikes(tmp_path / "two", monkeypatch, seed=3)
    other, _ = strikes(tmp_path / "three", monkeypatch, seed=4)
    assert [(event["kind"], event["target"]) for event in again] == [
        (event["kind"], event["target"]) for event in noted
    ]
    assert [(event["kind"], event["target"]) for event in other] != [
        (event["kind"], event["target"]) for event in noted
    ]


def write(path: Path, *events: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def left_behind(path: Path, *, late_s: float = 0.3) -> None:
    """A soak in which client 2 was killed at 12 s and rank 1 at 20 s."""
    opening = {
        "event": "started", "at_s": 0.0, "run": RUN, "round": 0, "crc32": 1, "held_crc32": 1, "incarnation": 1,
        "federated": {"checkpoint": {"dir": "x", "resume": True}},
    }  # fmt: skip
    rounds: list[dict[str, Any]] = [opening]
    for round_id in range(1, 31):
        at_s = round_id + (late_s if round_id > 12 else 0.0)
        rounds += [
            {"event": "commanded", "at_s": at_s - 0.5, "round": round_id},
            {
                "event": "committed",
                "at_s": at_s,
                "round": round_id,
                "clients": [],
                "num_samples": 0,
                "crc32": 1,
                "held_crc32": 1,
            },
        ]
    write(path / "federated" / "history" / "controller.jsonl", *rounds)
    client = {"event": "started", "incarnation": 5}
    offered = {"event": "offered", "run": RUN, "round": 1, "transfer": 1, "crc32": 1}
    write(
        path / "federated" / "history" / "client-2.jsonl",
        {**client, "at_s": 0.0},
        {**offered, "at_s": 1.0},
        {**client, "at_s": 14.0},
        {**offered, "at_s": 16.5},
    )
    for rank in (0, 2):
        write(
            path / "parallel" / "history" / f"rank-{rank}.jsonl",
            {"event": "started", "at_s": 0.0, "run": RUN},
            {"event": "hash", "at_s": 1.0, "step": 1, "hash": "a"},
            {"event": "failed", "at_s": 21.0 + rank / 10},
        )
    write(
        path / "parallel" / "history" / "rank-1.jsonl",
        {"event": "started", "at_s": 0.0, "run": RUN},
        {"event": "started", "at_s": 25.0, "run": RUN},
        {"event": "failed", "at_s": 30.0},  # of another cause
    )
    write(
        path / "nemesis.jsonl",
        {"event": "begins", "at_s": 12.0, "kind": "kill client", "target": "client-2", "lasts_s": 0.0},
        {"event": "begins", "at_s": 20.0, "kind": "kill rank", "target": "rank-1", "lasts_s": 0.0},
    )


def test_what_everybody_took_to_come_back_is_measured_from_the_histories(tmp_path: Path) -> None:
    left_behind(tmp_path)
    faults = [json.loads(line) for line in (tmp_path / "nemesis.jsonl").read_text().splitlines()]
    found = recoveries(read_history(tmp_path / "federated"), read_history(tmp_path / "parallel"), faults)
    assert found["gap of the others when a client is killed"] == [0.0]  # there was a commit in that moment
    assert found["client: from its new start to an update"] == [pytest.approx(2.5)]
    assert found["ranks: from the death of one to the knowledge of all"] == [pytest.approx(1.0), pytest.approx(1.2)]


def test_the_page_says_what_is_not_well(tmp_path: Path) -> None:
    left_behind(tmp_path)
    summary = summarise(tmp_path, minutes=0.5, seed=1)
    assert (summary["rounds"], summary["steps"], summary["rounds_lost"]) == (30, 1, 0)
    assert summary["too_slow"] == []
    assert summary["nothing_to_check"] == ["I3", "I7", "I8"]  # there are no payloads, no frames, no receipts
    assert "NOT WELL" in page(summary)
    assert "all well" in page({**summary, "ok": True})
    write(
        tmp_path / "nemesis.jsonl",
        {"event": "begins", "at_s": 17.5, "kind": "kill rank", "target": "rank-1", "lasts_s": 0.0},
    )
    slow = summarise(tmp_path, minutes=0.5, seed=1)
    assert slow["too_slow"] == ["ranks: from the death of one to the knowledge of all"]
    assert "NOT WELL" in page(slow)
    assert "TOO SLOW" in page(slow)
