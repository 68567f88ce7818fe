"""msgpack from anybody: it fits its limits, or nothing is made of it."""

from __future__ import annotations

import contextlib
import importlib
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from backend_support import HAS_TORCH_BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.collectives.objects import MAX_OBJECT_BYTES, MAX_OBJECT_MEMORY
from gradbus.runtime.collectives.objects import pack as pack_object
from gradbus.runtime.collectives.objects import unpack as unpack_object
from gradbus.runtime.errors import CollectiveError, FrameError
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.bounded_msgpack import Limits, PackingError, unpack

SMALL = Limits(1000, text_bytes=10, binary_bytes=5, items=4, fields=3, containers=6)


def peak_bytes(work: Callable[[], object]) -> int:
    """What it had in memory at most, beyond what was there before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [None, True, -1, 2**64 - 1, 0.5, "ten bytes.", b"five.", [1, 2, 3, 4], {"a": 1, "b": [2], "c": {}}, [[[[[[]]]]]]],
    ids=str,
)
def test_what_fits_comes_back(value: Any) -> None:
    assert unpack(msgpack.packb(value), SMALL) == value
    assert unpack(memoryview(msgpack.packb(value)), SMALL) == value


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "OutOfData"),
        (b"\xc1", "FormatError"),
        (b"\xc0\xc0", "ExtraData"),
        (b"\xc0" * 1001, "1001 bytes, at most 1000"),
        (msgpack.packb("eleven byte"), "11 exceeds max_str_len"),
        (b"\xa2\xff\xff", "UnicodeDecodeError"),
        (msgpack.packb(b"sixsix"), "6 exceeds max_bin_len"),
        (msgpack.packb([0] * 5), "5 exceeds max_array_len"),
        (msgpack.packb({"a": 1, "b": 2, "c": 3, "d": 4}), "4 exceeds max_map_len"),
        (msgpack.packb([[[[[[[]]]]]]]), "more than 6 lists and maps"),
        (msgpack.packb([{}, {}, {}, [{}, {}, {}]]), "more than 6 lists and maps"),
        (b"\x91" * 900 + b"\xc0", "more than 6 lists and maps"),
        (b"\x81\xc0\xc0", "not allowed for map key"),
        (b"\xc7\x00\x05", "extension type 5"),
        (b"\xd4\x05\x00", "max_ext_len"),
        (b"\xd6\xff" + b"\0" * 4, "max_ext_len"),  # a timestamp
    ],
)
def test_what_does_not_is_refused_with_the_reason(data: bytes, complaint: str) -> None:
    with pytest.raises(PackingError, match=complaint):
        unpack(data, SMALL)


def test_keys_of_any_kind_are_allowed_where_the_limits_say_so() -> None:
    assert unpack(b"\x82\xc0\x01\x05\x02", SMALL._replace(any_keys=True)) == {None: 1, 5: 2}
    with pytest.raises(PackingError, match="TypeError"):
        unpack(b"\x81\x90\xc0", SMALL._replace(any_keys=True))


# What makes much of little: (start, repeated, longest) of a message.
BOMBS = {
    "empty maps": (b"", b"\x80"),
    "empty maps in a list": (b"\xdc\x01\x00", b"\x80"),
    "lists that claim much, in each other": (b"", b"\xdc\x10\x00"),
    "lists that claim everything, in each other": (b"", b"\xdd\x00\x3f\xff\xff"),
    "full lists of empty maps": (b"\xdc\x10\x00" * 500, b"\x80"),
    "maps in maps": (b"", b"\x81\xa1a"),
}


# (function that reads a message, its longest message, the memory that it states)
READERS = {
    "control": (control.decode, control.MAX_BODY_BYTES, control.MAX_BODY_MEMORY),
    "object": (unpack_object, MAX_OBJECT_BYTES, MAX_OBJECT_MEMORY),
}
if HAS_TORCH_BACKEND:
    store_messages = importlib.import_module("gradbus.torch.store.messages")
    READERS["store"] = (store_messages.decode, frames.MAX_CHUNK_BYTES, store_messages.MAX_MEMORY)


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize(("read", "longest", "memory"), READERS.values(), ids=READERS)
def test_no_message_takes_more_memory_than_is_stated(
    read: Callable[[bytes], Any], longest: int, memory: int, name: str
) -> None:
    start, repeated = BOMBS[name]
    message = (start + repeated * (longest // len(repeated)))[:longest]

    def refused() -> None:
        with pytest.raises((FrameError, CollectiveError)):
            read(message)

    assert peak_bytes(refused) <= memory


def test_the_most_wasteful_object_takes_what_is_stated() -> None:
    """A map of short texts, all different: every 9 bytes are a text of its own and a place in a table."""
    count = MAX_OBJECT_BYTES // 9
    keys = b"".join(b"\xa7%07x\xc0" % number for number in range(count))
    message = b"\xdf" + struct.pack(">I", count) + keys
    assert len(message) <= MAX_OBJECT_BYTES + 9
    found: list[Any] = []
    assert peak_bytes(lambda: found.append(unpack_object(message[:MAX_OBJECT_BYTES]))) <= MAX_OBJECT_MEMORY
    assert len(found[0]) == count


def test_an_object_that_nobody_would_take_is_refused_where_it_is_packed() -> None:
    most = (1 << 18) - 1  # and the list that they are in
    assert len(unpack_object(pack_object([{}] * most))) == most
    with pytest.raises(ValueError, match=r"more than 262144 lists and maps; send it in parts"):
        pack_object([{}] * (most + 1))


NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
    max_leaves=20,
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(value=NESTED)
def test_any_object_comes_back_or_is_too_large(value: Any) -> None:
    assert unpack_object(msgpack.packb(value)) == value
    with contextlib.suppress(PackingError):
        assert unpack(msgpack.packb(value), SMALL) == value


@settings(derandomize=True, max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_an_object_or_an_error(data: bytes) -> None:
    with contextlib.suppress(PackingError):
        unpack(data, SMALL)


def test_no_memory_left_is_not_taken_for_a_fault_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpackb(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(msgpack, "unpackb", unpackb)
    with pytest.raises(MemoryError):
        unpack(msgpack.packb([1]), SMALL)
