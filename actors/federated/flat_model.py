"""A model as one vector: what travels on the wire and what is averaged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

Exchange = Literal["trained", "all"]


class FlatModel:
    """The floating-point tensors of a module's state as one vector, of which the first part travels.

    What is trained travels: parameters that require a gradient, and floating-point buffers, such as running means. What
    does not is the rest, the frozen parameters, behind it. With ``exchange="all"``, or where no parameter requires a
    gradient (then something else than a gradient trains them), everything travels, in the module's order.

    Where all tensors are float32 on one device the module is made to live in the vector: a vector that is read then
    *is* the model, without a second copy. Otherwise :meth:`read` and :meth:`write` copy. Integer buffers (counters)
    stay local.

    Attributes:
        module: the module.
        dim: number of elements that travel. frozen_dim: of those that do not.
        layout: 64-bit hash over names, shapes and dtypes: two nodes with equal layout mean the same vector.
        frozen: 64-bit hash over the values of what does not travel, as float32; 0 if there is nothing.
        table: name, dtype and shape of each tensor that travels, in the order in which they follow one another.
        everything, trained: ``dim`` and ``layout`` where all travels, and where only what is trained does; the latter
            zeros if that is the same.
    """

    dim: int
    frozen_dim: int
    layout: int
    frozen: int

    def __init__(self, module: nn.Module, exchange: Exchange = "trained") -> None:
        self.module = module
        floats = _floats(module)
        self.everything, self.trained = (_shape_of(floats, kind) for kind in ("all", "trained"))
        if self.everything == self.trained:
            self.trained = (0, 0)
        self.arrange(exchange)

    def arrange(self, exchange: Exchange) -> None:
        """Lay the vector out anew, if it is not like that already; the module keeps its values."""
        if getattr(self, "_exchange", None) == exchange:
            return
        self._exchange = exchange
        floats = _floats(self.module)
        travels = _travelling(floats, exchange)
        self._places: dict[str, slice] = {}  # of every name; tied weights share one, and travel once
        self.table: list[tuple[str, str, list[int]]] = []
        seen: dict[int, slice] = {}
        size = 0
        for of_frozen in (False, True):
            for name, tensor in floats.items():
                if travels[name] is of_frozen:
                    continue
                if id(tensor) not in seen:
                    seen[id(tensor)] = slice(size, size + tensor.numel())
                    size += tensor.numel()
                    if not of_frozen:
                        dtype = str(tensor.dtype).removeprefix("torch.")
                        self.table.append((name, dtype, list(tensor.shape)))
                self._places[name] = seen[id(tensor)]
            if not of_frozen:
                self.dim = size
        self.frozen_dim = size - self.dim
        self._frozen_names = [name for name in floats if not travels[name]]
        self.layout = _layout_of(floats, travels)
        self._vector: Tensor | None = None
        kinds = {(tensor.dtype, tensor.device) for tensor in floats.values()}
        if len(kinds) == 1 and next(iter(kinds))[0] == torch.float32:
            self._vector = torch.empty(size, device=next(iter(kinds))[1])
            for tensor, place in self._tensors():
                view = self._vector[place].view(tensor.shape)
                view.copy_(tensor.detach())
                tensor.data = view
        self._note_frozen()

    def _tensors(self, part: slice | None = None) -> list[tuple[Tensor, slice]]:
        """The tensors of a part of the vector, and their places, as the module has them now: ``to()`` and others put
        new ones in."""
        state = self.module.state_dict(keep_vars=True)
        return [
            (state[name], place)
            for name, place in self._places.items()
            if part is None or part.start <= place.start < part.stop or place.start == place.stop
        ]

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

    @property
    def _travelling(self) -> slice:
        return slice(0, self.dim)

    @property
    def _resting(self) -> slice:
        return slice(self.dim, self.dim + self.frozen_dim)

    def read(self) -> Tensor:
        """What travels, as float32 on the CPU, shape (D,). It may be the live vector: copy it if the model changes."""
        return self._read(self._travelling)

    def read_frozen(self) -> Tensor:
        """What does not travel, float32 on the CPU. It may be live, too."""
        return self._read(self._resting)

    @torch.no_grad()
    def _read(self, part: slice) -> Tensor:
        if self._in_place:
            assert self._vector is not None
            values = self._vector if part.stop - part.start == self._vector.numel() else self._vector[part]
            return values if values.device.type == "cpu" else values.cpu()
        vector = torch.empty(part.stop - part.start)
        for tensor, place in self._tensors(part):
            vector[_shifted(place, part)] = tensor.detach().to("cpu", torch.float32).reshape(-1)
        return vector

    def write(self, vector: Tensor) -> None:
        """Set what travels to ``vector``, float32, shape (D,)."""
        if vector.shape != (self.dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for a model of {self.dim} values")
        self._write(self._travelling, vector)

    def hold(self, vector: Tensor) -> None:
        """Make the model that of this vector, where it does not live in it anyway."""
        if self.read().data_ptr() != vector.data_ptr():
            self.write(vector)

    def write_frozen(self, vector: Tensor) -> None:
        """Set what does not travel, float32."""
        if vector.shape != (self.frozen_dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for {self.frozen_dim} frozen values")
        self._write(self._resting, vector)
        self._note_frozen()

    @torch.no_grad()
    def _write(self, part: slice, vector: Tensor) -> None:
        if self._in_place:
            assert self._vector is not None
            self._vector[part].copy_(vector)
            return
        for tensor, place in self._tensors(part):
            tensor.copy_(vector[_shifted(place, part)].view(tensor.shape))

    def check_frozen(self) -> None:
        """Raises ValueError: what does not travel has been trained after all, here and on no other node."""
        state = self.module.state_dict(keep_vars=True)
        thawed = [name for name in self._frozen_names if state[name].requires_grad]
        if not thawed and self._versions() == self._frozen_versions:
            return
        if thawed or _hash_of(self.read_frozen()) != self.frozen:
            what = f"parameter {thawed[0]!r} was" if thawed else "parameters were"
            raise ValueError(
                f"{what} frozen (requires_grad=False) when the model was built, and training has changed that: it "
                f"would not reach the other nodes. Freeze it in build_model only if it stays so, or set "
                f"federated.exchange='all' on the controller"
            )

    def _note_frozen(self) -> None:
        self.frozen = _hash_of(self.read_frozen()) if self.frozen_dim else 0
        self._frozen_versions = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """What changes when anybody writes to a frozen tensor, or puts another in its place."""
        state = self.module.state_dict(keep_vars=True)
        return [(state[name].data_ptr(), state[name]._version) for name in self._frozen_names]

    def vector_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector that a module with these tensors has, float32: what travels, and behind it what does not.

        Raises:
            KeyError: a tensor of this model is missing. ValueError: one has another shape.
        """
        vector = torch.empty(self.dim + self.frozen_dim)
        for name, (tensor, place) in zip(self._places, self._tensors(), strict=True):
            if name not in tensors:
                raise KeyError(f"no tensor {name!r}, there are {sorted(tensors)[:8]}")
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"{name!r} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}")
            vector[place] = tensors[name].to(torch.float32).reshape(-1)
        return vector


