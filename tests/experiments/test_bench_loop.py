"""How a host's event loop is watched, and a control loop beside training."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import pytest

from gradbus.experiments.bench import loop
from gradbus.experiments.bench.control_host import WAYS, ControlGaps, tail_of
from gradbus.experiments.bench.loop_host import IDLE_S, HostGaps
from gradbus.experiments.bench.ticker import loop_gaps
from gradbus.experiments.examples.control_loop import Pace


def test_a_loop_that_is_held_is_seen_and_so_is_who_holds_it(tmp_path: Path) -> None:
    async def holds(stacks: Path) -> list[float]:
        with stacks.open("w", encoding="utf-8") as file:
            async with loop_gaps(stacks=file, late_s=0.1) as gaps:
                await asyncio.sleep(0.05)
                time.sleep(0.5)  # noqa: ASYNC251 - the fault that is looked for
                await asyncio.sleep(0.05)
        return gaps

    gaps = asyncio.run(holds(tmp_path / "stacks.txt"))
    assert max(gaps) > 0.4
    text = (tmp_path / "stacks.txt").read_text(encoding="utf-8")
    assert " in holds" in text
    assert "-- the loop was" in text


def test_the_longest_delays_are_judged_over_those_of_the_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(role: str, *options: str) -> HostGaps:
        return HostGaps(
            idle_s=0.01, loop_s=0.05 if options else 0.2, held_s=0.04, starts_s=2.0, seconds=5.0, preload_s=3.0, ticks=9
        )

    monkeypatch.setattr(loop, "watch", watch)
    figures = {one.name: one for one in loop.measure_role("client", argparse.Namespace(processes=3))}
    over = figures["client, after preload(): p100 over that of the idle loop"]
    assert over.samples == pytest.approx((40.0,))
    assert over.asked == "<= 50"
    assert figures["client, without preload(): p100 over that of the idle loop"].samples == pytest.approx((190.0,))


def test_a_control_loop_is_judged_by_its_99th_percentile_without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(way: str, seconds: float) -> ControlGaps:
        return ControlGaps((0.001, 0.002), (0.003, 0.004), (0.0014, 0.005), rounds=20)

    monkeypatch.setattr(loop, "watch_control", watch)
    figures = list(loop.measure_control(argparse.Namespace(robots=2, seconds=10.0, way=None)))
    assert len(figures) == 2 * len(WAYS)
    (judged,) = [one for one in figures if one.asked]
    assert judged.name.startswith(WAYS[loop.RECOMMENDED])
    assert judged.ratios == pytest.approx((1.4, 1.4))


def test_the_tail_of_a_pace_is_its_99th_percentile_and_its_most() -> None:
    assert tail_of(Pace([number / 100 for number in range(101)])) == (0.99, 1.0)


@pytest.mark.slow
def test_a_host_with_a_client_is_watched(domain: int) -> None:
    found = asyncio.run(loop.watch("client", "--preload", domain=domain))
    assert found.ticks > 10
    assert 0 < found.loop_s < found.seconds
    assert 0 < found.idle_s < IDLE_S
    assert found.preload_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["process", "loop"])
def test_a_control_loop_is_measured_while_rounds_go_on(way: str, domain: int) -> None:
    found = asyncio.run(loop.watch_control(way, 2.0, domain=domain))
    assert found.rounds > 0
    assert all(p99 <= most for p99, most in (found.idle_s, found.starting_s, found.training_s))
