"""The benchmark of a relay takes memory and processor time of a real one."""

from __future__ import annotations

import argparse

import pytest

from gradbus.experiments.bench import relay


@pytest.mark.slow
def test_a_tiny_run_has_memory_and_processor_time_with_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SESSIONS", 3)
    monkeypatch.setattr(relay, "CLIENTS", 1)
    chosen = argparse.Namespace(effort="tiny")
    alone, each = relay.measure_memory(chosen)
    assert 10 < alone.judged < 2 * relay.MAX_RESIDENT_MIB
    assert alone.asked == f"<= {relay.MAX_RESIDENT_MIB:g}"
    assert each.unit == "KiB"
    time_of_one, growth = relay.measure_cpu(chosen)
    assert time_of_one.judged > 0
    assert time_of_one.asked == f"<= {relay.MAX_CPU_RATIO:g}"
    assert growth.unit == "MiB"
    of_eight, _ = relay.measure_fan_out(chosen)
    assert of_eight.judged > 0
    memory, taken = relay.measure_rounds(chosen)
    assert len(memory.samples) == 2
    assert taken.judged > 0
