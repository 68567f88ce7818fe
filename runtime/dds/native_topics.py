"""DDS topics as a C program makes them, of the types that the binding knows.

The binding's topics keep each sample in memory that is zeroed before it is written, on both sides: for 64 MiB between
two ranks over DDS that was a seventh of all processor time. Topics of Cyclone's own do not, and they need no GIL where
Cyclone compares types. What is on the wire, and the type that discovery tells of, are the same, so both kinds talk with
each other.

The binding cannot read or write them: samples go through :mod:`.libddsc`.
"""

from __future__ import annotations

import ctypes as ct
import threading
from typing import Any

from cyclonedds.core import Entity
from cyclonedds.topic import Topic as DdsTopic

from gradbus.runtime.dds import domains, libddsc

_LOCAL_DOMAIN = 1  # DDS_FIND_SCOPE_LOCAL_DOMAIN

_get_typeinfo = libddsc.function("dds_get_typeinfo", ct.c_int32, ct.c_int32, ct.c_void_p)
_free_typeinfo = libddsc.function("dds_free_typeinfo", ct.c_int32, ct.c_void_p)
_create_descriptor = libddsc.function(
    "dds_create_topic_descriptor", ct.c_int32, ct.c_int, ct.c_int32, ct.c_void_p, ct.c_int64, ct.c_void_p
)
_create_topic = libddsc.function(
    "dds_create_topic", ct.c_int32, ct.c_int32, ct.c_void_p, ct.c_char_p, ct.c_void_p, ct.c_void_p
)

_descriptors: dict[Any, int] = {}  # by IDL type: address of what describes it to Cyclone, for as long as the process is
_lock = threading.Lock()


class CTopic(DdsTopic[Any]):
    """What the binding takes for a topic of its own when it makes readers and writers."""

    def __init__(self, participant: Any, name: str, idl_type: Any) -> None:
        """Make one, with what the binding's own initialiser sets but for its call that makes the other kind.

        Raises:
            OSError: libddsc cannot describe the type. DDSException: DDS does not make the topic.
        """
        described = describe(participant, idl_type)
        self.data_type = idl_type
        Entity.__init__(self, _create_topic(participant._ref, described, name.encode(), None, None))
        self._keepalive_entities = [participant]


def describe(participant: Any, idl_type: Any) -> int:
    """Address of the descriptor of a type. Cyclone makes it of what the binding tells of the type with a topic of its
    own, once per process.

    Raises:
        OSError: libddsc cannot describe the type. DDSException: DDS does not make the topic.
    """
    with _lock:
        if idl_type not in _descriptors:
            known = DdsTopic(participant, "train/type", idl_type)  # some name: it is not used
            try:
                _descriptors[idl_type] = _describe(participant, known)
            finally:
                domains.delete(known)
        return _descriptors[idl_type]


def _describe(participant: Any, topic: Any) -> int:
    described, made = ct.c_void_p(), ct.c_void_p()
    code = _get_typeinfo(topic._ref, ct.byref(described))
    if code == libddsc.RETCODE_OK:
        code = _create_descriptor(_LOCAL_DOMAIN, participant._ref, described, 0, ct.byref(made))
        _free_typeinfo(described)
    if code != libddsc.RETCODE_OK or not made.value:
        raise OSError(f"libddsc cannot describe type {topic.data_type.__idl__.idl_transformed_typename}: {code}")
    return made.value


__all__ = ["CTopic", "describe"]
