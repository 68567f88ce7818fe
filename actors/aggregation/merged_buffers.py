"""Buffers of integers and booleans, such as counts and flags: merged by a rule, as no mean of them is of use.

    max, any   the largest value over the updates that count; of booleans: any is true
    min, all   the smallest one; of booleans: all are true
    sum        what all clients have added since the round began, added to the value before it
    median     the value in the middle, the lower one of two; of booleans: more than half are true

A client sends the buffers that its training has changed, and of ``sum`` the differences. One that does not send a
buffer stands for the value that it began with. None of this depends on the order of the updates, and except for the
median what a site has merged of its clients merges on as theirs would.

The bytes of changed buffers are a *block*, which follows an update, a partial sum or a model (docs/wire.md): of each
its number, uint32, and its values, little-endian, and at the end their length, uint32, and the magic ``GBXB``.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.codecs import CodecError
from gradbus.codecs.base import Payload, as_view
from gradbus.runtime.torch_compat import uncompiled_names

MAGIC = b"GBXB"
MERGEABLE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    }
)
_END = struct.Struct("<I4s")
_NUMBER = struct.Struct("<I")
_COMBINE: dict[str, Any] = {"max": np.maximum, "any": np.maximum, "min": np.minimum, "all": np.minimum}

Values = NDArray[
    Any
]  # of one buffer, in one dimension: of arrays of none NumPy makes scalars, which warn where they wrap
Buffers = Mapping[str, Tensor]


class MergedBuffer(NamedTuple):
    """A buffer, and the rule by which it is merged."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rule: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BufferLayout:
    """The merged buffers of a model, in its order.

    Attributes:
        digest: 64-bit hash over names, dtypes, shapes and rules, equal on nodes whose blocks mean the same; 0: there
            are none.
        max_bytes: of a block, its end included.
    """

    def __init__(self, buffers: Iterable[MergedBuffer] = ()) -> None:
        self.buffers = tuple(buffers)
        self._by_name = {one.name: (number, one) for number, one in enumerate(self.buffers)}
        plain = uncompiled_names(self._by_name)  # equal whether the model is compiled
        text = "\n".join(f"{plain[one.name]}:{one.dtype}:{one.shape}:{one.rule}" for one in self.buffers)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1
        self.digest = digest if self.buffers else 0
        self.max_bytes = sum(_NUMBER.size + one.num_bytes for one in self.buffers) + _END.size if self.buffers else 0

    def __bool__(self) -> bool:
        return bool(self.buffers)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def changes(self, before: Buffers, after: Buffers) -> dict[str, Tensor]:
        """Return what a client sends whose training has made one of the other: changed buffers, or differences."""
        found = {}
        for one in self.buffers:
            old, new = before[one.name], after[one.name]
            if not torch.equal(old, new):
                value = np.subtract(_flat(new), _flat(old)) if one.rule == "sum" else _flat(new)
                found[one.name] = _tensor(value, one)
        return found

    def pack(self, sent: Buffers) -> bytes:
        """Return the block of these buffers, all of which are of this layout; b"" in a layout of none."""
        if not self.buffers:
            return b""
        pieces = []
        for number, one in enumerate(self.buffers):
            if one.name in sent:
                values = _flat(sent[one.name])
                pieces += [_NUMBER.pack(number), values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()]
        return b"".join([*pieces, _END.pack(sum(map(len, pieces)), MAGIC)])

    def split(self, payload: Payload) -> tuple[memoryview, dict[str, Tensor]]:
        """Return what is in front of the block that ends a payload, and the buffers in it.

        Raises:
            CodecError: it does not end with a block of this layout.
        """
        view = as_view(payload)
        if not self.buffers:
            return view, {}
        content, block = split(view)
        return content, self.unpack(block)

    def unpack(self, block: Payload) -> dict[str, Tensor]:
        """Return the buffers in a block without its end. Raises CodecError: it is of another layout."""
        view, position, newest = as_view(block), 0, -1
        found: dict[str, Tensor] = {}
        while position < len(view):
            if len(view) - position < _NUMBER.size:
                raise CodecError(f"block of buffers cut short: {len(view)} bytes")
            (number,) = _NUMBER.unpack_from(view, position)
            position += _NUMBER.size
            if not newest < number < len(self.buffers):
                raise CodecError(f"buffer {number} after {newest} in a block: the model has {len(self.buffers)}")
            newest, one = number, self.buffers[number]
            if len(view) - position < one.num_bytes:
                raise CodecError(f"buffer {one.name!r} has {len(view) - position} bytes, expected {one.num_bytes}")
            found[one.name] = _read(view[position : position + one.num_bytes], one)
            position += one.num_bytes
        return found


