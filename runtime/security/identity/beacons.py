"""The controllers that have announced themselves to a node. Each may be a recording, or belong to another key.

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.identity import handshake
from gradbus.runtime.security.identity.join_messages import Beacon, parse
from gradbus.runtime.security.identity.rate_limits import TokenBucket

MAX_BEACONS = 8
MAX_SOURCES = 8
CHECKS_PER_S, CHECKS_AT_ONCE = 100, 200  # signatures: 0.15 ms each
# Share of one DDS writer: a controller has one of its own, which sends one beacon.
WRITER_PER_S, WRITER_AT_ONCE = 2, 8
_MAX_WRITERS = 1024  # that are remembered


@dataclass(slots=True, eq=False)
class AnnouncedController:
    """One controller, with its verified beacon.

    Attributes:
        sources: handles of the DDS writers that have sent it, the newest last. Anybody can replay a beacon with a
            writer of its own and delete that writer: so no single writer tells whether the controller is there.
        since_s: time of the first beacon. asked_s: time of the last Hello to it.
    """

    beacon: Beacon
    whole: bytes
    since_s: float
    sources: dict[int, None] = field(default_factory=dict)
    asked_s: float = float("-inf")

    def add_source(self, source: int) -> None:
        """Note one more writer of this beacon."""
        self.sources.pop(source, None)
        if len(self.sources) >= MAX_SOURCES:
            del self.sources[next(iter(self.sources))]
        self.sources[source] = None

    def is_there(self, alive: Callable[[int], bool]) -> bool:
        """Whether DDS still sees one of its writers."""
        return any(map(alive, self.sources))


class Beacons:
    """The announced controllers of one node, at most :data:`MAX_BEACONS`."""

    def __init__(self, job: str, pinned: bytes) -> None:
        """``pinned``: public key that the controller must have."""
        self._job = job
        self._pinned = pinned
        self._heard: dict[
            tuple[bytes, bytes], AnnouncedController
        ] = {}  # by session and key: sessions can be read by everybody
        self._checks = TokenBucket(CHECKS_PER_S, CHECKS_AT_ONCE)
        self._writers: dict[int, TokenBucket] = {}  # by handle

    def __iter__(self) -> Iterator[AnnouncedController]:
        return iter(self._heard.values())

    def get(self, session: bytes) -> AnnouncedController | None:
        """Return the controller of a session that has the expected key."""
        return self._heard.get((session, self._pinned))

    def receive(self, data: memoryview, source: int, joined: bytes | None, now_s: float) -> AnnouncedController | None:
        """Verify and note a beacon. ``joined``: session of the node's current controller. None: it is a repetition.

        Raises:
            FrameError: the beacon is rejected; ``reason`` is the name to count it by.
        """
        signed = parse(data)
        beacon = signed.message
        if not isinstance(beacon, Beacon):
            raise FrameError("join", "no beacon on the topic of beacons")
        known = self._heard.get((beacon.session, beacon.public))
        if known is not None and known.whole == signed.whole:
            known.add_source(source)
            return None
        if not self._share_of(source).take(now_s) or not self._checks.take(now_s):
            raise FrameError("busy", "more beacons came than are checked in a second")
        handshake.check(self._job, signed, beacon.public)
        if len(self._heard) >= MAX_BEACONS:
            self._make_room(joined)
        heard = self._heard[beacon.session, beacon.public] = AnnouncedController(beacon, signed.whole, now_s)
        heard.add_source(source)
        return heard

    def _share_of(self, source: int) -> TokenBucket:
        share = self._writers.get(source)
        if share is None:
            if len(self._writers) >= _MAX_WRITERS:
                del self._writers[next(iter(self._writers))]
            share = self._writers[source] = TokenBucket(WRITER_PER_S, WRITER_AT_ONCE)
        return share

    def _make_room(self, joined: bytes | None) -> None:
        """Drop one controller: another key before the expected one, an earlier start before a later one."""
        spare = [key for key in self._heard if key != (joined, self._pinned)]
        del self._heard[min(spare, key=lambda key: (key[1] == self._pinned, self._heard[key].beacon.start))]
