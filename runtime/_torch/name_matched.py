"""Collectives that are matched by their names alone, in whatever order each rank calls them.

They go past c10d, which matches by order, straight to the engine of the default process group. Their names cannot meet
those of c10d. Of one name, the first call of a rank belongs to the first of each other one, the second to the second.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.torch.backend import DdsBackend
from gradbus.torch.calls import CollectiveCall
from gradbus.torch.process_group import DdsProcessGroup
from gradbus.torch.register import NAME
from gradbus.torch.work import DdsWork

MAX_NAME_BYTES = 100  # of a name on its way; what is longer is cut, and made unique again by a hash
_MAX_SHAPE_BYTES = 64  # the same for a shape


def current() -> DdsBackend:
    """The backend of the default process group. Raises RuntimeError: there is none, or it has another backend."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"there is no process group yet: call gradbus.torch.init(), or "
            f"torch.distributed.init_process_group({NAME!r})"
        )
    group = dist.group.WORLD
    if isinstance(group, DdsProcessGroup):
        return group.dds
    backend = None if group is None else group._get_backend(torch.device("cpu"))  # "cpu:dds,cuda:nccl" has several
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, DdsBackend):
        raise RuntimeError(
            f"the wrappers of gradbus.torch need the backend {NAME!r}, and the default process group has "
            f"{dist.get_backend()!r}: make it with init_process_group({NAME!r}), or use torch.distributed as it is"
        )
    return backend


def start(backend: DdsBackend, call: CollectiveCall, space: str, name: str) -> DdsWork:
    """Start a call, on any thread. ``space``: of names; those of different spaces never meet."""
    for operation in call.operations:
        operation.label = name
    return backend.start(call, wire_name(space, name))


def wire_name(space: str, name: str) -> str:
    """The name that a call has in the engine."""
    return _within(f"named {space} {name}", MAX_NAME_BYTES)


def shape_of(tensor: Tensor, *, ragged: bool = False) -> str:
    """Dtype and shape, for names and signatures: ``float32 [3,4]``. ``ragged``: the first dimension may differ."""
    sizes = [*map(str, tensor.shape)]
    if ragged:
        sizes[0] = "*"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _within(f"{dtype} [{','.join(sizes)}]", _MAX_SHAPE_BYTES)


def check_on_cpu(tensor: Tensor, what: str) -> None:
    """Raises ValueError: it is no tensor, or lies where the backend does not reach."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what}: the tensor is on {tensor.device}, and backend {NAME!r} moves tensors of the CPU alone. Move it "
            f"there first: tensor.cpu()"
        )


def check_root(root_rank: int, world: int) -> None:
    """Raises ValueError: no rank."""
    if not 0 <= root_rank < world:
        raise ValueError(f"root_rank must be within 0 .. {world - 1}, got {root_rank}")


def _within(text: str, max_bytes: int) -> str:
    encoded = text.encode()
    if len(encoded) <= max_bytes and "\0" not in text:
        return text
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    kept = encoded[: max_bytes - len(digest) - 1].decode(errors="ignore").replace("\0", "?")
    return f"{kept}~{digest}"
