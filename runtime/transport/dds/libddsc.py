"""Calls into libddsc that the Python binding does not offer, made with ctypes.

Two reasons. The binding's ``write`` and ``take`` hold the GIL for their whole duration: a write that waits for a slow
reader stops every Python thread. And they copy: here a sample is written from scattered buffers and read in place.

``ddsi_*`` is private ABI of Cyclone DDS 11.0, hence the pinned version and :func:`self_test`, run once before first
use. Where it fails the bus falls back to the binding.
"""

from __future__ import annotations

import ctypes as ct
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from cyclonedds.internal import DDS, dds_c_t

from gradbus.runtime import forks
from gradbus.runtime.transport.dds.spdp import PREFIX_BYTES
from gradbus.runtime.transport.sample_layout import ENCAPSULATION

RETCODE_OK = 0
RETCODE_TIMEOUT = -10  # DDS_RETCODE_TIMEOUT
ANY_STATE = 0x7F  # every sample, view and instance state
_SERDATA_KIND_DATA = 2  # SDK_DATA of enum ddsi_serdata_kind

_lib = DDS._dll_handle  # noqa: SLF001 - the very library that the binding has loaded, which has no public name


JOINED_BYTES = 16 << 10  # to copy so much takes less time than to find the address of a buffer from Python


class _IoVec(ct.Structure):
    _fields_ = (("base", ct.c_void_p), ("size", ct.c_size_t))


_view = ct.PYFUNCTYPE(ct.py_object, ct.c_void_p, ct.c_ssize_t, ct.c_int)(("PyMemoryView_FromMemory", ct.pythonapi))
_WRITABLE = 0x200  # PyBUF_WRITE


class _Scattered(ct.Structure):
    """Three of them. What is Python bytes stands in a field of that type: ctypes has its address at once."""

    _fields_ = (
        ("head", ct.c_char_p), ("head_bytes", ct.c_size_t), ("body", ct.c_void_p), ("body_bytes", ct.c_size_t),
        ("pad", ct.c_char_p), ("pad_bytes", ct.c_size_t),
    )  # fmt: skip


_functions: list[Any] = []
missing: list[str] = []  # functions that libddsc does not export


def function(name: str, result: Any, *arguments: Any, brief: bool = False) -> Callable[..., Any]:
    """A function of libddsc. In place of one that it does not export stands one that fails: it returns -2, or a null
    pointer. ``brief``: it only looks, so the GIL is not given up for it, which would take longer."""
    try:
        made: Callable[..., Any] = (ct.PYFUNCTYPE if brief else ct.CFUNCTYPE)(result, *arguments)((name, _lib))
    except AttributeError:
        missing.append(name)
        return _nothing if result is not ct.c_int32 else _unsupported
    _functions.append(made)
    return made


def _unsupported(*_: object) -> int:
    return -2  # DDS_RETCODE_UNSUPPORTED


def _nothing(*_: object) -> None:
    pass


_from_iov = function(
    "ddsi_serdata_from_ser_iov", ct.c_void_p, ct.c_void_p, ct.c_int, ct.c_size_t, ct.c_void_p, ct.c_size_t
)
_writecdr = function("dds_writecdr", ct.c_int32, ct.c_int32, ct.c_void_p)
_takecdr = function("dds_takecdr", ct.c_int32, ct.c_int32, ct.c_void_p, ct.c_uint32, ct.c_void_p, ct.c_uint32)
_to_ser_ref = function(
    "ddsi_serdata_to_ser_ref", ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_size_t, ct.c_void_p, brief=True
)
_to_ser_unref = function("ddsi_serdata_to_ser_unref", None, ct.c_void_p, ct.c_void_p)
_serdata_size = function("ddsi_serdata_size", ct.c_uint32, ct.c_void_p, brief=True)
_serdata_unref = function("ddsi_serdata_unref", None, ct.c_void_p)
_entity_sertype = function("dds_get_entity_sertype", ct.c_int32, ct.c_int32, ct.c_void_p)
_matched_publications = function("dds_get_matched_publications", ct.c_int32, ct.c_int32, ct.c_void_p, ct.c_size_t)
waitset_attach = function("dds_waitset_attach", ct.c_int32, ct.c_int32, ct.c_int32, ct.c_ssize_t)
waitset_detach = function("dds_waitset_detach", ct.c_int32, ct.c_int32, ct.c_int32)
waitset_wait = function("dds_waitset_wait", ct.c_int32, ct.c_int32, ct.c_void_p, ct.c_size_t, ct.c_int64)
_wait_for_acks = function("dds_wait_for_acks", ct.c_int32, ct.c_int32, ct.c_int64)


