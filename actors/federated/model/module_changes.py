"""What training changes of a module beside the values that are exchanged.

Its structure it must leave as it found it, as tensors are exchanged by name and shape. And of the tensors that are not
exchanged none is left out without a word: each client goes on with its own values of them, or as they were built, and
the global model never has what was trained. A client names them once. Not named is what the run leaves to the clients
by a pattern, and what is no part of the model's state, such as buffers that are not persistent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradbus.actors.aggregation.merged_buffers import MERGEABLE
from gradbus.actors.federated.model.sharing import Sharing, TensorSpec, left_out
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Welcome

_NAMED = 3  # tensors in a text
_SHOWN = 5  # tensors in an event

log = get_logger("client")

ADDED = "register what training adds to the state in build_model"
PARAMETER = (
    "an integer parameter cannot be averaged: make it a buffer, which is merged, or name it in federated.share.exclude "
    "on the controller"
)
OTHER_DTYPE = (
    "a buffer of this dtype cannot be merged: use integers or booleans, or name it in federated.share.exclude on the "
    "controller"
)
PRIVATE = (
    "with federated.privacy an exact value would leave the client without noise: use a buffer of floats, or set it to "
    "keep in federated.buffers on the controller"
)
MASKED = (
    "with federated.secure_aggregation the controller would see the value of each client: a rule in federated.buffers "
    "on the controller, such as any or max, sends it in the clear, and keep leaves it here"
)


class Structure(NamedTuple):
    """A module without the values of its tensors. Two are equal if nothing else of the module has changed.

    Attributes:
        tensors: of each tensor of the state its name, dtype and shape, whether it requires a gradient, and the number
            of its hooks.
        modules: name, class and number of hooks of each submodule, the module itself included.
    """

    tensors: tuple[tuple[object, ...], ...]
    modules: tuple[tuple[object, ...], ...]


def structure_of(module: nn.Module) -> Structure:
    """Describe a module as it is now."""
    state = module.state_dict(keep_vars=True)
    tensors = [
        (name, one.dtype, tuple(one.shape), one.requires_grad, _count_hooks(one, _OF_TENSOR))
        for name, one in state.items()
        if isinstance(one, Tensor)
    ]
    modules = [(name, type(one), _count_hooks(one, _OF_MODULE)) for name, one in module.named_modules()]
    return Structure(tuple(tensors), tuple(modules))


# torch has no public way to list hooks.
_OF_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _count_hooks(owner: object, kinds: Sequence[str]) -> int:
    return sum(len(getattr(owner, kind, None) or ()) for kind in kinds)


def misfit(module: nn.Module, specs: Sequence[TensorSpec]) -> str:
    """Say in which names or shapes a module's tensors differ from those that it was built with; empty: in none.

    More tensors than these are no misfit: a cache that the first forward pass registers, for example. Nor is another
    dtype or device.
    """
    state = module.state_dict(keep_vars=True)
    shapes = {name: tuple(one.shape) for name, one in state.items() if isinstance(one, Tensor)}
    gone = [spec.name for spec in specs if spec.name not in shapes]
    if gone:
        known = {spec.name for spec in specs}
        added = [name for name in shapes if name not in known]
        return f"{_some(gone)} {_are(gone)} gone" + (f", {_some(added)} {_are(added)} new" if added else "")
    reshaped = [spec for spec in specs if shapes[spec.name] != spec.shape]
    if not reshaped:
        return ""
    first = reshaped[0]
    return f"{first.name!r} has shape {shapes[first.name]}, it was built with {first.shape}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (" ..." if len(names) > _NAMED else "")


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


class UnexchangedTensors:
    """Looks for changes of the tensors of one model that are not exchanged, though no pattern of the user says so."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """``specs``: of all tensors of the model, as it is built."""
        self._all = specs
        self._of: tuple[nn.Module, Sharing] | None = None  # what the rest is of
        self._specs: list[TensorSpec] = []
        self._digests: dict[str, tuple[tuple[int, int], bytes]] = {}  # by name: of which version, and the hash
        self._before: dict[str, bytes] = {}
        self._named: set[str] = set()

    def begin(self, module: nn.Module, sharing: Sharing) -> None:
        """Note the values that a training of this module begins with."""
        if self._of is None or self._of[0] is not module or self._of[1] != sharing:
            self._of, self._digests = (module, sharing), {}
            self._specs = left_out(self._all, sharing)
        self._before = self._values(module.state_dict(keep_vars=True)) if self._specs else {}

    def _values(self, state: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the hash of each, computed where the tensor was written to or replaced since the last time: those of a
        model of integers may be large."""
        for spec in self._specs:
            tensor: Tensor = state[spec.name].detach()
            version = tensor.data_ptr(), tensor._version  # noqa: SLF001 - torch has no public name for it
            if self._digests.get(spec.name, (None, b""))[0] != version:
                self._digests[spec.name] = version, _digest(tensor)
        return {spec.name: self._digests[spec.name][1] for spec in self._specs}

    def changed(self) -> list[str]:
        """Return the names of those that have changed since :meth:`begin`, or are new in the state."""
        assert self._of is not None, "begin() comes first"
        state = self._of[0].state_dict(keep_vars=True)
        after = self._values(state) if self._specs else {}
        found = [name for name, digest in after.items() if digest != self._before[name]]
        if len(state) == len(self._all):
            return found
        known = {spec.name for spec in self._all}
        return found + [name for name, one in state.items() if isinstance(one, Tensor) and name not in known]

    def warn(self, client_id: int, welcome: Welcome) -> None:
        """Log the tensors that have changed, each once."""
        names = [name for name in self.changed() if name not in self._named]
        if not names:
            return
        self._named.update(names)
        specs = {spec.name: spec for spec in self._specs}
        remedies = dict.fromkeys(_remedy(specs.get(name), welcome) for name in names)
        log.warning(
            "training has changed tensors that are not exchanged",
            client=client_id,
            tensors=len(names),
            first=names[:_SHOWN],
            effect="the global model does not get what was trained of them",
            remedy="; ".join(remedies),
        )


def _remedy(spec: TensorSpec | None, welcome: Welcome) -> str:
    if spec is None:
        return ADDED
    if spec.kind != "buffer":
        return PARAMETER
    if spec.dtype not in MERGEABLE:
        return OTHER_DTYPE
    return MASKED if welcome.masked else PRIVATE


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.int_repr() if tensor.is_quantized else tensor
    return hashlib.sha256(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
