"""Communication hooks for DistributedDataParallel: fewer bytes per gradient, over any backend.

    from gradbus.torch import hooks

    model = Net()
    ddp = DistributedDataParallel(model)
    state = hooks.DgcState(model.named_parameters(), density=0.001, momentum=0.9)
    ddp.register_comm_hook(state, hooks.dgc)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum: it is in the hook
    ...
    torch.save(state.state_dict(), f"hook-{rank}.pt")        # one for each rank

| hook | state | what travels | optimizer |
|---|---|---|---|
| ``dgc`` | :class:`DgcState` | the largest entries of the velocity, 0.1 % | without momentum |
| ``top_k`` | :class:`TopKState` | the largest entries of gradient and residual, 1 % | any |
| ``byte_grad`` | :class:`ByteGradState` | every entry in 8 bits | any |
| ``bf16`` | :class:`Bf16State` | every entry in 16 bits | any |

Each sends one message per bucket, in one all_gather, and works with several buckets, ``gradient_as_bucket_view``,
``find_unused_parameters``, ``static_graph`` and ``no_sync()``. Gradients are float32 on the CPU.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with the types themselves.

import torch
from torch._C._distributed_c10d import GradBucket

from gradbus.torch.hooks_dense import Bf16State, ByteGradState
from gradbus.torch.hooks_dgc import DgcState
from gradbus.torch.hooks_state import HookState
from gradbus.torch.hooks_top_k import TopKState

__all__ = ["Bf16State", "ByteGradState", "DgcState", "HookState", "TopKState", "bf16", "byte_grad", "dgc", "top_k"]


def dgc(state: DgcState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Deep gradient compression. ``state``: a :class:`DgcState`."""
    return _exchange(state, DgcState, bucket)


def top_k(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The largest entries, with error feedback. ``state``: a :class:`TopKState`."""
    return _exchange(state, TopKState, bucket)


def byte_grad(state: ByteGradState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """8 bits per entry. ``state``: a :class:`ByteGradState`."""
    return _exchange(state, ByteGradState, bucket)


def bf16(state: Bf16State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """bfloat16. ``state``: a :class:`Bf16State`."""
    return _exchange(state, Bf16State, bucket)


def _exchange(state: HookState, expected: type[HookState], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, expected):
        raise TypeError(
            f"hooks.{expected.hook} needs a {expected.__name__}, got {type(state).__name__}: "
            f"ddp.register_comm_hook(hooks.{expected.__name__}(model.named_parameters()), hooks.{expected.hook})"
        )
    return state.exchange(bucket)
