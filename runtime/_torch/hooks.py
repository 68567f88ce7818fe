"""Communication hooks for DistributedDataParallel: any algorithm of data-parallel training, over any backend.

    from gradbus.torch import hooks

    ddp = DistributedDataParallel(model)
    state = hooks.HookState(model.named_parameters(), "powersgd", rank=4)
    ddp.register_comm_hook(state, hooks.exchange)
    ...
    torch.save(state.state_dict(), f"hook-{rank}.pt")        # one for each rank

These have names of their own; ``docs/algorithms.md`` has all:

| hook | state | algorithm |
|---|---|---|
| ``dgc`` | :class:`DgcHookState` | ``dgc``, without a warm-up unless one is given. The optimizer has no momentum |
| ``top_k`` | :class:`TopKHookState` | ``topk`` |
| ``byte_grad`` | :class:`ByteGradHookState` | ``bytegrad`` |
| ``bf16`` | :class:`Bf16HookState` | ``dense`` with ``wire="bf16"`` |

They work with several buckets, ``gradient_as_bucket_view``, ``find_unused_parameters``, ``static_graph`` and
``no_sync()``. Gradients are float32. :func:`gradbus.torch.with_algorithm` does the same in one line, and has
the optimizers skip steps that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.torch.algorithm_hook import AlgorithmHook, exchange

__all__ = [
    "Bf16HookState",
    "ByteGradHookState",
    "DgcHookState",
    "HookState",
    "TopKHookState",
    "bf16",
    "byte_grad",
    "dgc",
    "exchange",
    "top_k",
]


class HookState(AlgorithmHook):
    """The state of a communication hook: of one rank, for one model and one algorithm. All ranks make it together."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        name: str,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            named_parameters: ``model.named_parameters()`` of what DDP wraps.
            name: of the algorithm, or ``package.module:Name``. options: of the algorithm.
            optimizers, process_group: see :class:`gradbus.torch.AlgorithmHook`.

        Raises:
            ConfigError: there is no such algorithm or option, it cannot work with the parameters or optimizers, or the
                ranks give different ones.
        """
        super().__init__(named_parameters, name, options, optimizers=optimizers, process_group=process_group)


class DgcHookState(HookState):
    """Deep gradient compression; options of ``dgc``. With a warm-up, call :meth:`start_epoch` in each epoch."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        super().__init__(named_parameters, "dgc", **{"warmup": "none", **options})


class TopKHookState(HookState):
    """The largest entries of gradient and residual; options of ``topk``."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        super().__init__(named_parameters, "topk", **options)


class ByteGradHookState(HookState):
    """8 bits per entry; options of ``bytegrad``."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        super().__init__(named_parameters, "bytegrad", **options)


class Bf16HookState(HookState):
    """bfloat16 on the way, float32 in the sum; options of ``dense``."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        super().__init__(named_parameters, "dense", **{"wire": "bf16", **options})


def _hook_of(kind: type[HookState]) -> Any:
    def hook(state, bucket, *more):  # type: ignore[no-untyped-def]
        if not isinstance(state, kind):
            raise TypeError(
                f"this hook needs a {kind.__name__}, got {type(state).__name__}: hooks.exchange takes any HookState"
            )
        return exchange(state, bucket, *more)  # type: ignore[no-untyped-call]

    return hook


dgc = _hook_of(DgcHookState)
top_k = _hook_of(TopKHookState)
byte_grad = _hook_of(ByteGradHookState)
bf16 = _hook_of(Bf16HookState)
