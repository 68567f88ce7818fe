"""Collectives as Horovod has them: a tensor, a name, and results at once or by a handle.

Ranks may make these calls in any order: those of one name belong together, the first call of a rank to the first of
each other one, the second to the second. Without a name, calls of one kind, operation, dtype and shape are counted, and
among those the order matters. Autograd records nothing.

They go past c10d, which matches by order, straight to the engine of the default process group. Their names cannot meet
those of c10d.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, Generic, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.runtime.collectives.data_movement import AllGatherOperation, BroadcastOperation
from gradbus.runtime.collectives.objects import MAX_OBJECT_BYTES, pack, unpack
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.staging import can_be_staged
from gradbus.runtime.collectives.tensors import check_sendable
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.launcher_environment import adopt_launcher
from gradbus.torch.backend import DdsBackend, checked_warning_s
from gradbus.torch.calls import CollectiveCall
from gradbus.torch.compression import Compressor, compression_of
from gradbus.torch.process_group import cpu_backend
from gradbus.torch.register import NAME, register
from gradbus.torch.work import DdsWork

MAX_GATHERED_BYTES = 4 << 30  # of one rank's tensor
MAX_NAME_BYTES = 100  # of a name on its way; what is longer is cut, and made unique again by a hash
_MAX_SHAPE_BYTES = 64  # the same for a shape

_Kind: Any = dist.ReduceOp.RedOpType  # its members are unknown to type checkers
OPS = {"mean": _Kind.AVG, "sum": _Kind.SUM, "min": _Kind.MIN, "max": _Kind.MAX, "product": _Kind.PRODUCT}

CALLED, COUNTED = "call", "auto"  # spaces of names

T = TypeVar("T")


class Handle(Generic[T]):
    """A call under way, for :func:`synchronize` and :func:`poll`."""

    def __init__(self, work: DdsWork, output: Callable[[], T]) -> None:
        """``output``: makes the result when the work has ended well."""
        self._work = work
        self._output: Callable[[], T] | None = output
        self._value: Any = None

    def wait(self) -> T:
        """The result. Raises DistBackendError: it failed, or its time is over."""
        self._work.wait()
        if self._output is not None:
            self._value, self._output = self._output(), None
        value: T = self._value
        return value

    def map(self, change: Callable[[T], T]) -> Self:
        """Have this change applied to the result, once, when it is waited for."""
        assert self._output is not None
        output = self._output
        self._output = lambda: change(output())
        return self

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._work.is_completed())


def synchronize(handle: Handle[T]) -> T:
    """Wait for a call. Raises DistBackendError (a RuntimeError): it failed, or its time is over."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Whether a call has ended, well or not."""
    return handle.done()


# The process group


def init(*, stall_warning_s: float | None = None, **options: Any) -> None:
    """Make the default process group, if there is none.

    Args:
        stall_warning_s: log collectives that wait longer than that; 0: never. By default
            ``GRADBUS_STALL_WARNING_S``, or 60. May be called again to change it.
        options: for ``torch.distributed.init_process_group("dds", ...)``.

    Raises:
        RuntimeError: there is one with another backend.
        ValueError: options for one that is there already; a time that is none.
    """
    warning_s = None if stall_warning_s is None else checked_warning_s(stall_warning_s)
    if not dist.is_initialized():
        if os.environ.get("GRADBUS_ELASTIC__MIN_WORLD", "").strip(" 0"):  # 0: ranks are fixed
            raise RuntimeError(
                "init: this process was started as one of an elastic run, where gradbus.torch.elastic.run makes the "
                "process group, anew for each generation of ranks: leave init() out, or start it without --elastic"
            )
        adopt_launcher()
        register()
        dist.init_process_group(NAME, **options)
    elif options:
        raise ValueError(f"the process group is there already, so {', '.join(options)} would have no effect")
    backend = current()
    if warning_s is not None:
        backend.stalls.warning_s = warning_s


