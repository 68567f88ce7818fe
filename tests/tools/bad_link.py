"""A link that delays, loses, doubles and reorders packets: two TAP devices, and a thread that carries what they send.

``tc netem`` would do the same, but many kernels do not have it, and this one counts what it did.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from gradbus.experiments.namespaces import Host, enter_namespace, two_hosts

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_PACKET_BYTES = 1 << 16
_QUEUED = 10_000  # packets under way at most: what comes then is lost, as in a router


@dataclass(frozen=True)
class LinkFaults:
    """What happens to packets, in each direction alike.

    Attributes:
        delay_s: how long each takes; jitter_s: by so much less or more, so that packets overtake each other.
        loss, duplicate: shares of packets.
        seed: of the dice.
    """

    delay_s: float = 0.05
    jitter_s: float = 0.01
    loss: float = 0.01
    duplicate: float = 0.01
    seed: int = 1


class BadLink:
    """Carries Ethernet frames between two TAP devices until it is closed.

    Attributes:
        counts: packets by what became of them: ``carried``, ``lost``, ``doubled``, ``overtaken``.
    """

    def __init__(self, first: int, second: int, faults: LinkFaults) -> None:
        """``first``, ``second``: descriptors of the devices, see :func:`open_tap`. They are closed with it."""
        self._other = {first: second, second: first}
        self._faults = faults
        self._dice = random.Random(faults.seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []  # due, number, where to, packet
        self._numbers = itertools.count()
        self._newest: dict[int, int] = {}  # by where to: the highest number that has come out
        self._stop, self._stopped = os.pipe()
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="gradbus-bad-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (*self._other, self._stop):
            poll.register(descriptor, select.POLLIN)
        while True:
            left_s = self._under_way[0][0] - time.monotonic() if self._under_way else None
            ready = poll.poll(None if left_s is None else max(0.0, left_s * 1000.0))
            for descriptor, _ in ready:
                if descriptor == self._stop:
                    return
                self._take(descriptor)
            self._deliver()

    def _take(self, descriptor: int) -> None:
        while True:
            try:
                packet = os.read(descriptor, _PACKET_BYTES)
            except BlockingIOError:
                return
            faults, dice = self._faults, self._dice
            if dice.random() < faults.loss or len(self._under_way) >= _QUEUED:
                self.counts["lost"] += 1
                continue
            copies = 1 + (dice.random() < faults.duplicate)
            self.counts["doubled"] += copies - 1
            for _ in range(copies):
                due_s = time.monotonic() + faults.delay_s + dice.uniform(-faults.jitter_s, faults.jitter_s)
                heapq.heappush(self._under_way, (due_s, next(self._numbers), self._other[descriptor], packet))

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, number, where, packet = heapq.heappop(self._under_way)
            self.counts["carried"] += 1
            self.counts["overtaken"] += number < self._newest.get(where, -1)
            self._newest[where] = max(number, self._newest.get(where, -1))
            try:
                os.write(where, packet)
            except OSError:  # the device is down, or its queue full
                self.counts["lost"] += 1

    def close(self) -> None:
        """Carry nothing more."""
        os.write(self._stopped, b"x")
        self._thread.join(5.0)
        for descriptor in (*self._other, self._stop, self._stopped):
            os.close(descriptor)


def open_tap(name: str, enter: Callable[[], None]) -> int:
    """Make a TAP device of this name. ``enter``: has the thread that it is called on enter a network namespace, in
    which the device will be. Returns its descriptor, which does not block. Raises OSError."""
    opened: list[int] = []
    failed: list[OSError] = []

    def make() -> None:  # on a thread of its own, which stays in that namespace
        try:
            enter()
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
            except OSError:
                os.close(descriptor)
                raise
            opened.append(descriptor)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make, name="gradbus-open-tap")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return opened[0]


@contextmanager
def two_far_hosts(faults: LinkFaults) -> Iterator[tuple[Host, Host, BadLink]]:
    """Make two namespaces joined by a link with these faults, and remove them at the end. Raises NoNamespaces."""
    taps: list[int] = []

    def link(first: Host, second: Host) -> None:
        taps.append(open_tap(first.interface, partial(enter_namespace, first.name)))
        taps.append(open_tap(second.interface, partial(enter_namespace, second.name)))

    try:
        with two_hosts(link) as hosts:
            carrier = BadLink(taps[0], taps[1], faults)
            taps.clear()  # they are closed with it
            try:
                yield (*hosts, carrier)
            finally:
                carrier.close()
    finally:
        for tap in taps:
            os.close(tap)