class _Endpoint(ct.Structure):
    """dds_builtintopic_endpoint_t."""

    _fields_ = (
        ("key", ct.c_uint8 * 16), ("participant", ct.c_uint8 * 16), ("participant_handle", ct.c_uint64),
        ("topic", ct.c_char_p), ("type", ct.c_char_p), ("qos", ct.c_void_p),
    )  # fmt: skip


class _Statistic(ct.Structure):
    """struct dds_stat_keyvalue, with a value of 64 bits."""

    _fields_ = (("name", ct.c_char_p), ("kind", ct.c_int), ("value", ct.c_uint64))


_matched_subscriptions = function("dds_get_matched_subscriptions", ct.c_int32, ct.c_int32, ct.c_void_p, ct.c_size_t)
# Not brief: it takes the lock of the writer, which a write holds for as long as it waits for a reader.
_subscription_data = function("dds_get_matched_subscription_data", ct.POINTER(_Endpoint), ct.c_int32, ct.c_uint64)
_RELIABLE = 1  # DDS_RELIABILITY_RELIABLE
_get_reliability = function("dds_qget_reliability", ct.c_bool, ct.c_void_p, ct.c_void_p, ct.c_void_p, brief=True)
_free_endpoint = function("dds_builtintopic_free_endpoint", None, ct.POINTER(_Endpoint), brief=True)
_create_statistics = function("dds_create_statistics", ct.c_void_p, ct.c_int32)
_refresh_statistics = function("dds_refresh_statistics", ct.c_int32, ct.c_void_p)
_lookup_statistic = function("dds_lookup_statistic", ct.c_void_p, ct.c_void_p, ct.c_char_p)
_delete_statistics = function("dds_delete_statistics", None, ct.c_void_p)

_FREEING = ("_to_ser_unref", "_serdata_unref", "_free_endpoint", "_delete_statistics")  # destructors call them


def disable_in_child() -> None:
    """In a child by fork of a process that has DDS open: none of these functions is called any more."""
    for name, value in list(globals().items()):
        if any(value is made for made in _functions):
            globals()[name] = _nothing if name in _FREEING else _refuse


def _refuse(*_: object) -> int:
    raise forks.refusal("DDS")


def handle_of(entity: Any) -> int:
    """Return the handle (a dds_entity_t) that the library has for an entity of the binding."""
    handle: int = entity._ref  # noqa: SLF001 - the binding has no public name for it
    return handle


def delete_entity(entity: Any) -> None:
    """Delete an entity of the binding now, and not when its object goes. Where the process may be a child by fork,
    ``domains.delete`` is meant, which leaves the parent's entities alone."""
    entity._delete(entity._ref)  # noqa: SLF001 - the binding has no public call for it


def sertype_of(entity: Any) -> int:
    """Address of the serialised-type object of a reader or writer."""
    pointer = ct.c_void_p()
    code = _entity_sertype(handle_of(entity), ct.byref(pointer))
    if code < 0 or not pointer.value:
        raise OSError(f"dds_get_entity_sertype returned {code}")
    return pointer.value


def matched_subscriptions(writer: Any) -> set[int]:
    """Handles of the readers that the writer is matched with. Empty where the call is missing."""
    return _matched(_matched_subscriptions, writer)


def matched_publications(reader: Any) -> set[int]:
    """Handles of the writers that the reader is matched with. Empty where the call is missing."""
    return _matched(_matched_publications, reader)


def _matched(ask: Callable[..., Any], entity: Any) -> set[int]:
    size = 256
    while True:
        handles = (ct.c_uint64 * size)()
        count = ask(handle_of(entity), ct.byref(handles), size)
        if count < 0:
            return set()
        if count <= size:
            return set(handles[:count])
        size = count + 16


class MatchedReader(NamedTuple):
    """A reader that a writer is matched with.

    Attributes:
        participant: of 12 bytes, with which the GUIDs of its participant begin.
        is_reliable: whether the writer waits for it.
    """

    participant: bytes
    is_reliable: bool


def tells_readers() -> bool:
    """Whether :func:`matched_readers` has the calls that it needs."""
    return not {"dds_get_matched_subscriptions", "dds_get_matched_subscription_data"} & set(missing)


