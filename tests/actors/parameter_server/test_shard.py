"""The weights that a server holds, and the optimizer over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.parameter_server.assignment import assign
from gradbus.actors.parameter_server.messages import Message, encode
from gradbus.actors.parameter_server.shard import Shard
from gradbus.actors.parameter_server.state import restore_model
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, ConfigError


def shard(optimizer: str, cut_bytes: int | None = None) -> Shard:
    """Of a model of matrices, on one server."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    trained = dict(model.named_parameters())
    config = DataParallelConfig(optimizer={"name": optimizer, "lr": 0.05})  # type: ignore[arg-type]
    return Shard(config, object(), model, assign(trained, 1, cut_bytes)[0])


def step(held: Shard, number: int) -> None:
    """One, by gradients that follow from its number."""
    generator = torch.Generator().manual_seed(number)
    gradients = [torch.randn(weights.shape, generator=generator) for weights in held.weights()]
    held.apply([encode(Message("push"), gradients)[64:]], 1, step=number, epoch=0)


def saved(held: Shard) -> Checkpoint:
    """All that it has."""
    return Checkpoint(1, {name: tensor.clone() for name, tensor in held.tensors().items()}, {})


def test_whole_tensors_keep_their_shapes_and_parts_are_flat() -> None:
    assert [tuple(weights.shape) for weights in shard("muon").weights()] == [(6, 8), (4, 6)]
    assert [tuple(weights.shape) for weights in shard("sgd", 100).weights()] == [(24,), (24,), (4, 6)]


def flat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As versions before held them."""
    return {name: tensor.reshape(-1) if tensor.ndim else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("was_flat", [False, True])
def test_a_checkpoint_is_gone_on_from_also_where_all_tensors_were_saved_flat(optimizer: str, was_flat: bool) -> None:
    before, after = shard(optimizer), shard(optimizer)
    step(before, 0)
    checkpoint = saved(before)
    after.restore(replace(checkpoint, tensors=flat(dict(checkpoint.tensors))) if was_flat else checkpoint)
    for held in (before, after):
        step(held, 1)
    assert all(map(torch.equal, before.weights(), after.weights()))


def test_each_server_refuses_an_optimizer_that_does_not_fit_what_another_one_holds() -> None:
    model = nn.Linear(16, 16)
    config = DataParallelConfig(optimizer={"name": "muon", "lr": 0.05})  # type: ignore[arg-type]
    held = assign(dict(model.named_parameters()), 2, None)
    assert sorted([piece.name for piece in pieces] for pieces in held) == [["bias"], ["weight"]]
    for pieces in held:
        with pytest.raises(ConfigError, match="2D"):
            Shard(config, object(), model, pieces)


def test_sums_over_a_flat_tensor_and_weights_of_another_shape_are_refused() -> None:
    held = shard("adafactor")
    step(held, 0)
    tensors = dict(saved(held).tensors)
    before = {
        f"own/optimizer/variance/{name}": torch.ones(tensors[f"weights/{name}"].numel())
        for name in ("0.weight", "1.weight")
    } | flat({key: tensor for key, tensor in tensors.items() if key.startswith("weights/")})
    with pytest.raises(CheckpointError, match=r"variance of '0.weight' is \(48,\)"):
        held.restore(Checkpoint(1, before, {}))
    with pytest.raises(CheckpointError, match=r"expected float32 of shape \(6, 8\), found float32 of shape \(8, 6\)"):
        held.restore(Checkpoint(1, tensors | {"weights/0.weight": torch.zeros(8, 6)}, {}))


class Copied(TorchDispatchMode):
    """Counts the entries that are copied."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.entries += found.numel()
        return found


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_each_entry_of_a_cut_tensor_is_copied_a_few_times_whatever_its_parts(
    memory_format: torch.memory_format,
) -> None:
    model = nn.Conv2d(16, 32, 3, bias=False).to(memory_format=memory_format)  # type: ignore[call-overload]
    pieces = assign(dict(model.named_parameters()), 1, cut_bytes=512)[0]
    values = torch.randn(model.weight.shape)
    meta = {
        "run_id": "0" * 16, "server": 0, "servers": 1, "workers": 1, "layout": describe_layout(model),
        "pieces": [{"tensor": p.tensor, "start": p.start, "stop": p.stop, "shape": list(p.shape)} for p in pieces],
        "settings": {}, "updates": 0, "refused": 0, "staleness": {},
    }  # fmt: skip
    checkpoint = Checkpoint(1, {f"weights/{piece.name}": piece.of(values) for piece in pieces}, meta)
    with Copied() as copied:
        restore_model(model, [checkpoint])
    assert torch.equal(model.weight, values)
    assert model.weight.is_contiguous(memory_format=memory_format)
    assert copied.entries <= 3 * values.numel()
    assert len(pieces) == 36
