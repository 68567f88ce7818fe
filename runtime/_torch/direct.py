"""The short way from ``torch.distributed`` to the backend, for collectives that nobody looks on.

torch hands every collective of a process group to its dispatcher, which finds the backend by the device of the tensors:
from Python to C++, through the dispatcher, and back to Python. On 2 cores of an Intel Xeon that takes 90 us a call, a
quarter of an all_gather of 64 KiB. All that it does is to tell autograd, the profiler, modes and transforms of the
call; where there are none, and the tensors are plain ones, the backend is called from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed import ProcessGroup

from gradbus.torch.untraced import untraced

if TYPE_CHECKING:
    from torch.distributed import Work

    from gradbus.torch.backend import DdsBackend

_PLAIN = (Tensor, torch.nn.Parameter)  # other classes may have more to say of what is done with them
_profiles = torch._C._autograd._profiler_enabled
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


def can_skip_dispatcher(*lists: Sequence[Tensor]) -> bool:
    """Whether a call with these tensors is nobody's business but the backend's."""
    if _profiles() or _modes() or _transforms():
        return False
    with_gradients = torch.is_grad_enabled()
    for tensors in lists:
        for tensor in tensors:
            if type(tensor) not in _PLAIN or (with_gradients and tensor.requires_grad):
                return False
    return True


@untraced
class DirectCalls(ProcessGroup):
    """Collectives as ``torch.distributed`` calls them: with all arguments, the options last. torch's C++ code calls
    them so as well, that of DistributedDataParallel for one, and comes here. Other ways to call them lead through C++.

    Each method has the name of the one it stands for, and calls that itself: by this C++ sees that it is not meant to
    call this one again.
    """

    dds: DdsBackend

    def broadcast(self, *args: Any, **named: Any) -> Work:
        """All get the root's tensors."""
        if _are(args, 2, BroadcastOptions, named) and can_skip_dispatcher(args[0]):
            return self.dds.broadcast(*args)
        return super().broadcast(*args, **named)

    def allreduce(self, *args: Any, **named: Any) -> Work:
        """All get the combinations of the tensors."""
        if _are(args, 2, AllreduceOptions, named) and can_skip_dispatcher(args[0]):
            return self.dds.allreduce(*args)
        return super().allreduce(*args, **named)

    def reduce(self, *args: Any, **named: Any) -> Work:
        """The root gets the combinations of the tensors."""
        if _are(args, 2, ReduceOptions, named) and can_skip_dispatcher(args[0]):
            return self.dds.reduce(*args)
        return super().reduce(*args, **named)

    def allgather(self, *args: Any, **named: Any) -> Work:
        """All get all tensors."""
        if _are(args, 3, AllgatherOptions, named) and can_skip_dispatcher(args[1], *args[0]):
            return self.dds.allgather(*args)
        return super().allgather(*args, **named)

    def all_gather_single(self, *args: Any, **named: Any) -> Work:
        """All get all tensors, in one."""
        if _are(args, 3, AllgatherOptions, named) and can_skip_dispatcher(args[:2]):
            return self.dds.all_gather_single(*args)
        return super().all_gather_single(*args, **named)

    def reduce_scatter(self, *args: Any, **named: Any) -> Work:
        """Each rank gets its part of the combination."""
        if _are(args, 3, ReduceScatterOptions, named) and can_skip_dispatcher(args[0], *args[1]):
            return self.dds.reduce_scatter(*args)
        return super().reduce_scatter(*args, **named)

    def reduce_scatter_single(self, *args: Any, **named: Any) -> Work:
        """Each rank gets its part of the combination of one tensor."""
        if _are(args, 3, ReduceScatterOptions, named) and can_skip_dispatcher(args[:2]):
            return self.dds.reduce_scatter_single(*args)
        return super().reduce_scatter_single(*args, **named)

    def alltoall(self, *args: Any, **named: Any) -> Work:
        """Each rank gets from each what that has for it."""
        if _are(args, 3, AllToAllOptions, named) and can_skip_dispatcher(*args[:2]):
            return self.dds.alltoall(*args)
        return super().alltoall(*args, **named)

    def all_to_all_single(self, *args: Any, **named: Any) -> Work:
        """The same with the parts of one tensor."""
        if _are(args, 5, AllToAllOptions, named) and can_skip_dispatcher(args[:2]):
            return self.dds.all_to_all_single(*args)
        return super().all_to_all_single(*args, **named)


def _are(args: Sequence[Any], count: int, options: type, named: dict[str, Any]) -> bool:
    """Whether these are the arguments of a call from ``torch.distributed``: so many, the last one these options."""
    return len(args) == count and type(args[-1]) is options and not named
