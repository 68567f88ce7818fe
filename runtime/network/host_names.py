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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradbus.runtime import forks
from gradbus.runtime.network.addresses import FAMILIES, address_fault, family_of

FIRST_LOOKUP_S = 1.0  # how long a bus that opens waits for the addresses of its peers; a local name server needs ms
# From one look-up of a name that has no address to the next: a quarter of the time for which it had none, within these.
RETRY_S = (1.0, 15.0)
MAX_LOOKUPS = 16  # at the same time, in this process
MAX_ADDRESSES = 4  # of one name
_NO_ANSWER = "no answer yet"


_Key = tuple[str, socket.AddressFamily]


@dataclass(slots=True)
class _Name:
    """Holds what is known of a name.

    Attributes:
        addresses: of the last look-up that found some. reason: why the last one found none; empty: it did.
        is_asked: a look-up has been asked for and has not ended. missing_since_s: since when none has found an address,
            by ``time.monotonic``; 0: the last one did. due_s: the earliest time of the next.
    """

    addresses: tuple[str, ...] = ()
    reason: str = _NO_ANSWER
    is_asked: bool = False
    missing_since_s: float = 0.0
    due_s: float = 0.0


class HostNames:
    """Looks up the names that a process asks for: one at a time for each, and a bounded number for all."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all names, and the threads: in a child by fork there are none, and one of them may have held the
        lock."""
        self._names: dict[_Key, _Name] = {}
        self._queue: deque[_Key] = deque()
        self._threads = 0
        self._ended = threading.Condition()

    def look_up(
        self, names: Iterable[str], timeout_s: float, family: socket.AddressFamily = socket.AF_INET
    ) -> dict[str, tuple[str, ...]]:
        """Look names up side by side. Blocks for at most ``timeout_s``; what takes longer goes on.

        Returns:
            Addresses of that family, by name; names without one are left out. Of AF_UNSPEC: of both, in the order of
            the system.
        """
        known = self._known(names, family)
        self._ask(known)
        with self._ended:
            self._ended.wait_for(lambda: not any(one.is_asked for one in known.values()), timeout_s)
            return {name: one.addresses for (name, _), one in known.items() if not one.reason}

    def retry(self, names: Iterable[str], family: socket.AddressFamily = socket.AF_INET) -> dict[str, tuple[str, ...]]:
        """Return the addresses of those names that have some, and look the others up again if it is time. Does not
        wait."""
        known = self._known(names, family)
        now_s = time.monotonic()
        with self._ended:
            due = {key: one for key, one in known.items() if one.reason and not one.is_asked and now_s >= one.due_s}
            found = {name: one.addresses for (name, _), one in known.items() if not one.reason}
        self._ask(due)
        return found

    def reasons(self, names: Iterable[str], family: socket.AddressFamily = socket.AF_INET) -> dict[str, str]:
        """Return why names have no address, for those that were looked up and have none."""
        with self._ended:
            known = {name: self._names.get((name, family)) for name in names}
            return {name: one.reason for name, one in known.items() if one is not None and one.reason}

    def _known(self, names: Iterable[str], family: socket.AddressFamily) -> dict[_Key, _Name]:
        with self._ended:
            return {(name, family): self._names.setdefault((name, family), _Name()) for name in names}

    def _ask(self, names: Mapping[_Key, _Name]) -> None:
        with self._ended:
            for key, one in names.items():
                if not one.is_asked:
                    one.is_asked = True
                    one.missing_since_s = one.missing_since_s or time.monotonic()
                    self._queue.append(key)
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
                key = self._queue.popleft()
            addresses, reason = _addresses_of(*key)
            with self._ended:
                self._note(self._names[key], addresses, reason)
                self._ended.notify_all()

    def _note(self, one: _Name, addresses: tuple[str, ...], reason: str) -> None:
        now_s = time.monotonic()
        one.is_asked, one.reason = False, reason
        if addresses:
            one.addresses, one.missing_since_s = addresses, 0.0
        else:
            least_s, most_s = RETRY_S
            one.due_s = now_s + min(max((now_s - one.missing_since_s) / 4, least_s), most_s)


def _addresses_of(name: str, family: socket.AddressFamily) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a name, of one family or, of AF_UNSPEC, both; or none, and why."""
    try:
        found = socket.getaddrinfo(name, None, family, socket.SOCK_DGRAM)
    except OSError as error:
        return (), (error.strerror or str(error)).lower()
    except Exception as error:  # a name that the codec of the standard library refuses, no more memory
        return (), str(error)
    wanted = {family} if family != socket.AF_UNSPEC else {*FAMILIES}
    given = dict.fromkeys(str(place[0]) for *_, place in found if family_of(str(place[0])) in wanted)
    faults = {address: address_fault(address) for address in given}  # a filter of names may answer with 0.0.0.0
    addresses = tuple(address for address, fault in faults.items() if not fault)[:MAX_ADDRESSES]
    if addresses:
        return addresses, ""
    return (), "; ".join(f"it is {address}: {fault}" for address, fault in faults.items()) or "it has no address"


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
"""The resolver of this process."""

forks.in_child(LOOKUPS.reset)
