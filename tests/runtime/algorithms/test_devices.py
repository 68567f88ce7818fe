"""Which algorithms take parameters of an accelerator. Device meta stands for one: nothing is computed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradbus.runtime.algorithms.base import Memory, Place, make_algorithm
from gradbus.runtime.choices import ALGORITHMS
from gradbus.runtime.errors import ConfigError

TAKE_ALL: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}), ("dense", {"wire": "fp16"}), ("dense", {"route": "shards"}), ("fixed-point", {}),
]  # fmt: skip
CPU_ALONE: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"route": "ring"}), ("dense", {"route": "halving-doubling"}), ("fixed-point", {"route": "ina"}),
    *((name, {}) for name in sorted(ALGORITHMS.table) if name not in ("dense", "fixed-point")),
]  # fmt: skip


def check(name: str, options: dict[str, Any]) -> None:
    parameters = {"weight": torch.nn.Parameter(torch.empty(4, 3, device="meta"))}
    make_algorithm(name, Place(0, 2), options).check(parameters, torch.optim.SGD(parameters.values(), lr=0.1))


@pytest.mark.parametrize(("name", "options"), CPU_ALONE, ids=str)
def test_an_algorithm_that_computes_on_the_cpu_alone_refuses_other_parameters(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="parameter weight is on meta, expected on the CPU"):
        check(name, options)


@pytest.mark.parametrize(("name", "options"), TAKE_ALL, ids=str)
def test_sums_that_the_collectives_make_take_parameters_of_any_device(name: str, options: dict[str, Any]) -> None:
    check(name, options)


def test_what_was_loaded_follows_the_tensor_that_it_is_for() -> None:
    memory = Memory()
    memory.load({"error/weight": torch.ones(3)}, frozenset({"error"}))
    assert memory.find_or_zeros("error", "weight", torch.empty(3, device="meta")).device.type == "meta"
    assert memory.find_or_zeros("error", "weight", torch.empty(3)).tolist() == [1.0] * 3
