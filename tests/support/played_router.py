"""A router whose links a test plays, and their connections."""

from __future__ import annotations

from collections.abc import Callable

from gradbus.runtime.network.tcp_connections import CarriedBytes
from gradbus.runtime.transport.zenoh.router import JobMember, LinkChange


class PlayedRouter:
    """A router whose links a test plays."""

    def __init__(self) -> None:
        self.report: Callable[[LinkChange], None] = lambda change: None
        self.up: set[str] = set()
        self.members: list[JobMember] = []
        self.is_closed = False
        self.announced: list[str] = []

    def watch_links(self, report: Callable[[LinkChange], None]) -> None:
        self.report = report

    def open(self, peer: str, address: str, node: str = "") -> None:
        self.up.add(address)
        self.report(LinkChange(True, peer, address, node))

    def end(self, peer: str, address: str, *, reported: bool = True) -> None:
        self.up.discard(address)
        if reported:
            self.report(LinkChange(False, peer, address, ""))

    def addresses(self) -> set[str]:
        return set(self.up)

    def watch_members(self) -> None:
        pass

    def memberships(self) -> list[JobMember]:
        return self.members

    def announce_disconnected(self, peer: str) -> int:
        self.announced.append(peer)
        return 1

    def close(self) -> None:
        self.is_closed = True


class PlayedConnection:
    """A connection of which a test says who has closed it, with the round trip of a link around the world: a session
    has a second to come back, also on a busy machine."""

    round_trip_s = 0.2

    def __init__(self, *, is_closed_by_peer: bool = True) -> None:
        self._is_closed_by_peer = is_closed_by_peer
        self.is_closed = False

    def traffic(self) -> CarriedBytes:
        return CarriedBytes()

    def closed_by_peer(self, patience_s: float) -> bool:
        return self._is_closed_by_peer

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
