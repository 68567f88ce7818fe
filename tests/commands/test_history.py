"""The checker of histories finds what is wrong in them, and finds nothing in those of real runs that went well."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from patience import PATIENT_S
from typer.testing import CliRunner

import gradbus
from gradbus import codecs
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.commands.cli.main import app
from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.history.invariants import InvariantResult, check
from gradbus.commands.history.reader import read_history
from gradbus.models import NoopTask
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.testing.journal import History, update_name, weights_name

DIM = 3000
RUN = "00000000000000aa"

Event = dict[str, Any]


def found(path: Path) -> dict[str, InvariantResult]:
    return {finding.name: finding for finding in check(read_history(path))}


def broken(path: Path) -> list[str]:
    return [name for name, finding in found(path).items() if finding.violations]


def write(path: Path, who: str, *events: Event) -> None:
    with (path / f"{who}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def started(round_id: int = 0, crc32: int = 1, run: str = RUN, *, adopts: bool = False, **federated: Any) -> Event:
    rules = {"checkpoint": {"dir": "state", "resume": True}, **federated}
    return {
        "event": "started",
        "run": run,
        "round": round_id,
        "crc32": crc32,
        "held_crc32": crc32,
        "incarnation": 1,
        "federated": rules,
        **({"adopts": True} if adopts else {}),
    }


def counted(round_id: int, client: int, **other: Any) -> Event:
    return {
        "event": "counted",
        "round": round_id,
        "client": client,
        "incarnation": 5,
        "transfer": round_id,
        "num_samples": 10,
        "crc32": 77,
        **other,
    }


def committed(round_id: int, *clients: int, crc32: int = 2, **other: Any) -> Event:
    return {
        "event": "committed",
        "round": round_id,
        "clients": list(clients),
        "num_samples": 10 * len(clients),
        "crc32": crc32,
        "held_crc32": crc32,
        **other,
    }


def adopted(round_id: int, crc32: int) -> Event:
    return {"event": "adopted", "round": round_id, "crc32": crc32, "held_crc32": crc32}


CLIENT = {"event": "started", "incarnation": 5}


def offered(round_id: int, crc32: int = 77, **other: Any) -> Event:
    return {
        "event": "offered",
        "run": RUN,
        "round": round_id,
        "transfer": round_id,
        "crc32": crc32,
        "num_samples": 10,
        **other,
    }


def receipt(round_id: int, *, accepted: bool = True, **other: Any) -> Event:
    return {"event": "receipt", "run": RUN, "round": round_id, "transfer": round_id, "accepted": accepted, **other}


WELCOMED = {"event": "welcomed", "run": RUN}


def decoded(round_id: int, crc32: int) -> Event:
    return {"event": "decoded", "run": RUN, "round": round_id, "crc32": crc32}


GOOD = [started(), counted(1, 0), counted(1, 1), committed(1, 0, 1)]
WRONG: dict[str, tuple[str, dict[str, list[Event]]]] = {
    "a client counted twice": ("I1", {"controller": [started(), counted(1, 0), counted(1, 0), committed(1, 0)]}),
    "a client that was not counted": ("I1", {"controller": [started(), counted(1, 0), committed(1, 0, 1)]}),
    "samples out of nowhere": ("I1", {"controller": [started(), counted(1, 0), committed(1, 0, num_samples=11)]}),
    "a receipt for nothing": ("I1", {"controller": GOOD, "client-0": [CLIENT, offered(1), receipt(1), receipt(2)]}),
    "an update that counts in two rounds": (
        "I1", {"controller": [*GOOD, counted(2, 0, transfer=1), committed(2, 0)]}
    ),
    "a round left out": ("I2", {"controller": [started(), counted(2, 0), committed(2, 0)]}),
    "another model at a client": ("I2", {"controller": GOOD, "client-0": [CLIENT, decoded(0, 1), decoded(1, 3)]}),
    "two models of a round": (
        "I2", {"controller": [*GOOD, started(), counted(1, 0), committed(1, 0, crc32=9)]}
    ),
    "two models of a round where clients hold the same": (
        "I2", {"controller": [*GOOD, started(), counted(1, 0), committed(1, 0, held_crc32=2, crc32=9)]}
    ),
    "rounds from nowhere": ("I4", {"controller": [*GOOD, started(3, 2)]}),
    "a round lost": ("I4", {"controller": [*GOOD, started()]}),
    "a run lost": ("I4", {"controller": [started(), {"event": "commanded", "round": 1}, started(run="bb")]}),
    "another model after a restart": ("I4", {"controller": [*GOOD, started(1, 9)]}),
    "a round lost that only a start has shown": ("I4", {"controller": [*GOOD, started(2, 3), started(1, 2)]}),
    "rounds from nowhere after a round that only a start has shown": (
        "I4", {"controller": [*GOOD, started(2, 3), started(4, 5)]}
    ),
    "another model than the start before had": ("I4", {"controller": [*GOOD, started(2, 3), started(2, 9)]}),
    "a run lost by a start after one that did nothing": (
        "I4", {"controller": [started(), {"event": "commanded", "round": 1}, started(), started(run="bb")]}
    ),
    "a run lost that only its round shows": ("I4", {"controller": [started(3, 4), started(run="bb")]}),
    "a site that goes on from another model": (
        "I4", {"controller": [started(), adopted(3, 4), started(3, 9)]}
    ),
    "other samples": (
        "I7", {"controller": [started(), counted(1, 0, num_samples=11)], "client-0": [CLIENT, offered(1)]}
    ),
    "an update that counts and is refused": (
        "I8", {"controller": GOOD, "client-0": [CLIENT, offered(1), receipt(1, accepted=False)]}
    ),
    "an update that is refused and counts in the open round": (
        "I8", {"controller": [started(), counted(1, 0)], "client-0": [CLIENT, offered(1), receipt(1, accepted=False)]}
    ),
    "an update that is refused and counts in a round that only the next start shows": (
        "I8",
        {
            "controller": [started(), counted(1, 0), started(1, 2)],
            "client-0": [CLIENT, offered(1), receipt(1, accepted=False)],
        },
    ),
    "an update that counts, and its client has no answer when it offers the next one": (
        "I8", {"controller": GOOD, "client-0": [CLIENT, WELCOMED, offered(1), offered(2)]}
    ),
    "an update of a client of a host that counts and is refused": (
        "I8",
        {
            "controller": [started(), counted(1, 3), committed(1, 3)],
            "client-2": [CLIENT, offered(1, client=3), receipt(1, accepted=False, client=3)],
        },
    ),
    "an update of a client of a host with other bytes": (
        "I7", {"controller": [started(), counted(1, 3)], "client-2": [CLIENT, offered(1, 78, client=3)]}
    ),
    "a receipt for nothing at a client of a host": (
        "I1", {"controller": GOOD, "client-0": [CLIENT, receipt(1), receipt(1, client=2)]}
    ),
    "an event that says nothing": ("I1", {"controller": [started(), {"event": "counted"}]}),
    "other bytes": ("I7", {"controller": GOOD, "client-0": [CLIENT, offered(1, crc32=78)]}),
    "ranks that differ": (
        "I5",
        {
            f"rank-{rank}": [{"event": "started", "run": RUN}, {"event": "hash", "step": 7, "hash": f"{rank // 2}"}]
            for rank in (0, 1, 2)
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_violation_is_found(name: str, tmp_path: Path) -> None:
    invariant, files = WRONG[name]
    for who, events in files.items():
        write(tmp_path, who, *events)
    assert invariant in broken(tmp_path)


def test_nothing_is_found_in_a_history_without_fault_also_over_a_restart(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD, counted(2, 0), started(1, 2), counted(2, 0), counted(2, 1))
    write(tmp_path, "controller", committed(2, 0, 1, crc32=3))
    write(tmp_path, "client-0", CLIENT, decoded(0, 1), offered(1), receipt(1), decoded(1, 2), decoded(2, 3), offered(2))
    assert broken(tmp_path) == []


def test_a_controller_that_dies_in_each_start_before_it_can_note_its_commit_has_lost_nothing(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD)
    for round_id in (2, 3, 4):  # each start goes on from what the one before has committed, and not noted
        write(tmp_path, "controller", started(round_id, round_id + 1), counted(round_id + 1, 0))
    write(tmp_path, "controller", committed(5, 0, crc32=6))
    findings = found(tmp_path)
    assert [finding.violations for finding in findings.values() if finding.violations] == []
    assert findings["I4"].checked > 6


@pytest.mark.parametrize(
    "client",
    [
        [CLIENT, WELCOMED, offered(1), receipt(1), offered(2), receipt(2, accepted=False)],  # round 2 is not committed
        [CLIENT, WELCOMED, offered(1), WELCOMED, offered(2)],  # the controller has started again before its answer
        [CLIENT, WELCOMED, offered(1), CLIENT, WELCOMED, offered(2)],  # it was killed before the answer came
        [CLIENT, WELCOMED, offered(2), receipt(2, accepted=False), offered(1), receipt(1)],
        [CLIENT, WELCOMED, offered(1), offered(2, client=3), receipt(1)],  # another client of the same host
    ],
)
def test_a_refused_update_does_not_count_where_the_round_was_begun_again(client: list[Event], tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD, counted(2, 0), started(1, 2))  # killed in round 2, which is done again
    write(tmp_path, "client-0", *client)
    assert found(tmp_path)["I8"].violations == []


def test_a_site_may_die_between_adopting_a_later_round_and_noting_it(tmp_path: Path) -> None:
    write(tmp_path, "controller", started(), adopted(1, 2), started(7, 8, adopts=True), adopted(9, 10))
    assert broken(tmp_path) == []
    write(tmp_path, "controller", started(8, 9, adopts=True))
    assert broken(tmp_path) == ["I4"]


def samples(pid: int, rss: Iterator[float], **other: int) -> list[Event]:
    return [
        {
            "event": "sample",
            "process": "client-1",
            "pid": pid,
            "rss_bytes": int(size * 1e6),
            "fds": 9,
            "threads": 4,
            "at_s": float(number),
            **other,
        }
        for number, size in enumerate(rss)
    ]


def test_growth_is_found_but_not_that_of_the_first_minutes(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD)
    write(tmp_path, "resources", *samples(1, (100 + min(i, 15) for i in range(60))))
    assert broken(tmp_path) == []
    write(tmp_path, "resources", *samples(2, (100 + i / 2 for i in range(60))))
    leak = samples(3, iter([100] * 60))
    for number, sample in enumerate(leak):
        sample["fds"] += number // 12  # one at each of five faults
    write(tmp_path, "resources", *leak)
    (one, other) = found(tmp_path)["I6"].violations
    assert "pid 2) grew" in one
    assert "(pid 3): fds grew from 10 to 12, more than 11" in other


@pytest.mark.parametrize(
    ("fds", "is_growth"),
    [
        ([9] * 40 + [10] * 20, False),  # one more, whatever it is
        ([9] * 40 + [11] * 20, True),
        ([9, 9, 9, 12] * 10 + [12] * 20, False),  # as many as before, for longer
        ([9, 9, 9, 12] * 10 + [13] * 20, True),
    ],
)
def test_a_descriptor_more_is_no_leak(fds: list[int], is_growth: bool, tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD)
    of_all = samples(1, iter([100] * len(fds)))
    write(tmp_path, "resources", *({**sample, "fds": count} for sample, count in zip(of_all, fds, strict=True)))
    assert (broken(tmp_path) == ["I6"]) == is_growth


def with_pools(*parts: tuple[list[int], list[str]], pid: int = 1) -> list[Event]:
    """Return samples of a process in whose parts these descriptors are open, and these pools of threads run."""
    fds = [(count, pools) for counts, pools in parts for count in counts]
    of_all = samples(pid, iter([100] * len(fds)))
    return [{**sample, "fds": count, "pools": pools} for sample, (count, pools) in zip(of_all, fds, strict=True)]


@pytest.mark.parametrize(
    ("later", "is_growth"),
    [
        ([12] * 60, False),
        ([12 + number // 10 for number in range(60)], True),  # one at each broken link
        ([12] * 36 + [15] * 24, True),  # as much again, by no pool that has started
    ],
)
def test_a_pool_that_starts_late_is_no_leak_and_one_behind_it_is_found(
    later: list[int], is_growth: bool, tmp_path: Path
) -> None:
    write(tmp_path, "controller", *GOOD)
    write(tmp_path, "resources", *with_pools(([9] * 90, ["app", "rx"]), (later, ["acc", "app", "rx"])))
    assert (broken(tmp_path) == ["I6"]) == is_growth


def test_a_leak_before_a_pool_starts_is_found_and_one_beside_a_pool_that_comes_and_goes(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD)
    leak = [9 + number // 10 for number in range(60)]
    write(tmp_path, "resources", *with_pools((leak, ["app"]), ([18] * 60, ["acc", "app"])))
    comes_and_goes = [([9 + number] * 10, ["app", "job"] if number % 2 else ["app"]) for number in range(10)]
    write(tmp_path, "resources", *with_pools(*comes_and_goes, pid=2))
    (one, other) = found(tmp_path)["I6"].violations
    assert "(pid 1): fds grew" in one
    assert "(pid 2): fds grew" in other


def test_threads_that_end_when_they_have_been_idle_are_no_leak_and_one_more_at_each_fault_is(tmp_path: Path) -> None:
    threads = [7] * 58 + ([7] * 5 + [11] * 10) * 3  # a fault takes four threads for 10 s
    write(tmp_path, "controller", *GOOD)
    for pid, counts in ((1, threads), (2, [count + number // 15 for number, count in enumerate(threads)])):
        of_all = samples(pid, iter([100] * len(counts)))
        write(tmp_path, "resources", *({**one, "threads": n} for one, n in zip(of_all, counts, strict=True)))
    (leak,) = found(tmp_path)["I6"].violations
    assert "(pid 2): threads grew from 9 to 12, more than 10" in leak


def test_a_relay_is_compared_with_itself_while_it_has_as_many_links(tmp_path: Path) -> None:
    """Two descriptors a link: eight of its peers start again for a while."""
    links = [12] * 60 + [4] * 50 + [12] * 90
    write(tmp_path, "controller", *GOOD)
    for pid, leaked in ((1, [0] * 200), (2, [number // 15 for number in range(200)])):
        counts = zip(samples(pid, iter([100] * 200)), links, leaked, strict=True)
        write(tmp_path, "resources", *({**one, "links": n, "fds": 20 + 2 * n + more} for one, n, more in counts))
    (leak,) = found(tmp_path)["I6"].violations
    assert "(pid 2): fds grew" in leak


def test_what_a_process_takes_to_start_and_to_end_is_no_growth(tmp_path: Path) -> None:
    def life(pid: int) -> list[Event]:
        """It waits for others for 40 s, works for 60 s, and ends for 30 s."""
        parts = ((40, 90, 22, 7), (100, 95, 25, 10), (130, 105, 28, 13))
        lines = [samples(pid, iter([rss] * until), fds=fds, threads=threads) for until, rss, fds, threads in parts]
        return [*lines[0], *lines[1][40:], *lines[2][100:]]

    write(tmp_path, "controller", *GOOD)
    write(tmp_path, "resources", *life(1))
    assert len(found(tmp_path)["I6"].violations) == 3
    write(tmp_path, "client-1", {**CLIENT, "pid": 1, "at_s": 39.5}, {"event": "failed", "pid": 1, "at_s": 99.5})
    assert found(tmp_path)["I6"].violations == []
    assert found(tmp_path)["I6"].checked == 3
    write(tmp_path, "resources", *samples(2, (100 + i / 2 for i in range(60))))
    write(tmp_path, "client-1", {**CLIENT, "pid": 2, "at_s": 0.0})
    assert len(found(tmp_path)["I6"].violations) == 1
    write(tmp_path, "resources", *samples(3, (100 + i for i in range(60))))  # killed before it was at work
    assert len(found(tmp_path)["I6"].violations) == 1


def test_a_line_that_was_cut_short_is_passed_over_and_the_next_start_begins_a_new_one(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD)
    with (tmp_path / "controller.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "comm')
    history = History(tmp_path, "controller")
    history.note(**started(1, 2))  # type: ignore[arg-type]
    history.close()
    history.note("not any more")
    run = read_history(tmp_path)
    assert run.cut_short == 1
    assert [start.opening["round"] for start in run.controller] == [0, 1]


def test_a_history_that_cannot_be_written_ends_without_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "below", "controller", payloads=True)
    history.note("started")
    history.keep("name", b"bytes")
    assert not history.on


def test_bytes_may_come_before_the_first_event_which_makes_the_directory(tmp_path: Path) -> None:
    history = History(tmp_path / "history", "controller", payloads=True)
    history.keep("name", b"bytes")
    assert history.keeps_payloads
    assert (tmp_path / "history" / "payloads" / "name").read_bytes() == b"bytes"


def test_a_disk_that_takes_half_a_line_ends_the_history_there_and_nothing_is_put_behind_it(tmp_path: Path) -> None:
    history = History(tmp_path, "controller")
    history.note(**started())  # type: ignore[arg-type]
    size = (tmp_path / "controller.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        history.note("committed", round=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    history.note("committed", round=2)
    assert not history.on
    assert (tmp_path / "controller.jsonl").stat().st_size == size + 20
    History(tmp_path, "controller").note("ended")
    assert read_history(tmp_path).cut_short == 1


def test_the_command_says_what_holds_and_what_was_left_out_and_ends_with_12_where_something_does_not(
    tmp_path: Path,
) -> None:
    write(tmp_path, "controller", *GOOD)
    write(tmp_path, "client-7", {**decoded(1, 9), "pid": 5}, {"event": "ended", "pid": 5})
    (tmp_path / "rank-0.jsonl").write_text('{"event": "has')
    well = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert well.exit_code == 0
    assert "I1  an update counts at most once            holds " in well.output
    assert "1 lines are left out" in well.output
    assert "1 events are left out" in well.output
    write(tmp_path, "controller", committed(3, 0))
    wrong = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert wrong.exit_code == ExitCode.HISTORY
    assert "round 3 was committed after round 1" in wrong.output


def test_a_journal_that_is_not_read_to_its_end_is_not_said_to_hold(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD)
    journal = tmp_path / "controller.jsonl"
    with journal.open("a") as file:
        file.write("\n" * 2000)
    write(tmp_path, "controller", committed(3, 0))  # which does not hold, and nobody reads it
    ended = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert ended.exit_code == ExitCode.HISTORY
    assert "not checked to the end" in ended.output


def test_where_there_is_no_history_the_error_says_who_keeps_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RUN_DIR/history"):
        read_history(tmp_path)


@pytest.mark.parametrize(
    "rules",
    [
        {"codec": "fp32"},
        {"codec": {"name": "q8", "version": 1}},
        {"codec": "sq8", "downlink_codec": "s4", "strategy": "fedavgm"},
        {"codec": "s4", "downlink_codec": "q8"},
    ],
    ids=["plain", "weights", "momentum", "both ways"],
)
def test_every_round_of_a_real_run_is_computed_again_to_the_last_bit(rules: dict[str, Any], tmp_path: Path) -> None:
    history = tmp_path / "history"
    crcs = asyncio.run(_run(history, rules))
    findings = found(tmp_path)
    assert [finding.violations for finding in findings.values() if finding.violations] == []
    assert findings["I3"].checked == 3
    assert findings["I2"].checked > 8  # both clients said what they hold
    assert findings["I7"].checked == 6
    controller = history / "controller.jsonl"
    lines = controller.read_text().splitlines(keepends=True)
    (at,) = (i for i, line in enumerate(lines) if '"committed"' in line and json.loads(line)["round"] == 2)
    commit, opening = json.loads(lines[at]), json.loads(lines[0])
    again = {**opening, "round": 2, "crc32": commit["crc32"], "held_crc32": commit["held_crc32"]}
    controller.write_text("".join([*lines[:at], json.dumps(again) + "\n", *lines[at + 1 :]]))
    assert broken(tmp_path) == []  # it died before it could note what it had committed
    assert found(tmp_path)["I3"].checked == 3
    damaged = next((history / "payloads").glob("update-000002-1-*"))
    payload = bytearray(damaged.read_bytes())
    payload[-1] ^= 0x80  # the sign of the last value, or a scale's
    damaged.write_bytes(payload)
    assert broken(tmp_path) == ["I3"]
    assert len(set(crcs)) == 3


def test_a_reader_of_the_check_may_end_before_it(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    write(tmp_path / "history", "controller", started())
    program = Path(sys.executable).parent / "gradbus"
    command = f"set -o pipefail; {program} check {tmp_path} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


BOTH_WAYS = {"codec": "s4", "downlink_codec": "q8"}


def test_a_round_whose_sum_does_not_fit_64_bits_is_computed_again_as_well(tmp_path: Path) -> None:
    history = tmp_path / "history"
    (history / "payloads").mkdir(parents=True)
    weights, mean = torch.zeros(DIM), FedAvg(DIM)
    (history / "payloads" / weights_name(int(RUN, 16), 0)).write_bytes(weights.numpy().tobytes())
    events = [started(crc32=zlib.crc32(weights.numpy().data), strategy={"name": "fedavg"})]
    mean.begin(1, weights)
    for client, value in enumerate((3.75, 3.5, 3.25, 0.125)):
        payload = codecs.get("fp32").encode(torch.full((DIM,), value))
        mean.add(Update(codecs.parse(payload, expected_dim=DIM)), Facts(client_id=client, num_samples=1 << 30))
        (history / "payloads" / update_name(1, client, 5, 1)).write_bytes(payload)
        events.append(counted(1, client, num_samples=1 << 30))
    mean.finish(weights)
    assert weights[0] == (3.75 + 3.5 + 3.25 + 0.125) / 4
    crc32 = zlib.crc32(weights.numpy().data)
    write(history, "controller", *events, committed(1, 0, 1, 2, 3, crc32=crc32, num_samples=1 << 32))
    assert broken(tmp_path) == []
    assert found(tmp_path)["I3"].checked == 1


def test_a_round_that_was_committed_and_not_noted_any_more_is_computed_again_from_what_the_next_start_says(
    tmp_path: Path,
) -> None:
    history = tmp_path / "history"
    asyncio.run(_run(history, BOTH_WAYS))
    events = _controller_of(history)
    second = next(event for event in events if event["event"] == "committed" and event["round"] == 2)
    where = events.index(second)
    again = {**events[0], "pid": 1, **{name: second[name] for name in ("round", "crc32", "held_crc32")}}
    (history / "controller.jsonl").unlink()
    write(history, "controller", *events[:where], again, *({**event, "pid": 1} for event in events[where + 1 :]))
    findings = found(tmp_path)
    assert [finding.violations for finding in findings.values() if finding.violations] == []
    assert findings["I3"].checked == 3
    damaged = next((history / "payloads").glob("update-000002-1-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + bytes([damaged.read_bytes()[-1] ^ 0x80]))
    assert broken(tmp_path) == ["I3"]


def test_rounds_are_not_computed_again_from_the_middle_of_a_run_where_more_than_weights_was_kept(
    tmp_path: Path,
) -> None:
    history = tmp_path / "history"
    asyncio.run(_run(history, BOTH_WAYS))
    events = _controller_of(history)
    first = next(event for event in events if event["event"] == "committed" and event["round"] == 1)
    opening = {**events[0], **{name: first[name] for name in ("round", "crc32", "held_crc32")}}
    (history / "controller.jsonl").unlink()
    write(history, "controller", opening, *events[events.index(first) + 1 :])
    (weights,) = (history / "payloads").glob("weights-*-000000.bin")
    weights.rename(weights.with_name(weights.name.replace("-000000", "-000001")))
    finding = found(tmp_path)["I3"]
    assert (finding.checked, finding.violations) == (0, [])


def _controller_of(history: Path) -> list[Event]:
    return [json.loads(line) for line in (history / "controller.jsonl").read_text().splitlines()]


async def _run(history: Path, rules: dict[str, Any], *, faults: str = "") -> list[int]:
    job, domain = f"history-{os.getpid()}", new_domain()
    config = gradbus.FederatedConfig(
        rounds=3,
        clients={"num": 2, "dead_after_s": PATIENT_S},
        eval_every=0,
        history={"dir": history, "payloads": True},
        **rules,
    )

    async def client(client_id: int) -> None:
        own = gradbus.ClientConfig(history={"dir": history})
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, NoopTask(DIM, delta="seeded"), client_id=client_id, config=own).run()

    connected = gradbus.connect(job=job, domain=domain, faults=faults)
    async with asyncio.timeout(60), connected as bus, asyncio.TaskGroup() as group:
        for client_id in (0, 1):
            group.create_task(client(client_id))
        controller = gradbus.Controller(bus, NoopTask(DIM), config)
        await controller.run()
        assert zlib.crc32(controller.weights.numpy().data) == controller.progress.reports[-1].weights_crc32
        return [report.weights_crc32 for report in controller.progress.reports]


def test_each_start_of_a_run_has_a_later_incarnation_than_the_one_before(tmp_path: Path) -> None:
    for _ in range(2):  # the second one finds that all rounds are done
        asyncio.run(_run(tmp_path / "history", {"checkpoint": {"dir": tmp_path / "state"}}))
    first, second = (start.opening for start in read_history(tmp_path).controller)
    assert (first["round"], second["round"]) == (0, 3)
    assert first["run"] == second["run"]
    assert first["incarnation"] < second["incarnation"]
    assert broken(tmp_path) == []


def test_a_model_that_cannot_be_saved_reaches_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, publish = RunState._save, ModelPublisher.publish  # noqa: SLF001 - a disk that is full for one round
    done: list[str] = []

    def full_in_round_two(self: RunState, held: Any) -> None:
        done.append(f"save {self.round_id}")
        if self.round_id == 2:
            raise CheckpointError("no space is left")
        save(self, held)

    async def noted(self: ModelPublisher) -> None:
        done.append("publish")
        await publish(self)

    monkeypatch.setattr(RunState, "_save", full_in_round_two)
    monkeypatch.setattr(ModelPublisher, "publish", noted)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(_run(tmp_path / "history", {"checkpoint": {"dir": tmp_path / "state"}}))
    assert caught.group_contains(CheckpointError, match="no space is left")
    assert done == ["save 0", "publish", "save 1", "publish", "save 2"]
    run = read_history(tmp_path)
    assert [event["round"] for event in run.controller[0].all("committed")] == [1]
    for starts in run.clients.values():
        assert max(event["round"] for start in starts for event in start.all("decoded")) == 1
    assert broken(tmp_path) == []


@pytest.mark.parametrize("forgets", [False, True], ids=["shipped", "forgets what it has counted"])
def test_a_client_that_is_refused_for_an_update_that_counts_is_found(
    forgets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgets:
        shipped = UpdateReceiver.on_request

        async def on_request(self: Any, *request: Any) -> None:
            self._answers.counted.clear()
            await shipped(self, *request)

        monkeypatch.setattr(UpdateReceiver, "on_request", on_request)
    asyncio.run(_run(tmp_path / "history", {"codec": "s4"}, faults="drop receipt nth=1"))
    findings = found(tmp_path)
    assert findings["I8"].checked >= 6
    assert broken(tmp_path) == (["I8"] if forgets else [])
    if forgets:
        assert "of round 1 is refused, and it counts" in findings["I8"].violations[0]


def test_the_command_names_what_does_not_hold_and_its_exit_code_says_so(tmp_path: Path) -> None:
    write(tmp_path, "controller", *GOOD, started())
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == ExitCode.HISTORY
    assert "I4  no committed round is lost               1 VIOLATED" in result.stdout
    assert "round 1 was committed, but the next start went on from round 0" in result.stdout
    assert CliRunner().invoke(app, ["check", str(tmp_path / "nothing")]).exit_code == ExitCode.CONFIG
