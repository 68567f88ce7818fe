"""A model as one vector: the part that is exchanged and averaged, and behind it the frozen parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.actors.aggregation.merged_buffers import BufferLayout
from gradbus.actors.federated.model.module_changes import Structure, UnexchangedTensors, misfit, structure_of
from gradbus.actors.federated.model.sharing import (
    Shape,
    Sharing,
    StateLayout,
    TensorSpec,
    VectorLayout,
    divide,
    shape_of,
    specs_of,
)
from gradbus.runtime.complex_pairs import as_pairs, from_pairs, restored
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.saved_state import Row
from gradbus.runtime.torch_compat import uncompiled_names

log = get_logger("model")


@dataclass(frozen=True, slots=True, eq=False)
class _Arrangement:
    """Holds what a module has for one sharing.

    Attributes:
        layout: of its vector. state_layout: of its whole state.
        vector: of which its tensors are views; None: they have several dtypes or devices.
    """

    layout: VectorLayout
    state_layout: StateLayout
    vector: Tensor | None


class FlatModel:
    """The tensors of floats of a module's state as one vector, of which the first part is exchanged.

    Which tensors are exchanged, frozen, or personal is decided by :func:`.sharing.divide`. The vector has the first
    two, in the module's order. Where these are all float32 on one device they become views of the vector, which then
    *is* the model. Otherwise :meth:`read` and :meth:`write` copy. A complex number is two of its values. Personal
    tensors, integer buffers among them, are not in it: they are read and written by name, in their own dtype, complex
    ones as pairs of floats.

    Attributes:
        frozen: 64-bit hash over the frozen values as float32; 0: there are none.
        everything, trained: ``dim`` and ``layout`` with all exchanged, and with the trained part alone; zeros if equal.
    """

    def __init__(
        self, module: nn.Module, sharing: Sharing | None = None, *, rebuild: Callable[[], nn.Module] | None = None
    ) -> None:
        """Lay a module out.

        Args:
            rebuild: builds the module again: for :meth:`repair`, and for the initial values of tensors that become
                personal later on. None: those values are the initial ones, and nothing is repaired.

        Raises:
            ConfigError: the module has no floating-point tensor, or one without a shape yet.
        """
        self.module = module
        self.specs = specs_of(module)
        if not any(spec.is_inexact for spec in self.specs):
            raise ConfigError(
                f"the model has no floating-point tensor, so there is nothing to train or exchange: build_model has "
                f"returned {type(module).__name__} with {len(self.specs)} tensors. Return a module with parameters"
            )
        self._spec_of = {spec.name: spec for spec in self.specs}
        self._rebuild = rebuild
        self._before: Structure | None = None  # of the module, when the task was given it
        self._has_failed = False
        self._is_as_built = True
        shapes = [self.shape_of(Sharing(exchange)) for exchange in ("all", "trained")]
        self.everything, self.trained = ((shape.dim, shape.layout) for shape in shapes)
        if self.everything == self.trained:
            self.trained = (0, 0)
        self._arrangement = self._arranged(sharing or Sharing())
        self.frozen, self._frozen_versions = self._frozen_part()

    @cached_property
    def unexchanged(self) -> UnexchangedTensors:
        """Return what names, once, the tensors that are neither exchanged nor personal and are trained all the same."""
        return UnexchangedTensors(self.specs)

    def shape_of(self, sharing: Sharing) -> Shape:
        """Sizes and layout with that sharing, which is not arranged. Raises ConfigError: as :func:`.sharing.divide`."""
        return shape_of(self.specs, divide(self.specs, sharing))

    def arrange(self, sharing: Sharing) -> None:
        """Lay the vector out for this sharing; the module keeps its values."""
        if self.sharing != sharing:
            self._arrangement = self._arranged(sharing)
            self._note_frozen()

    def _arranged(self, sharing: Sharing) -> _Arrangement:
        """Lay the module out for this sharing: its tensors become views of a new vector, where they can."""
        state = self.module.state_dict(keep_vars=True)
        layout = VectorLayout.of(self.specs, state, sharing)
        vector: Tensor | None = None
        kinds = {(state[name].dtype, state[name].device) for name in layout.places}
        if len(kinds) == 1 and next(iter(kinds))[0] == torch.float32:
            size = layout.dim + layout.frozen_dim
            vector = torch.empty(size, dtype=torch.float32, device=next(iter(kinds))[1])
        built = self._initial_values(layout)
        if vector is not None:
            for name, place in layout.places.items():
                view = vector[place].view(state[name].shape)
                view.copy_(state[name].detach())
                state[name].data = view
        in_vector_or_built = {*layout.places, *layout.buffers.names, *(spec.name for spec in layout.personal)}
        state_layout = StateLayout(
            layout=layout,
            specs=self._spec_of,
            names=tuple(state),
            built=built,
            held={
                name: one
                for name, one in state.items()
                if name not in self._spec_of or self._spec_of[name].first not in in_vector_or_built
            },
        )
        return _Arrangement(layout, state_layout, vector)

    def _initial_values(self, layout: VectorLayout) -> dict[str, Tensor]:
        """Copies of the personal tensors and the merged buffers as they were built."""
        names = [*(spec.name for spec in layout.personal), *layout.buffers.names]
        is_changed = names and not self._is_as_built and self._rebuild is not None
        source = self._rebuild() if is_changed and self._rebuild is not None else self.module
        return _copied(source.state_dict(), names)

    # The arrangement: see :class:`.sharing.VectorLayout`

    @property
    def sharing(self) -> Sharing:
        """Return what decides which tensors are exchanged, frozen, or personal."""
        return self._arrangement.layout.sharing

    @property
    def dim(self) -> int:
        """Return the number of exchanged values."""
        return self._arrangement.layout.dim

    @property
    def frozen_dim(self) -> int:
        """Return the number of frozen values, which follow the exchanged ones in the vector."""
        return self._arrangement.layout.frozen_dim

    @property
    def layout(self) -> int:
        """Return the 64-bit hash that is equal on nodes whose vectors mean the same."""
        return self._arrangement.layout.layout

    @property
    def layouts(self) -> frozenset[int]:
        """Return ``layout``, and the one that gradbus 0.1 has written into a checkpoint of a compiled model."""
        return self._arrangement.layout.layouts

    @property
    def table(self) -> list[Row]:
        """Return name, dtype and shape of each exchanged tensor, in the order of the vector."""
        return self._arrangement.layout.table

    @property
    def frozen_table(self) -> list[Row]:
        """Return the same of the frozen tensors."""
        return self._arrangement.layout.frozen_table

    @property
    def personal(self) -> list[TensorSpec]:
        """Return each personal tensor, in the module's order."""
        return self._arrangement.layout.personal

    @property
    def integers(self) -> list[TensorSpec]:
        """Return the parameters of integers, which stay as they were built."""
        return self._arrangement.layout.integers

    @property
    def buffers(self) -> BufferLayout:
        """Return the buffers of integers and booleans that are merged: they are not in the vector either."""
        return self._arrangement.layout.buffers

    @property
    def names(self) -> dict[str, Any]:
        """Return what names of the state are tied, or have no saved values, for ``StateNames`` of a checkpoint."""
        return self._arrangement.layout.names

    @property
    def state_layout(self) -> StateLayout:
        """Return where the values of each name of the state are, for any thread."""
        return self._arrangement.state_layout

    # What the task has done to the module

    def note_failure(self) -> None:
        """Note that the task has raised, possibly in the middle of a change of the module: :meth:`repair` then compares
        more than names and shapes."""
        self._has_failed = True

    @property
    def misfit(self) -> str:
        """In which names or shapes the module's tensors differ from those that it was built with; empty: in none."""
        return misfit(self.module, self.specs)

    def repair(self) -> None:
        """Build the module again, if the task has left it with tensors of other names or shapes, or has failed and left
        it with other tensors, submodules or hooks than it was given. Called before the task is given the module.

        What is exchanged or personal has to be written again then. Frozen values are kept if the failure has left
        them, else they are as they were built, and :attr:`frozen` says so.

        Raises:
            ConfigError: ``build_model`` does not build the same module again.
        """
        structure = structure_of(self.module)
        why = self.misfit
        if not why and self._has_failed and (structure != self._before or self._is_frozen_part_changed()):
            why = "what has failed has left it with other tensors, submodules, hooks or frozen values"
        self._has_failed = False
        if why and self._rebuild is not None:
            self._build_again(self._rebuild())
            structure = structure_of(self.module)
            log.warning(
                "model built again",
                reason=why,
                effect="whatever else the task has kept from the old one, such as an optimizer, is of no use any more",
            )
        self._before = structure

    def _is_frozen_part_changed(self) -> bool:
        return self._versions() != self._frozen_versions

    def _build_again(self, module: nn.Module) -> None:
        if module is self.module or specs_of(module) != self.specs:
            why = misfit(module, self.specs) or "it is the same object, or has other dtypes or other frozen parameters"
            raise ConfigError(
                f"the model has to be built again, as a training has changed it, and build_model returns a module that "
                f"differs from the first one: {why}. Let build_model make a new module in each call"
            )
        vector = self._arrangement.vector
        frozen = None if vector is None else vector[self._rest].to("cpu", copy=True)
        known = self.frozen
        self.module, self._is_as_built = module, True
        self._arrangement = self._arranged(self.sharing)
        self._note_frozen()
        if frozen is not None and self.frozen != known and hash_of(frozen) == known:
            self.write_frozen(frozen)

    # By name

    def read_personal(self) -> dict[str, Tensor]:
        """Copies of the personal tensors on the CPU, but for those buffers of integers, and frozen parameters, that are
        as they were built. There are none where nothing is to be kept by pattern or rule: a training then begins with
        them as built."""
        if not self.personal or not self.sharing.keeps_some:
            return {}
        found = _copied(self.module.state_dict(), [spec.name for spec in self.personal])
        return {
            spec.name: found[spec.name]
            for spec in self.personal
            if (spec.is_inexact and spec.kind != "frozen")
            or not torch.equal(found[spec.name], self.state_layout.built[spec.name])
        }

    def write_personal(self, kept: Mapping[str, Tensor]) -> None:
        """Set the personal tensors to what :meth:`read_personal` gave; those that it left out, as they were built.
        Buffers that are merged now, and that a client of version 0.1 has kept, are left alone.

        Raises:
            CheckpointError: it is of a model with other personal tensors.
        """
        own, merged = {spec.name: spec for spec in self.personal}, set(self.buffers.names)
        known = {name: one for name, one in self.state_layout.built.items() if name in own}
        self._write_named({**known, **{name: one for name, one in kept.items() if name not in merged}}, own)

    @property
    def personal_table(self) -> list[Row]:
        """Name, dtype and shape of each personal tensor of floats, in the module's order."""
        return [spec.row for spec in self.personal if spec.is_inexact]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the exchanged tensors in floats, in the order of the vector."""
        return [self._spec_of[name].shape_in_floats for name, _, _ in self.table]

    def read_buffers(self) -> dict[str, Tensor]:
        """Copies of the merged buffers on the CPU."""
        return _copied(self.module.state_dict(), self.buffers.names) if self.buffers else {}

    def write_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Set merged buffers to these, and those that are not named as they were built. Raises CheckpointError: they
        are of another model."""
        if self.buffers:
            self._write_named(
                {**self.built_buffers, **values}, {name: self._spec_of[name] for name in self.buffers.names}
            )

    @property
    def built_buffers(self) -> dict[str, Tensor]:
        """The merged buffers as they were built, which stay as they are."""
        return {name: self.state_layout.built[name] for name in self.buffers.names}

    def read_integers(self) -> dict[str, Tensor]:
        """Copies of the parameters of integers on the CPU."""
        names = sorted(spec.name for spec in self.integers)  # the order in which a file gives them back
        return _copied(self.module.state_dict(), names) if names else {}

    def write_integers(self, values: Mapping[str, Tensor]) -> None:
        """Set all of them. Raises CheckpointError: they are of another model."""
        self._write_named(values, {spec.name: spec for spec in self.integers})

    def read_fixed_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers of integers that are not merged."""
        names = [spec.name for spec in self.personal if not spec.is_inexact]
        return _copied(self.module.state_dict(), names) if names else {}

    def read_own(self) -> dict[str, Tensor]:
        """Copies of all that training can change, exchanged or personal, on the CPU."""
        return _copied(self.module.state_dict(), list(self._own_specs()))

    def write_own(self, kept: Mapping[str, Tensor]) -> None:
        """Set all that training can change to what :meth:`read_own` gave. Raises CheckpointError: it is of another
        model."""
        self._write_named(kept, self._own_specs())

    def _own_specs(self) -> dict[str, TensorSpec]:
        names = {*(name for name, _, _ in self.table), *self.buffers.names, *(spec.name for spec in self.personal)}
        return {spec.name: spec for spec in self.specs if spec.name in names}

    @torch.no_grad()
    def _write_named(self, tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
        self._is_as_built = False
        if tensors.keys() != specs.keys():
            odd = sorted(tensors.keys() ^ specs.keys())[:5]
            raise CheckpointError(
                f"what this client keeps is of a model with other tensors: {', '.join(map(repr, odd))} "
                f"are in one of them alone. Use the model of the run, or begin a new run"
            )
        state = self.module.state_dict(keep_vars=True) if tensors else {}
        for name, tensor in tensors.items():
            spec = specs[name]
            if spec.dtype.is_complex and tuple(tensor.shape) == spec.shape_in_floats:
                tensor = restored(tensor, spec.dtype)
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise CheckpointError(
                    f"what this client keeps has {name!r} as {tensor.dtype} of shape {tuple(tensor.shape)}, the model "
                    f"has {spec.dtype} of shape {spec.shape}. Use the model of the run, or begin a new run"
                )
            state[name].copy_(tensor)

    def _tensors(self, part: slice | None = None) -> list[tuple[Tensor, slice]]:
        """The module's tensors of a part of the vector, and their places. ``to()`` and others replace tensors."""
        state = self.module.state_dict(keep_vars=True)
        return [
            (state[name], place)
            for name, place in self._arrangement.layout.places.items()
            if part is None or part.start <= place.start < part.stop or place.start == place.stop
        ]

    def layers(self) -> dict[str, slice]:
        """The place of each exchanged tensor in the vector, by its name; tied weights share one."""
        return {name: place for name, place in self._arrangement.layout.places.items() if place.stop <= self.dim}

    def parameters(self) -> list[tuple[nn.Parameter, slice]]:
        """Exchanged parameters that are trained, each once, whatever its names, with its place in the vector."""
        state = {id(one): (one, place) for one, place in self._tensors(self._exchanged)}
        return [(one, place) for one, place in state.values() if isinstance(one, nn.Parameter) and one.requires_grad]

    def _vector_in_place(self) -> Tensor | None:
        """Return the vector, if the tensors are still views of it: a training function may have moved them."""
        if (vector := self._arrangement.vector) is None:
            return None
        item, start = vector.element_size(), vector.data_ptr()
        are_views = all(
            tensor.data_ptr() == start + place.start * item and tensor.is_contiguous() and tensor.dtype == torch.float32
            for tensor, place in self._tensors()
        )
        return vector if are_views else None

    @property
    def _exchanged(self) -> slice:
        return slice(0, self.dim)

    @property
    def _rest(self) -> slice:
        return slice(self.dim, self.dim + self.frozen_dim)

    def read(self) -> Tensor:
        """The exchanged part, float32 on the CPU, shape (D,). It may be live: copy it if the model changes."""
        return self._read(self._exchanged)

    def read_frozen(self) -> Tensor:
        """The frozen part, float32 on the CPU. It may be live, too."""
        return self._read(self._rest)

    @torch.no_grad()
    def _read(self, part: slice) -> Tensor:
        if (whole := self._vector_in_place()) is not None:
            values = whole if part.stop - part.start == whole.numel() else whole[part]
            return values if values.device.type == "cpu" else values.cpu()
        vector = torch.empty(part.stop - part.start, dtype=torch.float32)
        for tensor, place in self._tensors(part):
            vector[_shifted(place, part)] = as_pairs(tensor.detach()).to("cpu", torch.float32).reshape(-1)
        return vector

    def write(self, vector: Tensor) -> None:
        """Set the exchanged part to ``vector``, float32, shape (D,)."""
        if vector.shape != (self.dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for a model of {self.dim} values")
        self._write(self._exchanged, vector)

    def hold(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Set the exchanged part to this vector, unless it is a view of it, and the merged buffers to these, in a
        module that is repaired if need be."""
        self.repair()
        if self.read().data_ptr() != vector.data_ptr():
            self.write(vector)
        self.write_buffers(buffers)

    def write_frozen(self, vector: Tensor) -> None:
        """Set the frozen part, float32."""
        if vector.shape != (self.frozen_dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for {self.frozen_dim} frozen values")
        self._write(self._rest, vector)
        self._note_frozen()

    @torch.no_grad()
    def _write(self, part: slice, vector: Tensor) -> None:
        self._is_as_built = False
        if (whole := self._vector_in_place()) is not None:
            whole[part].copy_(vector)
            return
        for tensor, place in self._tensors(part):
            tensor.copy_(from_pairs(vector[_shifted(place, part)], tensor))

    def check_frozen(self) -> None:
        """Raises ValueError: a frozen parameter has been trained, on this node alone."""
        if not self._arrangement.layout.frozen_names:
            return
        state = self.module.state_dict(keep_vars=True)
        thawed = [name for name in self._arrangement.layout.frozen_names if state[name].requires_grad]
        if not thawed and self._versions() == self._frozen_versions:
            return
        if thawed or hash_of(self.read_frozen()) != self.frozen:
            what = f"parameter {thawed[0]!r} was" if thawed else "parameters were"
            raise ValueError(
                f"{what} frozen (requires_grad=False) when the model was built, and training has changed that: it "
                f"would not reach the other nodes. Freeze it in build_model only if it stays so, or set "
                f"federated.exchange='all' on the controller"
            )

    def _note_frozen(self) -> None:
        self.frozen, self._frozen_versions = self._frozen_part()

    def _frozen_part(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the hash of the frozen values as they are, and their versions."""
        return hash_of(self.read_frozen()) if self.frozen_dim else 0, self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """Changes when a frozen tensor is written to or replaced."""
        if not self._arrangement.layout.frozen_names:
            return []
        state = self.module.state_dict(keep_vars=True)
        return [
            (state[name].data_ptr(), state[name]._version)  # noqa: SLF001 - torch has no public name for it
            for name in self._arrangement.layout.frozen_names
        ]

    def vector_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The whole vector of a module with these tensors, float32; personal ones are not in it. Names may be those of
        the module before ``torch.compile``.

        Raises:
            KeyError: a tensor of this model is missing. ValueError: one has another shape.
        """
        vector = torch.empty(self.dim + self.frozen_dim, dtype=torch.float32)
        plain, own = uncompiled_names(tensors), uncompiled_names(self._arrangement.layout.places)
        tensors = {plain[name]: one for name, one in tensors.items()}
        for name, (tensor, place) in zip(own.values(), self._tensors(), strict=True):
            if name not in tensors:
                raise KeyError(f"no tensor {name!r}, there are {sorted(tensors)[:8]}")
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"{name!r} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}")
            if tensors[name].is_complex() != tensor.is_complex():
                raise ValueError(f"{name!r} is {tensors[name].dtype}, expected {tensor.dtype}".replace("torch.", ""))
            vector[place] = as_pairs(tensors[name]).to(torch.float32).reshape(-1)
        return vector


def _copied(state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Copies of these tensors on the CPU, complex ones as pairs of floats, as files have them."""
    return {name: as_pairs(state[name].detach()).to("cpu", copy=True).contiguous() for name in names}


def hash_of(values: Tensor) -> int:
    """Return the 64-bit hash by which frozen values, float32, are known; never 0."""
    return int.from_bytes(hashlib.sha256(values.contiguous().numpy().data).digest()[:8], "little") or 1


def hash_of_named(tensors: Mapping[str, Tensor]) -> int:
    """Return the 64-bit hash by which tensors with names are known; 0: there are none."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return (int.from_bytes(found.digest()[:8], "little") or 1) if tensors else 0


def _shifted(place: slice, part: slice) -> slice:
    return slice(place.start - part.start, place.stop - part.start)
