"""The process group: what Python must see as it is, around the backend that has the collectives.

A work that C++ hands on to Python knows only ``wait`` and ``get_future``. A receive from any rank is asked for its
sender, so messages are called here, past C++.

Collectives skip torch's dispatcher where they can. It finds the backend by the device of the tensors: from Python to
C++, through the dispatcher, and back to Python. On 2 cores of an Intel Xeon that takes 90 us a call, a quarter of an
all_gather of 64 KiB. All that it does is to notify autograd, the profiler, modes and transforms of the call; where
there are none, and the tensors are plain ones, the backend is called from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BroadcastOptions,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
)
from torch.distributed import ProcessGroup

from gradbus.runtime.errors import ConfigError
from gradbus.torch.backend import DdsBackend, timeout_of
from gradbus.torch.point_to_point import monitored_barrier
from gradbus.torch.reconfigure import HAS_RECONFIGURE, ReconfigureWork
from gradbus.torch.untraced import untraced
from gradbus.torch.work import DdsWork

_CPU = torch.device("cpu")
_CUSTOM = ProcessGroup.BackendType.CUSTOM

_PLAIN = (Tensor, torch.nn.Parameter)  # other classes may observe the call
# No public call of torch tells what would observe a call.
_profiles = torch._C._autograd._profiler_enabled  # noqa: SLF001 - see above
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - see above
_transforms = torch._C._are_functorch_transforms_active  # noqa: SLF001 - see above


def can_skip_dispatcher(lists: Iterable[Sequence[Tensor]]) -> bool:
    """Whether a call with these tensors concerns the backend alone."""
    if _profiles() or _modes() or _transforms():
        return False
    with_gradients = torch.is_grad_enabled()
    for tensors in lists:
        for tensor in tensors:
            if type(tensor) not in _PLAIN or (with_gradients and tensor.requires_grad):
                return False
    return True


def _direct(name: str, options: type, tensors_of: Callable[..., Iterable[Sequence[Tensor]]]) -> Any:
    """A collective as ``torch.distributed`` calls it: with all arguments, the options last. torch's C++ code calls it
    so as well, that of DistributedDataParallel for one. Other ways to call it lead through C++.

    Args:
        name: that of the methods of ProcessGroup and backend.
        tensors_of: lists of the tensors among the arguments before the options.
    """
    through_dispatcher = getattr(ProcessGroup, name)
    in_backend = getattr(DdsBackend, name)
    count = tensors_of.__code__.co_argcount + 1

    def call(self: DdsProcessGroup, *args: Any, **named: Any) -> Any:
        is_usual = len(args) == count and type(args[-1]) is options and not named
        if is_usual and can_skip_dispatcher(tensors_of(*args[:-1])):
            return in_backend(self.dds, *args)
        return through_dispatcher(self, *args, **named)

    # By the name of the code that calls it, C++ sees that it is not meant to call this method again.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


@untraced
class DdsProcessGroup(ProcessGroup):
    """One rank's view of the ranks that work together."""

    def __init__(self, store: Store, rank: int, size: int, backend: DdsBackend) -> None:
        super().__init__(store, rank, size)
        self.dds = backend
        self._set_default_backend(_CUSTOM)
        self._register_backend(_CPU, _CUSTOM, backend)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:  # a tensor there is refused by the backend, whose error has more than torch's
            self._register_backend(accelerator, _CUSTOM, backend)

    broadcast = _direct("broadcast", BroadcastOptions, lambda tensors: [tensors])
    allreduce = _direct("allreduce", AllreduceOptions, lambda tensors: [tensors])
    reduce = _direct("reduce", ReduceOptions, lambda tensors: [tensors])
    allgather = _direct("allgather", AllgatherOptions, lambda outputs, tensors: [tensors, *outputs])
    all_gather_single = _direct("all_gather_single", AllgatherOptions, lambda out, tensor: [(out, tensor)])
    reduce_scatter = _direct("reduce_scatter", ReduceScatterOptions, lambda outputs, tensors: [outputs, *tensors])
    reduce_scatter_single = _direct("reduce_scatter_single", ReduceScatterOptions, lambda out, tensor: [(out, tensor)])
    alltoall = _direct("alltoall", AllToAllOptions, lambda outputs, tensors: [outputs, tensors])
    all_to_all_single = _direct("all_to_all_single", AllToAllOptions, lambda out, tensor, to, of: [(out, tensor)])

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors can be: torch moves them there itself, in some places."""
        return [_CPU]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """For DDP's log, which would have "custom"."""
        return self.dds.getBackendName()

    def rank(self) -> int:
        """Of this process. A reconfigure changes it; torch's C++ code asks for it by the other name."""
        return self.dds.rank()

    def size(self) -> int:
        """How many ranks there are."""
        return self.dds.size()

    getRank, getSize = rank, size  # noqa: N815 (torch's names)

    # Here, past C++, which hands on of a work no more than its wait.

    @property
    def supports_reconfigure(self) -> bool:
        """Whether this torch has it."""
        return HAS_RECONFIGURE

    def get_reconfigure_handle(self) -> str:
        """See :meth:`DdsBackend.get_reconfigure_handle`."""
        return self.dds.get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> ReconfigureWork:
        """See :meth:`DdsBackend.reconfigure`."""
        return self.dds.reconfigure(opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> DdsWork:
        """A message to a rank."""
        return self.dds.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> DdsWork:
        """A message from a rank."""
        return self.dds.recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> DdsWork:
        """A message from any rank; the work's ``source_rank()`` is its rank."""
        return self.dds.recv_anysource(tensors, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; where some do not come, rank 0 names the first of them, or all.

        Raises:
            RuntimeError: ranks did not come in time.
        """
        limit = timeout_of(self.dds.options) if timeout is None else timeout
        monitored_barrier(self.dds.messages, self.rank(), self.size(), limit.total_seconds(), wait_all_ranks)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Backend.Options | None = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> DdsProcessGroup | None:
        """A group of some of these ranks; None on the others."""
        if self.rank() not in new_ranks:
            return None
        if not group_name:
            raise ValueError("split_group needs a name that no other group has")
        timeout = timeout or timeout_of(self.dds.options)
        options = make_options(self.dds.options.backend, timeout, group_name, [])
        store = PrefixStore(f"{group_name}/", self.get_group_store())
        backend = self.dds.split(store, new_ranks, options)
        assert backend is not None
        group = DdsProcessGroup(store, new_ranks.index(self.rank()), len(new_ranks), backend)
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "undefined")
        return group


def cpu_backend(group: ProcessGroup) -> Backend | None:
    """The backend that has a group's tensors on the CPU: "cpu:dds,cuda:nccl" has several, and "nccl" none."""
    if isinstance(group, DdsProcessGroup):
        return group.dds
    try:
        backend: Backend = group._get_backend(_CPU)  # noqa: SLF001 - torch has no public name for it
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL


def group_beside(group: ProcessGroup, ranks: Sequence[int], *, timeouts: int = 1) -> Any:
    """Make a group of these ranks, all of which call this, with the backend of another one and so many times its
    timeout: what travels in it needs no common order with the calls of that one.

    Raises:
        ConfigError: that backend has no tensors on the CPU.
    """
    backend = cpu_backend(group)
    if backend is None:
        raise ConfigError(
            f"the process group has the backend {dist.get_backend(group)!r}, and what is exchanged here is on the CPU: "
            f"name one for it, too, such as init_process_group('cpu:dds,cuda:nccl'), or give a process_group that has "
            f"one"
        )
    timeout = timeouts * timeout_of(backend.options)
    return dist.new_group(list(ranks), timeout, dist.get_backend(group), use_local_synchronization=True)


def make_options(backend: str, timeout: timedelta, group_name: Any, global_ranks: Sequence[int]) -> Backend.Options:
    """The options that a backend is made with."""
    options = Backend.Options(backend, timeout)
    options.group_name = group_name
    options.global_ranks_in_group = list(global_ranks)
    return options


def create(name: str, given: Any) -> DdsProcessGroup | DdsBackend:
    """Make a process group for torch: ``name`` of the backend, ``given`` torch's c10d::DistributedBackendOptions.

    Returns:
        The group; or, where CPU tensors are not all ("cpu:dds,cuda:nccl"), the backend for them.
    """
    options = make_options(name, given.timeout, given.group_id, given.global_ranks_in_group)
    later = getattr(given, "enable_reconfigure", False)  # since torch 2.15
    backend = DdsBackend(given.store, given.group_rank, given.group_size, options, forms_later=later)
    if given.process_group is not None and given.process_group.name() != "custom":
        return backend
    return DdsProcessGroup(given.store, given.group_rank, given.group_size, backend)
