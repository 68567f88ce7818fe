"""The model of a version from the checkpoints of all servers, as named tensors, without the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbus.actors.data_parallel.saved_state import check_layout, finish
from gradbus.actors.parameter_server.assignment import TensorPart
from gradbus.actors.parameter_server.shard import WEIGHTS
from gradbus.actors.parameter_server.state import FROZEN, SavedPart, SavedServer, check_servers
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.saved_state import BUFFER, SavedState, own_copies, size_of


def saved_state(checkpoints: Sequence[Checkpoint]) -> SavedState:
    """Return the state of a version. The buffers are those of the first worker.

    Args:
        checkpoints: of all of its servers, server 0's first.

    Raises:
        CheckpointError: a part is missing, or they are of several models.
    """
    all_saved, state = [SavedServer.of(checkpoint) for checkpoint in checkpoints], SavedState()
    check_servers(all_saved)
    if any(saved.layout != all_saved[0].layout for saved in all_saved):
        raise CheckpointError("the checkpoints of its servers are of different models")
    for name, tensor in _joined(checkpoints, all_saved).items():
        state.add(name, tensor)
    first = min(map(int, all_saved[0].own), default=None)
    for prefix in (FROZEN, f"worker-{first}/{BUFFER}"):
        for name, tensor in own_copies(checkpoints[0].tensors, prefix).items():
            state.add(name, tensor)
    layout = all_saved[0].layout
    if first is None:  # no worker was there to keep its buffers
        state.left_out = [line.split(" torch.", 1)[0] for line in layout if line.endswith(" buffer")]
        layout = [line for line in layout if not line.endswith(" buffer")]
    check_layout(state, layout)
    finish(state, all_saved[0].names)
    return state


def _joined(checkpoints: Sequence[Checkpoint], all_saved: Sequence[SavedServer]) -> dict[str, Tensor]:
    """Return the trained parameters, each of the parts that one or more servers have of it."""
    parts: dict[str, list[tuple[SavedPart, Tensor]]] = {}
    for checkpoint, saved in zip(checkpoints, all_saved, strict=True):
        for part in saved.pieces:
            parts.setdefault(part.tensor, []).append((part, _values_of(checkpoint, part)))
    return {name: _joined_parts(name, of_one) for name, of_one in parts.items()}


def _values_of(checkpoint: Checkpoint, part: SavedPart) -> Tensor:
    size_of(part.tensor, list(part.shape))
    name = TensorPart(part.tensor, part.start, part.stop, part.shape, torch.float32).name
    values = checkpoint.tensors.get(WEIGHTS + name)
    if values is None or values.numel() != part.stop - part.start:
        raise CheckpointError(f"the values of {name[:80]!r} are missing, or have another length: it is damaged")
    return values.reshape(-1)


def _joined_parts(name: str, parts: list[tuple[SavedPart, Tensor]]) -> Tensor:
    """Join a tensor of all its parts, which must follow each other from its first entry to its last."""
    parts.sort(key=lambda one: one[0].start)
    stops = [0, *(part.stop for part, _ in parts)]
    shape = list(parts[0][0].shape)
    if [part.start for part, _ in parts] != stops[:-1] or stops[-1] != size_of(name, shape):
        raise CheckpointError(f"the servers have not all parts of {name[:80]!r}, or some of them twice: it is damaged")
    if any(list(part.shape) != shape or values.dtype != parts[0][1].dtype for part, values in parts):
        raise CheckpointError(f"the parts of {name[:80]!r} are of different tensors: it is damaged")
    return torch.cat([values for _, values in parts]).view(shape)
