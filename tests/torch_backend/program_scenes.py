"""Rank programs on a process group."""

from __future__ import annotations

from typing import Any

import program_case
import torch
from torch_node import RankLocation

from gradbus.torch.programs import run_program


def every_program(place: RankLocation) -> dict[str, Any]:
    """Of every request, and of every algorithm."""
    torch.set_num_threads(1)
    place.start()
    return {
        "requests": run_program(program_case.every_request(place.rank, place.world)),
        "algorithms": run_program(program_case.every_algorithm(place.rank, place.world)),
    }
