"""The process group: what Python must see as it is, around the backend that has the collectives.

A work that C++ hands on to Python knows only ``wait`` and ``get_future``. Who receives from any rank asks it for the
sender, so messages are called here, past C++. Collectives go past it where nobody looks on, see :mod:`.direct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed import ProcessGroup

from gradbus.torch.backend import DdsBackend
from gradbus.torch.direct import DirectCalls
from gradbus.torch.monitored_barrier import monitored_barrier
from gradbus.torch.register import NAME
from gradbus.torch.untraced import untraced
from gradbus.torch.work import DdsWork

_CPU = torch.device("cpu")
_CUSTOM = ProcessGroup.BackendType.CUSTOM


@untraced
class DdsProcessGroup(DirectCalls):
    """One rank's view of the ranks that work together."""

    def __init__(self, store: Store, rank: int, size: int, backend: DdsBackend) -> None:
        super().__init__(store, rank, size)
        self.dds = backend
        self._set_default_backend(_CUSTOM)
        self._register_backend(_CPU, _CUSTOM, backend)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:  # a tensor there is refused by the backend, which says more than torch does
            self._register_backend(accelerator, _CUSTOM, backend)

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors can be: torch moves them there itself, in some places."""
        return [_CPU]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """For DDP's log, which else says "custom"."""
        return NAME

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> DdsWork:
        """A message to a rank."""
        return self.dds.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> DdsWork:
        """A message from a rank."""
        return self.dds.recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> DdsWork:
        """A message from any rank; the work's ``source_rank()`` says which."""
        return self.dds.recv_anysource(tensors, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; where some do not come, rank 0 names the first of them, or all.

        Raises:
            RuntimeError: ranks did not come in time.
        """
        limit = self.dds.options._timeout if timeout is None else timeout
        monitored_barrier(self.dds, limit.total_seconds(), wait_all_ranks)

    def split_group(
        self, new_ranks: list[int], timeout: timedelta | None = None, opts: Backend.Options | None = None,
        group_name: Any = None, group_desc: str | None = None, device_types: list[torch.device] | None = None,
    ) -> DdsProcessGroup | None:  # fmt: skip
        """A group of some of these ranks; None on the others."""
        if self.rank() not in new_ranks:
            return None
        if not group_name:
            raise ValueError("split_group needs a name that no other group has")
        timeout = timeout or self.dds.options._timeout
        options = make_options(timeout, group_name, [])
        store = PrefixStore(f"{group_name}/", self.get_group_store())
        backend = self.dds.split(store, new_ranks, options)
        assert backend is not None
        group = DdsProcessGroup(store, new_ranks.index(self.rank()), len(new_ranks), backend)
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "undefined")
        return group


def make_options(timeout: timedelta, name: Any, global_ranks: Sequence[int]) -> Backend.Options:
    """What a backend is made with."""
    options = Backend.Options(NAME, timeout)
    options.group_name = name
    options.global_ranks_in_group = list(global_ranks)
    return options


def create(given: Any, backend_options: Any) -> DdsProcessGroup | DdsBackend:
    """What torch calls for a new process group: ``given`` are its c10d::DistributedBackendOptions.

    Returns:
        The group; or, where CPU tensors are not all ("cpu:dds,cuda:nccl"), the backend for them.
    """
    options = make_options(given.timeout, given.group_id, given.global_ranks_in_group)
    backend = DdsBackend(given.store, given.group_rank, given.group_size, options)
    if given.process_group is not None and given.process_group._get_backend_name() != "custom":
        return backend
    return DdsProcessGroup(given.store, given.group_rank, given.group_size, backend)
