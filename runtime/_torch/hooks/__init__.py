"""Communication hooks for DistributedDataParallel: fewer bytes per gradient, over any backend.

    from gradbus.torch import hooks

    model = Net()
    ddp = DistributedDataParallel(model)
    state = hooks.DgcHookState(model.named_parameters(), density=0.001, momentum=0.9)
    ddp.register_comm_hook(state, hooks.dgc)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum: it is in the hook
    ...
    torch.save(state.state_dict(), f"hook-{rank}.pt")        # one for each rank

| hook | state | what travels | optimizer |
|---|---|---|---|
| ``dgc`` | :class:`DgcHookState` | the largest entries of the velocity, 0.1 % | without momentum |
| ``top_k`` | :class:`TopKHookState` | the largest entries of gradient and residual, 1 % | any |
| ``byte_grad`` | :class:`ByteGradHookState` | every entry in 8 bits | any |
| ``bf16`` | :class:`Bf16HookState` | every entry in 16 bits | any |

Each sends one message per bucket, in one all_gather, and works with several buckets, ``gradient_as_bucket_view``,
``find_unused_parameters``, ``static_graph`` and ``no_sync()``. Gradients are float32 on the CPU.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotations of a hook with the types themselves.

import torch
from torch._C._distributed_c10d import GradBucket

from gradbus.torch.hooks.dense import Bf16HookState, ByteGradHookState
from gradbus.torch.hooks.dgc_hook import DgcHookState
from gradbus.torch.hooks.state import HookState
from gradbus.torch.hooks.top_k_hook import TopKHookState

__all__ = [
    "Bf16HookState",
    "ByteGradHookState",
    "DgcHookState",
    "HookState",
    "TopKHookState",
    "bf16",
    "byte_grad",
    "dgc",
    "top_k",
]


def dgc(state: DgcHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Deep gradient compression. ``state``: a :class:`DgcHookState`."""
    return _exchange(state, DgcHookState, bucket)


def top_k(state: TopKHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The largest entries, with error feedback. ``state``: a :class:`TopKHookState`."""
    return _exchange(state, TopKHookState, bucket)


def byte_grad(state: ByteGradHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """8 bits per entry. ``state``: a :class:`ByteGradHookState`."""
    return _exchange(state, ByteGradHookState, bucket)


def bf16(state: Bf16HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """bfloat16. ``state``: a :class:`Bf16HookState`."""
    return _exchange(state, Bf16HookState, bucket)


def _exchange(state: HookState, expected: type[HookState], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, expected):
        raise TypeError(
            f"hooks.{expected.hook} needs a {expected.__name__}, got {type(state).__name__}: "
            f"ddp.register_comm_hook(hooks.{expected.__name__}(model.named_parameters()), hooks.{expected.hook})"
        )
    return state.exchange(bucket)
