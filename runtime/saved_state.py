"""A model's state from a checkpoint, as named tensors, without the model: from safetensors and JSON alone.

A checkpoint may be somebody else's. Nothing that it names is imported or run, and what it says of sizes is compared
with the bytes that are there before memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from gradbus.runtime.checkpoint import Count, Meta
from gradbus.runtime.complex_pairs import restored, shape_in_floats
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.safetensors_header import MAX_DIMENSIONS, is_shape

BUFFER = "buffer/"  # before the names of buffers in a checkpoint
MAX_TENSORS = 1_000_000  # of a model
MAX_NAME_CHARS = 4096
MAX_COPIES = 4  # times the tensors of a checkpoint: what names of tied weights may add, each with a copy
MAX_COPIED_BYTES = 1 << 30  # if that is more: one layer may have a hundred names
_COMPLEX = ("complex32", "complex64", "complex128")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", *_COMPLEX)
_FLOAT_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _FLOATS}

Row = tuple[str, str, Annotated[list[Count], Field(max_length=MAX_DIMENSIONS)]]
Table = Annotated[list[Row], Field(max_length=MAX_TENSORS)]
"""Name, dtype and shape of tensors, in their order."""
Names = Annotated[list[str], Field(max_length=MAX_TENSORS)]


class StateNames(Meta):
    """Says where the names in ``model.state_dict()`` differ from those of the tensors in a checkpoint.

    Attributes:
        tied: names of tensors that have another name before, with that one. Tied weights are saved once.
        unsaved: names of which a checkpoint has no values.
        transient: names that ``state_dict()`` has not: buffers that are not persistent.
    """

    tied: Annotated[dict[str, str], Field(max_length=MAX_TENSORS)] = Field(default_factory=dict)
    unsaved: Names = Field(default_factory=list)
    transient: Names = Field(default_factory=list)

    @classmethod
    def of_model(cls, model: nn.Module) -> dict[str, Any]:
        """Return the names of a model of which parameters and buffers are saved under their first names, as plain
        data."""
        first = {id(one): name for name, one in (*model.named_parameters(), *model.named_buffers())}
        state = model.state_dict(keep_vars=True)
        names = {name: first.get(id(value)) for name, value in state.items()}
        return {
            "tied": {name: saved for name, saved in names.items() if saved is not None and saved != name},
            "unsaved": [name for name, saved in names.items() if saved is None],
            "transient": [name for name in first.values() if name not in state],
        }


@dataclass(slots=True)
class SavedState:
    """Holds the state of a model, as far as a checkpoint has it.

    Attributes:
        tensors: by name, in their own dtypes, each in memory of its own.
        personal: names of tensors that each client has its own values of, whether they are in ``tensors`` or not.
        left_out: names in the model's state that the checkpoint has no values of.
        unknown: what of the model a checkpoint of an earlier version lacks: parts of a sentence.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    personal: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor. Raises CheckpointError: the name cannot be one, or is there already."""
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name == "__metadata__":
            raise CheckpointError(f"{name[:80]!r} is no name of a tensor: it is damaged, or no checkpoint of gradbus")
        if name in self.tensors:
            raise CheckpointError(f"two tensors are named {name[:80]!r}: it is damaged")
        self.tensors[name] = tensor

    def add_vector(self, vector: Tensor, table: Iterable[Row]) -> None:
        """Take the tensors that a table cuts a vector into, complex numbers as two values. Raises CheckpointError: it
        has another length, or another tensor than one of floats is in it."""
        rows = list(table)
        sizes = [size_of(name, shape) * (2 if dtype in _COMPLEX else 1) for name, dtype, shape in rows]
        if sum(sizes) != vector.numel():
            raise CheckpointError(f"{vector.numel():,} values, but the table has {sum(sizes):,}: it is damaged")
        for (name, dtype, shape), part in zip(rows, torch.split(vector.reshape(-1), sizes), strict=True):
            found = float_dtype(name, dtype)
            values = restored(part.view(shape_in_floats(found, shape)), found)
            self.add(name, values.to(found, copy=True))

    def replace_personal(self, names: Sequence[str]) -> None:
        """Note which personal tensors a client has values of: the others are left out."""
        self.left_out += [name for name in self.personal if name not in names]
        self.personal = list(names)

    def finish(self, names: StateNames) -> None:
        """Rename as ``model.state_dict()`` does, at the end.

        Raises:
            CheckpointError: names are tied to each other, or tied weights would take very much more memory than all
                others.
        """
        self.left_out += names.unsaved
        have = sum(tensor.nbytes for tensor in self.tensors.values())
        tied = {name: self.tensors[first] for name, first in names.tied.items() if first in self.tensors}
        if chain := next((name for name, first in names.tied.items() if first in names.tied), None):
            raise CheckpointError(f"{chain[:80]!r} is tied to a name that is tied itself: it is damaged")
        copied = sum(tensor.nbytes for tensor in tied.values())
        if copied > max(MAX_COPIES * have, MAX_COPIED_BYTES):
            raise CheckpointError(
                f"{len(tied):,} names of tied weights would take {copied:,} bytes, and the model has {have:,}: it is "
                f"damaged"
            )
        for name, tensor in tied.items():
            self.add(name, tensor.clone())
        for missing in (self.personal, self.left_out):
            having = set(missing)
            missing += [name for name, first in names.tied.items() if first in having]
        for name in names.transient:
            self.tensors.pop(name, None)


def float_dtype(name: str, dtype: str) -> torch.dtype:
    """Return the dtype of this name. Raises CheckpointError, with the tensor's ``name``: it is none of floats."""
    if dtype not in _FLOAT_DTYPES:
        raise CheckpointError(f"{name[:80]!r} has dtype {dtype[:40]!r}, expected one of {', '.join(_FLOATS)}")
    return _FLOAT_DTYPES[dtype]


def size_of(name: str, shape: list[int]) -> int:
    """Return how many elements a tensor has. Raises CheckpointError: no tensor has that shape."""
    if not is_shape(shape):
        raise CheckpointError(f"{name[:80]!r} has the impossible shape {str(shape)[:80]}: it is damaged")
    return math.prod(shape)


def own_copies(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return copies of the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): one.clone() for name, one in tensors.items() if name.startswith(prefix)}
