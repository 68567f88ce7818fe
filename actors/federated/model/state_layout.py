"""Where the values of a module's state are, by name: for a model that has arrived while the module is being trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.aggregation.merged_buffers import BufferLayout
from gradbus.actors.federated.model.sharing import Sharing, TensorSpec
from gradbus.runtime.complex_pairs import restored


@dataclass(frozen=True, slots=True, eq=False)
class StateLayout:
    """Says of each name of a module's state where its value is, for one sharing. It does not change, so that any thread
    may read it.

    Attributes:
        sharing: what it is of.
        specs: the tensors, by name. names: all of the state, in its order.
        dim: values of the exchanged part of the vector. places: of the names in the vector, frozen ones included.
        personal: first names of the tensors that stay at this client. buffers: those that are merged.
        built: copies of both, as they were built.
        held: what is in neither, and no training changes: parameters of integers, frozen ones that are not exchanged,
            and values that are no tensors.
    """

    sharing: Sharing
    specs: Mapping[str, TensorSpec]
    names: tuple[str, ...]
    dim: int
    places: Mapping[str, slice]
    personal: frozenset[str]
    buffers: BufferLayout
    built: Mapping[str, Tensor]
    held: Mapping[str, object]

    def state(self, vector: Tensor, frozen: Tensor, buffers: bytes, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the state of a model, as tensors of their own on the CPU, by name.

        Args:
            vector: float32, shape (D,): the exchanged part. frozen: float32: what follows that.
            buffers: the block of the merged buffers that are not as they were built.
            kept: personal tensors of this client by name, complex ones as pairs of floats; the others are as built.
        """
        own = {name: one for name, one in kept.items() if name in self.personal}
        named = {**self.built, **own, **self.buffers.unpack(buffers)}
        return {name: self._value(name, vector, frozen, named) for name in self.names}

    def _value(self, name: str, vector: Tensor, frozen: Tensor, named: Mapping[str, Tensor]) -> Any:
        if name in self.held:
            value = self.held[name]
            return _copied(value.detach().cpu()) if isinstance(value, Tensor) else value
        spec, place = self.specs[name], self.places.get(name)
        if place is None:
            values = named[spec.first]
        else:
            is_exchanged = place.stop <= self.dim
            values = vector[place] if is_exchanged else frozen[place.start - self.dim : place.stop - self.dim]
        values = values.reshape(spec.shape_in_floats)
        return _copied(restored(values, spec.dtype) if spec.dtype.is_complex else values).to(spec.dtype)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
