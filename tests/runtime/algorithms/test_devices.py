"""Where tensors of algorithms may be. Device meta stands for one that torch does not use as its accelerator."""

from __future__ import annotations

import pytest
import torch

from gradbus.runtime.algorithms.base import Memory
from gradbus.runtime.collectives.staging import check_devices
from gradbus.runtime.errors import ConfigError


def test_parameters_that_the_bus_cannot_reach_are_refused() -> None:
    check_devices("topk", {"weight": torch.empty(4, 3)})
    with pytest.raises(ConfigError, match="topk: parameter weight is on meta, expected on the CPU, or on the accel"):
        check_devices("topk", {"bias": torch.empty(4), "weight": torch.empty(4, 3, device="meta")})


def test_what_was_loaded_follows_the_tensor_that_it_is_for() -> None:
    memory = Memory()
    memory.load({"error/weight": torch.ones(3)}, frozenset({"error"}))
    assert memory.find_or_zeros("error", "weight", torch.empty(3, device="meta")).device.type == "meta"
    assert memory.find_or_zeros("error", "weight", torch.empty(3)).tolist() == [1.0] * 3
