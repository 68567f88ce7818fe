"""The configuration file of a relay.

It is apart from those of :mod:`gradbus.commands.files`, whose settings a relay would load for nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from gradbus.runtime.config.settings import NonNegative, Settings
from gradbus.runtime.wire.frames import MAX_CHUNK_BYTES

ANY = "*"  # in access.jobs: every certificate, or every job
DEFAULT_LISTEN = ("tls/0.0.0.0:443",)

# The largest frame in its envelope, with the header of its sample: a smaller limit would drop it each time it is sent.
MIN_MESSAGE_BYTES = MAX_CHUNK_BYTES + (64 << 10)

Count = Annotated[int, Field(ge=1, le=1_000_000)]


class RelaySettings(Settings):
    """Where a relay listens, with which certificates, and how it ends; see docs/relay.md."""

    listen: tuple[str, ...] = DEFAULT_LISTEN
    """Endpoints on which the relay accepts links: `tls/HOST:PORT`, or `tcp/HOST:PORT` for a network that needs no TLS.
    `0.0.0.0` stands for all IPv4 addresses of this machine, `[::]` for all addresses."""
    tls: bool = True
    """Require TLS for links beyond this machine. With false, `tcp/` is allowed there, too; what members of a job send
    stays encrypted."""
    tls_certificate: Path | None = None
    """File of the certificate that the relay shows, in PEM, as `gradbus keys tls HOST` makes it."""
    tls_key: Path | None = None
    """File of the private key of that certificate."""
    tls_ca: Path | None = None
    """File of the authority that signs the certificates of clients, in PEM. Needed with `tls_clients`."""
    tls_clients: bool = False
    """Accept only clients that show a certificate signed by `tls_ca` (mutual TLS)."""
    lease_s: Annotated[float, Field(ge=0.1, le=3_600, allow_inf_nan=False)] | None = None
    """Silence, in seconds, after which clients take the relay for dead. null: 10, or 60 where all endpoints are on
    loopback. How long a client may be silent is the client's own `bus.lease_s`."""
    drain_s: NonNegative = 10.0
    """Seconds that the relay goes on forwarding after SIGTERM while sessions are open, and reports that it is not
    ready."""


class RelayLimits(Settings):
    """Limits on the sessions of a relay and on their messages."""

    sessions: Count = 2_000
    """Most sessions at a time. Further ones are refused."""
    sessions_per_node: Count | None = None
    """Most sessions at a time with the same name in the certificate. Further ones are closed. null: no limit but
    `sessions`. Needs `relay.tls_clients`."""
    message_bytes: Annotated[int, Field(ge=MIN_MESSAGE_BYTES, le=1 << 30)] = 16 << 20
    """Most bytes of a message. A larger one is dropped. A process of gradbus sends at most 8 MiB of data at a time,
    besides some KiB of headers."""


class AccessSettings(Settings):
    """Who may take part in which jobs."""

    jobs: dict[str, tuple[str, ...]] = Field(default={})
    """Names of jobs by the name in a client's certificate, such as `{"site-1": ["mnist"], "operator": ["*"]}`. `*`
    stands for every job, or for every client. Empty: everybody whom TLS lets in may take part in every job. Names other
    than `*` need `relay.tls_clients`. The job `mnist` with `bus.domain = 3` is `mnist@3` here."""


class HttpSettings(Settings):
    """The HTTP server of a relay: `/metrics` for Prometheus, `/live` and `/ready` for supervisors."""

    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Port that serves them. 0: any free one, which the log names. null: none."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine alone; what is served is not secret, and not
    protected."""


class RelayFile(Settings):
    """A configuration file of a relay."""

    relay: RelaySettings = RelaySettings()
    limits: RelayLimits = RelayLimits()
    access: AccessSettings = AccessSettings()
    http: HttpSettings = HttpSettings()

    @model_validator(mode="after")
    def _names_come_from_certificates(self) -> RelayFile:
        if self.relay.tls_clients:
            return self
        named = sorted(name for name in self.access.jobs if name != ANY)
        if named:
            raise ValueError(
                f"access.jobs names {named[0]!r}, and only a certificate proves a name: set relay.tls_clients=true and "
                f"relay.tls_ca, or name '*' alone"
            )
        if self.limits.sessions_per_node is not None:
            raise ValueError(
                "limits.sessions_per_node counts by the name in a certificate: set relay.tls_clients=true and "
                "relay.tls_ca, or take it out"
            )
        return self
