"""A model that has arrived, by name: the same as the state of a module that holds it, which there is none of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_task import GoldenModel
from torch import nn

from gradbus.actors.aggregation.merged_buffers import split
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import REST, Sharing
from gradbus.runtime.checkpoint import copy_state


class Odd(nn.Module):
    """Has complex and half-precision numbers, integers, flags, tied weights, and a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.half = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.fixed, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.fixed.requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("mean", torch.randn(2, 2).t())

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


RULES = (("*count*", "max"), ("num_batches_tracked", "max"), (REST, "keep"))
SHARINGS = {
    "the trained part": Sharing(buffers=((REST, "median"),)),
    "all": Sharing("all", buffers=((REST, "median"),)),
    "a part": Sharing(include=("first.*", "second.*", "last.*", "*mean", "count"), buffers=RULES),
    "all but a part": Sharing(exclude=("wave", "half.*", "head.*", "fixed.*", "frozen.*"), buffers=RULES),
    "nothing of integers": Sharing(),
}


@pytest.mark.parametrize("sharing", SHARINGS.values(), ids=SHARINGS)
@pytest.mark.parametrize("make", [GoldenModel, Odd, lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))])
@pytest.mark.parametrize("has_kept", [True, False])
def test_the_state_is_that_of_a_module_that_holds_the_model(
    make: Callable[[], nn.Module], sharing: Sharing, has_kept: bool
) -> None:
    def built(seed: int) -> FlatModel:
        torch.manual_seed(seed)
        return FlatModel(make(), rebuild=make)

    trained, holder, other = built(1), built(1), built(2)
    for one in (trained, holder, other):
        one.arrange(sharing)
    with torch.no_grad():  # what a training leaves in it, before the model that is to be named has come
        for name, value in trained.module.state_dict().items():
            if isinstance(value, torch.Tensor) and name not in trained.state_layout.held:
                value.copy_(value.logical_not() if value.dtype == torch.bool else value * 3)
    trained.write_frozen(other.read_frozen())
    vector = torch.linspace(-1.0, 1.0, trained.dim)
    buffers = {name: (one if one.dtype == torch.bool else one + 7) for name, one in trained.built_buffers.items()}
    block = bytes(split(trained.buffers.pack(buffers))[1]) if trained.buffers else b""
    kept = other.read_personal() if has_kept else {}

    holder.write_frozen(other.read_frozen())
    holder.write_personal(kept)
    holder.hold(vector, holder.buffers.unpack(block))
    expected = copy_state(holder.module)
    frozen = trained.read_frozen().clone()
    found = trained.state_layout.state(vector, frozen, block, kept)
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(found[name], value), name
            assert found[name].is_contiguous()
        else:
            assert found[name] == value
    make().load_state_dict(found)
    vector.zero_()
    assert all(torch.equal(found[name], expected[name]) for name in found if isinstance(expected[name], torch.Tensor))
