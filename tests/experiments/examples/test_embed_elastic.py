"""A rank that joins and leaves inside a web service."""

from __future__ import annotations

import pytest
from patience import soonest

from gradbus.experiments.bench.elastic_embed import measure
from gradbus.experiments.bench.timing import percentile

pytestmark = pytest.mark.slow

LATE_S = 0.1  # the benchmark has the gate of 20 ms; here are other tests beside it


def test_a_rank_joins_and_leaves_while_its_host_serves(domain: int) -> None:
    def late_s() -> float:
        found = measure(times=2, trains_s=0.5, domain=domain)
        assert found.outcomes == ["left", "left"]
        assert all("processes 0, 1" in progress for progress in found.progress)
        return percentile(found.loop_s, 0.99)

    assert soonest(late_s, LATE_S) < LATE_S