def shutdown() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Of this process. Raises RuntimeError: there is no process group of this backend."""
    return current().group.rank


def size() -> int:
    """Number of processes. Raises RuntimeError: there is no process group of this backend."""
    return current().group.world


def local_rank() -> int:
    """Number of this process among those of its machine, as what has started it says: torchrun, or ``gradbus run``.

    Raises:
        RuntimeError: nothing says so.
    """
    return place("local_rank", "LOCAL_RANK", 0, "the number of this process on its machine")


def place(what: str, variable: str, least: int, meaning: str) -> int:
    """Return the number in an environment variable. Raises RuntimeError: ``what`` needs it, and it is not there, no
    number, or below ``least``."""
    text = os.environ.get(variable, "")
    if not text.isdecimal() or int(text) < least:
        raise RuntimeError(
            f"{what}: the environment variable {variable} is {text!r}, expected {meaning}: start with torchrun, which "
            f"sets it, or set it for each process"
        )
    return int(text)


# Tensors


def allreduce(
    tensor: Tensor,
    name: str | None = None,
    op: str | None = "mean",
    *,
    compression: Compressor | Literal["fp16", "bf16"] | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The tensors of all ranks combined, in new memory.

    Args:
        op: ``mean``, ``sum``, ``min``, ``max``, ``product``; None: ``mean``.
        compression: as of a :func:`.DistributedOptimizer`.
        prescale_factor, postscale_factor: what the tensor is multiplied with before, and the result.
    """
    check_reachable(tensor, _what("allreduce", name))
    compressor = compression_of(compression)
    buffer, context = compressor.compress(tensor.detach())
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return compressor.decompress(allreduce_async(buffer, name, op, **factors).wait(), context)


