"""The model of a federated run from its checkpoint, as named tensors, without the model."""

from __future__ import annotations

import torch

from gradbus.actors.federated.controller.saved_run import NOTHING, Load, SavedRun, load_integers
from gradbus.actors.federated.model.flat_model import hash_of
from gradbus.actors.federated.model.own_tensors import own_tensors
from gradbus.runtime.checkpoint import Checkpoint, tensor_of
from gradbus.runtime.complex_pairs import restored, shape_in_floats
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.saved_state import BUFFER, SavedState, StateNames, float_dtype, own_copies


def saved_state(checkpoint: Checkpoint, load: Load, client: Checkpoint | None = None) -> SavedState:
    """Return the state that a checkpoint has.

    Args:
        load: a file beside the checkpoints by name: ``CheckpointStore.load_constant``.
        client: of a client; its own tensors take the place of the run's, and are then ``personal``.

    Raises:
        CheckpointError: it does not fit together, or the client's is of another model.
    """
    saved = SavedRun.of(checkpoint)
    state = SavedState(personal=[name for name, _, _ in saved.personal])
    state.add_vector(tensor_of(checkpoint, "weights"), saved.tensors)
    _add_frozen(state, saved, load)
    for name, tensor in (load_integers(saved.integers, load) if saved.integers != NOTHING else {}).items():
        state.add(name, tensor.clone())
    for name, tensor in own_copies(checkpoint.tensors, BUFFER).items():
        state.add(name, tensor)
    if client is not None:
        _take_own(state, saved, client)
    if saved.names is None:
        state.unknown.append(
            "the second names of tied weights and the buffers that are not exchanged, if the model has any (left out)"
        )
        if saved.sharing.has_patterns and client is None:
            state.unknown.append("the tensors that federated.share leaves at the clients (left out)")
    state.finish(saved.names or StateNames())
    return state


def _add_frozen(state: SavedState, saved: SavedRun, load: Load) -> None:
    if saved.frozen == NOTHING:
        return
    vector = load(f"frozen-{saved.frozen}").get("frozen")
    if vector is None or vector.dtype != torch.float32 or f"{hash_of(vector):016x}" != saved.frozen:
        raise CheckpointError(f"frozen-{saved.frozen}.safetensors holds other values than its name says")
    if saved.names is None:
        state.unknown.append(f"the names of frozen parameters (their {vector.numel():,} values are left out)")
    else:
        state.add_vector(vector, saved.frozen_tensors)


def _take_own(state: SavedState, saved: SavedRun, client: Checkpoint) -> None:
    """Put the tensors that a client has of its own into the state, in the dtypes of the model."""
    known = {name: (list(tensor.shape), tensor.dtype) for name, tensor in state.tensors.items()}
    known |= {name: (shape, float_dtype(name, dtype)) for name, dtype, shape in saved.personal}
    own = own_tensors(client.tensors)
    for name, tensor in own.items():
        # A checkpoint of an earlier version does not name what is personal.
        shape, dtype = known.get(name, (None if saved.names else list(tensor.shape), tensor.dtype))
        if shape is not None and dtype.is_complex and tuple(tensor.shape) == shape_in_floats(dtype, shape):
            tensor = restored(tensor, dtype)
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"a client keeps {name[:80]!r} of shape {tuple(tensor.shape)}, which the model has not"
            )
        state.tensors.pop(name, None)
        state.add(name, tensor.to(dtype, copy=True))
    state.replace_personal(list(own))
