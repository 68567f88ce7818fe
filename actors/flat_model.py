"""A model as one vector: what travels on the wire and what is averaged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class FlatModel:
    """All floating-point tensors of a module's state (parameters, and buffers such as running means), in its order.

    Where they all are float32 on one device the module is made to live in the vector: :attr:`vector` then *is* the
    model, without a second copy. Otherwise :meth:`read` and :meth:`write` copy. Integer buffers (counters) stay local.

    Attributes:
        module: the module.
        dim: number of elements.
        layout: 64-bit hash over names, shapes and dtypes: two nodes with equal layout mean the same vector.
        table: name, dtype and shape of each tensor in the vector, in the order in which they follow one another there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places: dict[str, slice] = {}  # of every name; tied weights share one, and travel once
        seen: dict[int, slice] = {}
        text: list[str] = []
        self.table: list[tuple[str, str, list[int]]] = []
        self.dim = 0
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                continue
            if id(tensor) not in seen:
                seen[id(tensor)] = slice(self.dim, self.dim + tensor.numel())
                self.dim += tensor.numel()
                text.append(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}")
                self.table.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            self._places[name] = seen[id(tensor)]
        self.layout = int.from_bytes(hashlib.sha256("\n".join(text).encode()).digest()[:8], "little")
        self._vector: Tensor | None = None
        kinds = {(tensor.dtype, tensor.device) for tensor, _ in self._tensors()}
        if len(kinds) == 1 and next(iter(kinds))[0] == torch.float32:
            self._vector = torch.empty(self.dim, device=next(iter(kinds))[1])
            for tensor, place in self._tensors():
                view = self._vector[place].view(tensor.shape)
                view.copy_(tensor.detach())
                tensor.data = view

    def _tensors(self) -> list[tuple[Tensor, slice]]:
        """The tensors and their places, as the module has them now: ``to()`` and others put new ones in."""
        state = self.module.state_dict(keep_vars=True)
        return [(state[name], place) for name, place in self._places.items()]

    @property
    def _in_place(self) -> bool:
        """Whether the module still lives in the vector: a training function may have moved it elsewhere."""
        if self._vector is None:
            return False
        item = self._vector.element_size()
        start = self._vector.data_ptr()
        return all(
            tensor.data_ptr() == start + place.start * item and tensor.is_contiguous() and tensor.dtype == torch.float32
            for tensor, place in self._tensors()
        )

    @torch.no_grad()
    def read(self) -> Tensor:
        """The model as float32 on the CPU, shape (D,). It may be the live vector: copy it if the model changes."""
        if self._in_place:
            assert self._vector is not None
            return self._vector if self._vector.device.type == "cpu" else self._vector.cpu()
        vector = torch.empty(self.dim)
        for tensor, place in self._tensors():
            vector[place] = tensor.detach().to("cpu", torch.float32).reshape(-1)
        return vector

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the model to ``vector``, float32, shape (D,)."""
        if vector.shape != (self.dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for a model of {self.dim} values")
        if self._in_place:
            assert self._vector is not None
            self._vector.copy_(vector)
            return
        for tensor, place in self._tensors():
            tensor.copy_(vector[place].view(tensor.shape))

    def hold(self, vector: Tensor) -> None:
        """Make the model that of this vector, where it does not live in it anyway."""
        if self.read().data_ptr() != vector.data_ptr():
            self.write(vector)

    def vector_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector that a module with these tensors has, float32, shape (D,).

        Raises:
            KeyError: a tensor of this model is missing. ValueError: one has another shape.
        """
        vector = torch.empty(self.dim)
        for name, (tensor, place) in zip(self._places, self._tensors(), strict=True):
            if name not in tensors:
                raise KeyError(f"no tensor {name!r}, there are {sorted(tensors)[:8]}")
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"{name!r} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}")
            vector[place] = tensors[name].to(torch.float32).reshape(-1)
        return vector
