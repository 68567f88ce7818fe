"""The messages between the ranks of a store and its arbiter: schema, limits, and how they become frames.

A message is one frame: a msgpack array ``[kind, {field: value}]``, as control messages are. The header of the frame has
its sender (rank and incarnation) and, in the field ``job``, the incarnation it is for; 0 stands for the process that
holds the table.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.bounded_msgpack import Limits, pack_body, read_body
from gradbus.runtime.wire.frames import FrameKey, Kind

VERSION = 3  # earlier ones had other messages
MAX_KEY_BYTES = 1024  # in UTF-8
MAX_VALUE_BYTES = 4_000_000  # two of them, as in compare_set, fit into one frame
MAX_PAGE_BYTES = 2 * MAX_VALUE_BYTES  # of all values of a message
MAX_KEYS = 4096  # of a message
MAX_WAITING = 1024  # requests of a process that wait for what is not there
MAX_MEMORY = 2 * frames.MAX_CHUNK_BYTES  # that reading a message may take
_LIMITS = Limits(
    frames.MAX_CHUNK_BYTES,
    text_bytes=MAX_KEY_BYTES,
    binary_bytes=MAX_VALUE_BYTES,
    items=MAX_KEYS,
    fields=32,
    containers=16,
)

_STRICT = ConfigDict(strict=True, extra="ignore")

Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
Text = Annotated[str, Field(max_length=MAX_KEY_BYTES), AfterValidator(plain_line)]  # for people
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Keys = Annotated[list[Annotated[str, Field(max_length=MAX_KEY_BYTES)]], Field(max_length=MAX_KEYS)]
Values = Annotated[list[Annotated[bytes, Field(max_length=MAX_VALUE_BYTES)]], Field(max_length=MAX_KEYS)]
Op = Literal[
    "set",
    "get",
    "add",
    "check",
    "wait",
    "delete",
    "num_keys",
    "list_keys",
    "compare_set",
    "append",
    "push",
    "pop",
    "queue_wait",
    "queue_len",
]
READ_ONLY: frozenset[Op] = frozenset(["get", "check", "wait", "num_keys", "list_keys", "queue_wait", "queue_len"])
Outcome = Literal["done", "timeout", "empty", "error"]


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoreJoin:
    """Rank to the arbiter: it wants to use the store. Repeated until there is a :class:`StoreStatus` ``joined``.

    Attributes:
        version: of these messages. world: how many ranks there are. host: host name and process id, for people.
    """

    version: Number
    world: Rank
    host: Text


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoreStatus:
    """Arbiter to a rank: what this rank is in the store.

    Attributes:
        state: ``joined``: it may send requests. ``taken``: another process has its rank. ``departed``: another process
            has had its rank, and has left or died; a rank takes part in a store only once. ``refused``: it does not
            fit. ``closed``: there are no more answers.
        text: why, for people; with ``joined`` where the arbiter is.
    """

    state: Literal["joined", "taken", "departed", "refused", "closed"]
    text: Text


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoreRequest:
    """Rank to the arbiter. Repeated until there is an :class:`StoreAnswer`; executed once, unless it only reads.

    Attributes:
        id: counts the requests of this process. Of those that write, it sends one after the other.
        op: what to do. keys, values, number: with what; see :mod:`.table`.
        wait_s: how long to wait for what is not there.
    """

    id: Number
    op: Op
    keys: Keys
    values: Values
    number: Int64
    wait_s: Seconds


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoreAnswer:
    """Arbiter to a rank: what came of a request.

    Attributes:
        id: of the request.
        outcome: ``timeout``: what it waits for did not come; ``empty``: a queue has nothing; ``error``: see ``text``.
        keys, values, number: the result; with ``timeout`` some keys that are not there.
        text: for people.
    """

    id: Number
    outcome: Outcome
    keys: Keys
    values: Values
    number: Int64
    text: Text


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoreLeave:
    """Rank to the arbiter: it needs the store no more."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class ArbiterStatus:
    """Arbiter to other arbiters of the same store, of which there must be none.

    Attributes:
        complete: all ranks have joined. host: host name and process id, for people.
    """

    complete: bool
    host: Text


Message = StoreJoin | StoreStatus | StoreRequest | StoreAnswer | StoreLeave | ArbiterStatus

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}


def frame_of(message: Message, *, sender: int, incarnation: int, to: int) -> tuple[bytes, memoryview]:
    """The frame of a message: header and body.

    Raises:
        ValueError: longer than a receiver accepts.
    """
    body = pack_body(message, frames.MAX_CHUNK_BYTES)
    key = FrameKey(Kind.CONTROL, to, 0, sender, incarnation, name=peer_processes.own_claim())
    (frame,) = frames.split(key, body, chunk_bytes=frames.MAX_CHUNK_BYTES)
    return frame


def decode(data: bytes | memoryview) -> Message:
    """The message in the body of a frame.

    Raises:
        FrameError: ``store``: not msgpack within the limits, of an unknown kind, or against the schema.
    """
    message: Message = read_body(data, _LIMITS, _KINDS, "store")
    return message


def cut(text: str, max_bytes: int = MAX_KEY_BYTES) -> str:
    """The start of a text, of so many bytes at most in UTF-8."""
    return text.encode()[:max_bytes].decode(errors="ignore")
