"""Carries the join protocol over a transport in clear: beacons, join messages and the timer that drives both sides.

Everything runs on the receive thread of the bus. The messages that ``Admission`` and ``JoinClient`` return
are written here.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gradbus.runtime.errors import ConfigError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import AllowListWatcher
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.join_messages import JOIN_TOPIC
from gradbus.runtime.transport.api import Inlet, IoThread, Peer, Periodic, Transport
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.wrappers import InletWrapper
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Message

BEACON_TOPIC = "train/beacon"
TICK_S, IDLE_TICK_S = 0.05, 0.2  # the former while an answer is awaited
BEACON_S = 2.0  # repeated for nodes that lost it or that followed a forged one
LIST_S = 0.4  # interval of checks of the allow list; a change takes effect after two equal checks
MAX_UNSENT = 1024  # messages that wait for room, as many as there are pending handshakes; then the oldest is dropped

log = get_logger("bus")


def _none(sample: Any) -> Message | Frame:
    raise FrameError("join", "a sample of the join protocol is no message of an actor")


JOIN = Channel(JOIN_TOPIC, "Frame", False, False, 512, 0, 0.01, False, _none, ignore_local=True)
BEACON = Channel(BEACON_TOPIC, "Frame", True, False, 64, 0, 0.01, False, _none, ignore_local=True)
# Of a controller: the newest alone is kept, so that a reader that takes nothing cannot block the writer.
LAST_BEACON = replace(BEACON, keep_last=True, lasts_to_all=True)


class JoinInlet(InletWrapper):
    """Passes the samples of the join protocol to its transport. No actor gets one."""

    def __init__(self, below: Inlet, transport: JoinTransport) -> None:
        super().__init__(below.channel, below)
        self._transport = transport

    def take(self, limit: int) -> list[tuple[Any, Peer]]:
        return [((raw, source), source) for raw, source in self.below.take(limit)]

    def decode(self, raw: Any) -> None:
        """Pass a sample on.

        Raises:
            FrameError, SampleError, ValueError, TypeError, OverflowError: it is invalid.
        """
        sample, source = raw
        self._transport.receive(self.channel.name, memoryview(self.below.octets(sample)).cast("B"), source)


class JoinTransport:
    """The join protocol of one bus: its topics, its timer and its log events."""

    def __init__(
        self,
        party: Admission | JoinClient,
        transport: Transport,
        thread: IoThread,
        *,
        list_watcher: AllowListWatcher | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the topics and announce a controller.

        Args:
            list_watcher: of the controller's allow list, checked every :data:`LIST_S`.
            on_refused: called when the controller refuses this process, or when this is a duplicate controller.
        """
        self._party = party
        self._thread = thread
        self._list_watcher = list_watcher
        self._on_refused = on_refused
        self._looked_s = self._ticked_s = time.monotonic()
        self._is_polling = False
        self._beacon_s = -math.inf
        self._unsent: deque[bytes] = deque(maxlen=MAX_UNSENT)
        self._writer = transport.outlet(JOIN)
        party.own = transport.own
        if isinstance(party, Admission):
            party.dropped = thread.rejected
            events = party.events
            events.joined = lambda name, role: _log(log.info, "joined", node=name, role=role)
            events.refused = lambda name, why: _log(log.warning, "join refused", node=name, reason=why)
            events.rotated = lambda epoch, why: _log(log.info, "new key epoch", epoch=epoch, reason=why)
            party.on_refused = on_refused
            self._beacon = transport.outlet(LAST_BEACON)
            self._send_beacon(party, self._ticked_s)
        else:
            party.on_joined = self._on_joined
        self._beacons = JoinInlet(transport.inlet(BEACON), self)
        for one in (JoinInlet(transport.inlet(JOIN), self), self._beacons):
            thread.add_reader(one)
        thread.add_writer(self._writer)
        thread.add_periodic(Periodic(self._tick, IDLE_TICK_S))

    def receive(self, topic: str, data: memoryview, source: Peer) -> None:
        """Process one sample of a join topic and send the answers. Raises FrameError: the sample is invalid."""
        now_s, party = time.monotonic(), self._party
        if topic == JOIN_TOPIC or isinstance(party, Admission):
            self._send(party.receive(data, now_s))
            return
        misconfiguration = party.misconfiguration
        self._send(party.receive_beacon(data, source, now_s))
        if party.misconfiguration != misconfiguration:
            raise FrameError("other key", party.misconfiguration)

    def _send(self, messages: Iterable[bytes]) -> None:
        """Send messages in their order. What finds no room is sent at the next tick, with all behind it: a node that
        has sent a Hello waits for the answer, and for longer each time."""
        self._unsent.extend(messages)
        while self._unsent:
            data = self._unsent.popleft()
            if not self._writer.write((), (data,)):
                self._unsent.appendleft(data)
                break
        if self._is_busy and not self._is_polling:
            self._is_polling = True
            self._thread.add_periodic(Periodic(self._poll, TICK_S))

    @property
    def _is_busy(self) -> bool:
        is_changing = self._list_watcher is not None and self._list_watcher.is_changing
        return bool(self._unsent) or self._party.is_busy or is_changing

    def _poll(self) -> bool:
        """Advance the protocol more often while something is unsent, an answer is pending or the allow list changes."""
        self._advance()
        self._is_polling = self._is_busy
        return self._is_polling

    def _tick(self) -> bool:
        self._advance()
        return True

    def _advance(self) -> None:
        now_s = time.monotonic()
        if now_s - self._ticked_s < TICK_S:
            return
        self._ticked_s = now_s
        if isinstance(self._party, JoinClient):
            if self._writer.matched:
                self._send(self._party.tick(now_s, self._beacons.peers().__contains__))
            return
        if now_s - self._looked_s > LIST_S:
            self._looked_s = now_s
            self._look_at_list(self._party, now_s)
        if now_s - self._beacon_s > BEACON_S and not self._party.refusal:
            self._send_beacon(self._party, now_s)
        self._send(self._party.tick(now_s))

    def _send_beacon(self, admission: Admission, now_s: float) -> None:
        if self._beacon.write((), (admission.beacon,)):  # else at the next tick
            self._beacon_s = now_s

    def _look_at_list(self, admission: Admission, now_s: float) -> None:
        try:
            allowed = None if self._list_watcher is None else self._list_watcher.news()
        except ConfigError as error:
            _log(log.error, "allow list not read", reason=str(error), effect="the one before stays in force")
            return
        if allowed is None:
            return
        _log(log.info, "allow list read", nodes=len(allowed.entries))
        self._send(admission.allow(allowed, now_s))

    def _on_joined(self) -> None:
        party = self._party
        assert isinstance(party, JoinClient)
        if party.refusal:
            _log(log.error, "join refused", node=party.key.name, reason=party.refusal)
            self._on_refused()
        elif party.keys is not None:
            _log(log.info, "joined", node=party.key.name, role=party.role, epoch=party.epoch)
        self._thread.rematched()


def _log(log_it: Callable[..., Any], event: str, **facts: object) -> None:
    """Write a log event. A handler of the host application that fails must not end the receive thread."""
    with contextlib.suppress(Exception):
        log_it(event, **facts)
