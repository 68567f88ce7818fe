"""Outlets that apply fault rules to samples on their way into a transport.

    async with gradbus.connect(job="mnist", faults="drop update p=0.1; duplicate control; seed=3") as bus:
        await gradbus.Client(bus, task, client_id=0).run()
        print(bus.faults.fired)

or for whole processes ``--set bus.faults="..."``, or ``GRADBUS_BUS__FAULTS`` in the environment. Faults apply to what
is sent: samples of all topics, those of collectives too, before they are encrypted: one that is written twice has two
envelopes. Shared memory does not pass here; switch it off (``shared_memory=False``) to have everything on the bus.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

from gradbus.runtime.errors import BusClosed, FrameError, GradbusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.testing.failpoints import kill_self
from gradbus.runtime.testing.faults import Faults, Rule
from gradbus.runtime.transport.api import Outlet, Transport
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.wrappers import OutletWrapper, TransportWrapper
from gradbus.runtime.wire import control, frames

_NAMES = {"train_cmd": "command", "client_update": "update", "model_blob": "model", "frame": "collective"}
_ROUND_AT = {"command": 0, "update": 1, "model": 0}  # which field of the sample
_MAX_TRIED = 16
_TRIES = 100  # to write what is late, to a reader that is full

log = get_logger("faults")


class _Sample(NamedTuple):
    """One on its way into the transport."""

    fields: tuple[Any, ...]
    parts: tuple[Any, ...]


class FaultInjector:
    """Puts fault rules between a bus and its transport; a bus without faults has none of this.

    Attributes:
        faults: the rules, and the counts of those that fired.
    """

    def __init__(self, rules: str | list[Rule] | Faults) -> None:
        """``rules``: see :mod:`.faults`. Raises ConfigError: they are wrong."""
        self.faults = rules if isinstance(rules, Faults) else Faults(rules)
        self._late = _LateWrites()
        log.warning("faults are switched on", rules=[str(rule) for rule in self.faults.rules])

    def over(self, transport: Transport) -> Transport:
        """Return the transport with faults at the outlets that its bus opens. What it sends itself, as its security
        does, passes unharmed."""
        return _FaultyTransport(transport, self.faults, self._late)

    def close(self) -> None:
        """Log what has fired, and write what is still delayed: it is late, not lost, also where its sender leaves."""
        if self.faults.fired:
            log.warning("faults that fired", **{key.replace(" ", "_"): n for key, n in self.faults.fired.items()})
        self._late.stop()


class _FaultyTransport(TransportWrapper):
    def __init__(self, below: Transport, faults: Faults, late: _LateWrites) -> None:
        super().__init__(below)
        self._faults = faults
        self._late = late

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> Outlet:
        below = self.below.outlet(channel, retained_samples=retained_samples)
        return _FaultyOutlet(channel, below, faults=self._faults, late=self._late)


class _FaultyOutlet(OutletWrapper):
    """Applies faults to samples on their way out. A write that a fault has swallowed succeeds for its caller."""

    def __init__(self, channel: Channel, below: Outlet, *, faults: Faults, late: _LateWrites) -> None:
        super().__init__(channel, below)
        self._faults = faults
        self._late = late
        self._holding = threading.Lock()
        self._held: _Sample | None = None  # until another one has overtaken it
        # Those that were refused, by their identity; what they are made of is kept, so that it is not used again.
        self._tried: dict[tuple[int, int], tuple[Any, _Sample, int]] = {}
        name = channel.name.split("/")[1]
        self._name = _NAMES.get(name, name)

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        tried = self._tried.pop((id(fields), id(parts)), None)
        if tried is not None:  # a reader was full: the same sample once more, which has been struck already, or spared
            return self._write_copies(fields, parts, *tried[1:])
        struck = self._faults.strike(*self._describe(fields, parts))
        sample = _Sample(fields, parts)
        if not struck:
            return self._write_copies(fields, parts, sample, 1)
        if sample.parts:
            sample = sample._replace(parts=(b"".join(sample.parts),))  # the caller may use its memory again
        copies = 1
        for rule, dice in struck:
            match rule.action:
                case "crash":
                    kill_self()
                case "drop":
                    return True
                case "corrupt" if sample.parts:
                    sample = sample._replace(parts=(_damaged(sample.parts[0], dice),))
                case "duplicate":
                    copies += 1
                case "delay":
                    self._late.add(rule.seconds, self, sample, copies)
                    return True
                case "reorder" if self._held is None:
                    self._held = sample
                    self._late.add(rule.seconds, self, sample, copies, held=True)
                    return True
        return self._write_copies(fields, parts, sample, copies)

    def _write_copies(self, fields: tuple[Any, ...], parts: tuple[Any, ...], sample: _Sample, copies: int) -> bool:
        for left in range(copies, 0, -1):
            if not self.write_now(sample):
                while len(self._tried) >= _MAX_TRIED:  # of those that nobody has tried again
                    self._tried.pop(next(iter(self._tried)), None)
                self._tried[id(fields), id(parts)] = ((fields, parts), sample, left)
                return False
        return self._let_go()

    def write_now(self, sample: _Sample) -> bool:
        """Write without faults. True as well when the outlet is closed."""
        try:
            return self.below.write(sample.fields, sample.parts)
        except BusClosed:
            return True

    def _let_go(self) -> bool:
        held = self.take_held()
        if held is not None:
            try:
                if not self.write_now(held):
                    self._late.add(0.0, self, held, 1)
            finally:
                self._late.written(self)
        return True

    def take_held(self, sample: _Sample | None = None) -> _Sample | None:
        """Return what is held back, if it is this sample, or any; then it is not held back any more."""
        with self._holding:
            held = self._held
            if held is None or (sample is not None and held is not sample):
                return None
            self._held = None
            return held

    def wait_for_acks(self, timeout_s: float) -> bool:
        """See :meth:`.api.Outlet.wait_for_acks`. Samples that are delayed still count as not acknowledged."""
        until_s = time.monotonic() + timeout_s
        return self._late.wait(self, timeout_s) and self.below.wait_for_acks(max(0.0, until_s - time.monotonic()))

    @property
    def is_acknowledged(self) -> bool:
        """See :meth:`wait_for_acks`."""
        return self.wait_for_acks(0.0)

    def _describe(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> tuple[tuple[str, ...], int | None]:
        """Return what a sample is, and of which round."""
        if self._name in _ROUND_AT and any(fields):
            return (self._name,), int(fields[_ROUND_AT[self._name]])
        try:
            frame = frames.parse(b"".join(parts))
            if self._name != "control":
                return (self._name,), frame.key.round_id
            body = control.decode(frame.data)
        except FrameError:
            return (self._name,), None
        return ("control", control.kind_name(type(body))), getattr(body, "round_id", None)


def _damaged(data: bytes, dice: random.Random) -> bytes:
    """With one bit flipped, where the frame's checksum covers it: what does not leave the machine has one over its
    head alone."""
    flags = int.from_bytes(data[6:8], "little")
    covered = len(data)
    if flags & frames.Flags.HEAD_CRC and not flags & frames.Flags.SHARED:
        covered = frames.HEADER_BYTES
    damaged = bytearray(data)
    damaged[dice.randrange(covered)] ^= 1 << dice.randrange(8)
    return bytes(damaged)


# When it is due on the monotonic clock, its number, its outlet, what it is, how often, and whether it is held back.
_Late = tuple[float, int, _FaultyOutlet, _Sample, int, bool]


class _LateWrites:
    """A thread that writes what is late; there is none until something is."""

    def __init__(self) -> None:
        self._due: list[_Late] = []
        self._waiting: Counter[_FaultyOutlet] = Counter()  # how many of an outlet are due, or are being written
        self._numbers = itertools.count()
        self._wakeup = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, seconds: float, outlet: _FaultyOutlet, sample: _Sample, copies: int, *, held: bool = False) -> None:
        """Write the sample so much later. ``held``: unless another one has overtaken it, and it is written already."""
        late = (time.monotonic() + seconds, next(self._numbers), outlet, sample, copies, held)
        with self._wakeup:
            self._waiting[outlet] += 1
            if not self._stopped:
                heapq.heappush(self._due, late)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="gradbus-late", daemon=True)
                    self._thread.start()
                self._wakeup.notify_all()
                return
        self._write(late)  # without the lock: it may wait for a reader

    def written(self, outlet: _FaultyOutlet) -> None:
        """One that was late is written, or lost."""
        with self._wakeup:
            self._waiting[outlet] -= 1
            if not self._waiting[outlet]:
                del self._waiting[outlet]
            self._wakeup.notify_all()

    def wait(self, outlet: _FaultyOutlet, timeout_s: float) -> bool:
        """Whether all that is late of an outlet has been written, within so long."""
        with self._wakeup:
            return self._wakeup.wait_for(lambda: not self._waiting[outlet], timeout_s)

    def stop(self) -> None:
        """Write what is left, in its order and at once; and what is added from now on."""
        with self._wakeup:
            self._stopped = True
            left = sorted(self._due)
            self._due.clear()
            self._wakeup.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(2.0)
        for late in left:
            self._write(late)

    def _run(self) -> None:
        while True:
            with self._wakeup:
                while not self._stopped and (not self._due or self._due[0][0] > time.monotonic()):
                    self._wakeup.wait(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                if self._stopped:
                    return
                late = heapq.heappop(self._due)
            self._write(late)

    def _write(self, late: _Late) -> None:
        _, _, outlet, sample, copies, held = late
        if held and outlet.take_held(sample) is None:
            return
        try:
            for _ in range(copies):
                self._write_one(outlet, sample)
        finally:
            self.written(outlet)

    def _write_one(self, outlet: _FaultyOutlet, sample: _Sample) -> None:
        reason = "a reader is full"
        for _ in range(_TRIES):
            try:
                if outlet.write_now(sample):
                    return
                if self._stopped:
                    break
            except (GradbusError, OSError) as error:  # also of security, which stands below
                reason = str(error)
                break
        log.warning("late sample lost", topic=outlet.channel.name, reason=reason)
