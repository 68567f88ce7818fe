"""The table of a store: keys, values and queues, and the requests that wait for them. No I/O, no clock, no threads.

Operations, by name in :class:`.messages.StoreRequest`, with what torch's own stores make of them:

- ``set`` keys to values; ``append`` them to what is there.
- ``get``: values, as many from the first key on as fit into a message; waits for all the keys.
- ``add`` a number to a value that is a decimal number, 0 if there is none: the sum.
- ``compare_set`` a key from one value to another: what it holds then. Where there is none: the new value if the
  expected one is empty, else nothing is set, and the answer is the expected one.
- ``check`` (1 or 0) and ``wait``: whether all keys hold a value, or are queues that hold something.
- ``delete`` a key: 1 if it was there. ``num_keys``; ``list_keys`` after a key, sorted; number 1: there are more.
- ``push`` a value to the end of a queue, ``pop`` its first one, ``queue_wait`` until it has one, ``queue_len``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from gradbus.torch.store.messages import (
    MAX_KEYS,
    MAX_PAGE_BYTES,
    MAX_VALUE_BYTES,
    Op,
    Outcome,
    StoreAnswer,
    StoreRequest,
    cut,
)

MAX_TABLE_KEYS = 1_000_000
MAX_TABLE_BYTES = 256 << 20
_ENTRY_BYTES = 64  # what an entry costs besides its key and value, about
_NAMED = 4  # keys that a timeout names

Reply = Callable[[StoreAnswer], None]


class TableError(ValueError):
    """The request cannot be done; the text is for its process."""


class _KeyMissing(Exception):
    """The request has to wait for a key."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@dataclass(slots=True, eq=False)
class StoreWaiter:
    """A request that waits for ``key``."""

    request: StoreRequest
    reply: Reply
    key: str


