"""The four DDS types of ``gradbus.idl``, with the serialisation of :mod:`gradbus.runtime.transport.sample_layout`.

The binding packs a ``sequence<octet>`` byte by byte (about 20 MB/s). The same IDL type with ``serialize`` and
``deserialize`` overridden streams at memory speed, and every other DDS program still reads it. A test compares these
bytes with those of the generated serialiser.
"""

# No "from __future__ import annotations" here: the binding reads the annotations of the fields as objects.
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from cyclonedds.idl import IdlStruct
from cyclonedds.idl import annotations as idl
from cyclonedds.idl.types import byte, float64, int32, int64, sequence

from gradbus.runtime.transport.sample_layout import LAYOUTS

T = TypeVar("T")


def _laid_out(name: str, *, has_octets: bool = True) -> Callable[[type[T]], type[T]]:
    """Give a type the serialisation of the layout of this name.

    A decorator and not a base class: the binding takes the first base of a type for its IDL parent.
    """
    layout = LAYOUTS[name]

    def serialize(sample: Any, buffer: Any = None, endianness: Any = None, use_version_2: bool | None = None) -> bytes:
        values = tuple(getattr(sample, field.name) for field in fields(sample))
        parts = layout.parts(values[:-1], values[-1:]) if has_octets else layout.parts(values, ())
        return b"".join((*parts, bytes(-sum(map(len, parts)) % 4)))

    def deserialize(cls: Any, data: Any, has_header: bool = True, use_version_2: bool | None = None) -> Any:
        return cls(*layout.decode(data))

    def decorate(kind: type[T]) -> type[T]:
        made: Any = kind
        made.serialize, made.deserialize = serialize, classmethod(deserialize)
        return kind

    return decorate


@_laid_out("TrainCmd", has_octets=False)
@dataclass
@idl.final
class TrainCmdType(IdlStruct, typename="gradbus.TrainCmd"):
    """Train round ``round_id`` from the model of the round before."""

    round_id: int32
    subset_size: int32
    epochs: int32
    lr: float64
    seed: int32


@_laid_out("ClientUpdate")
@dataclass
@idl.final
class ClientUpdateType(IdlStruct, typename="gradbus.ClientUpdate"):
    """One frame of a client's update."""

    client_id: int32
    round_id: int32
    num_samples: int64
    data: sequence[byte]  # type: ignore[type-arg]


@_laid_out("ModelBlob")
@dataclass
@idl.final
class ModelBlobType(IdlStruct, typename="gradbus.ModelBlob"):
    """One frame of a global model."""

    round_id: int32
    data: sequence[byte]  # type: ignore[type-arg]


@_laid_out("Frame")
@dataclass
@idl.final
class FrameType(IdlStruct, typename="gradbus.Frame"):
    """One frame of control or of a collective."""

    data: sequence[byte]  # type: ignore[type-arg]


IDL_TYPES: dict[str, Any] = {
    "TrainCmd": TrainCmdType, "ClientUpdate": ClientUpdateType, "ModelBlob": ModelBlobType, "Frame": FrameType,
}  # fmt: skip
"""By :attr:`~gradbus.runtime.transport.channels.Channel.sample_type`."""
