"""A model as one vector: the part that is exchanged and averaged, and behind it the frozen parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from gradbus.runtime.wire.control import Welcome

Exchange = Literal["trained", "all"]


def exchange_of(welcome: Welcome) -> Exchange:
    """What models contain in the run of this Welcome."""
    return "trained" if welcome.frozen else "all"


class FlatModel:
    """The floating-point tensors of a module's state as one vector, of which the first part is exchanged.

    Exchanged are parameters that require a gradient, and floating-point buffers, such as running means; with
    ``exchange="all"``, or where no parameter requires a gradient, all of them, in the module's order. The others are
    frozen. Where all tensors are float32 on one device they become views of the vector, which then *is* the model.
    Otherwise :meth:`read` and :meth:`write` copy. Integer buffers stay local.

    Attributes:
        dim: number of exchanged elements. frozen_dim: of the others.
        layout: 64-bit hash over names, shapes and dtypes: equal on nodes whose vectors mean the same.
        frozen: 64-bit hash over the frozen values as float32; 0: there are none.
        table: name, dtype and shape of each exchanged tensor, in the order of the vector.
        everything, trained: ``dim`` and ``layout`` with all exchanged, and with the trained part alone; zeros if equal.
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
        """Lay the vector out for this exchange; the module keeps its values."""
        if getattr(self, "_exchange", None) == exchange:
            return
        self._exchange = exchange
        floats = _floats(self.module)
        exchanged = _exchanged_names(floats, exchange)
        self._places: dict[str, slice] = {}  # of every name; tied weights share one
        self.table: list[tuple[str, str, list[int]]] = []
        seen: dict[int, slice] = {}
        size = 0
        for of_frozen in (False, True):
            for name, tensor in floats.items():
                if exchanged[name] is of_frozen:
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
        self._frozen_names = [name for name in floats if not exchanged[name]]
        self.layout = _layout_of(floats, exchanged)
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
        """The module's tensors of a part of the vector, and their places. ``to()`` and others replace tensors."""
        state = self.module.state_dict(keep_vars=True)
        return [
            (state[name], place)
            for name, place in self._places.items()
            if part is None or part.start <= place.start < part.stop or place.start == place.stop
        ]

    def parameters(self) -> list[tuple[nn.Parameter, slice]]:
        """Exchanged parameters that are trained, each with its place in the vector."""
        state = self._tensors(self._exchanged)
        return [(one, place) for one, place in state if isinstance(one, nn.Parameter) and one.requires_grad]

    @property
    def _in_place(self) -> bool:
        """Whether the tensors are still views of the vector: a training function may have moved them."""
        if self._vector is None:
            return False
        item = self._vector.element_size()
        start = self._vector.data_ptr()
        return all(
            tensor.data_ptr() == start + place.start * item and tensor.is_contiguous() and tensor.dtype == torch.float32
            for tensor, place in self._tensors()
        )

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
        if self._in_place:
            assert self._vector is not None
            values = self._vector if part.stop - part.start == self._vector.numel() else self._vector[part]
            return values if values.device.type == "cpu" else values.cpu()
        vector = torch.empty(part.stop - part.start)
        for tensor, place in self._tensors(part):
            vector[_shifted(place, part)] = tensor.detach().to("cpu", torch.float32).reshape(-1)
        return vector

    def write(self, vector: Tensor) -> None:
        """Set the exchanged part to ``vector``, float32, shape (D,)."""
        if vector.shape != (self.dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for a model of {self.dim} values")
        self._write(self._exchanged, vector)

    def hold(self, vector: Tensor) -> None:
        """Set the exchanged part to this vector, unless it is a view of it."""
        if self.read().data_ptr() != vector.data_ptr():
            self.write(vector)

    def write_frozen(self, vector: Tensor) -> None:
        """Set the frozen part, float32."""
        if vector.shape != (self.frozen_dim,):
            raise ValueError(f"vector of shape {tuple(vector.shape)} for {self.frozen_dim} frozen values")
        self._write(self._rest, vector)
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
        """Raises ValueError: a frozen parameter has been trained, on this node alone."""
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
        """Changes when a frozen tensor is written to or replaced."""
        state = self.module.state_dict(keep_vars=True)
        return [(state[name].data_ptr(), state[name]._version) for name in self._frozen_names]

    def vector_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The whole vector of a module with these tensors, float32.

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
    exchanged = _exchanged_names(floats, exchange)
    sizes = {id(tensor): tensor.numel() for name, tensor in floats.items() if exchanged[name]}
    return sum(sizes.values()), _layout_of(floats, exchanged)


def _floats(module: nn.Module) -> dict[str, Tensor]:
    return {n: tensor for n, tensor in module.state_dict(keep_vars=True).items() if tensor.is_floating_point()}


def _exchanged_names(floats: Mapping[str, Tensor], exchange: Exchange) -> dict[str, bool]:
    trained = any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in floats.values())
    everything = exchange == "all" or not trained
    return {
        name: everything or tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        for name, tensor in floats.items()
    }


def _layout_of(floats: Mapping[str, Tensor], exchanged: Mapping[str, bool]) -> int:
    """Tied weights count once, by their first name. Frozen ones come last, marked as such."""
    first = {id(tensor): name for name, tensor in reversed(list(floats.items()))}
    lines: tuple[list[str], list[str]] = ([], [])
    for name, tensor in floats.items():
        if first[id(tensor)] == name:
            lines[int(not exchanged[name])].append(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}")
    text = "\n".join([*lines[0], *(f"frozen {line}" for line in lines[1])])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _hash_of(values: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(values.contiguous().numpy().data).digest()[:8], "little") or 1


def _shifted(place: slice, part: slice) -> slice:
    return slice(place.start - part.start, place.stop - part.start)
