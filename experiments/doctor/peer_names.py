"""Host names among the peers: their addresses, looked up again while the doctor waits, and what is said of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gradbus.experiments.doctor.machine import Finding, Severity
from gradbus.runtime.dds.host_names import FIRST_LOOKUP_S, LOOKUPS
from gradbus.runtime.dds.peers import parse_peer


class OtherMachines:
    """The addresses of the machines that a setting names, without this one. ``addresses`` grows as names resolve."""

    def __init__(self, peers: Sequence[str], own_address: str) -> None:
        """Raises ConfigError: one of them is no address."""
        parsed = [parse_peer(peer, "peers (bus.peers)") for peer in peers]
        self._own = {own_address, "127.0.0.1"}
        self._waiting = {peer.host for peer in parsed if peer.is_name}
        self.addresses: list[str] = []
        self._add([peer.host for peer in parsed if not peer.is_name])

    async def resolve(self) -> None:
        """Look names up, for as long as a bus does when it opens."""
        if self._waiting:
            await asyncio.to_thread(LOOKUPS.look_up, self._waiting, FIRST_LOOKUP_S)
        self.look()

    def look(self) -> None:
        """Take up names that have got an address, and look others up again if it is time. Does not wait."""
        for name, addresses in LOOKUPS.retry(self._waiting).items():
            self._waiting.discard(name)
            self._add(addresses)

    @property
    def all_resolved(self) -> bool:
        """Whether each name has an address."""
        return not self._waiting

    def _add(self, addresses: Sequence[str]) -> None:
        self.addresses += [one for one in addresses if one not in self._own and one not in self.addresses]

    def __str__(self) -> str:
        return ", ".join([*self.addresses, *sorted(self._waiting)])


def unresolved(peers: Sequence[str]) -> list[Finding]:
    """Return a finding for each host name of ``bus.peers`` that has no address now. Blocks for a second at most.

    Raises ConfigError: one of them is no address.
    """
    names = [one.host for one in (parse_peer(peer, "peers (bus.peers)") for peer in peers) if one.is_name]
    found = LOOKUPS.look_up(names, FIRST_LOOKUP_S)
    reasons = LOOKUPS.reasons([name for name in names if name not in found])
    return [
        Finding(
            f"peer {name}", "its name has no address on this machine", Severity.BAD,
            f"{reason}: check DNS or /etc/hosts here ('getent ahostsv4 {name}' shows what they say), or name the "
            f"machine by its IP address. A job starts without it, and finds it when the name resolves",
        )
        for name, reason in reasons.items()
    ]  # fmt: skip
