"""Settings of the network, checked once. They also decide which transport carries the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.network.addresses import check_peers, interfaces
from gradbus.runtime.network.links import LinkConfig

if TYPE_CHECKING:
    from gradbus.runtime.config.bus import BusSettings

Profile = Literal["loopback", "network"]

LEASES_S: dict[Profile, float] = {"loopback": 60.0, "network": 10.0}
MIN_LEASE_S, MAX_LEASE_S = 0.01, 3_600.0  # Cyclone DDS takes no longer one; a shorter one ends before it is renewed
# With 65,500 B datagrams on MTU 1500, 1 % packet loss makes a transfer collapse: the halves of datagrams that did
# arrive fill the kernel's reassembly memory.
DATAGRAM_BYTES: dict[Profile, int] = {"loopback": 65_500, "network": 1_400}


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Holds what decides how a bus uses the network.

    Attributes:
        profile: ``loopback`` (one machine, or a lossless network with jumbo frames: 65,500 B datagrams) or ``network``
            (anything real: 1,400 B datagrams, so that one lost packet costs one packet).
        datagram_bytes: most bytes of a datagram, 1,200 to 65,500; None: as the profile has it. One that is larger than
            a packet of the network costs less processor time, and is lost with any of its packets.
        interface: name of the network interface.
        peers: IP addresses or host names of all machines, this one included, see :func:`.addresses.parse_peer`; empty:
            this machine alone (or everybody, with multicast). Names without an address yet are looked up again.
        multicast: let discovery and data use multicast on the interface.
        lease_s: a process of another machine that is silent for so long is gone. The lease that counts is the silent
            one's own. Threads of the transport renew it, so a busy process does not lose it. Of a process of this
            machine the kernel tells, at once; there it is how long a process that was stopped may lose nothing. By
            default 60 s with ``loopback``, and 10 s with ``network``; at most an hour.
        shared_memory: large data between processes of one machine (of a group; updates and models of a federated run)
            goes through memory they share, and a message says where it lies. False: everything goes over the
            transport.
        loss_per_mille: drop so many of 1,000 outgoing packets (tests of loss).
        links: endpoints that are dialled or listened on: with them the bus uses Zenoh, and what is only for DDS
            (``datagram_bytes``, ``interface``, ``peers``, ``multicast``, ``loss_per_mille``) must be left out. None: it
            uses DDS.
        first_link_s: how long to dial again where nothing answers yet; None: as members of a job do. 0: not again.
    """

    profile: Profile = "loopback"
    datagram_bytes: int | None = None
    interface: str = LOOPBACK
    peers: tuple[str, ...] = ()
    multicast: bool = False
    lease_s: float | None = None
    shared_memory: bool = True
    loss_per_mille: int = 0
    links: LinkConfig | None = None
    first_link_s: float | None = None

    def __post_init__(self) -> None:
        if self.profile not in LEASES_S:
            raise ConfigError(f"network {self.profile!r}: expected 'loopback' or 'network'")
        size = self.datagram_bytes
        if size is not None and not (isinstance(size, int) and 1_200 <= size <= 65_500):
            raise ConfigError(f"datagram_bytes must be 1,200 to 65,500, got {self.datagram_bytes}")
        self._check_types()
        check_peers(self.peers)
        if self.links is not None:
            self._check_links(self.links)

    def _check_types(self) -> None:
        """Raise ConfigError: a value is of another type, or one that a transport could not use."""
        if not (isinstance(self.interface, str) and self.interface):
            raise ConfigError(
                f"interface (bus.interface): {self.interface!r} is no name. This machine has: {', '.join(interfaces())}"
            )
        if not isinstance(self.multicast, bool):
            raise ConfigError(f"multicast (bus.multicast) must be true or false, got {self.multicast!r}")
        lease_s, per_mille = self.lease_s, self.loss_per_mille
        if lease_s is not None and not (_is_number(lease_s) and MIN_LEASE_S <= lease_s <= MAX_LEASE_S):
            raise ConfigError(
                f"lease_s (bus.lease_s) must be {MIN_LEASE_S:g} to {MAX_LEASE_S:,g} seconds, got {lease_s!r}"
            )
        if not (isinstance(per_mille, int) and not isinstance(per_mille, bool) and 0 <= per_mille <= 1_000):
            raise ConfigError(f"loss_per_mille must be an integer of 0 to 1,000, got {per_mille!r}")

    def _check_links(self, links: LinkConfig) -> None:
        """Raise ConfigError: a setting has no meaning for links, or says something else than they do."""
        if not isinstance(links, LinkConfig):
            raise ConfigError(f"links must be a LinkConfig, got {links!r}")
        given = {
            "datagram_bytes": self.datagram_bytes is not None,
            "interface": self.interface != LOOPBACK,
            "peers": bool(self.peers),
            "multicast": self.multicast,
            "loss_per_mille": self.loss_per_mille != 0,
        }
        if others := [f"bus.{name}" for name, is_set in given.items() if is_set]:
            raise ConfigError(
                f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} for DDS, and bus.connect or bus.listen "
                f"is set, with which the bus uses Zenoh. Leave out the one or the other"
            )
        if self.lease_s is not None and self.lease_s != links.lease_s:
            raise ConfigError(f"lease_s is {self.lease_s!r} here and {links.lease_s!r} in links: set it only in links")

    @classmethod
    def of(cls, settings: BusSettings) -> NetworkConfig:
        """Return what the settings of a bus say about the network, and with it which transport it uses.

        Raises:
            ConfigError: the settings contradict each other, or one is wrong.
        """
        has_links = bool(settings.connect or settings.listen)
        if settings.transport == "zenoh" and not has_links:
            raise ConfigError(
                "bus.transport is 'zenoh', and neither bus.connect nor bus.listen is set: name the endpoint of a "
                "relay, as in bus.connect=['tls/relay.example.org:443'], or one to listen on"
            )
        if settings.transport == "dds" and has_links:
            name = "bus.connect" if settings.connect else "bus.listen"
            raise ConfigError(
                f"bus.transport is 'dds', and {name} is set, which only Zenoh has: leave out {name}, or set "
                f"bus.transport to 'auto'"
            )
        return cls(
            links=LinkConfig.of(settings) if has_links else None,
            profile=settings.network,
            datagram_bytes=settings.datagram_bytes,
            interface=settings.interface,
            peers=settings.peers,
            multicast=settings.multicast,
            lease_s=settings.lease_s,
            shared_memory=settings.shared_memory,
        )

    @property
    def effective_lease_s(self) -> float:
        """Return the lease in force."""
        if self.links is not None:
            return self.links.effective_lease_s
        return self.lease_s if self.lease_s is not None else LEASES_S[self.profile]

    @property
    def effective_datagram_bytes(self) -> int:
        """Return the most bytes of a datagram in force."""
        return DATAGRAM_BYTES[self.profile] if self.datagram_bytes is None else self.datagram_bytes


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
