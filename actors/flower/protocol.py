"""What hub and nodes agree on: which control messages mean what, sizes, and how often things are repeated.

The messages are those of a federated run. An *instruction* is a payload for one or more nodes. It has a number, which
stands where a round's stands: RoundTerms name its nodes, ModelAvailable its size and where it lies in shared memory,
frames of a model carry it elsewhere. A reply is an update of that round.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import Self

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.shm.segment import PayloadMemory, SharedPayload
from gradbus.runtime.wire.frames import CHUNK_BYTES, CONTROLLER, MAX_FRAMES, FrameKey, Kind

CODEC = "flower"  # of a Welcome: what updates hold
HEARTBEAT_S = 1.0
MAX_NODES = 4096
MAX_PARTITIONS = 1 << 20
LAST_NAMED = 9_999_999  # seven digits, so that RoundTerms have room for the numbers of MAX_NODES nodes
MAX_OPEN = 4096  # instructions without all their replies
DEFAULT_MAX_BYTES = 8 << 30
_MARK = zlib.crc32(b"gradbus.flower.1") << 32


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Says which node a process is. Made by :meth:`of_partition` or :meth:`derive_from_name`.

    Attributes:
        number: of the node on the bus: its partition, or one above all partitions that follows from its name.
        num_partitions: how many partitions there are; 0: the node is known by its name.
        name: of the node; empty: it is known by its partition.
    """

    number: int
    num_partitions: int
    name: str = ""

    @classmethod
    def of_partition(cls, partition: int, num_partitions: int) -> Self:
        """Return the place of a node with a partition. Raises ConfigError: there is no such partition."""
        if not 0 <= partition < num_partitions <= MAX_PARTITIONS:
            raise ConfigError(
                f"partition {partition} of {num_partitions}: partitions count from 0, so give one of 0 to "
                f"{min(num_partitions, MAX_PARTITIONS) - 1}"
            )
        return cls(partition, num_partitions)

    @classmethod
    def derive_from_name(cls, name: str) -> Self:
        """Return the place of a node with this name. The same name has the same number in every run."""
        digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        return cls(MAX_PARTITIONS + digest % (LAST_NAMED + 1 - MAX_PARTITIONS), 0, name)


def is_named(number: int) -> bool:
    """Return whether a node of this number is known by its name."""
    return number >= MAX_PARTITIONS


def layout_of(num_partitions: int) -> int:
    """The ``layout`` of a node's Hello: it marks a node of Flower apps, and has the number of partitions, 32 bits; 0
    for a node that is known by its name."""
    return _MARK | num_partitions


def partitions_of(layout: int) -> int | None:
    """The number of partitions that a layout names; None: it is not that of a node of Flower apps."""
    return layout & 0xFFFF_FFFF if layout & ~0xFFFF_FFFF == _MARK else None


def instruction_key(run_id: int, number: int, session: int, signature: str = "") -> FrameKey:
    """The key of an instruction's frames. ``session``: the incarnation of the hub."""
    return FrameKey(Kind.MODEL, run_id, number, CONTROLLER, session, number, signature)


def reply_key(run_id: int, number: int, node: int, incarnation: int) -> FrameKey:
    """The key of a reply's frames."""
    return FrameKey(Kind.UPDATE, run_id, number, node, incarnation, number)


def check_max_bytes(max_bytes: int) -> None:
    """Raises ConfigError: a payload of this size cannot be sent."""
    limit = CHUNK_BYTES * MAX_FRAMES
    if not 1 << 10 <= max_bytes <= limit:
        raise ConfigError(
            f"the largest message must have 1 KiB to {limit >> 40} TiB, got {max_bytes} bytes: set flower.max_bytes"
        )


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload to send.

    Attributes:
        data: its bytes, contiguous.
        shared: the same in memory that processes of this machine may read; None: there is none.
    """

    data: memoryview
    shared: SharedPayload | None

    @property
    def place(self) -> str:
        """Return where it lies in shared memory; empty: nowhere."""
        return "" if self.shared is None else self.shared.place


def make_payload(memory: PayloadMemory, parts: list[bytes | memoryview]) -> Payload:
    """Put the parts of a payload together, with one copy: into shared memory where there is some."""
    shared = memory.put(*parts)
    if shared is not None:
        return Payload(shared.payload, shared)
    return Payload(memoryview(b"".join(parts)), None)
