"""The benchmark of aggregators: exact sums over DDS, beside direct ones."""

from __future__ import annotations

import pytest

from gradbus.experiments.bench.aggregation import TOPOLOGIES, AggregatorBench, measure


@pytest.mark.slow
def test_sums_through_aggregators_are_timed_beside_direct_ones_with_and_without_loss() -> None:
    plan = AggregatorBench(
        world=2, topology=TOPOLOGIES["chain"], losses=(0.0, 0.1), numel=1 << 14, block_elems=1 << 10, repeats=3
    )
    without, with_loss = measure(plan, "chain")
    assert (without.name, len(without.ratios)) == ("sum of 64 KiB, 2 workers, chain, loss 0%", 3)
    assert "0.1 MB of a worker" in without.note
    assert "packets of workers lost" in with_loss.note