def _shape_of(floats: Mapping[str, Tensor], exchange: Exchange) -> tuple[int, int]:
    """``dim`` and ``layout`` with that exchange."""
    travels = _travelling(floats, exchange)
    sizes = {id(tensor): tensor.numel() for name, tensor in floats.items() if travels[name]}
    return sum(sizes.values()), _layout_of(floats, travels)


def _floats(module: nn.Module) -> dict[str, Tensor]:
    return {n: tensor for n, tensor in module.state_dict(keep_vars=True).items() if tensor.is_floating_point()}


def _travelling(floats: Mapping[str, Tensor], exchange: Exchange) -> dict[str, bool]:
    trained = any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in floats.values())
    everything = exchange == "all" or not trained
    return {
        name: everything or tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        for name, tensor in floats.items()
    }


def _layout_of(floats: Mapping[str, Tensor], travels: Mapping[str, bool]) -> int:
    """Tied weights count once, by their first name. Frozen ones stand behind, marked as such."""
    first = {id(tensor): name for name, tensor in reversed(list(floats.items()))}
    lines: tuple[list[str], list[str]] = ([], [])
    for name, tensor in floats.items():
        if first[id(tensor)] == name:
            lines[int(not travels[name])].append(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}")
    text = "\n".join([*lines[0], *(f"frozen {line}" for line in lines[1])])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _hash_of(values: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(values.contiguous().numpy().data).digest()[:8], "little") or 1


def _shifted(place: slice, part: slice) -> slice:
    return slice(place.start - part.start, place.stop - part.start)
