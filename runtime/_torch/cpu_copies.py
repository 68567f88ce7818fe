"""Copies of a rank's parameters for the exchange of weights between hosts: float32, on the CPU.

Within a host a script trains as it likes: on a GPU, in bfloat16, or with the shards of FSDP2, of which each rank
exchanges its own with its counterparts. What goes between hosts are these copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.errors import CollectiveError
from gradbus.torch.process_group import group_beside


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _mesh_of(tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """The device mesh over which these tensors are sharded; None: they are whole."""
    return next((one.device_mesh for one in tensors if isinstance(one, DTensor)), None)


def are_finite_on_the_mesh(tensors: Iterable[Tensor]) -> bool:
    """Whether all entries are finite; of shards, on all ranks that hold one, which have to call this at the same time:
    those of a replica make a step together, or none of them does."""
    known = list(tensors)
    found = are_finite([local_of(one) for one in known])
    mesh = _mesh_of(known)
    if mesh is None:
        return found
    agreed = torch.tensor(float(found), device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=mesh.get_group(dimension))
    return bool(agreed)


EXCHANGED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types that parameters may have: they are exchanged as float32, which cannot hold a float64."""


_TIMEOUTS = 4
"""In which holders agree, as multiples of the timeout of the group that exchanges weights. Each waits for the exchange
of the slowest one: some requests, one after the other, of which each may take that long, though not all do."""

# By the group that exchanges weights, and by the ranks: one is made once, as all of its ranks make it together, and it
# keeps its connections for as long as the process lives.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class ShardHolders:
    """The ranks that hold the shards of one copy of the model. What they decide about an exchange of weights, they
    decide for all shards alike.

    Attributes:
        counted: how many exchanges have counted on this rank. It is equal on all holders, unless one of them has missed
            what they agreed on last.
    """

    def __init__(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
        """All of these ranks make one, at the same time. ``group``: that which exchanges weights, None: the default
        one; what they agree on travels as its tensors do, but in a group of its own: FSDP uses the mesh meanwhile."""
        mesh = _mesh_of(parameters)
        whole: Any = group or dist.group.WORLD
        self.counted = 0
        self._group: Any = None
        if mesh is not None:
            ranks, made = tuple(mesh.mesh.flatten().tolist()), _groups.setdefault(whole, {})
            if ranks not in made:
                made[ranks] = group_beside(whole, ranks, timeouts=_TIMEOUTS)
            self._group = made[ranks]

    def agree(self, *own: bool) -> list[bool]:
        """Which of these hold on all of these ranks, each of which calls this. Without shards, which hold here.

        Raises:
            CollectiveError: an exchange has counted on some of these ranks only, so that their shards do not belong
                together. All of them raise it.
        """
        if self._group is None:
            return list(own)
        agreed = torch.tensor([*own, self.counted, -self.counted], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._group)
        *found, least, most = agreed.tolist()
        if least != -most:
            raise CollectiveError(
                f"the shards of the model on ranks {dist.get_process_group_ranks(self._group)} have counted {least:g} "
                f"to {-most:g} exchanges of weights: one of them has lost its connection to the others when they "
                f"agreed on one. Its error says why. Start all ranks again from their last checkpoint"
            )
        return [bool(one) for one in found]


class CpuCopies:
    """Copies of parameters, as vectors of weights that algorithms read and change.

    A parameter of less precision holds the rounded weight. What it lacks is kept beside it, so that rounding is not
    taken for training: without training, a copy is read back as it was written.

    Attributes:
        residuals: by name, float32 on the CPU: what the parameters of less precision lack.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: of floating point, on any device; shards count as what this rank holds."""
        self._parameters = parameters
        pins = any(local_of(one).is_cuda for one in parameters.values())  # so that copies need no buffer on the way
        self._copies = {
            name: torch.empty(local_of(one).shape, dtype=torch.float32, pin_memory=pins)
            for name, one in parameters.items()
        }
        self.residuals = {
            name: torch.zeros_like(self._copies[name], pin_memory=False)
            for name, one in parameters.items()
            if one.dtype != torch.float32
        }

    @torch.no_grad()
    def read(self) -> Mapping[str, Tensor]:
        """The weights as they are now, by name. They are overwritten by the next call."""
        for name, parameter in self._parameters.items():
            copy = self._copies[name].copy_(local_of(parameter))
            if name in self.residuals:
                copy += self.residuals[name]
        return self._copies

    @contextmanager
    def edit(self) -> Iterator[Mapping[str, Tensor]]:
        """The same. At the end, parameters get what has been made of them."""
        copies = self.read()
        yield copies
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                local = local_of(parameter)
                local.copy_(copies[name])
                if name in self.residuals:
                    torch.sub(copies[name], local.to("cpu", torch.float32), out=self.residuals[name])


def needs_copies(parameters: Iterable[Tensor]) -> bool:
    """Whether some of these are not float32 on the CPU, as a whole."""
    return any(isinstance(one, DTensor) or not one.is_cpu or one.dtype != torch.float32 for one in parameters)
