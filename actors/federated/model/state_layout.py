"""Where the values of a model are, for one sharing: in its vector, and by the names of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.aggregation.merged_buffers import MERGEABLE, BufferLayout
from gradbus.actors.federated.model.sharing import Sharing, TensorSpec, divide, layout_of, shape_of
from gradbus.runtime.complex_pairs import count_floats, restored
from gradbus.runtime.saved_state import Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VectorLayout:
    """Places the exchanged tensors of a model in a vector, and behind them the frozen ones.

    Attributes:
        sharing: what decides which tensors these are.
        dim, frozen_dim: numbers of values of both. places: of every name in the vector; tied weights share one.
        layout: 64-bit hash over names, shapes and dtypes: equal on nodes whose vectors mean the same. layouts: that,
            and the one that gradbus 0.1 has written into a checkpoint of a compiled model.
        table, frozen_table: name, dtype and shape of each tensor, in the order of the vector.
        frozen_names: of the frozen ones, tied weights under each of their names.
        personal: the tensors that stay at a client, in the module's order.
        integers: the parameters of integers, which stay as they were built.
        buffers: the buffers of integers and booleans that are merged.
        names: which names of the module's state are tied, or have no saved values, for ``StateNames`` of a checkpoint.
    """

    sharing: Sharing
    dim: int
    frozen_dim: int
    places: dict[str, slice]
    layout: int
    layouts: frozenset[int]
    table: list[Row]
    frozen_table: list[Row]
    frozen_names: list[str]
    personal: list[TensorSpec]
    integers: list[TensorSpec]
    buffers: BufferLayout
    names: dict[str, Any]

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], state_names: Iterable[str], sharing: Sharing) -> VectorLayout:
        """Lay out a model of these tensors. Raises ConfigError: as :func:`.sharing.divide`.

        Args:
            state_names: all names of the module's state, also of values that are no tensors.
        """
        division = divide(specs, sharing)
        shape = shape_of(specs, division)
        places: dict[str, slice] = {}
        tables: tuple[list[Row], list[Row]] = ([], [])
        seen: dict[str, slice] = {}  # by first name
        size = 0
        for names, table in zip((division.shared, division.constant), tables, strict=True):
            for spec in specs:
                if spec.name not in names:
                    continue
                if spec.first not in seen:
                    seen[spec.first] = slice(size, size + count_floats(spec.dtype, spec.shape))
                    size = seen[spec.first].stop
                    table.append(spec.row)
                places[spec.name] = seen[spec.first]
        firsts = [spec for spec in specs if spec.name == spec.first]
        personal = [spec for spec in firsts if spec.name in division.personal]
        integers = [spec for spec in firsts if spec.kind != "buffer" and spec.dtype in MERGEABLE]
        buffers = layout_of(specs, sharing)
        saved = {*places, *buffers.names, *(spec.name for spec in (*personal, *integers))}
        tied = {spec.name: spec.first for spec in specs if spec.first != spec.name}
        return cls(
            sharing=sharing,
            dim=shape.dim,
            frozen_dim=shape.frozen_dim,
            places=places,
            layout=shape.layout,
            layouts=frozenset({shape.layout, shape_of(specs, division, as_named=True).layout}),
            table=tables[0],
            frozen_table=tables[1],
            frozen_names=[spec.name for spec in specs if spec.name in division.constant],
            personal=personal,
            integers=integers,
            buffers=buffers,
            names={"tied": tied, "unsaved": [name for name in state_names if name not in saved and name not in tied]},
        )


@dataclass(frozen=True, slots=True, eq=False)
class StateLayout:
    """Says of each name of a module's state where its value is: also of a model that has arrived while the module is
    being trained. It does not change, so that any thread may read it.

    Attributes:
        layout: of the vector.
        specs: the tensors, by name. names: all of the state, in its order.
        built: copies of the personal tensors and the merged buffers, as they were built.
        held: what is in neither, and no training changes: parameters of integers, frozen ones that are not exchanged,
            and values that are no tensors.
    """

    layout: VectorLayout
    specs: Mapping[str, TensorSpec]
    names: tuple[str, ...]
    built: Mapping[str, Tensor]
    held: Mapping[str, object]

    def state(self, vector: Tensor, frozen: Tensor, buffers: bytes, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the state of a model, as tensors of their own on the CPU, by name.

        Args:
            vector: float32, shape (D,): the exchanged part. frozen: float32: what follows that.
            buffers: the block of the merged buffers that are not as they were built.
            kept: personal tensors of this client by name, complex ones as pairs of floats; the others are as built.
        """
        personal = {spec.name for spec in self.layout.personal}
        own = {name: one for name, one in kept.items() if name in personal}
        named = {**self.built, **own, **self.layout.buffers.unpack(buffers)}
        return {name: self._value(name, vector, frozen, named) for name in self.names}

    def _value(self, name: str, vector: Tensor, frozen: Tensor, named: Mapping[str, Tensor]) -> Any:
        if name in self.held:
            value = self.held[name]
            return _copied(value.detach().cpu()) if isinstance(value, Tensor) else value
        spec, place, dim = self.specs[name], self.layout.places.get(name), self.layout.dim
        if place is None:
            values = named[spec.first]
        else:
            values = vector[place] if place.stop <= dim else frozen[place.start - dim : place.stop - dim]
        values = values.reshape(spec.shape_in_floats)
        return _copied(restored(values, spec.dtype) if spec.dtype.is_complex else values).to(spec.dtype)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
