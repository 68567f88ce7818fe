"""The four DDS types of ``gradbus.idl``, with serialisation written by hand.

The binding packs a ``sequence<octet>`` byte by byte (about 20 MB/s). The same IDL type with ``serialize`` and
``deserialize`` overridden streams at memory speed, and every other DDS program still reads it. A test compares these
bytes with those of the generated serialiser.

All are written as XCDR1, little-endian (encapsulation ``00 01 00 00``): what a reader in any language expects of a
final type. Offsets are the same in XCDR2, but for the double of TrainCmd.
"""

# No "from __future__ import annotations" here: the binding reads the annotations of the fields as objects.
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from cyclonedds.idl import IdlStruct
from cyclonedds.idl import annotations as idl
from cyclonedds.idl.types import byte, float64, int32, int64, sequence

ENCAPSULATION = b"\x00\x01\x00\x00"


class SampleError(ValueError):
    """The bytes of a DDS sample are cut short, or in a representation that is not ours."""


_SIZE = struct.Struct("<I")


def _body(data: Any, need: int, name: str) -> memoryview:
    view = memoryview(data)
    if len(view) < 4 + need:
        raise SampleError(f"{name}: sample of {len(view)} bytes, expected at least {4 + need}")
    if view[0] or view[1] not in (1, 7):
        raise SampleError(
            f"{name}: encapsulation {bytes(view[:2]).hex()}, expected 0001 (CDR) or 0007 (XCDR2), little-endian"
        )
    return view


def _tail(view: memoryview, at: int, size: int, name: str) -> memoryview:
    if at + size > len(view):
        raise SampleError(f"{name}: says {size} bytes of data, has {len(view) - at}")
    if len(view) - at - size > 3:  # padding; more would be memory that nobody has counted
        raise SampleError(
            f"{name}: {len(view) - at - size} bytes behind its {size} bytes of data, at most 3 are padding"
        )
    return view[at : at + size]


T = TypeVar("T")


def _packed(layout: str) -> Callable[[type[T]], type[T]]:
    """Give a type that ends with a sequence of octets its serialisation: fixed fields, length, bytes, padding.

    A decorator and not a base class: the binding takes the first base of a type for its IDL parent.

    Args:
        layout: of the fixed fields, for ``struct``.
    """
    fixed, prefix = struct.Struct(f"<{layout}"), struct.Struct(f"<{layout}I")
    start = len(ENCAPSULATION) + prefix.size

    def prefix_of(*values: int) -> bytes:
        """The bytes before the payload, from the fixed fields and the payload's size."""
        return ENCAPSULATION + prefix.pack(*values)

    def decorate(kind: type[T]) -> type[T]:
        name = kind.__name__.removesuffix("Type")

        def serialize(
            sample: Any, buffer: Any = None, endianness: Any = None, use_version_2: bool | None = None
        ) -> bytes:
            *before, data = (getattr(sample, field.name) for field in fields(sample))
            return b"".join((prefix_of(*before, len(data)), data, bytes(-len(data) % 4)))

        def octets(data: Any) -> memoryview:
            """Those of a sample, in place. Raises SampleError."""
            view = _body(data, start - 4, name)
            return _tail(view, start, _SIZE.unpack_from(view, start - 4)[0], name)

        def deserialize(cls: Any, data: Any, has_header: bool = True, use_version_2: bool | None = None) -> Any:
            found = octets(data)
            return cls(*fixed.unpack_from(data, 4), found)

        made: Any = kind
        made.serialize, made.prefix, made.octets = serialize, staticmethod(prefix_of), staticmethod(octets)
        made.deserialize = classmethod(deserialize)
        return kind

    return decorate


@dataclass
@idl.final
class TrainCmdType(IdlStruct, typename="gradbus.TrainCmd"):
    """Train round ``round_id`` from the model of the round before."""

    round_id: int32
    subset_size: int32
    epochs: int32
    lr: float64
    seed: int32

    def serialize(self, buffer: Any = None, endianness: Any = None, use_version_2: bool | None = None) -> bytes:
        """XCDR1: the double stands at a multiple of 8."""
        return ENCAPSULATION + struct.pack("<iii4xdi", self.round_id, self.subset_size, self.epochs, self.lr, self.seed)

    @classmethod
    def deserialize(cls, data: Any, has_header: bool = True, use_version_2: bool | None = None) -> Self:
        view = _body(data, 24, "TrainCmd")
        if view[1] == 7:  # XCDR2: doubles are aligned to 4
            return cls(*struct.unpack_from("<iiidi", view, 4))
        view = _body(data, 28, "TrainCmd")
        return cls(*struct.unpack_from("<iii4xdi", view, 4))


@_packed("iiq")
@dataclass
@idl.final
class ClientUpdateType(IdlStruct, typename="gradbus.ClientUpdate"):
    """One frame of a client's update."""

    client_id: int32
    round_id: int32
    num_samples: int64
    data: sequence[byte]  # type: ignore[type-arg]


@_packed("i")
@dataclass
@idl.final
class ModelBlobType(IdlStruct, typename="gradbus.ModelBlob"):
    """One frame of a global model."""

    round_id: int32
    data: sequence[byte]  # type: ignore[type-arg]


@_packed("")
@dataclass
@idl.final
class FrameType(IdlStruct, typename="gradbus.Frame"):
    """One frame of control or of a collective."""

    data: sequence[byte]  # type: ignore[type-arg]
