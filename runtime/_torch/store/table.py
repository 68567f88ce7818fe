"""The table of a store: keys, values and queues, and those who wait for them. No I/O, no clock, no threads.

Operations, by name in :class:`.messages.StoreRequest`, with what torch's own stores make of them:

- ``set`` keys to values; ``append`` them to what is there.
- ``get``: values, as many from the first key on as fit into a message; waits for all the keys.
- ``add`` a number to a value that is a decimal number, 0 if there is none: the sum.
- ``compare_set`` a key from one value to another: what it holds then. Where there is none: the new value if the
  expected one is empty, else nothing is set, and the answer is the expected one.
- ``check`` (1 or 0) and ``wait``: whether all keys hold a value, or are queues that hold something.
- ``delete`` a key: 1 if it was there. ``num_keys``; ``list_keys`` after a key, in order; number 1: there are more.
- ``push`` a value to the end of a queue, ``pop`` its first one (waits), ``pop_now`` (does not), ``queue_len``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from gradbus.torch.store.messages import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_PAGE_BYTES,
    MAX_VALUE_BYTES,
    Op,
    Outcome,
    StoreAnswer,
    StoreRequest,
)

MAX_TABLE_KEYS = 1_000_000
MAX_TABLE_BYTES = 256 << 20
_ENTRY_BYTES = 64  # what an entry costs besides its key and value, about
_NAMED = 4  # keys that a timeout names

Reply = Callable[[StoreAnswer], None]

# Keys and values that each operation needs; None: any number of keys, and a value for each where there are values.
_NEEDS: dict[Op, tuple[int | None, int | None]] = {
    "set": (None, None), "append": (None, None), "get": (None, 0), "add": (1, 0), "check": (None, 0), "wait": (None, 0),
    "delete": (1, 0), "num_keys": (0, 0), "list_keys": (1, 0), "compare_set": (1, 2), "push": (1, 1), "pop": (1, 0),
    "pop_now": (1, 0), "queue_len": (1, 0),
}  # fmt: skip


class TableError(ValueError):
    """The request cannot be done; the text is for who asked."""


@dataclass(slots=True, eq=False)
class StoreWaiter:
    """A request that waits for ``key``."""

    request: StoreRequest
    reply: Reply
    key: str


@dataclass(slots=True)
class _Missing:
    """What a request has to wait for."""

    key: str


class StoreTable:
    """Bounded: what would pass a limit is an error for who asked, and changes nothing."""

    def __init__(self, *, max_keys: int = MAX_TABLE_KEYS, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, list[StoreWaiter]] = {}
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._bytes = 0

    def submit(self, request: StoreRequest, reply: Reply) -> StoreWaiter | None:
        """Do it; ``reply`` gets the answer, at once or when what it waits for is there. Returns who waits, if so."""
        try:
            result = self._do(request)
        except TableError as error:
            reply(answer(request, "error", text=str(error)))
            return None
        if isinstance(result, _Missing):
            waiter = StoreWaiter(request, reply, result.key)
            self._waiting.setdefault(result.key, []).append(waiter)
            return waiter
        reply(result)
        for key in request.keys if request.op in ("set", "append", "add", "compare_set", "push") else ():
            self._wake(key)
        return None

    def expire(self, waiter: StoreWaiter) -> None:
        """Its time is over."""
        self.cancel(waiter)
        missing = list(islice((key for key in waiter.request.keys if not self._has(key)), _NAMED))
        waiter.reply(answer(waiter.request, "timeout", keys=missing or [waiter.key]))

    def cancel(self, waiter: StoreWaiter) -> None:
        """Nobody wants its answer."""
        waiters = self._waiting.get(waiter.key, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(waiter.key, None)

    def _wake(self, key: str) -> None:
        for waiter in self._waiting.pop(key, ()):
            result = self._do(waiter.request)
            if isinstance(result, _Missing):
                waiter.key = result.key
                self._waiting.setdefault(result.key, []).append(waiter)
            else:
                waiter.reply(result)

    def _has(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _do(self, request: StoreRequest) -> StoreAnswer | _Missing:
        keys, values = request.keys, request.values
        needs = _NEEDS[request.op]
        if len(keys) != (len(keys) if needs[0] is None else needs[0]) or len(values) != (
            len(keys) if needs[1] is None else needs[1]
        ):
            raise TableError(f"{request.op} with {len(keys)} keys and {len(values)} values")
        match request.op:
            case "set":
                return self._put(request, keys, values)
            case "append":
                return self._put(request, keys, self._appended(keys, values))
            case "get":
                return self._get(request)
            case "add":
                total = self._number(keys[0]) + request.number
                if not -(1 << 63) <= total < 1 << 63:
                    raise TableError(f"add: the sum for key {keys[0]!r} does not fit into 64 bits")
                return self._put(request, keys, [str(total).encode()], total)
            case "compare_set":
                return self._compare_set(request)
            case "check":
                return answer(request, number=int(all(map(self._has, keys))))
            case "wait":
                missing = next((key for key in keys if not self._has(key)), None)
                return answer(request) if missing is None else _Missing(missing)
            case "delete":
                gone = self._values.pop(keys[0], None)
                self._bytes -= 0 if gone is None else _cost(keys[0], gone)
                return answer(request, number=int(gone is not None))
            case "num_keys":
                return answer(request, number=len(self._values))
            case "list_keys":
                return self._list(request)
            case "push":
                self._reserve(_cost(keys[0], values[0]))
                self._queues.setdefault(keys[0], deque()).append(values[0])
                return answer(request)
            case "pop" | "pop_now":
                return self._pop(request)
            case "queue_len":
                return answer(request, number=len(self._queues.get(keys[0], ())))

    def _put(self, request: StoreRequest, keys: Sequence[str], values: Sequence[bytes], number: int = 0) -> StoreAnswer:
        pairs = dict(zip(keys, values, strict=True))
        held = sum(_cost(key, self._values[key]) for key in pairs if key in self._values)
        self._reserve(sum(_cost(*pair) for pair in pairs.items()) - held, sum(key not in self._values for key in pairs))
        self._values.update(pairs)
        return answer(request, number=number)

    def _reserve(self, more_bytes: int, more_keys: int = 0) -> None:
        if len(self._values) + more_keys > self._max_keys or self._bytes + more_bytes > self._max_bytes:
            raise TableError(
                f"the store is full: {len(self._values)} keys and {self._bytes} bytes, at most {self._max_keys} and "
                f"{self._max_bytes}. Delete keys that are not needed any more"
            )
        self._bytes += more_bytes

    def _appended(self, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
        longer = dict.fromkeys(keys, b"")
        for key, value in zip(keys, values, strict=True):
            longer[key] += value
        for key, value in longer.items():
            longer[key] = self._values.get(key, b"") + value
            if len(longer[key]) > MAX_VALUE_BYTES:
                raise TableError(f"append: the value of key {key!r} would have {len(longer[key])} bytes, at most "
                                 f"{MAX_VALUE_BYTES}")  # fmt: skip
        return [longer[key] for key in keys]

    def _number(self, key: str) -> int:
        text = self._values.get(key, b"0")
        try:
            if len(text) > 20:
                raise ValueError
            return int(text)
        except ValueError:
            raise TableError(f"add: the value of key {key!r} is not a number: {text[:20]!r}") from None

    def _get(self, request: StoreRequest) -> StoreAnswer | _Missing:
        found: list[bytes] = []
        size = 0
        for key in request.keys:
            value = self._values.get(key)
            if value is None:
                return _Missing(key)
            size += len(value)
            if size <= MAX_PAGE_BYTES:
                found.append(value)
        return answer(request, values=found)

    def _compare_set(self, request: StoreRequest) -> StoreAnswer:
        (key,), (expected, desired) = request.keys, request.values
        held = self._values.get(key)
        if held != expected and (held is not None or expected):
            return answer(request, values=[expected if held is None else held])
        self._put(request, [key], [desired])
        return answer(request, values=[desired])

    def _pop(self, request: StoreRequest) -> StoreAnswer | _Missing:
        key = request.keys[0]
        queue = self._queues.get(key)
        if queue is None:
            return _Missing(key) if request.op == "pop" else answer(request, "empty")
        value = queue.popleft()
        self._bytes -= _cost(key, value)
        if not queue:
            del self._queues[key]
        return answer(request, values=[value])

    def _list(self, request: StoreRequest) -> StoreAnswer:
        """The empty key is a key: a number that is not 0 says that nothing was listed before."""
        rest = sorted(key for key in self._values if request.number or key > request.keys[0])
        return answer(request, keys=rest[:MAX_KEYS], number=int(len(rest) > MAX_KEYS))


def answer(
    request: StoreRequest, outcome: Outcome = "done", *, keys: Sequence[str] = (), values: Sequence[bytes] = (),
    number: int = 0, text: str = "",
) -> StoreAnswer:  # fmt: skip
    """The answer to a request."""
    text = text.encode()[:MAX_KEY_BYTES].decode(errors="ignore")
    return StoreAnswer(request.id, outcome, list(keys), list(values), number, text)


def _cost(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
