"""Finds an earlier live controller of the job with the same key, by asking each announced one.

A beacon may be a recording, which does not answer. Pure: the caller passes the time.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from gradbus.runtime.security.identity import handshake
from gradbus.runtime.security.identity.allow_list import ROLES
from gradbus.runtime.security.identity.handshake import Stamps
from gradbus.runtime.security.identity.join_messages import Beacon, JoinHello, JoinRefusal
from gradbus.runtime.security.identity.key import NodeKey

PROBES, PROBE_S = 20, 0.1  # number and interval of the Hellos to one controller
AGAIN_S = 30.0  # interval until one that did not answer, and still announces itself, is asked again
MAX_DUPLICATES = 16
HOLD_S = 3.0  # longest delay of admissions: many recordings could keep this controller asking


@dataclass(slots=True, eq=False)
class _Probe:
    """The probe of one other controller; ``left``: Hellos that are still to be sent."""

    start: int
    data: bytes
    digest: bytes
    sent_s: float
    left: int = PROBES


class EarlierControllers:
    """Probes the earlier controllers on behalf of one start of a controller."""

    def __init__(self, job: str, key: NodeKey, session: bytes, start: int, stamps: Stamps) -> None:
        """``session``, ``start``, ``stamps``: of this controller."""
        self._job = job
        self._stamps = stamps
        self._key = key
        self._session = session
        self._start = start
        self._probes: dict[bytes, _Probe] = {}  # by session of the other one
        self._first_asked_s: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is pending."""
        return any(probe.left for probe in self._probes.values())

    def holds_up(self, now_s: float) -> bool:
        """Whether admissions are delayed, until another controller has had time to answer."""
        return self._first_asked_s is not None and now_s - self._first_asked_s < HOLD_S and self.is_busy

    def is_news(self, beacon: Beacon, now_s: float) -> bool:
        """Whether to probe the sender of a beacon, provided that its signature is valid."""
        if beacon.start >= self._start:
            return False
        known = self._probes.get(beacon.session)
        if known is not None:
            return not known.left and now_s - known.sent_s > AGAIN_S
        return len(self._probes) < MAX_DUPLICATES or self._least[0] < (True, beacon.start)

    @property
    def _least(self) -> tuple[tuple[bool, int], bytes]:
        """The probe to evict first: a finished one, then the earliest start, which is the oldest recording."""
        return min(((bool(probe.left), probe.start), session) for session, probe in self._probes.items())

    def ask(self, beacon: Beacon, now_s: float) -> bytes:
        """Return the Hello that probes the sender of a beacon."""
        if beacon.session not in self._probes and len(self._probes) >= MAX_DUPLICATES:
            del self._probes[self._least[1]]
        if self._first_asked_s is None:
            self._first_asked_s = now_s
        public = self._key.public
        hello = JoinHello(
            self._session,
            beacon.session,
            self._start,
            1,
            secrets.token_bytes(32),
            bytes(32),
            public,
            public,
            ROLES.index("controller"),
            self._key.name,
        )
        whole = handshake.signed(self._job, self._key, hello)
        data = self._stamps.stamped(whole, public)
        self._probes[beacon.session] = _Probe(beacon.start, data, hashlib.sha256(whole).digest(), now_s)
        return data

    def is_answer(self, refusal: JoinRefusal) -> bool:
        """Whether a refusal answers one of the probes."""
        probe = self._probes.get(refusal.session)
        return probe is not None and probe.digest == refusal.hello

    def stop(self) -> None:
        """End all probes, as one was answered."""
        self._probes.clear()

    def tick(self, now_s: float) -> list[bytes]:
        """Return the Hellos that are due for repetition."""
        due = [probe for probe in self._probes.values() if probe.left and now_s - probe.sent_s >= PROBE_S]
        for probe in due:
            probe.sent_s, probe.left = now_s, probe.left - 1
        return [probe.data for probe in due]
