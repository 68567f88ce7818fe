"""Reports of very long runs: in bounded memory, with curves that keep their peaks, and with sums of all rounds."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gradbus.actors import EpochReport, RoundReport
from gradbus.actors.federated.controller.report import ClientTimeline
from gradbus.commands.dashboard import following
from gradbus.commands.dashboard.following import Following
from gradbus.commands.report import figures as draw
from gradbus.commands.report import style
from gradbus.commands.report.build import page_of
from gradbus.commands.report.page import render
from gradbus.commands.rundir import whole_run
from gradbus.commands.rundir.reading import MAX_WINDOWS, read_run
from gradbus.commands.rundir.thinned import Thinned
from gradbus.commands.rundir.whole_run import MAX_KEPT, MAX_LISTED, MAX_WHOLE, WholeRun, totals
from gradbus.runtime.json_text import json_text

ROUNDS = 10_000
PEAK = 6_789  # the round with the largest loss, and the longest


def reported(round_id: int, clients: int = 2) -> RoundReport:
    timeline = tuple(
        ClientTimeline(client_id=n, offered_s=0.1, received_s=0.1, adding_s=0.1, counted_s=0.2, train_s=0.1, loss=1.0)
        for n in range(clients)
    )
    is_peak = round_id == PEAK
    return RoundReport(
        round_id=round_id,
        clients=tuple(range(clients)),
        expected=clients,
        outcome="all",
        loss=50.0 if is_peak else 1 + math.sin(round_id),
        seconds=9.0 if is_peak else 0.25,
        train_s=0.125,
        bytes_up=1000 + round_id % 7,
        bytes_down=500,
        accuracy=round_id / ROUNDS if round_id % 10 == 0 else None,
        dropped={"stale": 1} if round_id % 1000 == 0 else {},
        weights_crc32=round_id,
        timeline=timeline,
    )


def write(path: Path, rounds: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"federated": {}}')
    with (path / "rounds.jsonl").open("w") as file:
        file.writelines(json_text(reported(number).to_json()) + "\n" for number in range(1, rounds + 1))
    return path


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("long") / "run", ROUNDS)


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        read_run(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_rounds(long_run: Path, tmp_path: Path) -> None:
    """What is left grows by 16 bytes a round: the times that medians are of."""
    before = peak_bytes(write(tmp_path / "run", ROUNDS // 2))
    after = peak_bytes(long_run)
    assert after < 40 << 20
    assert after < 1.3 * before


def test_sums_and_counts_are_of_all_rounds(long_run: Path) -> None:
    run, expected = read_run(long_run), [reported(number) for number in range(1, ROUNDS + 1)]
    assert run.whole.sums.to_json() == totals(expected)
    assert run.whole.median_s == 0.25
    assert run.whole.faults.dropped == {"stale": ROUNDS // 1000}
    assert run.whole.faults.in_rounds["stale"].text.endswith("8000 and 2 more")
    assert run.whole.gaps.count == 0
    curve = draw.curve_of_rounds(run.rounds, style.nth_look(0, "a"), run.spent)
    assert curve.num_bytes[-1] == sum(report.bytes_up + report.bytes_down for report in expected)
    assert curve.seconds[-1] == pytest.approx(sum(report.seconds for report in expected))


def test_peaks_and_both_ends_are_kept(long_run: Path) -> None:
    rounds = read_run(long_run).rounds
    ids = [report.round_id for report in rounds]
    assert ids == sorted(set(ids))
    assert PEAK in ids
    assert ids[:MAX_LISTED] == list(range(1, MAX_LISTED + 1))
    assert ids[-MAX_LISTED:] == list(range(ROUNDS - MAX_LISTED + 1, ROUNDS + 1))
    assert len(ids) < MAX_KEPT + MAX_WHOLE + 2 * MAX_LISTED
    gaps = [after - before for before, after in pairwise(ids)]
    assert max(gaps) < ROUNDS / 100  # no part of a curve is left out
    assert any(report.timeline for report in rounds)


def test_the_page_says_that_curves_are_sampled(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.commands.report.page.images_of", lambda figure: None)
    html = render(page_of([read_run(long_run)]))
    assert "The run has 10,000 rounds: curves and timelines are sampled, such that no peak is lost" in html
    assert "9600 rounds are left out; rounds.jsonl has all of them" in html
    assert "Only of a sample of the rounds." in html


def test_the_reports_of_a_shorter_run_are_all_there(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", 600))
    assert run.rounds == tuple(reported(number) for number in range(1, 601))
    assert not run.whole.is_thinned
    assert run.spent == {}


def test_rounds_with_very_many_clients_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "MAX_TIMELINES", 1000)
    whole = WholeRun.of(reported(number, clients=20) for number in range(1, 501))
    assert whole.is_thinned
    assert sum(len(report.timeline) for report in whole.reports) <= 1100
    assert len(whole.reports) == 500  # their figures are all there


def test_a_round_that_comes_again_far_behind_is_named(long_run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1000)
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json_text(replace(reported(999), loss=7.0).to_json()) + "\n")
        file.write(json_text(reported(3).to_json()) + "\n")
    run = read_run(path)
    assert run.rounds[998].loss == 7.0
    assert "rounds.jsonl, line 1002 is left out: number 3 comes again, or far out of order." in run.missing


def test_very_many_epochs_and_windows_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"parallel": {}}')
    with (tmp_path / "epochs.jsonl").open("w") as file:
        for number in range(5000):
            loss = 50.0 if number == 4321 else 1.0
            report = EpochReport(epoch=number, step=number + 1, loss=loss, bytes_out_per_step=3.0, seconds=0.5)
            file.write(json_text(report.to_json()) + "\n")
    with (tmp_path / "profile-rank-0.jsonl").open("w") as file:
        file.write('{"kind": "start", "rank": 0}\n')
        for number in range(MAX_WINDOWS * 9):
            step_s = 2.0 if number == 777 else 0.5
            file.write(
                f'{{"kind": "window", "rank": 0, "first_step": {number}, "last_step": {number}, "steps": 1, '
                f'"mean": {{"step_s": {step_s}}}, "max": {{}}}}\n'
            )
    run = read_run(tmp_path)
    assert len(run.epochs) <= MAX_WHOLE + 1
    assert run.epochs[-1].epoch == 4999
    assert max(report.loss for report in run.epochs) == 50.0
    assert run.spent[4999] == (15_000.0, 2500.0)
    assert len(run.windows[0]) <= MAX_WINDOWS
    assert max(window.mean["step_s"] for window in run.windows[0]) == 2.0


def test_the_dashboard_keeps_the_newest_rounds_of_a_long_run(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REPORTS", 1000)
    run = Following(long_run, "federated")
    run.refresh()
    assert len(run.files.rounds) == 1000
    assert run.newest.round_id == ROUNDS


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000, 4321])
def test_what_is_thinned_keeps_its_order_its_extremes_and_its_bound(count: int) -> None:
    values = [math.sin(n * n) for n in range(count)]
    kept: Thinned[int] = Thinned([lambda n: values[n], lambda n: None, lambda n: math.nan], 64)
    for number in range(count):
        kept.add(number)
    found = kept.items()
    assert found == sorted(set(found))
    assert found[0] == 0
    assert max(values) in {values[n] for n in found}
    assert min(values) in {values[n] for n in found}
    assert len(found) <= 64 + 3
    assert (len(found) == count) == (not kept.is_thinned)
