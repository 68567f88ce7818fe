"""Tensors without values: what a program exchanges, where only its sizes count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor


class SizeOnly:
    """Stands for a contiguous tensor of which shape and dtype are known, and no value.

    Functions, methods and operators of torch take it: their results have the shapes and dtypes that torch itself finds,
    on its meta device. Calls of one kind are looked up only once, for that device takes 50 us for an addition. There is
    one object for each shape and dtype, so nothing is allocated for a million messages.

    Attributes:
        meta: the same on torch's meta device.
    """

    _known: ClassVar[dict[tuple[torch.Size, torch.dtype], SizeOnly]] = {}
    _results: ClassVar[dict[Any, Any]] = {}

    __slots__ = ("dtype", "meta", "nbytes", "shape")

    meta: Tensor
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def of(cls, meta: Tensor) -> Self:
        """The object for the shape and dtype of a tensor on the meta device."""
        key = (meta.shape, meta.dtype)
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = cls()
            found.meta = meta.contiguous()
            found.shape, found.dtype, found.nbytes = meta.shape, meta.dtype, meta.nbytes
        return cast(Self, found)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        key = (function, _key(args), _key(kwargs) if kwargs else None)
        try:
            found = cls._results[key]
        except KeyError:
            on_meta = function(*_mapped(args, _meta_of), **_mapped(dict(kwargs or {}), _meta_of))
            found = cls._results[key] = _mapped(on_meta, _size_only_of)
        return list(found) if type(found) is list else found

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name)  # no other names than those of a tensor
        if not callable(attribute):
            return _mapped(getattr(self.meta, name), _size_only_of)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(attribute, (), (self, *args), kwargs)

        return call

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SizeOnly({tuple(self.shape)}, {self.dtype})"


def _operator(name: str) -> Any:
    function = getattr(Tensor, name)

    def call(self: SizeOnly, *args: Any) -> Any:
        return self.__torch_function__(function, (), (self, *args))

    return call


for _name in (
    "add",
    "radd",
    "iadd",
    "sub",
    "rsub",
    "isub",
    "mul",
    "rmul",
    "imul",
    "truediv",
    "rtruediv",
    "itruediv",
    "matmul",
    "neg",
    "and",
    "or",
    "xor",
    "invert",
    "lt",
    "le",
    "gt",
    "ge",
    "getitem",
    "setitem",
):
    setattr(SizeOnly, f"__{_name}__", _operator(f"__{_name}__"))


def size_only(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape without values."""
    return cast(Tensor, SizeOnly.of(torch.empty(shape, dtype=dtype, device="meta")))


def has_values(tensor: Tensor) -> bool:
    """Whether it is a true tensor."""
    return not isinstance(cast(object, tensor), SizeOnly)


def _key(value: Any) -> Any:
    """Return a key of an argument, equal for calls whose results have equal sizes."""
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_key(one) for one in value])
    if kind is slice:
        return (slice, value.start, value.stop, value.step)
    if kind is dict:
        return tuple([(name, _key(one)) for name, one in value.items()])
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    return value


def _meta_of(value: Any) -> Any:
    if type(value) is SizeOnly:
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def _size_only_of(value: Any) -> Any:
    return SizeOnly.of(value) if isinstance(value, Tensor) else value


def _mapped(value: Any, change: Any) -> Any:
    """The value with each tensor in it changed."""
    if type(value) in (tuple, list):
        return type(value)([_mapped(one, change) for one in value])
    if type(value) is dict:
        return {name: _mapped(one, change) for name, one in value.items()}
    return change(value)
