"""The buffers of a module as they were before a step: put back when the step is skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ModuleBuffers:
    """A copy of a module's buffers: running means of batch norm, for example, which a forward pass with NaN in it
    spoils.

    Which modules have buffers is looked up once. A copy of all costs less than finding out which have changed: code
    that writes through ``.data`` leaves no trace in a tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
        ]
        self._kept: list[Tensor | None] = [None] * len(self._places)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember what they are now."""
        for index, (module, name) in enumerate(self._places):
            live, kept = _buffers_of(module).get(name), self._kept[index]
            if live is not None and kept is not None and _alike(live, kept):
                kept.copy_(live)
            else:
                self._kept[index] = None if live is None else live.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were."""
        for (module, name), kept in zip(self._places, self._kept, strict=True):
            live = _buffers_of(module).get(name)
            if live is not None and kept is not None and _alike(live, kept):
                live.copy_(kept)
            else:
                _buffers_of(module)[name] = None if kept is None else kept.clone()


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers  # noqa: SLF001 - register_buffer would also decide anew whether it is saved


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
