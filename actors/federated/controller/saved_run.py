"""What is on the disk of a federated run: the metadata of its checkpoints, and how a module is set to one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, StringConstraints
from torch import Tensor, nn

from gradbus.actors.federated.client_names import MAX_NAMED_CLIENTS, Pair
from gradbus.actors.federated.controller.participation import MAX_KNOWN, Entry
from gradbus.actors.federated.controller.report import KEPT_IN_CHECKPOINT, RoundReport
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.actors.federated.model.flat_model import FlatModel, hash_of_named
from gradbus.actors.federated.model.sharing import Exchange, Sharing
from gradbus.runtime.checkpoint import Checkpoint, Count, Hex64, Meta, tensor_of
from gradbus.runtime.complex_pairs import from_pairs
from gradbus.runtime.config.federated import ShareSettings
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.saved_state import BUFFER, StateNames, Table, own_copies

NOTHING = "0" * 16  # no frozen parameters, or none of integers
Load = Callable[[str], Mapping[str, Tensor]]
CountedUpdate = tuple[Count, Count, Hex64, Count]
"""An update in a checkpoint: the id of its client, its round, the incarnation of the client, its transfer."""


class SavedRun(Meta):
    """The metadata of a checkpoint: attributes of :class:`.state.RunState`, and

    Attributes:
        tensors: name, dtype and shape of each tensor in the vector of weights, in its order.
        frozen: hash of the frozen parameters. frozen_tensors: as ``tensors``, in the vector of these.
        integers: hash of the parameters of integers, which are in a file of their own.
        personal: as ``tensors``, of those that each client has its own values of.
        names: where those in the model's state differ; None: saved by an earlier version, as are the two before then.
        share: the patterns of what is in that vector. exchange: what they choose from; of runs of earlier versions,
            which have not saved it, the trained part.
    """

    run_id: Hex64
    incarnation: Count
    layout: Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]
    tensors: Table
    frozen: Hex64 = NOTHING
    frozen_tensors: Table = Field(default_factory=list)
    integers: Hex64 = NOTHING
    personal: Table = Field(default_factory=list)
    names: StateNames | None = None
    share: ShareSettings = ShareSettings()
    exchange: Exchange = "trained"
    downlink_codec: Annotated[str, StringConstraints(max_length=256)]
    downlink: Literal["full", "lossy"]
    conduct: Annotated[list[Strike], Field(default_factory=list, max_length=MAX_KNOWN)]
    participation: Annotated[list[Entry], Field(default_factory=list, max_length=MAX_KNOWN)]
    client_names: Annotated[list[Pair], Field(default_factory=list, max_length=MAX_NAMED_CLIENTS)]
    counted: Annotated[list[CountedUpdate], Field(default_factory=list, max_length=MAX_KNOWN)]
    history: Annotated[list[RoundReport], Field(max_length=KEPT_IN_CHECKPOINT)]

    @property
    def sharing(self) -> Sharing:
        """Return what decides which tensors of a model are in that vector."""
        return Sharing(self.exchange, tuple(self.share.include), tuple(self.share.exclude))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """As :meth:`Meta.of`; rounds are in order, and none is newer than the checkpoint."""
        saved = super().of(checkpoint)
        rounds = [0, *(report.round_id for report in saved.history), checkpoint.round_id + 1]
        if not all(earlier < later for earlier, later in pairwise(rounds)):
            raise CheckpointError(
                f"meta.history: its rounds must ascend from 1 to {checkpoint.round_id} at most, got "
                f"{str(rounds[1:-1])[:80]}"
            )
        return saved


class SavedOrder(Meta):
    """An order on the disk: of which round of which run."""

    run_id: Hex64
    round_id: Count
    order: dict[str, Any]


class SavedStart(Meta):
    """The newest start of a controller with a state directory, written before it sends anything. host: for people."""

    run_id: Hex64
    incarnation: Hex64
    host: Annotated[str, StringConstraints(max_length=256)] = ""


@torch.no_grad()
def restore_weights(module: nn.Module, checkpoint: Checkpoint, load: Load) -> None:
    """Set a module, as ``build_model`` gives it, to the checkpoint: frozen parameters and all saved buffers, too.

    Args:
        load: a file beside the checkpoints by name: ``CheckpointStore.load_constant``.

    Raises:
        CheckpointError: the module is another one, or a file is missing.
    """
    saved, place = SavedRun.of(checkpoint), 0
    weights, state = tensor_of(checkpoint, "weights"), module.state_dict(keep_vars=True)
    where = f"checkpoint of round {checkpoint.round_id}"
    for name, dtype, shape in saved.tensors:
        tensor = state.get(name)
        end = place + math.prod(shape) * (2 if dtype.startswith("complex") else 1)
        found = None if tensor is None else (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if tensor is None or found != (dtype, shape) or end > weights.numel():
            here = "has none" if found is None else f"has {found[0]} of shape {tuple(found[1])}"
            raise CheckpointError(
                f"{where} holds {name!r} as {dtype} of shape {tuple(shape)}, the model that is configured {here}. Use "
                f"the model of the run"
            )
        tensor.copy_(from_pairs(weights[place:end], tensor))
        place = end
    if place != weights.numel():
        raise CheckpointError(f"{where} holds {weights.numel():,} values, its table has {place:,}: it is damaged")
    if saved.frozen != NOTHING:
        restore_frozen(FlatModel(module, saved.sharing), saved.frozen, load, where)
    if saved.integers != NOTHING:
        restore_integers(FlatModel(module), saved.integers, load)
    for name, buffer in own_copies(checkpoint.tensors, BUFFER).items():
        tensor = state.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (buffer.dtype, buffer.shape):
            raise CheckpointError(
                f"{where} holds the buffer {name!r} of shape {tuple(buffer.shape)}, the model that is configured has "
                f"none such. Use the model of the run"
            )
        tensor.copy_(buffer)


def restore_frozen(model: FlatModel, stated: str, load: Load, where: str) -> None:
    """Set the frozen parameters to those with this hash, from the file that the run has written at its start, unless
    ``build_model`` gives them. Raises CheckpointError: there is no such file."""
    if stated in (NOTHING, f"{model.frozen:016x}"):
        return
    vector = load(f"frozen-{stated}").get("frozen")
    if vector is None or vector.shape != (model.frozen_dim,):
        raise CheckpointError(
            f"{where} was made with other frozen parameters than the model has that is configured. Use the model of "
            f"the run, with the same parameters frozen (requires_grad=False)"
        )
    model.write_frozen(vector)
    if f"{model.frozen:016x}" != stated:
        raise CheckpointError(f"{where}: frozen-{stated}.safetensors holds other values than its name says")


def restore_integers(model: FlatModel, stated: str, load: Load) -> None:
    """Set the parameters of integers to those with this hash, unless ``build_model`` gives them. Raises
    CheckpointError: they are of another model, or there is no such file."""
    if stated not in (NOTHING, f"{hash_of_named(model.read_integers()):016x}"):
        model.write_integers(load_integers(stated, load))


def load_integers(stated: str, load: Load) -> dict[str, Tensor]:
    """Return the parameters of integers with this hash, from the file that the run has written at its start. Raises
    CheckpointError: there is no such file, or it holds something else."""
    found = dict(sorted(load(f"integers-{stated}").items()))
    if f"{hash_of_named(found):016x}" != stated:
        raise CheckpointError(f"integers-{stated}.safetensors holds other values than its name says")
    return found
