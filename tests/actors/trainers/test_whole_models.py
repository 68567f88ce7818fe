"""A client exchanges whole models: parameters that are spread over several ranks are refused when it starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from gradbus.actors.trainers.federated_rounds import check_whole
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.fast_paths import LOOPBACK


@pytest.fixture
def lone_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process only."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings(
    "ignore:.*FSDP.*"
)  # that a world of one has nothing to shard, and that there is a newer one
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_in_fully_sharded_data_parallel_is_refused(lone_rank: None, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    with pytest.raises(ConfigError, match="spread over several ranks, as with FSDP"):
        check_whole(model)


def test_a_plain_model_is_whole() -> None:
    check_whole(nn.Linear(4, 2))