class StoreTable:
    """Bounded: what would pass a limit is an error for its process, and changes nothing."""

    def __init__(
        self,
        why_late: Callable[[], str] = lambda: "",
        *,
        max_keys: int = MAX_TABLE_KEYS,
        max_bytes: int = MAX_TABLE_BYTES,
    ) -> None:
        """``why_late``: a text for the answer to a wait that has timed out."""
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, list[StoreWaiter]] = {}
        self._why_late = why_late
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._bytes = 0

    def submit(self, request: StoreRequest, reply: Reply) -> StoreWaiter | None:
        """Do it; ``reply`` gets the answer, at once or when what it waits for is there. Returns what waits, if so."""
        try:
            reply(self._do(request))
        except TableError as error:
            reply(answer(request, "error", text=str(error)))
        except _KeyMissing as missing:
            waiter = StoreWaiter(request, reply, missing.key)
            self._waiting.setdefault(missing.key, []).append(waiter)
            return waiter
        else:
            for key in request.keys if request.op in ("set", "append", "add", "compare_set", "push") else ():
                self._wake(key)
        return None

    def expire(self, waiter: StoreWaiter) -> None:
        """Its time is over."""
        self.cancel(waiter)
        missing = list(islice((key for key in waiter.request.keys if not self._has(key)), _NAMED))
        waiter.reply(answer(waiter.request, "timeout", keys=missing or [waiter.key], text=self._why_late()))

    def cancel(self, waiter: StoreWaiter) -> None:
        """Its answer is not wanted any more."""
        waiters = self._waiting.get(waiter.key, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(waiter.key, None)

    def _wake(self, key: str) -> None:
        for waiter in self._waiting.pop(key, ()):
            try:
                waiter.reply(self._do(waiter.request))
            except _KeyMissing as missing:
                waiter.key = missing.key
                self._waiting.setdefault(missing.key, []).append(waiter)

    def _do(self, request: StoreRequest) -> StoreAnswer:
        """Raises TableError: it cannot be done. _KeyMissing: not yet."""
        function, keys, values = self._OPERATIONS[request.op]
        given = len(request.keys), len(request.values)
        expected_keys = given[0] if keys is None else keys
        if given != (expected_keys, expected_keys if values is None else values):
            raise TableError(f"{request.op} with {given[0]} keys and {given[1]} values")
        return function(self, request)

    def _has(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _reserve(self, more_bytes: int, more_keys: int = 0) -> None:
        if len(self._values) + more_keys > self._max_keys or self._bytes + more_bytes > self._max_bytes:
            raise TableError(
                f"the store is full: {len(self._values)} keys and {self._bytes} bytes, at most {self._max_keys} and "
                f"{self._max_bytes}. Delete keys that are not needed any more"
            )
        self._bytes += more_bytes

    # Values

    def _put(self, pairs: dict[str, bytes]) -> None:
        held = sum(_cost(key, self._values[key]) for key in pairs if key in self._values)
        self._reserve(sum(_cost(*pair) for pair in pairs.items()) - held, sum(key not in self._values for key in pairs))
        self._values.update(pairs)

    def _set(self, request: StoreRequest) -> StoreAnswer:
        self._put(dict(zip(request.keys, request.values, strict=True)))
        return answer(request)

    def _append(self, request: StoreRequest) -> StoreAnswer:
        longer = {key: self._values.get(key, b"") for key in request.keys}
        for key, value in zip(request.keys, request.values, strict=True):
            size = len(longer[key]) + len(value)
            if size > MAX_VALUE_BYTES:
                raise TableError(f"append: the value of key {key!r} would have {size} bytes, at most {MAX_VALUE_BYTES}")
            longer[key] += value
        self._put(longer)
        return answer(request)

    def _get(self, request: StoreRequest) -> StoreAnswer:
        found: list[bytes] = []
        size = 0
        for key in request.keys:
            value = self._values.get(key)
            if value is None:
                raise _KeyMissing(key)
            size += len(value)
            if size <= MAX_PAGE_BYTES:
                found.append(value)
        return answer(request, values=found)

    def _add(self, request: StoreRequest) -> StoreAnswer:
        (key,) = request.keys
        text = self._values.get(key, b"0")
        try:
            total = int(text if len(text) <= 20 else b"none") + request.number
        except ValueError:
            raise TableError(f"add: the value of key {key!r} is not a number: {text[:20]!r}") from None
        if not -(1 << 63) <= total < 1 << 63:
            raise TableError(f"add: the sum for key {key!r} does not fit into 64 bits")
        self._put({key: str(total).encode()})
        return answer(request, number=total)

    def _compare_set(self, request: StoreRequest) -> StoreAnswer:
        (key,), (expected, desired) = request.keys, request.values
        held = self._values.get(key)
        if held != expected and (held is not None or expected):
            return answer(request, values=[expected if held is None else held])
        self._put({key: desired})
        return answer(request, values=[desired])

    def _delete(self, request: StoreRequest) -> StoreAnswer:
        (key,) = request.keys
        gone = self._values.pop(key, None)
        self._bytes -= 0 if gone is None else _cost(key, gone)
        return answer(request, number=int(gone is not None))

    # Keys

    def _check(self, request: StoreRequest) -> StoreAnswer:
        return answer(request, number=int(all(map(self._has, request.keys))))

    def _wait(self, request: StoreRequest) -> StoreAnswer:
        for key in request.keys:
            if not self._has(key):
                raise _KeyMissing(key)
        return answer(request)

    def _num_keys(self, request: StoreRequest) -> StoreAnswer:
        return answer(request, number=len(self._values))

    def _list_keys(self, request: StoreRequest) -> StoreAnswer:
        """The empty key is a key: with a number that is not 0 nothing was listed before."""
        rest = sorted(key for key in self._values if request.number or key > request.keys[0])
        return answer(request, keys=rest[:MAX_KEYS], number=int(len(rest) > MAX_KEYS))

    # Queues

    def _push(self, request: StoreRequest) -> StoreAnswer:
        (key,), (value,) = request.keys, request.values
        self._reserve(_cost(key, value))
        self._queues.setdefault(key, deque()).append(value)
        return answer(request)

    def _pop(self, request: StoreRequest) -> StoreAnswer:
        (key,) = request.keys
        queue = self._queues.get(key)
        if queue is None:
            return answer(request, "empty")
        value = queue.popleft()
        self._bytes -= _cost(key, value)
        if not queue:
            del self._queues[key]
        return answer(request, values=[value])

    def _queue_wait(self, request: StoreRequest) -> StoreAnswer:
        (key,) = request.keys
        if key not in self._queues:
            raise _KeyMissing(key)
        return answer(request)

    def _queue_len(self, request: StoreRequest) -> StoreAnswer:
        return answer(request, number=len(self._queues.get(request.keys[0], ())))

    # What does each operation, and the keys and values that it needs; None: any number of keys, and a value for each.
    _OPERATIONS: ClassVar[
        dict[Op, tuple[Callable[[StoreTable, StoreRequest], StoreAnswer], int | None, int | None]]
    ] = {
        "set": (_set, None, None),
        "append": (_append, None, None),
        "get": (_get, None, 0),
        "add": (_add, 1, 0),
        "compare_set": (_compare_set, 1, 2),
        "delete": (_delete, 1, 0),
        "check": (_check, None, 0),
        "wait": (_wait, None, 0),
        "num_keys": (_num_keys, 0, 0),
        "list_keys": (_list_keys, 1, 0),
        "push": (_push, 1, 1),
        "pop": (_pop, 1, 0),
        "queue_wait": (_queue_wait, 1, 0),
        "queue_len": (_queue_len, 1, 0),
    }


def answer(
    request: StoreRequest,
    outcome: Outcome = "done",
    *,
    keys: Sequence[str] = (),
    values: Sequence[bytes] = (),
    number: int = 0,
    text: str = "",
) -> StoreAnswer:
    """The answer to a request."""
    return StoreAnswer(request.id, outcome, list(keys), list(values), number, cut(text))


def _cost(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
