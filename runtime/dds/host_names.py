"""Addresses of host names, looked up on threads of their own.

The system's call, ``getaddrinfo``, takes many seconds where a name server does not answer, and cannot be ended. So it
never runs on an event loop or the thread of a bus: whoever needs an address waits for it a bounded time, and asks again
later. A thread that is in the call when nobody waits any more ends with it, and keeps the process from nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gradbus.runtime import forks

FIRST_LOOKUP_S = 1.0  # how long a bus that opens waits for the addresses of its peers; a local name server needs ms
# From one look-up of a name that has no address to the next: a quarter of the time for which it had none, within these.
RETRY_S = (1.0, 15.0)
MAX_LOOKUPS = 16  # at the same time, in this process
MAX_ADDRESSES = 4  # of one name
_NO_ANSWER = "no answer yet"


@dataclass(slots=True)
class _Name:
    """What is known of a name.

    Attributes:
        addresses: IPv4, of the last look-up that found some. reason: why the last one found none; empty: it did.
        is_asked: a look-up has been asked for and has not ended. asked_s: since when none has found an address, by
            ``time.monotonic``. due_s: the earliest time of the next.
    """

    addresses: tuple[str, ...] = ()
    reason: str = _NO_ANSWER
    is_asked: bool = False
    missing_since_s: float = 0.0
    due_s: float = 0.0


class HostNames:
    """The look-ups of a process: one at a time for each name, and a bounded number for all."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self._queue: deque[str] = deque()
        self._threads = 0
        self._ended = threading.Condition()

    def look_up(self, names: Collection[str], timeout_s: float) -> dict[str, tuple[str, ...]]:
        """Look names up side by side. Blocks for at most ``timeout_s``; what takes longer goes on.

        Returns:
            IPv4 addresses, by name; names without one are left out.
        """
        self._ask(names)
        with self._ended:
            self._ended.wait_for(lambda: not any(self._names[name].is_asked for name in names), timeout_s)
            return {name: self._names[name].addresses for name in names if not self._names[name].reason}

    def retry(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the addresses of those names that have some, and look the others up again if it is time. Does not
        wait."""
        names = list(names)
        now_s = time.monotonic()
        with self._ended:
            known = {name: self._names.setdefault(name, _Name()) for name in names}
            due = [name for name, one in known.items() if one.reason and not one.is_asked and now_s >= one.due_s]
        self._ask(due)
        return {name: one.addresses for name, one in known.items() if not one.reason}

    def reasons(self, names: Iterable[str]) -> dict[str, str]:
        """Return why names have no address, for those that were looked up and have none."""
        with self._ended:
            return {name: one.reason for name in names if (one := self._names.get(name)) is not None and one.reason}

    def _ask(self, names: Collection[str]) -> None:
        with self._ended:
            for name in names:
                one = self._names.setdefault(name, _Name())
                if not one.is_asked:
                    one.is_asked = True
                    one.missing_since_s = one.missing_since_s or time.monotonic()
                    self._queue.append(name)
            wanted = min(len(self._queue), MAX_LOOKUPS - self._threads)
            self._threads += wanted
        for _ in range(wanted):
            thread = threading.Thread(target=self._work, name="gradbus-names", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: it is tried again with the next names
                with self._ended:
                    self._threads -= 1

    def _work(self) -> None:
        while True:
            with self._ended:
                if not self._queue:
                    self._threads -= 1
                    return
                name = self._queue.popleft()
            addresses, reason = _addresses_of(name)
            with self._ended:
                self._note(self._names[name], addresses, reason)
                self._ended.notify_all()

    def _note(self, one: _Name, addresses: tuple[str, ...], reason: str) -> None:
        now_s = time.monotonic()
        one.is_asked, one.reason = False, reason
        if addresses:
            one.addresses, one.missing_since_s = addresses, 0.0
        else:
            least_s, most_s = RETRY_S
            one.due_s = now_s + min(max((now_s - one.missing_since_s) / 4, least_s), most_s)


def _addresses_of(name: str) -> tuple[tuple[str, ...], str]:
    """Return the IPv4 addresses of a name; or none, and why."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM)
    except OSError as error:
        return (), (error.strerror or str(error)).lower()
    except Exception as error:  # a name that the codec of the standard library refuses, no more memory
        return (), str(error)
    addresses = tuple(dict.fromkeys(str(place[0]) for *_, place in found))[:MAX_ADDRESSES]
    return addresses, "" if addresses else "it has no IPv4 address"


def describe_missing(reasons: Mapping[str, str]) -> str:
    """Return a sentence about names without an address, and what to do; empty where there are none."""
    if not reasons:
        return ""
    shown = [f"{name} ({reason})" for name, reason in list(reasons.items())[:3]]
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return (
        f"No address yet for {', '.join(shown)}{more} of bus.peers: check DNS or /etc/hosts here, or give IP addresses"
    )


LOOKUPS = HostNames()
"""Of this process."""

forks.in_child(LOOKUPS.__init__)  # type: ignore[misc]
