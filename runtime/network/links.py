"""Settings of links over TCP and TLS, checked once: endpoints to dial or to listen on, and certificates.

Processes behind firewalls dial out to one port of a relay, or of a controller that listens. With such links a bus uses
Zenoh; without any it uses DDS, see :class:`~gradbus.runtime.network.network_config.NetworkConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.endpoints import LinkEndpoint, parse_endpoints

if TYPE_CHECKING:
    from gradbus.runtime.config.bus import BusSettings

Mode = Literal["client", "router"]

LEASE_S, LOOPBACK_LEASE_S = 10.0, 60.0  # as the profiles "network" and "loopback" have it on DDS
MIN_LEASE_S, MAX_LEASE_S = 0.1, 3_600.0  # four keep-alives fit into each lease


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Holds the links of a process, and what proves who is at their ends.

    Attributes:
        connect: endpoints of relays, or of a controller that listens, as :func:`.endpoints.parse_endpoint` takes them:
            the first that answers is used.
        listen: endpoints on which this process accepts links, and forwards between them.
        tls: False: ``tcp/`` endpoints beyond loopback are allowed. What the bus encrypts stays encrypted.
        ca: file of the authority's certificate, in PEM. Who dials accepts another end that it has signed, or one of
            the authorities that every browser trusts: Zenoh adds ``ca`` to these, with no setting for ``ca`` alone.
            Who listens accepts only clients that it has signed.
        certificate, key: files in PEM: what this process shows on links, certificate first and then those of
            authorities between, and its private key. Needed to listen on ``tls/``.
        requires_client_certificate: a listening end accepts only those that show a certificate of ``ca``.
        lease_s: after so long a silence the other end of a link is lost; 0.1 to 3,600 s. By default 10 s, and 60 s
            while all endpoints are on loopback. The lease that counts is the silent one's own.
    """

    connect: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    tls: bool = True
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    requires_client_certificate: bool = False
    lease_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("connect", "listen"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        if not (self.dials or self.listens):
            raise ConfigError(
                "links: expected an endpoint in bus.connect or bus.listen, got none. Name one, as in "
                "bus.connect=['tls/relay.example.org:443']"
            )
        if not isinstance(self.tls, bool):
            raise ConfigError(f"tls (bus.tls) must be true or false, got {self.tls!r}")
        self._check_addresses()
        self._check_plain()
        self._check_files()
        lease_s = self.lease_s
        is_number = isinstance(lease_s, int | float) and not isinstance(lease_s, bool)
        if lease_s is not None and not (is_number and MIN_LEASE_S <= lease_s <= MAX_LEASE_S):
            raise ConfigError(
                f"lease_s (bus.lease_s) must be {MIN_LEASE_S:g} to {MAX_LEASE_S:,g} seconds on links, got {lease_s!r}"
            )

    @classmethod
    def of(cls, settings: BusSettings) -> LinkConfig:
        """Return what the settings of a bus say about links. Raises ConfigError: it is wrong, or there are none."""
        return cls(
            connect=settings.connect,
            listen=settings.listen,
            tls=settings.tls,
            ca=settings.tls_ca,
            certificate=settings.tls_certificate,
            key=settings.tls_key,
            requires_client_certificate=settings.tls_clients,
            lease_s=settings.lease_s,
        )

    @cached_property
    def dials(self) -> tuple[LinkEndpoint, ...]:
        """Return the endpoints of :attr:`connect`."""
        return parse_endpoints(self.connect, "connect (bus.connect)")

    @cached_property
    def listens(self) -> tuple[LinkEndpoint, ...]:
        """Return the endpoints of :attr:`listen`."""
        return parse_endpoints(self.listen, "listen (bus.listen)", listens=True)

    @property
    def mode(self) -> Mode:
        """Return the mode of the session: who listens forwards between the links, as a router."""
        return "router" if self.listen else "client"

    @property
    def is_exposed(self) -> bool:
        """Return whether an endpoint is on another machine, or can be reached from one."""
        return not all(endpoint.is_loopback for endpoint in (*self.dials, *self.listens))

    @property
    def effective_lease_s(self) -> float:
        """Return the lease in force."""
        if self.lease_s is not None:
            return self.lease_s
        return LEASE_S if self.is_exposed else LOOPBACK_LEASE_S

    def _check_addresses(self) -> None:
        """Raise ConfigError: Zenoh finds no name in the address that a certificate could be checked against."""
        for one in self.dials:
            if one.scheme == "tls" and ":" in one.host:
                raise ConfigError(
                    f"connect (bus.connect): {one}: over TLS, Zenoh dials no IPv6 address itself. Use a host name that "
                    f"has this address, in DNS or /etc/hosts, and is in the certificate there"
                )

    def _check_plain(self) -> None:
        """Raise ConfigError: a link beyond this machine would have no TLS, without ``tls=False``."""
        for where, endpoints in (("connect (bus.connect)", self.dials), ("listen (bus.listen)", self.listens)):
            plain = [one for one in endpoints if one.scheme == "tcp" and not one.is_loopback]
            if plain and self.tls:
                raise ConfigError(
                    f"{where}: {plain[0]} leaves this machine without TLS, so that a process on the way could cut in. "
                    f"Write tls/{plain[0].place}, with certificates that 'gradbus keys tls HOST' makes, or set "
                    f"bus.tls=false where the network is trusted"
                )

    def _check_files(self) -> None:
        """Raise ConfigError: of certificate, key and authority one is missing that the others or the endpoints need."""
        if (self.certificate is None) != (self.key is None):
            given, missing = ("tls_certificate", "tls_key") if self.key is None else ("tls_key", "tls_certificate")
            raise ConfigError(f"bus.{given} is set and bus.{missing} is not: set both, the two files belong together")
        listens_tls = next((one for one in self.listens if one.scheme == "tls"), None)
        if listens_tls is not None and self.certificate is None:
            raise ConfigError(
                f"listen (bus.listen): {listens_tls} needs a certificate: set bus.tls_certificate and bus.tls_key to "
                f"files that 'gradbus keys tls HOST' makes, HOST being the name that others dial"
            )
        if self.requires_client_certificate and listens_tls is None:
            raise ConfigError("bus.tls_clients needs an endpoint tls/HOST:PORT in bus.listen, and there is none")
        if self.requires_client_certificate and self.ca is None:
            raise ConfigError(
                "bus.tls_clients needs the authority of the clients' certificates: set bus.tls_ca to its file"
            )
