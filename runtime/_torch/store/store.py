"""torch's ``Store`` over DDS. From any thread; a call blocks its thread, with the GIL free, and never an event loop.

What torch's own stores do, it does, with these limits: keys of 1 KiB, values of 4 MB, a table of a million keys and
256 MiB. torch's ``PrefixStore``, which process groups put around it, hands on everything but ``delete_key``,
``num_keys``, ``list_keys`` and queues: torch does not offer these of a store written in Python.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Store
from torch.distributed import QueueEmptyError

from gradbus.runtime.bus.background import JOB_KEY
from gradbus.torch.store.link import StoreLink
from gradbus.torch.store.messages import MAX_KEY_BYTES, MAX_KEYS, MAX_PAGE_BYTES, MAX_VALUE_BYTES, Op, StoreAnswer

_FOREVER_S = 30 * 86400.0  # of a timeout of 0, which stands for none

# Of stores that are closed C++ may have a process group yet. It shall get their error, and not find them gone.
_closed: deque[DdsStore] = deque(maxlen=64)


class DdsStore(Store):
    """A handle on the store of one job. Made by ``dist.rendezvous("dds://...")``.

    Raises (all calls):
        DistStoreError: not done in time. DistNetworkError: rank 0 is gone, or the store is closed.
    """

    def __init__(self, link: StoreLink, timeout: timedelta, *, is_clone: bool = False) -> None:
        super().__init__()
        self._link = link
        self.set_timeout(timeout)
        if not is_clone:
            link.handles.add(self)

    def clone(self) -> DdsStore:
        """Another handle on the same connection, with its own timeout."""
        copy = DdsStore(self._link, cast(Any, self).timeout, is_clone=True)
        self._link.clones.append(copy)
        return copy

    def close(self) -> None:
        """Leave the store, if no other handle is open; clones do not count. Does not wait."""
        handles = self._link.handles
        if self in handles:
            handles.discard(self)
            _closed.append(self)
            if not handles:
                self._link.close()

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def _call(
        self,
        op: Op,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        number: int = 0,
        *,
        waits: bool = False,
        timeout: timedelta | float | None = None,
    ) -> StoreAnswer:
        """See :meth:`StoreLink.call`. ``timeout``: by default that of the handle."""
        return self._link.call(op, keys, values, number, waits=waits, timeout_s=self._limit_s(timeout))

    def _limit_s(self, timeout: timedelta | float | None = None) -> float:
        limit = cast(Any, self).timeout if timeout is None else timeout
        limit_s = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
        return min(limit_s, _FOREVER_S) if limit_s > 0 else _FOREVER_S

    # Values

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._call("set", [_key(key)], [_value(key, value)])

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it."""
        return self._call("get", [_key(key)], waits=True).values[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 where there is none. Returns the sum."""
        number = operator.index(value)
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"add: {number} for key {key!r} does not fit into 64 bits")
        return self._call("add", [_key(key)], number=number).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it holds the expected value, or none and the expected one is empty. Returns what it holds then;
        where there is none, the expected value."""
        if key == JOB_KEY:  # an address has what processes of other stores must agree on
            return self._link.address.number.encode()
        values = [_value(key, expected_value), _value(key, desired_value)]
        return self._call("compare_set", [_key(key)], values).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value, empty where there is none."""
        self._call("append", [_key(key)], [_value(key, value)])

    def delete_key(self, key: str) -> bool:
        """Delete a key. Whether it was there."""
        return self._call("delete", [_key(key)]).number == 1

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys; waits for them."""
        wanted = [_key(key) for key in keys]
        found: list[bytes] = []
        while len(found) < len(wanted):
            some = wanted[len(found) : len(found) + MAX_KEYS]
            found += self._call("get", some, waits=True).values
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set keys."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values")
        pairs = [(_key(key), _value(key, value)) for key, value in zip(keys, values, strict=True)]
        for some in _pages(pairs):
            self._call("set", [key for key, _ in some], [value for _, value in some])

    # Keys

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._call("check", some).number == 1 for some in _parts(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys are there."""
        for some in _parts(keys):
            self._call("wait", some, waits=True, timeout=timeout)

    def num_keys(self) -> int:
        """How many keys there are; queues do not count."""
        return self._call("num_keys", []).number

    def list_keys(self) -> list[str]:
        """All keys, sorted."""
        found: list[str] = []
        more = True
        while more:
            answer = self._call("list_keys", found[-1:] or [""], number=0 if found else 1)
            found += answer.keys
            more = answer.number == 1
        return found

    # Queues

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Add a value to the end of a queue."""
        self._call("push", [_key(key)], [_value(key, value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; ``block``: wait for it. Raises QueueEmptyError."""
        until_s = time.monotonic() + self._limit_s()
        while True:
            if block:
                left_s = max(0.001, until_s - time.monotonic())
                self._call("queue_wait", [_key(key)], waits=True, timeout=left_s)
            try:
                return self._call("pop", [_key(key)]).values[0]
            except QueueEmptyError:  # another rank was faster
                if not block:
                    raise

    def queue_len(self, key: str) -> int:
        """How many values a queue holds."""
        return self._call("queue_len", [_key(key)]).number


def _key(key: str) -> str:
    size = len(key.encode())
    if size > MAX_KEY_BYTES:
        raise ValueError(f"key of {size} bytes, at most {MAX_KEY_BYTES}: {key[:40]!r}...")
    return key


def _value(key: str, value: str | bytes) -> bytes:
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise TypeError(f"value of type {type(value).__name__} for key {key!r}: expected str or bytes")
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE_BYTES:
        raise ValueError(
            f"value of {len(data)} bytes for key {key!r}, at most {MAX_VALUE_BYTES}: send it by a collective"
        )
    return data


def _parts(keys: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), MAX_KEYS):
        yield [_key(key) for key in keys[start : start + MAX_KEYS]]


def _pages(pairs: list[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Parts that fit into one message each."""
    page: list[tuple[str, bytes]] = []
    size = 0
    for key, value in pairs:
        if page and (size + len(value) > MAX_PAGE_BYTES or len(page) == MAX_KEYS // 16):
            yield page
            page, size = [], 0
        page.append((key, value))
        size += len(value)
    if page:
        yield page
