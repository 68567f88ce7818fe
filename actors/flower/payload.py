"""Flower's messages as payloads, by Flower's own protobuf schema; the bytes of arrays lie behind it as they are.

A payload is ``<II``: bytes of the protobuf message and number of arrays; ``<Q`` for each array: its bytes; the message,
whose arrays are empty; the bytes of the arrays, in the order of the message. So no array is copied into protobuf, whose
messages end at 2 GiB.
"""

from __future__ import annotations

import gc
import struct
from itertools import accumulate

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from gradbus.runtime.errors import FrameError

LARGE_BYTES = 16 << 20

_HEAD = struct.Struct("<II")


def encode(message: Message) -> list[bytes | memoryview]:
    """The parts of a message's payload, which refer to the bytes of its arrays."""
    data: list[bytes] = []
    content: RecordDict | None = None
    if message.has_content():
        content = RecordDict()
        for name, record in message.content.items():
            content[name] = _without_data(record, data) if isinstance(record, ArrayRecord) else record
        message = Message(metadata=message.metadata, content=content)
    proto = message_to_proto(message).SerializeToString()
    head = _HEAD.pack(len(proto), len(data)) + struct.pack(f"<{len(data)}Q", *map(len, data))
    return [head, proto, *data]


def _without_data(record: ArrayRecord, data: list[bytes]) -> ArrayRecord:
    """Return the same arrays without their bytes, which are appended to ``data``."""
    data.extend(array.data for array in record.values())
    empty = {name: Array(array.dtype, array.shape, array.stype, b"") for name, array in record.items()}
    return ArrayRecord(array_dict=empty, keep_input=False)


def decode(payload: bytes | memoryview) -> Message:
    """The message in a payload. Each array gets bytes of its own.

    Raises:
        FrameError: ``flower``: it is not what :func:`encode` makes.
    """
    view = memoryview(payload).cast("B")
    try:
        proto_bytes, count = _HEAD.unpack_from(view)
        proto_at = _HEAD.size + 8 * count
        if proto_at > len(view):
            raise ValueError(f"{count} arrays")
        sizes = struct.unpack_from(f"<{count}Q", view, _HEAD.size)
        data_at = proto_at + proto_bytes
        if data_at + sum(sizes) != len(view):
            raise ValueError(f"sizes that make {data_at + sum(sizes)} bytes")
        message = message_from_proto(ProtoMessage.FromString(bytes(view[proto_at:data_at])))
        # Not content.array_records: what that makes refers to itself and to the arrays, and keeps them; see collect().
        records = message.content.values() if message.has_content() else ()
        arrays = [array for record in records if isinstance(record, ArrayRecord) for array in record.values()]
        if len(arrays) != count:
            raise ValueError(f"{len(arrays)} arrays in the message and {count} behind it")
    except Exception as error:  # Flower's own parsers are not made for what others have altered
        raise FrameError("flower", f"a payload of {len(view)} bytes is no message of Flower: {error}") from None
    for array, start, size in zip(arrays, accumulate(sizes, initial=data_at), sizes, strict=False):
        array.data = bytes(view[start : start + size])
    return message


def collect(used_bytes: int) -> None:
    """Let go of messages of this size that nobody uses any more.

    What Flower makes for ``RecordDict.array_records`` refers to itself, so that the arrays stay until the garbage
    collector comes; and that comes after so many objects, of which a large model has few. Without this a node of 500 MB
    would grow by as much with every message.
    """
    if used_bytes >= LARGE_BYTES:
        gc.collect()
