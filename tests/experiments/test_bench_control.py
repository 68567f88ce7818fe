"""The benchmark of the control path counts what clients receive, and judges it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gradbus.experiments.bench.control_path import LEVELS, MAX_CPU_MS, RoundState, figures_of, rounds_of


@pytest.mark.parametrize("level", LEVELS)
def test_a_client_receives_no_more_than_is_allowed_at_any_level(level: str, tmp_path: Path) -> None:
    counted = asyncio.run(rounds_of(level, 2, 10, tmp_path))
    assert len(counted) == 10
    _, messages = figures_of(level, 2, counted)
    assert 0 < sum(messages.samples) / len(messages.samples) <= 8


def test_a_round_is_what_lies_between_two_states_and_heartbeats_are_counted_apart() -> None:
    counted = [RoundState(0.01 * number, 64 * number, 16 * number) for number in range(8)]
    cpu, messages = figures_of("none", 32, counted)
    assert cpu.samples == pytest.approx((10.0, 10.0))
    assert cpu.at_most == MAX_CPU_MS[32]
    assert messages.samples == (2.0, 2.0)
    assert messages.note == "and 0.50 heartbeats"
