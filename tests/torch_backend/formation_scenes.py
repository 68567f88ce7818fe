"""Process groups whose ranks are late: before they begin, and at each step of forming."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch_node import RankLocation

from gradbus.torch import formation, groups, register

register()

LATE_S = 0.5
EVERY_S = 0.2  # after which a rank that waits for rank 0 looks again
STEPS = ("RankLock", "agreed_name", "acquire_bus", "RankLocations")  # of forming, in this order


def summed(place: RankLocation, **options: Any) -> float:
    """Make a process group, add up 1 + rank, and destroy it."""
    timeout = timedelta(seconds=30)
    dist.init_process_group("dds", rank=place.rank, world_size=place.world, timeout=timeout, **options)
    tensor = torch.tensor(1.0 + place.rank)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def tcp(place: RankLocation) -> Any:
    return dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=timedelta(seconds=30))


def late_in_each_store(place: RankLocation) -> dict[str, float]:
    """By store and rank that is late."""
    folder, found = Path(place.options["folder"]), {}

    def file(name: str) -> Any:
        return dist.FileStore(str(folder / name), place.world)

    ways: dict[str, Callable[[str], dict[str, Any]]] = {
        "file": lambda name: {"init_method": f"file://{folder / name}"},
        "prefix of file": lambda name: {"store": dist.PrefixStore("one", file(name))},
        "tcp": lambda name: {"store": dist.PrefixStore(name, tcp(place))},
        "dds": lambda name: {"init_method": f"dds://{os.environ['GRADBUS_BUS__DOMAIN']}/{name}"},
    }
    with patch.object(formation, "EVERY_S", EVERY_S):
        for way, options_of in ways.items():
            for late in range(place.world):
                name = f"{way}-{late}".replace(" ", "-")
                if place.rank == late:
                    time.sleep(LATE_S)
                found[name] = summed(place, **options_of(name))
    return found


def late_at_each_step(place: RankLocation) -> dict[str, float]:
    """By step and rank that is late, in a file."""
    folder, found = Path(place.options["folder"]), {}
    with patch.object(formation, "EVERY_S", EVERY_S):
        for step in STEPS:
            for late in range(place.world):
                begin = getattr(groups, step)

                def begin_late(*arguments: Any, begin: Any = begin, is_late: bool = place.rank == late) -> Any:
                    if is_late:
                        time.sleep(LATE_S)
                    return begin(*arguments)

                with patch.object(groups, step, begin_late):
                    found[f"{step} {late}"] = summed(place, init_method=f"file://{folder}/{step}-{late}")
    return found


def late_for_real(place: RankLocation) -> float:
    """Rank 0 starts 12 s after rank 1."""
    if place.rank == 0:
        time.sleep(12.0)
    return summed(place, init_method=f"file://{place.options['folder']}/late")
