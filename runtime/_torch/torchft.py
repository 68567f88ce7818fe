"""torchft's process group over the bus, for the Manager of torchft 0.2, which is installed apart.

manager = torchft.Manager(pg=ProcessGroupDds(timeout=timedelta(seconds=10)), ...)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store, Work
from torch.distributed import DistBackendError, ProcessGroup
from torchft.process_group import ProcessGroupWrapper

from gradbus.torch.backend import DdsBackend
from gradbus.torch.process_group import DdsProcessGroup, make_options


class _FailsByFuture(Work):
    """Work whose error is in its future alone.

    torchft 0.2 takes the future of what it has waited for, but has none where the wait raises: then its hook for DDP
    ends the replica (``ddp.py``, ``assert fut._fut``) that should drop the step. What the future has it reports.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended, well or not."""
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except DistBackendError:
            return False

    def get_future(self) -> Any:
        """Of the tensors, or with the error."""
        return self._work.get_future()


class ProcessGroupDds(ProcessGroupWrapper):  # type: ignore[misc]  # its types are not installed
    """Ranks of replica groups, which come and go: each quorum of torchft has a store of its own, and a new group."""

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        options = make_options("dds", self._timeout, f"torchft_{self._quorum_id}", [])
        return DdsProcessGroup(store, rank, world_size, DdsBackend(store, rank, world_size, options))

    def allreduce(self, tensors: list[Tensor], opts: object) -> Work:
        """As that of torch. Errors are in the future of what is returned."""
        return _FailsByFuture(super().allreduce(tensors, opts))

    def shutdown(self) -> None:
        """Leave the group."""
        self.abort(errored=False)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """For messages."""
        return "torchft-dds"
