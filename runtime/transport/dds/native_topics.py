"""DDS topics as a C program makes them, of the types that the binding knows.

The binding's topics keep each sample in memory that is zeroed before it is written, on both sides: for 64 MiB between
two ranks over DDS that was a seventh of all processor time. Topics of Cyclone's own do not, and they need no GIL where
Cyclone compares types. What is on the wire, and the type that discovery tells of, are the same, so both kinds talk with
each other.

The binding cannot read or write them: samples go through :mod:`.libddsc`.

Topic descriptors are made here. Cyclone could make the same ones from the binding's topics
(``dds_create_topic_descriptor``), but version 11.0.1 walks its type library for that without the library's lock
(``ddsi_topic_descriptor_from_type``): an endpoint discovered at that moment could crash the process, or have the type
refused.
"""

from __future__ import annotations

import ctypes as ct
import dataclasses
from typing import Any

from cyclonedds.core import Entity
from cyclonedds.idl._support import Endianness
from cyclonedds.idl.types import byte, float64, int32, int64, sequence
from cyclonedds.topic import Topic as DdsTopic

from gradbus.runtime import forks
from gradbus.runtime.transport.dds import libddsc

_create_topic = libddsc.function(
    "dds_create_topic", ct.c_int32, ct.c_int32, ct.c_void_p, ct.c_char_p, ct.c_void_p, ct.c_void_p
)


class _Octets(ct.Structure):
    """dds_sequence_t: how a ``sequence<octet>`` lies in a C program's memory."""

    _fields_ = (("maximum", ct.c_uint32), ("length", ct.c_uint32), ("buffer", ct.c_void_p), ("release", ct.c_bool))


class _Serialized(ct.Structure):
    """struct dds_type_meta_ser."""

    _fields_ = (("data", ct.c_char_p), ("size", ct.c_uint32))


class _Descriptor(ct.Structure):
    """dds_topic_descriptor_t of dds_public_impl.h."""

    _fields_ = (
        ("size", ct.c_uint32), ("align", ct.c_uint32), ("flags", ct.c_uint32), ("num_keys", ct.c_uint32),
        ("type_name", ct.c_char_p), ("keys", ct.c_void_p), ("num_ops", ct.c_uint32), ("ops", ct.c_void_p),
        ("meta", ct.c_char_p), ("type_information", _Serialized), ("type_mapping", _Serialized),
        ("representations", ct.c_uint32),
    )  # fmt: skip


# Of dds_opcodes.h. An instruction is DDS_OP_ADR | the kind of field | its flags; the field's offset follows.
_ADR = 0x01 << 24
_4BY, _8BY, _SEQUENCE_OF_1BY = 0x03 << 16, 0x04 << 16, 0x07 << 16 | 0x01 << 8
_FLOATING, _SIGNED = 1 << 1, 1 << 2
_RTS = 0  # the end
_FIXED_SIZE, _XTYPES_METADATA = 1 << 4, 1 << 6  # DDS_TOPIC_...

_FIELDS: dict[Any, tuple[Any, int]] = {  # by IDL type of a field: how it lies in C's memory, and its instruction
    int32: (ct.c_int32, _ADR | _4BY | _SIGNED),
    int64: (ct.c_int64, _ADR | _8BY | _SIGNED),
    float64: (ct.c_double, _ADR | _8BY | _FLOATING),
    sequence[byte]: (_Octets, _ADR | _SEQUENCE_OF_1BY),  # type: ignore[misc]
}

_descriptors: dict[Any, tuple[_Descriptor, Any]] = {}  # by IDL type; with what it points to, for as long as the process
_lock = forks.ForkLock()


class CTopic(DdsTopic[Any]):
    """Holds what the binding takes for a topic of its own when it makes readers and writers."""

    def __init__(self, participant: Any, name: str, idl_type: Any) -> None:
        """Make one, with what the binding's own initialiser sets but for its call that makes the other kind.

        Raises:
            DDSException: DDS does not make the topic.
        """
        described = ct.addressof(describe(idl_type))
        self.data_type = idl_type
        Entity.__init__(self, _create_topic(libddsc.handle_of(participant), described, name.encode(), None, None))
        self._keepalive_entities = [participant]


def describe(idl_type: Any) -> _Descriptor:
    """Return the topic descriptor of a type. It is made once per process, and lives as long.

    Raises:
        KeyError: a field is of a type that :mod:`.idl_types` has no use for.
    """
    with _lock:
        if idl_type not in _descriptors:
            _descriptors[idl_type] = _described(idl_type)
        return _descriptors[idl_type][0]


def _described(idl_type: Any) -> tuple[_Descriptor, Any]:
    kinds = {field.name: _FIELDS[field.type] for field in dataclasses.fields(idl_type)}
    layout = type("Layout", (ct.Structure,), {"_fields_": [(name, kind) for name, (kind, _) in kinds.items()]})
    program: list[int] = []
    for name, (_, instruction) in kinds.items():
        program += instruction, getattr(layout, name).offset
    program.append(_RTS)
    ops = (ct.c_uint32 * len(program))(*program)
    has_fixed_size = all(kind is not _Octets for kind, _ in kinds.values())
    idl = idl_type.__idl__
    idl.populate()
    serialized = [
        _Serialized(data, len(data))
        for data in (
            what.serialize(endianness=Endianness.Little, use_version_2=True)[4:]  # without its encapsulation
            for what in (idl.get_type_info(), idl.get_type_mapping())
        )
    ]
    made = _Descriptor(
        size=ct.sizeof(layout),
        align=ct.alignment(layout),
        flags=_XTYPES_METADATA | (_FIXED_SIZE if has_fixed_size else 0),
        type_name=idl.idl_transformed_typename.encode(),
        num_ops=len(program),
        ops=ct.addressof(ops),
        meta=b"",
        type_information=serialized[0],
        type_mapping=serialized[1],
    )
    return made, (ops, serialized)


__all__ = ["CTopic", "describe"]