def allreduce_(
    tensor: Tensor,
    name: str | None = None,
    op: str | None = "mean",
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return the same in place."""
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return allreduce_async_(tensor, name, op, **factors).wait()


def allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: str | None = "mean",
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Return the same as :func:`allreduce`; the tensor may be changed at once."""
    check_reachable(tensor, _what("allreduce", name))
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return allreduce_async_(tensor.detach().clone(), name, op, **factors)


def allreduce_async_(
    tensor: Tensor,
    name: str | None = None,
    op: str | None = "mean",
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Return the same in place: until it has ended the tensor must neither be changed nor read.

    Raises:
        ValueError: an operation that is not known or not defined for this dtype, or a tensor that cannot be sent.
        RuntimeError: there is no process group of this backend.
    """
    op = "mean" if op is None else op
    if op not in OPS:
        raise ValueError(f"op {op!r}: expected one of {', '.join(OPS)}")
    check_reachable(tensor, _what("allreduce", name))
    scales = prescale_factor != 1.0 or postscale_factor != 1.0
    if scales and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"prescale_factor and postscale_factor need a floating point tensor, got {tensor.dtype}")
    space, label = _place(name, f"allreduce {op} {shape_of(tensor)}")
    if not scales:
        return start_reduction(current(), tensor, space, label, op)
    with torch.no_grad():
        tensor *= prescale_factor
    return start_reduction(current(), tensor, space, label, op).map(lambda sum_: _scale(sum_, postscale_factor))


@torch.no_grad()
def _scale(tensor: Tensor, factor: float) -> Tensor:
    tensor *= factor
    return tensor


def start_reduction(backend: DdsBackend, tensor: Tensor, space: str, name: str, op: str) -> Handle[Tensor]:
    """An all_reduce in place. Raises ValueError: as :func:`allreduce_async_`."""
    call = backend.calls.all_reduce(tensor, dist.ReduceOp(OPS[op]))
    call.what = f"allreduce of {name!r}"
    return Handle(start(backend, call, space, name), lambda: tensor)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The tensors of all ranks, one after the other along the first dimension, in which they may differ."""
    return allgather_async(tensor, name).wait()


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle[Tensor]:
    """The same. Until it has ended the tensor must not be changed.

    Raises:
        ValueError: a tensor that cannot be sent. RuntimeError: there is no process group of this backend.
    """
    check_reachable(tensor, _what("allgather", name))
    check_sendable(tensor)
    source = tensor.detach()
    source = source.reshape(1) if source.dim() == 0 else source.contiguous()
    shape = shape_of(source, ragged=True)
    space, label = _place(name, f"allgather {shape}")
    backend = current()
    gather = AllGatherOperation(source, backend.group.rank, backend.group.world, MAX_GATHERED_BYTES)
    call = CollectiveCall(f"allgather of {label!r}", [gather]).sign(shape)
    return Handle(start(backend, call, space, label), lambda: torch.cat(gather.value))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The root's tensor, in new memory. Dtype and shape are those of this rank's."""
    check_reachable(tensor, _what("broadcast", name))
    return broadcast_async_(tensor.detach().clone(), root_rank, name).wait()


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the same in place."""
    return broadcast_async_(tensor, root_rank, name).wait()


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle[Tensor]:
    """Return the same in place: until it has ended the tensor must neither be changed nor read.

    Raises:
        ValueError: no such rank, or a tensor that cannot be sent.
        RuntimeError: there is no process group of this backend.
    """
    check_reachable(tensor, _what("broadcast", name))
    space, label = _place(name, f"broadcast {root_rank} {shape_of(tensor)}")
    return start_broadcast(current(), tensor, space, label, root_rank)


def start_broadcast(backend: DdsBackend, tensor: Tensor, space: str, name: str, root_rank: int) -> Handle[Tensor]:
    """A broadcast in place. Raises ValueError: as :func:`broadcast_async_`."""
    check_root(root_rank, backend.group.world)
    call = backend.calls.broadcast(tensor, root_rank).sign(shape_of(tensor))
    call.what = f"broadcast of {name!r}"
    return Handle(start(backend, call, space, name), lambda: tensor)


# Objects


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object; what the others give is not looked at.

    It is made of numbers, text, bytes, lists, maps, None and bool, and has at most 4 MiB as msgpack. Tuples arrive as
    lists. Never pickle: that would run whatever code a peer sends.

    Raises:
        ValueError, on all ranks: the root's cannot be sent.
    """
    space, label = _place(name, f"object of rank {root_rank}")
    return share_object(current(), lambda: obj, (space, label), root_rank, f"broadcast_object {label!r}")


def share_object(
    backend: DdsBackend, make: Callable[[], Any], place: tuple[str, str], root_rank: int, what: str
) -> Any:
    """The root's object, which ``make`` makes there. ``place``: space and name. Raises ValueError on all ranks: as
    :func:`broadcast_object`, or ``make`` has raised it."""
    group = backend.group
    check_root(root_rank, group.world)
    payload = _packed(make) if group.rank == root_rank else None
    operation = BroadcastOperation(payload, root_rank, group.rank, group.world, MAX_OBJECT_BYTES)
    return _unpacked(_result(backend, operation, place, what), root_rank, what)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in rank order.

    Raises:
        ValueError, on all ranks: one of them cannot be sent; see :func:`broadcast_object`.
    """
    space, label = _place(name, "objects")
    return gather_objects(current(), obj, (space, label), f"allgather_object {label!r}")


def gather_objects(backend: DdsBackend, obj: Any, place: tuple[str, str], what: str) -> list[Any]:
    """The objects of all ranks. ``place``: space and name. Raises ValueError: as :func:`allgather_object`."""
    operation = AllGatherOperation(_packed(lambda: obj), backend.group.rank, backend.group.world, MAX_OBJECT_BYTES)
    values = _result(backend, operation, place, what)
    return [_unpacked(value, other, what) for other, value in enumerate(values)]


def _result(backend: DdsBackend, operation: Operation, place: tuple[str, str], what: str) -> Any:
    start(backend, CollectiveCall(what, [operation]), *place).wait()
    return operation.value


def _packed(make: Callable[[], Any]) -> bytes:
    """An object for the others, which wait for it; or, if it cannot be sent, the error that this rank gets as well."""
    try:
        return pack([True, make()])
    except ValueError as error:
        return pack([False, f"{error}. Pickle is never used"])


def _unpacked(data: Any, rank: int, what: str) -> Any:
    match unpack(data):
        case [True, value]:
            return value
        case [False, str(why)]:
            raise ValueError(f"{what}, rank {rank}: {why}")
    raise CollectiveError(f"{what}: what came from rank {rank} is no object of this function")


# Names


def _place(name: str | None, counted: str) -> tuple[str, str]:
    """Space and name of a call; ``counted``: its name if it has none.

    Raises:
        ValueError: the name is no text. Where it stands, Horovod has ``average``.
    """
    if name is None:
        return COUNTED, counted
    if not isinstance(name, str):
        raise ValueError(
            f"name must be text or None, got {name!r}. In place of Horovod's average, give op='mean' or op='sum'"
        )
    return CALLED, name


def _what(call: str, name: str | None) -> str:
    return call if name is None else f"{call} of {name!r}"


def current() -> DdsBackend:
    """The backend of the default process group. Raises RuntimeError: there is none, or it has another backend."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"there is no process group yet: call gradbus.torch.init(), or "
            f"torch.distributed.init_process_group({NAME!r})"
        )
    group = dist.group.WORLD
    backend = None if group is None else cpu_backend(group)
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


def check_reachable(tensor: Tensor, what: str) -> None:
    """Raises ValueError: it is no tensor, or lies where the backend does not reach."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what}: expected a tensor, got {type(tensor).__name__}")
    if not can_be_staged(tensor):
        raise ValueError(
            f"{what}: the tensor is on {tensor.device}, and backend {NAME!r} moves tensors of the CPU and of torch's "
            f"accelerator. Move it there first: tensor.cpu()"
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
