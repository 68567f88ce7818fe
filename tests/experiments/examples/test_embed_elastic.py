"""A rank that joins and leaves inside a web service."""

from __future__ import annotations

import pytest

from gradbus.experiments.bench.elastic_embed import measure
from gradbus.experiments.bench.timing import percentile

pytestmark = [pytest.mark.slow, pytest.mark.alone]

LATE_S = 0.1  # the benchmark has the gate of 20 ms; here other tests may be ending


def test_a_rank_joins_and_leaves_while_its_host_serves(domain: int) -> None:
    found = measure(times=2, trains_s=1.0, domain=domain)
    assert found.outcomes == ["left", "left"]
    assert all("processes 0, 1" in progress for progress in found.progress)
    assert percentile(found.loop_s, 0.99) < LATE_S
