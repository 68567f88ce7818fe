"""DiLoCo in a script of one's own: two lines, on any backend of torch.distributed.

    diloco = gradbus.torch.DiLoCo(model, inner_optimizer, outer_optimizer, steps=50)

The rest of the script stays as it is, with a plain module: no DistributedDataParallel, as gradients are not exchanged.
See :mod:`gradbus.runtime.algorithms.diloco`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradbus.runtime.algorithms.base import bucket_of
from gradbus.runtime.algorithms.requests import AllReduce, Broadcast, Program
from gradbus.runtime.errors import ConfigError
from gradbus.torch.algorithm_hook import AlgorithmHook
from gradbus.torch.cpu_copies import local_of
from gradbus.torch.programs import queue_of
from gradbus.torch.whole_gradients import check_shards_of_weights


class DiLoCo(AlgorithmHook):
    """Local steps of an optimizer, and an outer step of all ranks after every few of them.

    At the start all ranks get the parameters and buffers of rank 0. The ``state_dict`` of this object has those of its
    rank, which ``load_state_dict`` puts back there: whether the model itself is loaded before or after, or not at all,
    makes no difference. An exchange that fails raises its error in ``inner_optimizer.step()``, after the local step;
    weights stay as they are, and what they have changed is part of the next exchange. A rank whose gradients are not
    finite skips its own step. All drop the result of an exchange that has failed on some rank, or is not finite there:
    those that have it go on with it, and take it back before the next exchange, or in ``drain()``. A rank whose own
    weights are not finite goes on from those of the last exchange. With shards, all this is for the ranks that hold
    those of one copy of the model alike: if one is not finite, all of them skip, drop or go back.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        steps: int = 50,
        **options: Any,
    ) -> None:
        """All ranks of the group make one, at the same time.

        Args:
            model: a plain module, or one of FSDP2, with parameters of floating point on any device. What ranks exchange
                are float32 copies on the CPU, as ``group`` needs: its backend is one of CPU tensors.
            inner_optimizer: any one. Its state stays with its rank.
            outer_optimizer: ``torch.optim.SGD`` of the same parameters, with ``nesterov=True`` or without momentum: its
                learning rate and momentum are read here, and it is never stepped. None: 0.7 and 0.9.
            group: the ranks; None: the default group. With shards, those that hold the same part of the model, one of
                each host: each of them makes its own object.
            steps: number of local steps between two exchanges. options: others of the algorithm ``diloco``.

        Raises:
            ConfigError: an option or optimizer that cannot work; or ranks call this with different ones.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError("DiLoCo: the model is wrapped in DistributedDataParallel, which exchanges every gradient")
        check_shards_of_weights(model.named_parameters(), group, "DiLoCo")
        self._model = model
        queue = queue_of(group)
        tensors = [*model.parameters(), *model.buffers()]
        queue.submit(queue.run, _copies_of_first(tensors)).result()
        chosen = {**_outer_options(outer_optimizer), "steps": steps, **options}
        super().__init__(model.named_parameters(), "diloco", chosen, optimizers=[inner_optimizer], process_group=group)
        self.call_before_forward(model)

    def _of_rank(self) -> dict[str, dict[str, Tensor]]:
        return super()._of_rank() | {"buffers": dict(self._model.named_buffers())}

    def average(self) -> None:
        """Make the model, on all ranks, the mean of theirs, with floating-point buffers such as running means.

        For an evaluation, and at the end; call it on all ranks, between two steps. Training goes on as without it, but
        that all ranks do so from their mean.
        """
        self.drain()
        buffers = {f"buffer {name}": one for name, one in self._model.named_buffers() if one.is_floating_point()}
        assert self._weights is not None
        with self._weights.exchange.edit_weights() as weights:
            self._programs.call(self._programs.run, _mean_of({**weights, **buffers}))


def _outer_options(optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) != 1:
        raise ConfigError(
            f"DiLoCo: the outer optimizer is torch.optim.SGD with one group of parameters, got "
            f"{type(optimizer).__name__} with {len(optimizer.param_groups)}"
        )
    group = optimizer.param_groups[0]
    if group["momentum"] and not group["nesterov"]:
        raise ConfigError("DiLoCo: the outer optimizer has momentum, so it needs nesterov=True")
    for name in ("dampening", "weight_decay", "maximize"):
        if group[name]:
            raise ConfigError(f"DiLoCo: the outer optimizer has {name}={group[name]}, expected none")
    return {"outer_lr": float(group["lr"]), "outer_momentum": float(group["momentum"])}


@torch.no_grad()
def _copies_of_first(tensors: list[Tensor]) -> Program[None]:
    for number, tensor in enumerate(tensors):
        local = local_of(tensor)
        sent = local.cpu().contiguous().clone()
        local.copy_((yield Broadcast(f"first {number}", sent)))


@torch.no_grad()
def _mean_of(tensors: dict[str, Tensor]) -> Program[None]:
    bucket = bucket_of({name: tensor.cpu() for name, tensor in tensors.items()})
    yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat)
    for name, tensor in tensors.items():
        tensor.copy_(bucket.tensors[name])