def split(view: memoryview) -> tuple[memoryview, memoryview]:
    """Return what is in front of a block, and the block without its end. Raises CodecError: there is none."""
    if len(view) >= _END.size:
        length, magic = _END.unpack_from(view, len(view) - _END.size)
        start = len(view) - _END.size - length
        if magic == MAGIC and start >= 0:
            return view[:start], view[start : len(view) - _END.size]
    raise CodecError(f"{len(view)} bytes that do not end with a block of buffers: use one version and one model")


class BufferMerge:
    """Merges the buffers of the updates that count in a round. One call at a time, on any thread."""

    def __init__(self, layout: BufferLayout) -> None:
        self.layout = layout
        self._base: dict[str, Values] = {}
        self._updates = 0
        self._sent: dict[str, int] = {}  # updates that have changed it
        self._found: dict[str, list[Values]] = {}  # merged so far, one; of a median all of them

    def begin(self, base: Buffers) -> None:
        """Start a round, or start it anew, from the buffers that the clients hold."""
        self._base = {one.name: _flat(base[one.name]).copy() for one in self.layout.buffers}
        self._updates, self._sent, self._found = 0, {}, {}

    def add(self, sent: Buffers, *, staleness: int = 0) -> None:
        """Add the buffers of one update, as :meth:`BufferLayout.changes` gives them.

        ``staleness``: rounds by which its base is behind. Such an update takes no maximum or minimum back to what it
        was: it counts together with the value of today.
        """
        self._updates += 1
        for name, tensor in sent.items():
            values, rule = _flat(tensor).copy(), self._rule(name)
            if staleness and rule in _COMBINE:
                values = _COMBINE[rule](values, self._base[name])
            found = self._found.setdefault(name, [])
            self._sent[name] = self._sent.get(name, 0) + 1
            if rule == "median" or not found:
                found.append(values)
            else:
                found[0] = _COMBINE.get(rule, np.add)(found[0], values)

    def _rule(self, name: str) -> str:
        return self.layout._by_name[name][1].rule  # noqa: SLF001 - its other half

    def _merged(self, name: str) -> Values:
        """Return the value after the round."""
        base, found, rule = self._base[name], self._found.get(name), self._rule(name)
        if found is None:
            return base
        silent = self._updates - self._sent[name]
        if rule == "median":
            ordered = np.sort(np.stack([*found, *[base] * silent]), axis=0)
            middle: Values = ordered[(len(ordered) - 1) // 2]
            return middle
        if rule == "sum":
            added: Values = np.add(base, found[0])
            return added
        combined: Values = _COMBINE[rule](found[0], base) if silent else found[0]
        return combined

    def finish(self) -> dict[str, Tensor]:
        """Return all buffers after the round."""
        return {one.name: _tensor(self._merged(one.name), one) for one in self.layout.buffers}

    def changes(self) -> dict[str, Tensor]:
        """Return what a site sends of its clients, as one client would."""
        before = {one.name: _tensor(self._base[one.name], one) for one in self.layout.buffers}
        return self.layout.changes(before, self.finish())


def _flat(tensor: Tensor) -> Values:
    values: Values = tensor.detach().cpu().contiguous().reshape(-1).numpy()
    return values


def _tensor(values: Values, one: MergedBuffer) -> Tensor:
    return torch.from_numpy(values.copy()).view(one.shape)


def _read(data: memoryview, one: MergedBuffer) -> Tensor:
    kind = torch.empty(0, dtype=one.dtype).numpy().dtype
    if one.dtype == torch.bool and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise CodecError(f"buffer {one.name!r} of booleans holds other bytes than 0 and 1")
    return _tensor(np.frombuffer(data, kind.newbyteorder("<")).astype(kind), one)
