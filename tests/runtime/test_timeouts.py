"""The order of timeouts."""

from __future__ import annotations

import pytest

from gradbus.runtime.config.data_parallel import DataParallelConfig, TimeoutSettings
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.timeouts import federated_timeouts, out_of_order, parallel_timeouts


@pytest.mark.parametrize("lease_s", [None, 10.0])
def test_the_defaults_are_in_order(lease_s: float | None) -> None:
    elastic = DataParallelConfig.model_validate({"elastic": {"min_world": 1}})
    for config in (DataParallelConfig(), elastic):
        assert out_of_order(parallel_timeouts(config, lease_s=lease_s)) == []
    assert out_of_order(federated_timeouts(FederatedConfig(), lease_s=lease_s)) == []


def test_a_collective_that_ends_before_the_lease_is_named_with_both_settings_and_the_reason() -> None:
    config = DataParallelConfig(timeouts=TimeoutSettings(collective_s=5.0))
    (fault,) = out_of_order(parallel_timeouts(config, lease_s=10.0))
    assert fault.startswith(
        "bus.lease_s (10 s) is longer than parallel.timeouts.collective_s (5 s): a collective would"
    )
    assert out_of_order(parallel_timeouts(config, lease_s=None)) == []  # the kernel tells who is dead


def test_an_elastic_group_waits_longer_than_a_collective() -> None:
    config = DataParallelConfig.model_validate({"elastic": {"min_world": 1, "wait_s": 30.0}})
    (fault,) = out_of_order(parallel_timeouts(config, lease_s=10.0))
    assert "parallel.elastic.wait_s (30 s)" in fault
    assert [str(timeout) for timeout in parallel_timeouts(config, lease_s=10.0)] == [
        "lease 10 s",
        "join 60 s",
        "collective 60 s",
        "commit 600 s",
        "wait 30 s",
    ]
