"""The model of data-parallel ranks from the checkpoint of rank 0, as named tensors, without the model."""

from __future__ import annotations

from collections.abc import Sequence

from gradbus.actors.data_parallel.state import SavedRank
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.saved_state import BUFFER, SavedState, StateNames, own_copies

_PARAMETER = "parameter/"


def saved_state(checkpoint: Checkpoint) -> SavedState:
    """Return the state that a checkpoint has. Raises CheckpointError: tensors are missing, or of another model."""
    saved, state = SavedRank.of(checkpoint), SavedState()
    for prefix in (_PARAMETER, BUFFER):
        for name, tensor in own_copies(checkpoint.tensors, prefix).items():
            state.add(name, tensor)
    check_layout(state, saved.layout)
    finish(state, saved.names)
    return state


def check_layout(state: SavedState, layout: Sequence[str]) -> None:
    """Raises CheckpointError: the state has other tensors than a layout names, as of ``describe_layout``."""
    expected = {line.rpartition(" ")[0] for line in layout}
    found = {f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in state.tensors.items()}
    if odd := sorted(expected ^ found):
        raise CheckpointError(
            f"its tensors and its layout differ: {odd[0][:200]!r} is in one of them alone. It is damaged: restore it "
            f"from a backup, or take another step (--round)"
        )


def finish(state: SavedState, names: StateNames | None) -> None:
    """Name the tensors as the model's state does. ``names``: None: of an earlier version, which has not saved them."""
    if names is None:
        state.unknown.append(
            "the second names of tied weights (left out), and which buffers are not persistent (not left out), if the "
            "model has any"
        )
    state.finish(names or StateNames())
