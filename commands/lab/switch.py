"""A switch in this process: the interfaces of hosts are TAP devices, and a thread carries their Ethernet frames.

It delays, loses, doubles and limits them as ``tc netem`` and ``tbf`` do; many kernels have no netem.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from gradbus.commands.lab.conditions import LinkConditions

LATE_S = 5e-3  # a frame that leaves so long after its time was held up by the switch, not by the network it stands for
MOST_LATE = 0.01  # of all frames, for the switch not to have been the limit
_FEW_LATE = 20  # so many may be late in any run: a pause of the machine
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 1 << 16
_BATCH = 64  # frames that are taken from one host before the others and before those that are due
MOST_BYTES = 512_000_000  # under way at a time: memory, whatever rate, delay and MTU are
_ENTRY_BYTES = 300  # that a frame takes beside its own
_NICE = -10
_CATCH_UP_S = 0.02  # so late a frame may be taken from its host without the link having been idle meanwhile


class Switch:
    """Carries frames between TAP devices from its start until it is closed. A context manager, for ``close``.

    Attributes:
        counts: frames by what became of them: ``carried``, ``lost`` (drawn), ``full`` (no room in a queue),
            ``doubled``, ``overtaken`` (by one that was sent later), ``late`` (see LATE_S), ``refused`` (the device
            is down).
        under_way: frames that have not come out yet, as a heap by when they are due.
    """

    def __init__(self, devices: Mapping[bytes, int], conditions: LinkConditions, *, limits_senders: bool) -> None:
        """Args:
        devices: descriptor of the TAP device of each host, by its Ethernet address; they are closed with it.
        limits_senders: apply the rate to what hosts send, too; else something else does.
        """
        self._devices = dict(devices)
        self._conditions = conditions
        self._limits_senders = limits_senders and conditions.rate_bit_s is not None
        self._s_per_byte = 8.0 / conditions.rate_bit_s if conditions.rate_bit_s else 0.0
        self._most_wait_s = conditions.queue_bytes * self._s_per_byte if conditions.rate_bit_s else float("inf")
        # Of each way from host to host, so that what the others send changes nothing.
        self._dice = {
            (source, target): random.Random(f"{conditions.seed} {first} {second}")
            for first, source in enumerate(devices.values())
            for second, target in enumerate(devices.values())
        }
        self._from_free_s = dict.fromkeys(devices.values(), 0.0)  # when the link from each host will be idle
        self._to_free_s = dict(self._from_free_s)
        self.under_way: list[tuple[float, int, int, bytes]] = []  # due, number, device, frame
        self._under_way_bytes = 0
        self._numbers = itertools.count()
        self._newest = dict.fromkeys(devices.values(), -1)  # the highest number that has come out
        self._stop, self._stopped = os.pipe()
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="gradbus-switch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def was_the_limit(self) -> bool:
        """Whether so many frames left late that what was measured is that of the switch."""
        return self.counts["late"] > max(_FEW_LATE, MOST_LATE * self.counts["carried"])

    def close(self) -> None:
        """Carry nothing more."""
        os.write(self._stopped, b"x")
        self._thread.join(10.0)
        for descriptor in (*self._devices.values(), self._stop, self._stopped):
            os.close(descriptor)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the rights may be missing; the count of late frames tells what it has cost
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        descriptors = [*self._devices.values(), self._stop]
        while True:
            # select, not poll, whose timeout has whole milliseconds.
            wait_s = max(0.0, self.under_way[0][0] - time.monotonic()) if self.under_way else None
            ready, _, _ = select.select(descriptors, (), (), wait_s)
            if self._stop in ready:
                return
            for descriptor in ready:
                self._take(descriptor)
            if self.under_way:
                self._deliver()

    def _take(self, source: int) -> None:
        arrived_s = time.monotonic()
        for _ in range(_BATCH):
            try:
                frame = os.read(source, _FRAME_BYTES)
            except OSError:  # nothing more for now, or the device is down
                return
            sent_s = arrived_s
            if self._limits_senders:
                sent_s = self._pass(self._from_free_s, source, arrived_s, len(frame))
                if sent_s < 0.0:
                    continue
            target = self._devices.get(frame[:6])
            if target is not None:
                self._forward(source, target, frame, sent_s)
            elif frame[0] & 1:  # to all, or to a group
                for other in self._devices.values():
                    if other != source:
                        self._forward(source, other, frame, sent_s)

    def _pass(self, free_s: dict[int, float], link: int, now_s: float, size: int) -> float:
        """When the last bit of a frame that comes now has passed a link; -1: there is no room for it."""
        begins_s = max(free_s[link], now_s - _CATCH_UP_S)
        if begins_s - now_s > self._most_wait_s:
            self.counts["full"] += 1
            return -1.0
        free_s[link] = ends_s = begins_s + size * self._s_per_byte
        return max(ends_s, now_s)

    def _forward(self, source: int, target: int, frame: bytes, sent_s: float) -> None:
        conditions, dice = self._conditions, self._dice[source, target]
        if conditions.loss and dice.random() < conditions.loss:
            self.counts["lost"] += 1
            return
        size = len(frame) + _ENTRY_BYTES
        if self._under_way_bytes + size > MOST_BYTES:
            self.counts["full"] += 1
            return
        copies = 1
        if conditions.duplicate and dice.random() < conditions.duplicate:
            self.counts["doubled"] += 1
            copies = 2
        for _ in range(copies):
            due_s = sent_s
            if self._s_per_byte:
                due_s = self._pass(self._to_free_s, target, sent_s, len(frame))
                if due_s < 0.0:
                    return
            due_s += conditions.delay_s
            if conditions.jitter_s:
                due_s += dice.uniform(-conditions.jitter_s, conditions.jitter_s)
            heapq.heappush(self.under_way, (due_s, next(self._numbers), target, frame))
            self._under_way_bytes += size

    def _deliver(self) -> None:
        under_way, counts, now_s = self.under_way, self.counts, time.monotonic()
        for _ in range(4 * _BATCH):
            if not under_way or under_way[0][0] > now_s:
                return
            due_s, number, target, frame = heapq.heappop(under_way)
            self._under_way_bytes -= len(frame) + _ENTRY_BYTES
            counts["carried"] += 1
            if now_s - due_s > LATE_S:
                counts["late"] += 1
            if number < self._newest[target]:
                counts["overtaken"] += 1
            else:
                self._newest[target] = number
            try:
                os.write(target, frame)
            except OSError:
                counts["refused"] += 1


def open_tap(name: str, enter: Callable[[], None]) -> int:
    """Make a TAP device. Returns its descriptor, which does not block.

    Args:
        enter: has the thread that it is called on enter the network namespace in which the device is to be.

    Raises:
        OSError: there is no /dev/net/tun, or no right to use it.
    """
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
