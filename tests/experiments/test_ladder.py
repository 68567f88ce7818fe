"""Real runs of ranks in network namespaces with links of a given rate and delay: the ladder, and loss over time."""

from __future__ import annotations

import argparse

import pytest
from patience import soonest

from gradbus.commands.lab.namespaces import NoNamespaces
from gradbus.experiments.bench import ladder
from gradbus.experiments.bench.rungs import climb, link_share
from gradbus.experiments.bench.thin_link import ThinLinkPlan, train_on_a_thin_link

pytestmark = [pytest.mark.slow, pytest.mark.netns]


@pytest.mark.timeout(240)
def test_over_hosts_half_of_the_bytes_leave_a_host() -> None:
    """2 (M - 1) / M K for two hosts: the vector once. By shards over all ranks it is twice."""
    try:
        _, sent = ladder.measure_hosts(argparse.Namespace(effort="tiny"))
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert sent.against is not None
    payload_mb = 4 * ladder.TINY_NUMEL / 1e6
    assert payload_mb < min(sent.samples) < 1.5 * payload_mb  # headers, and what was sent again
    assert 2 * payload_mb < min(sent.against.samples)


@pytest.mark.timeout(240)
def test_a_rung_is_run_and_simulated() -> None:
    try:
        found = climb("ring", ladder.PLANS["tiny"])
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert found.steps == 4
    assert found.bytes_out == pytest.approx(4 * 1_199_882, rel=0.01)  # 2 (N - 1) / N of the CNN, for two ranks
    # At 200 Mbit/s these bytes take 0.19 s, beside what is computed.
    assert found.compute_s + 0.19 <= found.simulated_step_s < found.compute_s + 0.25
    assert found.to_target_s is None


def test_a_link_that_sends_all_the_time_is_used_wholly() -> None:
    assert link_share(25e6, 1.0) == 1.0  # 200 Mbit/s
    assert link_share(1e6, 0.1, 100.0) == 0.8


@pytest.mark.timeout(240)
def test_a_step_that_is_late_is_timed_beside_computing_and_exchanging_alone() -> None:
    try:
        late, apart, compute, exchange = ladder.measure_pipeline(argparse.Namespace(effort="tiny"))
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert late.against is not None
    assert list(late.against.samples) == [max(*compute.samples, *exchange.samples)]
    # What counts is the wait of the rank that came last. The other's half may be there already: what then takes time
    # at this rate is the half that it sends to be summed, of which the sums come back meanwhile.
    half_ms = 1e3 * 8 * 4 * 1_199_882 / 2 / (ladder.PIPELINE_RATE_MBIT_S * 1e6)
    assert min(exchange.samples) > 0.9 * half_ms
    assert min(apart.samples) > min(exchange.samples)


@pytest.mark.timeout(240)
def test_local_steps_go_on_where_an_exchange_in_each_step_would_wait_for_the_link() -> None:
    exchange_s = 0.87  # in which 4.8 MB go over 50 Mbit/s, with 0.1 s of delay
    plan = ThinLinkPlan(seconds=2.0, windows=2, data="glyphs")

    def step_s() -> float:
        *_, last = train_on_a_thin_link("DiLoCo", plan)
        assert last.loss is not None
        return plan.seconds / last.steps

    try:
        assert soonest(step_s, exchange_s / 5) < exchange_s / 5
    except NoNamespaces as error:
        pytest.skip(str(error))