def matched_readers(writer: Any, known: Mapping[int, MatchedReader]) -> dict[int, MatchedReader]:
    """Readers that the writer is matched with, by handle. Empty where a call is missing.

    Args:
        known: what was returned before, so that only new ones are asked for.
    """
    readers: dict[int, MatchedReader] = {}
    for handle in matched_subscriptions(writer):
        if handle in known:
            readers[handle] = known[handle]
        elif endpoint := _subscription_data(handle_of(writer), handle):  # none: it has gone meanwhile
            kind = ct.c_int(_RELIABLE)
            if endpoint.contents.qos:
                _get_reliability(endpoint.contents.qos, ct.byref(kind), None)
            readers[handle] = MatchedReader(
                bytes(endpoint.contents.participant[:PREFIX_BYTES]), kind.value == _RELIABLE
            )
            _free_endpoint(endpoint)
    return readers


def throttled_s(writer: Any) -> float:
    """How long writes of this writer have waited for its readers, all together. 0 where a call is missing."""
    statistics = _create_statistics(handle_of(writer))
    if not statistics:
        return 0.0
    try:
        is_new = _refresh_statistics(statistics) == RETCODE_OK
        at = _lookup_statistic(statistics, b"time_throttle") if is_new else None
        return float(_Statistic.from_address(at).value) / 1e9 if at else 0.0
    finally:
        _delete_statistics(statistics)


def wait_for_acks(writer: Any, timeout_s: float) -> bool:
    """Whether all matched readers have acknowledged all that was written, within so long. The GIL is free meanwhile."""
    return bool(_wait_for_acks(handle_of(writer), int(timeout_s * 1e9)) == RETCODE_OK)


def _address(part: Any) -> tuple[int, int]:
    """Address and length of a contiguous buffer of octets; the caller keeps it alive."""
    try:
        return ct.addressof(ct.c_char.from_buffer(part)), len(part)
    except (TypeError, ValueError):  # it is read-only, which takes longer, or empty
        array = np.frombuffer(part, np.uint8)
        return int(array.__array_interface__["data"][0]), array.nbytes


_PADS = (b"", b"\0", b"\0\0", b"\0\0\0")


def write(entity: int, sertype: int, parts: Sequence[Any]) -> int:
    """Write one sample from scattered buffers, without the GIL.

    Args:
        entity: the writer's handle.
        sertype: from :func:`sertype_of`.
        parts: bytes-like, contiguous; the first one starts with the 4-byte encapsulation. All but the last are small.

    Returns:
        The DDS return code: 0, or negative (-10: the writer's max_blocking_time passed).
    """
    body = parts[-1]
    pad = _PADS[-sum(map(len, parts)) % 4]  # the representation is padded to a multiple of four
    if len(body) <= JOINED_BYTES:
        head, count = b"".join((*parts, pad)), 1
        vector = _Scattered(head, len(head))
        total = len(head)
    else:
        head, count = b"".join(parts[:-1]), 3 if pad else 2
        if not head:  # DDS wants the encapsulation in the first buffer
            head, body = bytes(body[: len(ENCAPSULATION)]), memoryview(body)[len(ENCAPSULATION) :]
        vector = _Scattered(head, len(head), *_address(body), pad, len(pad))
        total = len(head) + len(body) + len(pad)
    return int(_writecdr(entity, _sample_of(sertype, vector, count, total)))  # takes over the reference


def write_made(entity: int, sertype: int, head: bytes, room_bytes: int, make: Callable[[memoryview], None]) -> int:
    """Write one sample, most of which is made right where DDS keeps it, and copied from nowhere.

    Args:
        entity, sertype: as for :func:`write`.
        head: what it starts with, the 4-byte encapsulation and the number of its octets among it.
        room_bytes: of what comes behind that.
        make: gets the room for it, and fills it. If it raises, nothing is written.

    Returns:
        As :func:`write`.
    """
    start, end = len(head), len(head) + room_bytes
    size = end + -end % 4
    sample = _sample_of(sertype, *_with_room(head, size - start), size)  # DDS counts the octets at once
    iov = _IoVec()
    _to_ser_ref(sample, 0, size, ct.byref(iov))
    try:
        with _view(iov.base, size, _WRITABLE) as view, view[start:end] as room:
            make(room)
    except BaseException:
        _serdata_unref(sample)
        raise
    finally:
        _to_ser_unref(sample, ct.byref(iov))
    return int(_writecdr(entity, sample))


