"""The structure of a module: what training must leave as it found it, as tensors are exchanged by name and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gradbus.actors.federated.model.sharing import TensorSpec

_NAMED = 3  # tensors in a text


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
