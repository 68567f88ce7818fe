"""A relay that runs: it watches the links of its router, writes the access log, and drains when it is asked to end.

All state belongs to the event loop. The router reports links on threads of Zenoh's; the HTTP server reads counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from gradbus.commands.relay import metrics
from gradbus.commands.relay.sessions import RelaySession, Sessions
from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.disconnections import TURN_S, Disconnections
from gradbus.runtime.network.tcp_connections import canonical, find_connections
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.token_buckets import TokenBucket
from gradbus.runtime.transport.zenoh.router import JobMember, LinkChange

FIND_S = 0.02  # after a session has opened: connections of those that come together are looked for once
JOIN_S = 1.0  # and until its jobs are logged: it opens before it says what it takes part in
LINES_PER_S, LINES_BURST = 50.0, 200  # of the access log: who may connect can do so often
_SENDERS_SHOWN = 8

log = get_logger("relay")


class RouterLike(Protocol):
    """The part of :class:`~gradbus.runtime.transport.zenoh.router.Router` that a relay uses."""

    def watch_links(self, report: Callable[[LinkChange], None]) -> None:
        """See there."""

    def addresses(self) -> set[str]:
        """See there."""

    def watch_members(self) -> None:
        """See there."""

    def memberships(self) -> list[JobMember]:
        """See there."""

    def announce_disconnected(self, peer: str) -> int:
        """See there."""

    def close(self) -> None:
        """See there."""


class Relay:
    """Watches over an open router, from :meth:`serve` until a signal handler of the loop calls :meth:`stop`."""

    def __init__(
        self,
        router: RouterLike,
        *,
        max_sessions: int,
        drain_s: float,
        lease_s: float = 60.0,
        max_per_node: int | None = None,
    ) -> None:
        """Args:
        max_sessions: that the router lets in. It does not report those that it refuses.
        drain_s: how long it forwards after :meth:`stop`, while there are sessions.
        lease_s: after so long a silence of this relay clients take it for dead.
        max_per_node: most sessions with the same name in the certificate; None: any number.
        """
        self._max_sessions = max_sessions
        self._drain_s = drain_s
        self._router = router
        self._sessions = Sessions(max_per_node)
        self._joined: set[str] = set()  # addresses of the sessions whose jobs are logged
        self._lines = TokenBucket(LINES_PER_S, LINES_BURST)
        self._lines_left_out = 0
        self._is_serving = False
        self._stop = asyncio.Event()
        self._unfound = asyncio.Event()  # there are sessions whose connection is not known
        self._unasked = asyncio.Event()  # there are sessions whose jobs are not known
        self._is_empty = asyncio.Event()
        self._disconnections = Disconnections(lease_s, time.monotonic())
        self._disconnected = asyncio.Event()  # there are new ones

    @property
    def is_ready(self) -> bool:
        """Return whether new clients should come here. Any thread may ask."""
        return self._is_serving and not self._stop.is_set()

    def render_metrics(self) -> str:
        """Return the page ``/metrics``. Any thread may call it."""
        return metrics.render(self._sessions.by_node(), max_sessions=self._max_sessions, is_ready=self.is_ready)

    def stop(self) -> None:
        """End :meth:`serve`, which drains first."""
        self._stop.set()

    async def serve(self, announce: Callable[[], None]) -> None:
        """Follow the links of the router until :meth:`stop`; then forward for ``drain_s`` more, or until no session is
        left, and close the router.

        Args:
            announce: called once this is ready, and so are the signal handlers of the loop.
        """
        loop = asyncio.get_running_loop()

        def report(change: LinkChange) -> None:  # on a thread of Zenoh's
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(self._notice, change)

        self._router.watch_members()
        self._router.watch_links(report)
        self._is_serving = True
        announce()
        try:
            async with TaskGroup() as tasks:
                following = [
                    tasks.create_task(self._find_connections(), name="relay-connections"),
                    tasks.create_task(self._follow_jobs(), name="relay-jobs"),
                    tasks.create_task(self._look_for_ends(), name="relay-ends"),
                    tasks.create_task(self._announce_disconnections(), name="relay-disconnections"),
                ]
                await self._stop.wait()
                await self._drain()
                for task in following:
                    task.cancel()
        finally:
            self._is_serving = False
            await asyncio.to_thread(self._router.close)
            for session in self._sessions.all():
                self._close(session.address)

    async def _drain(self) -> None:
        log.info("relay drains", sessions=self._sessions.count, drain_s=self._drain_s)
        self._note_count()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._is_empty.wait()
        log.info("relay ends", sessions=self._sessions.count)

    def _notice(self, change: LinkChange) -> None:
        """Take a report of the router."""
        address = canonical(change.address)
        if change.is_up:
            session = self._sessions.open(change.peer, address, change.node, time.monotonic())
            self._disconnections.note_open(change.peer)
            self._write("session opened", session)
            if self._sessions.count >= self._max_sessions and self._may_write():
                log.warning("relay is full", sessions=self._sessions.count, advice="raise limits.sessions")
            self._unfound.set()
            self._unasked.set()
        else:
            self._close(address)
        self._note_count()

    def _note_count(self) -> None:
        if self._sessions.count:
            self._is_empty.clear()
        else:
            self._is_empty.set()

    def _close(self, address: str) -> None:
        session = self._sessions.close(address)
        if session is None:
            return
        received_bytes, sent_bytes = session.traffic
        if session.connection is not None:
            may_be_gone = not session.is_refused and not self._sessions.has_newer(session)
            if may_be_gone and self._disconnections.note_ended(session.peer, session.connection, time.monotonic()):
                self._disconnected.set()
            session.connection.close()
        self._joined.discard(address)
        seconds = round(time.monotonic() - session.opened_s, 3)
        self._write("session closed", session, seconds=seconds, received_bytes=received_bytes, sent_bytes=sent_bytes)

    async def _find_connections(self) -> None:
        """Find the connections of new sessions, and end those of nodes that have too many."""
        while True:
            await self._unfound.wait()
            await asyncio.sleep(FIND_S)
            self._unfound.clear()
            for session in self._sessions.connect(find_connections):
                if session.connection is not None and self._sessions.is_over_limit(session):
                    self._write("session refused", session, reason="limits.sessions_per_node")
                    session.connection.hang_up()

    async def _look_for_ends(self) -> None:
        """Close the sessions whose end the router does not report."""
        while True:
            await asyncio.sleep(TURN_S)
            self._disconnections.note_turn(time.monotonic())
            known = self._sessions.all()  # before the router is asked: later ones may not be there yet
            if known:
                up = {canonical(address) for address in await asyncio.to_thread(self._router.addresses)}
                for session in known:
                    if session.address not in up:
                        self._close(session.address)
                self._note_count()

    async def _announce_disconnections(self) -> None:
        """Announce the sessions whose hosts have closed their connections, and which have not come back in time."""
        while True:
            due_in_s = self._disconnections.due_in_s(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_in_s):
                    await self._disconnected.wait()
            self._disconnected.clear()
            for peer in self._disconnections.take_due(time.monotonic()):
                jobs = await asyncio.to_thread(self._router.announce_disconnected, peer)
                if jobs and self._may_write():
                    log.info("disconnection announced", peer=peer, jobs=jobs)

    async def _follow_jobs(self) -> None:
        """Log which jobs new sessions take part in."""
        while True:
            await self._unasked.wait()
            await asyncio.sleep(JOIN_S)
            self._unasked.clear()
            self._log_jobs()

    def _log_jobs(self) -> None:
        by_peer: dict[str, dict[str, list[str]]] = {}
        for member in self._router.memberships():
            by_peer.setdefault(member.peer, {}).setdefault(member.job, []).append(member.sender)
        for session in self._sessions.all():
            if session.address not in self._joined and session.peer in by_peer:
                self._joined.add(session.address)
                for job, senders in by_peer[session.peer].items():
                    self._write("session joined", session, job=job, senders=senders[:_SENDERS_SHOWN])

    def _write(self, event: str, session: RelaySession, **facts: object) -> None:
        """Write a line of the access log, unless there were too many of late."""
        if self._may_write():
            log.info(event, node=session.node, address=session.address, peer=session.peer, **facts)

    def _may_write(self) -> bool:
        if not self._lines.take(time.monotonic()):
            self._lines_left_out += 1
            return False
        if self._lines_left_out:
            log.warning("lines of the access log left out", count=self._lines_left_out)
            self._lines_left_out = 0
        return True
