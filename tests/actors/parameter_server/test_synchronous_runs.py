"""Synchronous runs over DDS: the bits of one process, also after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_scene import make_task, single_process, vector
from server_scene import serve


@pytest.mark.parametrize(
    ("workers", "servers", "settings"),
    [(2, 1, {}), (3, 2, {}), (4, 2, {"cut_bytes": 4096})],
    ids=["2 workers", "3 workers, 2 servers", "4 workers, 2 servers, cut tensors"],
)
def test_a_run_has_the_bits_of_one_process(workers: int, servers: int, settings: dict[str, Any]) -> None:
    optimizer = {"optimizer__nesterov": True, "optimizer__weight_decay": 1e-3}
    ends = serve(
        make_task(), workers=workers, servers=servers, parallel={"epochs": 2, **optimizer}, **settings
    ).succeeded()
    reference = vector(single_process(make_task(), workers, epochs=2, **optimizer))
    for end in ends.workers:
        assert torch.equal(end.parameters, reference)
        assert [report.finished for report in end.reports] == [True, True]
    assert {end.summary.updates for end in ends.servers if end.summary} == {ends.workers[0].reports[-1].step}
