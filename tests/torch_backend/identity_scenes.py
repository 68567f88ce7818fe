"""Ranks whose nodes have keys of their own: torch meets in its own store, and at ``dds://``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_node import RankLocation

from gradbus.torch import register

register()


def both_ways(place: RankLocation) -> list[Any]:
    """With a store of torch's, where a group without rank 0 is made as well; then with ours, until the gate is open."""
    place.start()
    pair = dist.new_group([1, 2])
    tensor = torch.full((300_000,), place.rank + 1.0)
    dist.all_reduce(tensor)
    found: list[Any] = [tensor.min().item(), tensor.max().item()]
    if place.rank:
        dist.all_reduce(tensor, group=pair)
    found.append(tensor[0].item())
    dist.destroy_process_group()
    url = f"dds://{os.environ['GRADBUS_BUS__DOMAIN']}/known-{place.port}"
    dist.init_process_group("dds", init_method=url, rank=place.rank, world_size=place.world)
    dist.all_reduce(tensor[:1].fill_(place.rank + 1.0))
    found.append(tensor[0].item())
    place.say("met", url=url)
    while not Path(place.options["gate"]).exists():
        time.sleep(0.01)
    dist.barrier()
    return found


def stranger(place: RankLocation) -> str:
    """A process that is not on the list comes to the same address."""
    try:
        dist.init_process_group("dds", init_method=place.options["url"], rank=1, world_size=3)
    except dist.DistNetworkError as error:
        return str(error)
    return "it is in"
