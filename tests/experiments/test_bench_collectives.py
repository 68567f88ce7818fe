"""The benchmark of torch.distributed: its parts run in real processes, and what falls short is reported."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from gradbus.experiments.bench import collectives
from gradbus.experiments.bench.cells import Cell
from gradbus.experiments.bench.collectives import SETUPS, SIZES, Setup, big_rows, cell_rows
from gradbus.experiments.bench.ddp_step import step_rows, time_steps
from gradbus.experiments.bench.limits import Part, at_most
from gradbus.experiments.bench.multicast import COLLECTIVES, multicast_rows, sent_row
from gradbus.experiments.bench.processes import BenchRank, ProcessFailed, run_ranks
from gradbus.experiments.bench.timing import in_turns, ratios_of, size_text

KIB_4 = 4096


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """gloo in a world of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_read_as_it_is_shown(size: int) -> None:
    for text in (size_text(size), size_text(size).replace(" ", ""), str(size), f"{size} B"):
        assert collectives.size_of(text) == size


@pytest.mark.parametrize("text", ["", "4 GiB", "-4", "0", "6", "1.5MiB"])
def test_what_is_no_size_of_whole_floats_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="64KiB, got"):
        collectives.size_of(text)


def test_each_cell_has_a_limit() -> None:
    asked = [limits for setup in SETUPS for limits in setup.limits.values()]
    assert [len(limits) for limits in asked] == [len(SIZES)] * 4


def test_every_repeat_has_all_blocks_and_every_second_one_in_the_opposite_order() -> None:
    assert in_turns(["ours", "gloo"], 3) == ["ours", "gloo", "gloo", "ours", "ours", "gloo"]


def test_the_slowest_rank_counts_and_ratios_are_taken_within_a_repeat() -> None:
    ranks = [
        {"median_s": {"ours": [1.0, 6.0, 1.0], "gloo": [2.0, 1.0, 1.0]}},
        {"median_s": {"ours": [3.0, 1.0, 1.0], "gloo": [1.0, 2.0, 4.0]}},
    ]
    ratios, ms = ratios_of(ranks)
    assert ratios == {"ours": [1.5, 3.0, 0.25], "gloo": [1.0, 1.0, 1.0]}
    assert ms == {"ours": 3000.0, "gloo": 2000.0}
    assert ratios_of(ranks, base="ours")[0]["gloo"] == [2 / 3, 1 / 3, 4.0]


def test_a_wrong_result_is_noticed(alone: dist.ProcessGroup) -> None:
    for collective in ("all_reduce", "all_gather"):
        Cell(BenchRank(0, 1, "bench", 0, "one-host", None), collective, KIB_4).check({"gloo": alone})
    of_two = Cell(
        BenchRank(0, 2, "bench", 0, "one-host", None), "all_reduce", KIB_4
    )  # whose second rank does not take part
    with pytest.raises(RuntimeError, match="all_reduce of 4 KiB: the result of 'gloo' is wrong"):
        of_two.check({"gloo": alone})


@pytest.mark.parametrize(("limit", "code"), [(2.0, 0), (0.5, 1)])
def test_the_exit_code_tells_of_a_figure_that_falls_short(
    limit: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(lambda: ([at_most("all_reduce", 1.0, limit, "x gloo")], {}), "one")
    monkeypatch.setattr(collectives, "parts", lambda chosen: {"big": part})
    out = tmp_path / "bench.json"
    assert collectives.main(["--part", "big", "--out", str(out)]) == code
    assert json.loads(out.read_text(encoding="utf-8"))["rows"][0]["ok"] is (code == 0)


def test_a_world_without_limits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        collectives.main(["--part", "collectives", "--world", "3"])
    assert ended.value.code == 2
    assert "there are no limits for 3 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(ProcessFailed, match=r"rank 0 failed: (.|\n)*AttributeError: .*'model'"):
        run_ranks(time_steps, 1)


@pytest.mark.slow
def test_collectives_are_timed_and_a_cell_above_its_limit_falls_short() -> None:
    limits = {"all_reduce": (1e6,) * len(SIZES), "all_gather": (1e-6,) * len(SIZES)}
    rows, taken = cell_rows([Setup("one-host", 2, limits)], sizes=[KIB_4, 8192], repeats=2)
    memory, *rows = rows
    assert memory.ok, memory
    assert [row.name for row in rows[::3]] == [
        f"{collective} {size}, one host, world 2" for collective in limits for size in ("4 KiB", "8 KiB")
    ]
    assert [(row.asked, row.ok) for row in rows[::3]] == [
        ("<= 1e+06", True), ("", True), ("<= 1e-06", False), ("", True)
    ]  # fmt: skip
    assert all(row.asked == "<= 1.05" and row.measured > 0 for row in rows[1::3])
    assert all("Group" in row.name and row.measured > 0 for row in rows[2::3])
    for rank in taken["one host, world 2"]:
        assert [{name: len(values) for name, values in cell["median_s"].items()} for cell in rank["cells"]] == [
            {"ours": 2, "none": 2, "gloo": 2}
        ] * 4


@pytest.mark.parametrize(("world", "ok"), [(3, False), (2, True)])
def test_packets_that_are_not_multicast_fall_short_where_there_is_more_than_one_reader(world: int, ok: bool) -> None:
    assert sent_row({"multicast": 0.01, "unicast": 0.0}, "here", world).ok is ok
    assert sent_row({"multicast": 1.01, "unicast": 0.0}, "here", world).ok


@pytest.mark.slow
def test_collectives_by_multicast_are_timed_beside_the_same_without_it() -> None:
    rows, taken = multicast_rows([3], sizes=[KIB_4], repeats=2)
    sent, *rows = rows
    assert (sent.asked, sent.ok) == (">= 1", True), sent
    assert [row.name for row in rows] == [f"{name} 4 KiB by multicast, DDS only, world 3" for name in COLLECTIVES]
    assert all(row.measured > 0 for row in rows)
    for rank in taken["multicast, DDS only, world 3"]:
        assert [{name: len(values) for name, values in cell["median_s"].items()} for cell in rank["cells"]] == [
            {"unicast": 2, "multicast": 2}
        ] * 3


@pytest.mark.slow
def test_data_parallel_steps_are_timed_with_shared_memory_switched_off() -> None:
    (row,), taken = step_rows(["dds-only"], repeats=1, steps=2, model="small")
    assert row.asked == "<= 1.1"
    assert row.measured > 0
    assert [rank["median_s"].keys() for rank in taken[row.name]] == [{"ours", "gloo"}] * 2


@pytest.mark.slow
def test_memory_of_a_large_collective_includes_the_tensor() -> None:
    size = 64 << 20
    (row,), taken = big_rows(["one-host"], size=size)
    assert row.asked == "<= 3"
    assert row.measured >= 1, taken


@pytest.mark.slow
def test_a_profile_shows_threads_of_both_backends_and_functions_of_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    arguments = ["--profile", "--sizes", "4KiB", "--seconds", "0.1", "--out", str(out)]
    assert collectives.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("MainThread") >= 3
    assert text.count("gradbus-") >= 1  # which thread has work depends on the way that frames take
    assert "pt_gloo_runloop" in text
    saved = json.loads(out.read_text(encoding="utf-8"))[str(KIB_4)]
    assert all(rank["ours"]["threads"]["MainThread"]["cpu_s"] > 0 for rank in saved["threads"])
    for rank in saved["functions"]:
        functions = {name.split()[-1] for of_thread in rank["threads"].values() for name in of_thread}
        assert {"Engine.start", "Engine.receive"} <= functions