BLANK_BYTES = 256 << 10  # so much stays in the processor's caches
_BLANK = bytes(BLANK_BYTES)
_BLANK_AT = _address(_BLANK)[0]


@functools.lru_cache(maxsize=64)
def _vectors(count: int) -> Any:
    return _IoVec * count  # a new type; to make one takes longer than to use it


def _with_room(head: bytes, room_bytes: int) -> tuple[Any, int]:
    """Buffers of a sample, and their number: what it begins with, and as many octets as it says, whatever they are."""
    full, rest = divmod(room_bytes, len(_BLANK))
    blanks = ((_BLANK_AT, len(_BLANK)),) * full
    return _vectors(full + 2)(_address(head), *blanks, (_BLANK_AT, rest)), full + 2


def _sample_of(sertype: int, vector: Any, count: int, size: int) -> int:
    sample = _from_iov(sertype, _SERDATA_KIND_DATA, count, ct.byref(vector), size)
    if not sample:
        raise OSError(f"ddsi_serdata_from_ser_iov refused a sample of {size} bytes")
    return int(sample)


class _Owner:
    """Gives the sample's memory back to DDS when the last view on it is gone."""

    __slots__ = ("_iov", "_sample")

    def __init__(self, sample: int, iov: _IoVec) -> None:
        self._sample = sample
        self._iov = iov

    def __del__(self) -> None:
        _to_ser_unref(self._sample, ct.byref(self._iov))
        _serdata_unref(self._sample)


@functools.lru_cache(maxsize=64)
def _octets(size: int) -> Any:
    return ct.c_uint8 * size  # a new type; to make one takes longer than to use it


class Taker:
    """Takes samples of one reader in place: the views it returns lie in DDS's own memory until they are dropped. What
    is small is copied instead, which takes less time than to look after memory of DDS."""

    def __init__(self, reader: Any, max_samples: int) -> None:
        self._entity = handle_of(reader)
        self._max_samples = max_samples
        self._samples = (ct.c_void_p * max_samples)()
        self._infos = (dds_c_t.sample_info * max_samples)()

    def take(self, limit: int) -> list[tuple[memoryview, int]]:
        """Up to ``limit`` samples: (bytes with the encapsulation, handle of the writer that sent them)."""
        count = _takecdr(self._entity, self._samples, min(limit, self._max_samples), self._infos, ANY_STATE)
        if count < 0:
            raise OSError(f"dds_takecdr returned {count}")
        taken: list[tuple[memoryview, int]] = []
        for index in range(count):
            sample, info = int(self._samples[index] or 0), self._infos[index]
            if not info.valid_data:  # a change of state without data
                _serdata_unref(sample)
                continue
            size = _serdata_size(sample)
            iov = _IoVec()
            _to_ser_ref(sample, 0, size, ct.byref(iov))
            if size <= JOINED_BYTES:
                view = memoryview(ct.string_at(iov.base, size))
                _to_ser_unref(sample, ct.byref(iov))
                _serdata_unref(sample)
            else:
                array = _octets(size).from_address(iov.base)
                array.owner = _Owner(sample, iov)
                view = memoryview(array).cast("B")
            taken.append((view, info.publication_handle))
        return taken


def self_test(reader: Any, writer: Any, wait: Callable[[], bool]) -> str | None:
    """Send two known blobs from ``writer`` to ``reader`` and compare. Returns what is wrong, or None.

    Args:
        reader: reader of FrameType, matched with the writer, nobody else in their partition.
        writer: the writer.
        wait: blocks until the reader has data or a short time has passed; says whether there is data.
    """
    if missing:
        return f"libddsc does not export {', '.join(missing)}"
    taker = Taker(reader, 4)
    sertype = sertype_of(writer)
    for size in (13, 70_001):
        payload = np.arange(size, dtype=np.uint32).astype(np.uint8)
        head = ENCAPSULATION + size.to_bytes(4, "little")

        def make(room: memoryview, payload: Any = payload) -> None:
            room[:] = payload.data

        for code in (
            write(handle_of(writer), sertype, (head, payload)),
            write_made(handle_of(writer), sertype, head, size, make),
        ):
            if code != RETCODE_OK:
                return f"write returned {code}"
        taken: list[tuple[memoryview, int]] = []
        while len(taken) < 2:
            if not wait():
                return "the sample did not arrive"
            taken += taker.take(4)
        if any(bytes(view[: 8 + size]) != head + payload.tobytes() for view, _ in taken):
            return "the sample came back with other bytes"
    return None
