"""The benchmark of a relay with many sessions: its figures, and a tiny run with Flower nodes that share processes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gradbus.experiments.bench import relay_sessions
from gradbus.experiments.bench.flower import PROGRAMS
from gradbus.experiments.bench.relay_sessions import RelayMoment, SessionsPlan, figures_of

PLAN = SessionsPlan(nodes=3, processes=1, rounds=2, num_bytes=1_000_000)


def test_processor_time_and_memory_of_a_relay_are_divided_by_its_sessions() -> None:
    start, formed = RelayMoment(10.0, 1.0, 40.0), RelayMoment(14.0, 1.4, 44.0)
    ends = [RelayMoment(16.0, 1.8, 48.0), RelayMoment(17.0, 2.6, 48.0)]
    found = {one.name.rpartition(": ")[2]: one.samples for one in figures_of(PLAN, [start, formed, *ends])}
    assert found == {
        "until all are there": (4.0,),
        "a round": (2.0, 1.0),
        "processor time of the relay for each session until all are there": (100.0,),
        "processor time of the relay for each session in a round": (100.0, 200.0),
        "memory of the relay for each session after each round": (2048.0, 2048.0),
    }


@pytest.mark.slow
@pytest.mark.skipif(not (PROGRAMS / "flwr").exists(), reason="Flower is not set up here: make setup-flower")
def test_a_tiny_run_has_all_figures_and_nodes_that_import_no_torch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)  # where Flower is looked for
    figures = list(relay_sessions.measure(argparse.Namespace(effort="tiny", nodes=None, rounds=None, security="psk")))
    assert [len(one.samples) for one in figures] == [1, 2, 1, 2, 2]
    assert all(one.judged > 0 for one in figures)
