"""Controllers that a node has heard of. Each may be a recording, or somebody else's.

Pure; the time is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.identity import handshake
from gradbus.runtime.security.identity.join_messages import Beacon, parse
from gradbus.runtime.security.token_bucket import TokenBucket

MAX_BEACONS = 8
MAX_SOURCES = 8
CHECKS_PER_S, CHECKS_AT_ONCE = 100, 200  # signatures: 0.15 ms each
# Of these as many for one DDS writer: a controller has one of its own, which says no more than one beacon.
WRITER_PER_S, WRITER_AT_ONCE = 2, 8
_MAX_WRITERS = 1024  # that are remembered


@dataclass(slots=True, eq=False)
class AnnouncedController:
    """A controller that has said that it is there.

    Attributes:
        sources: handles of DDS writers that have said so, the newest last. Whoever has heard a beacon can say it again
            with a writer of his own, and take that away: so none of them stands for the others.
        since_s: when it was heard for the first time. asked_s: when it was last said Hello to.
    """

    beacon: Beacon
    whole: bytes
    since_s: float
    sources: dict[int, None] = field(default_factory=dict)
    asked_s: float = float("-inf")

    def add_source(self, source: int) -> None:
        """One more writer has said it."""
        self.sources.pop(source, None)
        if len(self.sources) >= MAX_SOURCES:
            del self.sources[next(iter(self.sources))]
        self.sources[source] = None

    def is_there(self, alive: Callable[[int], bool]) -> bool:
        """Whether one of them is still there."""
        return any(map(alive, self.sources))


class Beacons:
    """What was heard for one node."""

    def __init__(self, job: str, pinned: bytes) -> None:
        """``pinned``: the key that the controller must have."""
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
        """The controller of this session, with the key that is expected."""
        return self._heard.get((session, self._pinned))

    def receive(self, data: memoryview, source: int, joined: bytes | None, now_s: float) -> AnnouncedController | None:
        """A beacon. ``joined``: session of the controller that the node is with. None: it was heard before.

        Raises:
            FrameError: it was not taken, with a ``reason`` to count it by.
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
        """Forget a controller: one with another key before one with the right one, an earlier start before a later."""
        spare = [key for key in self._heard if key != (joined, self._pinned)]
        del self._heard[min(spare, key=lambda key: (key[1] == self._pinned, self._heard[key].beacon.start))]
