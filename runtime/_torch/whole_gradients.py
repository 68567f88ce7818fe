"""Which gradients can be combined or compressed: those that are whole on each rank.

ZeRO-1 shards the state of the optimizer: each rank still gets the whole mean gradient. FSDP and tensor parallel layers
shard the parameters. There a rank has no gradient of the others' shards, a mean over the ranks would mix shards of
different parameters, and the reduce-scatter that makes a shard's gradient is not ours to compress. That of HSDP between
its replicas is done inside of torch, which lets a hook see its result alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradbus.runtime.errors import ConfigError

_BETWEEN_HOSTS = (
    "To send less between hosts, give the ranks that hold the same shard as group: "
    "gradbus.torch.DiLoCo(..., group=mesh.get_group('hosts'))"
)


def is_zero(optimizer: Any) -> bool:
    """Whether an optimizer is a ZeroRedundancyOptimizer."""
    loaded = sys.modules.get("torch.distributed.optim")  # a class that nothing has loaded has no objects
    kind = getattr(loaded, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. To load that class takes longer than most of what is done here."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that makes the steps: that of a ZeroRedundancyOptimizer has the settings of all of them."""
    return optimizer.optim if is_zero(optimizer) else optimizer  # type: ignore[attr-defined]


def check_whole(parameters: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise ConfigError: a parameter is in shards, so that no rank has its whole gradient. ``what`` was asked for."""
    for name, parameter in parameters:
        if is_sharded(parameter):
            raise ConfigError(
                f"{what}: parameter {name!r} is in shards (FSDP2, HSDP or tensor parallel), and gradients are summed "
                f"shard by shard inside of torch, so no rank has a whole gradient to exchange: leave the gradients to "
                f"torch. {_BETWEEN_HOSTS}"
            )
        if getattr(parameter, "_fsdp_flattened", False):
            raise ConfigError(
                f"{what}: parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), and no rank has its whole "
                f"gradient: leave the gradients to torch, or use DistributedDataParallel"
            )


def check_shards_of_weights(parameters: Iterable[tuple[str, Tensor]], group: Any, what: str) -> None:
    """Raise ConfigError: ranks of this group hold other shards of the same model, whose mean would mix them.

    ``group``: that exchanges weights; None: the default one. ``what`` was asked for.
    """
    for name, parameter in parameters:
        if getattr(parameter, "_fsdp_flattened", False):
            raise ConfigError(
                f"{what}: parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which does not show its "
                f"shards: use fully_shard (FSDP2), and give the ranks that hold the same shard as group"
            )
        if is_sharded(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
            others = set(mesh.mesh.flatten().tolist()) & ranks
            if others:
                raise ConfigError(
                    f"{what}: the model has shards, and ranks {sorted(others)} of the group hold others of the same "
                    f"model. Give the ranks that hold the same shard as group: of a mesh of hosts and ranks, its "
                    f"dimension of hosts"
                )
            return


def check_zero(optimizers: Iterable[Any], what: str, *, exchanges_weights: bool) -> None:
    """Raise ConfigError: a ZeroRedundancyOptimizer that cannot be used so. ``what`` was asked for."""
    for optimizer in filter(is_zero, optimizers):
        if optimizer._overlap_with_ddp:  # noqa: SLF001 - torch has no public name for it
            raise ConfigError(
                f"{what}: ZeroRedundancyOptimizer(overlap_with_ddp=True) makes its steps in a communication hook of "
                f"its own, and there can be one alone: leave overlap_with_ddp out"
            )
        if exchanges_weights:
            raise ConfigError(
                f"{what}: ZeroRedundancyOptimizer sends each rank's part of the weights to all in every step, and this "
                f"exchanges weights after some steps of each rank's own: take the optimizer itself, "
                f"{type(optimizer.optim).__name__}"
            )


def why_not_wrapped(module: nn.Module) -> str:
    """Return why a model that is not in DistributedDataParallel has no gradients to exchange."""
    parameters = list(module.named_parameters())
    try:
        check_whole(parameters, "")
    except ConfigError as error:
        return str(error).removeprefix(": ")
    return "it exchanges gradients: wrap the model in DistributedDataParallel first"
