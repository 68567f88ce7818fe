"""What a call of torch's comes to: collectives to start, and what is to be done when they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradbus.runtime.collectives.operation import Operation


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One call on one rank.

    Attributes:
        what: the call, for errors.
        operations: to be started, in this order.
        value: what its future holds; tensors only, and at least one: DDP reads the first without looking.
        finish: puts results in their places where the operations could not do so themselves. Runs once, after all
            have ended well, on whatever thread first asks for the result.
    """

    what: str
    operations: list[Operation]
    value: list[Tensor] = field(default_factory=list)
    finish: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if not self.value:
            self.value = [torch.empty(0)]


def together(what: str, tasks: Sequence[CollectiveCall], value: Sequence[Tensor] = ()) -> CollectiveCall:
    """Several calls as one."""
    if len(tasks) == 1 and not value:
        return tasks[0]
    operations = [operation for task in tasks for operation in task.operations]
    endings = [task.finish for task in tasks if task.finish is not None]

    def finish() -> None:
        for ending in endings:
            ending()

    return CollectiveCall(
        what, operations, list(value) or [t for task in tasks for t in task.value], finish if endings else None
    )


def copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None] | None:
    """A function that copies each second tensor into the first, where they are not the same memory."""
    needed = [(into, source) for into, source in pairs if into.data_ptr() != source.data_ptr()]
    if not needed:
        return None

    def copy() -> None:
        for into, source in needed:
            into.detach().copy_(source.view(into.shape))

    return copy
