"""Host names among the peers: their addresses, looked up again while the doctor waits, and what is said of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from socket import AF_INET, AddressFamily

from gradbus.commands.buses import peer_names_of
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.network.addresses import parse_peer
from gradbus.runtime.network.host_names import FIRST_LOOKUP_S, LOOKUPS


class OtherMachines:
    """The addresses of the machines that a setting names, without this one. ``addresses`` grows as names resolve."""

    def __init__(self, peers: Sequence[str], own_address: str, family: AddressFamily = AF_INET) -> None:
        """``family``: of addresses that names are looked up for. Raises ConfigError: one of them is no address."""
        parsed = [parse_peer(peer, "peers (bus.peers)") for peer in peers]
        self._family = family
        self._own = {own_address, "127.0.0.1", "::1"}
        self._waiting = {peer.host for peer in parsed if peer.is_name}
        self.addresses: list[str] = []
        self._add([peer.host for peer in parsed if not peer.is_name])

    async def resolve(self) -> None:
        """Look names up, for as long as a bus does when it opens."""
        if self._waiting:
            await asyncio.to_thread(LOOKUPS.look_up, self._waiting, FIRST_LOOKUP_S, self._family)
        self.look()

    def look(self) -> None:
        """Take up names that have got an address, and look others up again if it is time. Does not wait."""
        for name, addresses in LOOKUPS.retry(self._waiting, self._family).items():
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


def unresolved(settings: BusSettings) -> list[Finding]:
    """Return a finding for each host name of ``bus.peers`` that has no address now. Blocks for a second at most.

    Raises ConfigError: one of them is no address.
    """
    found = peer_names_of(settings)
    LOOKUPS.look_up(found.names, FIRST_LOOKUP_S, found.family)
    database = "ahostsv6" if found.ipv6 else "ahostsv4"
    return [
        Finding(
            f"peer {name}",
            "its name has no address on this machine",
            Severity.BAD,
            f"{reason}: check DNS or /etc/hosts here ('getent {database} {name}' shows what they say), or name the "
            f"machine by its IP address. A job starts without it, and finds it when the name resolves",
        )
        for name, reason in LOOKUPS.reasons(found.names, found.family).items()
    ]
