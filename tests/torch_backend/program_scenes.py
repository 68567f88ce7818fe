"""Rank programs on a process group."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import program_case
import torch
import torch.distributed as dist
from torch_node import RankLocation

from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.torch.programs import run_program


def every_program(place: RankLocation) -> dict[str, Any]:
    """Of every request, and of every algorithm."""
    torch.set_num_threads(1)
    place.start()
    return {
        "requests": run_program(program_case.every_request(place.rank, place.world)),
        "algorithms": run_program(program_case.every_algorithm(place.rank, place.world)),
    }


def half_on_the_way(place: RankLocation) -> str:
    """The type in which the backend gets a tensor of half precision."""
    place.start()

    def program() -> Program[None]:
        yield AllReduce("half", torch.ones(3, dtype=torch.bfloat16), "mean")

    with patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as called:
        run_program(program())
    return str(called.call_args.args[0].dtype)
