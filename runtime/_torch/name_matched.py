"""Collectives that are matched by their names alone, in whatever order each rank calls them.

They go past c10d, which matches by order, straight to the engine of the default process group. Their names cannot meet
those of c10d. Of one name, the first call of a rank belongs to the first of each other one, the second to the second.
"""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.runtime.collectives.operation import Operation
from gradbus.torch.backend import DdsBackend
from gradbus.torch.calls import CollectiveCall, CollectiveCalls
from gradbus.torch.process_group import DdsProcessGroup
from gradbus.torch.register import NAME
from gradbus.torch.stall_report import StallReport, Waiting, begins, warning_from_environment
from gradbus.torch.work import DdsWork

MAX_NAME_BYTES = 100  # of a name on its way; what is longer is cut, and made unique again by a hash
_MAX_SHAPE_CHARS = 64  # the same for a shape
_AHEAD_BYTES = 128 << 20  # half of what a rank keeps for calls that it has not made yet


class NamedCalls:
    """Those of one rank of one process group. Any thread may start them.

    Attributes:
        tasks: makes what can be started.
        stall: reports what waits too long.
    """

    def __init__(self, backend: DdsBackend) -> None:
        """Raises ConfigError: the environment has a time for the stall report that is none."""
        group = backend.group
        self.rank = group.rank
        self.world = group.world
        self.tasks = CollectiveCalls(group.rank, group.world)
        self.stall = StallReport(group.name, group.rank, group.world, warning_from_environment())
        self._queue = backend.queue
        self._queue.also_watch = self.stall.look
        self._timeout_s = backend.options._timeout.total_seconds()
        self._lock = threading.Lock()
        self._ahead_bytes = 0
        self._optimizers = 0

    def start(self, task: CollectiveCall, space: str, name: str, size_bytes: int) -> DdsWork:
        """Start a call.

        Args:
            space: of names; those of different spaces never meet.
            name: for people, too.
            size_bytes: that it sends to each other rank at most.
        """
        waiting = begins(name, task, size_bytes)
        with self._lock:
            # Ranks may come in any order, so they keep what they have not called for. Beyond half of the room for that,
            # what is sent waits until its receivers have called.
            asks_first = self._ahead_bytes + size_bytes > _AHEAD_BYTES // self.world
            self._ahead_bytes += size_bytes
        for operation in task.operations:
            if asks_first:
                operation.rendezvous.limit_bytes = 0
            operation.on_end.append(partial(self._one_ended, waiting))
        self.stall.add(waiting)
        work = self._queue.start(DdsWork(self._queue, task, wire_name(space, name), self._timeout_s, ordered=False))
        self._queue.engine.progress.wake_io_thread()
        return work

    def _one_ended(self, waiting: Waiting, operation: Operation) -> None:
        """On whatever thread: nothing here may wait."""
        with self._lock:
            waiting.left -= 1
            ended = waiting.left == 0
            if ended:
                self._ahead_bytes -= waiting.size_bytes
        if ended:
            self.stall.remove(waiting)

    def next_optimizer(self) -> int:
        """A number for an optimizer: the same on all ranks if they make theirs in the same order."""
        with self._lock:
            self._optimizers += 1
            return self._optimizers - 1


_calls: WeakKeyDictionary[DdsBackend, NamedCalls] = WeakKeyDictionary()
_lock = threading.Lock()


def current() -> NamedCalls:
    """Those of the default process group. Raises RuntimeError: there is none, or it has another backend."""
    backend = _backend()
    with _lock:
        calls = _calls.get(backend)
        if calls is None:
            calls = _calls[backend] = NamedCalls(backend)
        return calls


def _backend() -> DdsBackend:
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


def wire_name(space: str, name: str) -> str:
    """What a call has as its name in the engine."""
    return _within(f"named {space} {name}", MAX_NAME_BYTES)


def sign(task: CollectiveCall, shape: str) -> CollectiveCall:
    """Let the operations say a shape, too: so that ranks whose tensors differ are told of both."""
    for operation in task.operations:
        operation.signature = f"{operation.signature} {_within(shape, _MAX_SHAPE_CHARS)}"
    return task


def shape_of(tensor: Tensor, *, ragged: bool = False) -> str:
    """For errors and names. ``ragged``: the first dimension may differ."""
    sizes = [*map(str, tensor.shape)]
    if ragged:
        sizes[0] = "*"
    return f"[{','.join(sizes)}]"


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
