"""``gradbus.connect``: loads what a bus and its actors need, beside the event loop, and joins a job.

It is a module of its own so that to call it costs nothing: the bus is a second of imports, torch some more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gradbus import loading
from gradbus.runtime.misuse import opening

if TYPE_CHECKING:
    from pathlib import Path

    from gradbus.runtime.bus.bus import Bus
    from gradbus.runtime.network.network_config import NetworkConfig, Profile
    from gradbus.runtime.security import Level, Security
    from gradbus.runtime.testing.faults import Faults


@opening("gradbus.connect", "bus")
async def connect(  # noqa: PLR0913 - settings by keyword, for programs that have no NetworkConfig
    job: str | None = None,
    *,
    domain: int = 0,
    network: Profile | NetworkConfig = "loopback",
    interface: str | None = None,
    peers: Sequence[str] = (),
    lease_s: float | None = None,
    stall_timeout_s: float = 30.0,
    shared_memory: bool = True,
    connect: Sequence[str] = (),
    listen: Sequence[str] = (),
    tls: bool = True,
    tls_ca: str | Path | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    tls_clients: bool = False,
    fast: bool | None = None,
    faults: str | Faults = "",
    security: Level | Security = "user",
    load_actors: bool = True,
) -> AsyncIterator[Bus]:
    """Join a job on the data bus.

    Args:
        job: name of the job; only members of the same job see each other. By default one of this user:
            ``default-USER``.
        domain: DDS domain, 0 .. 232.
        network: profile ``loopback`` or ``network``, or all settings at once.
        interface: network interface; default ``lo``: nothing leaves this machine.
        peers: IP addresses or host names of all machines of the job, this one included. A name that does not resolve
            yet is looked up again; with an IPv6 address among them the bus uses IPv6.
        lease_s: after so long a silence other machines take this process for dead; by default 60 s, and 10 s with
            ``network``.
        stall_timeout_s: sending fails when DDS takes nothing for so long.
        shared_memory: large data between processes of one machine goes through memory they share.
        connect: endpoints of relays, or of a controller that listens, that this process dials, such as
            ``tls/relay.example.org:443``: then the bus uses Zenoh, not DDS, and needs no open port here.
        listen: endpoints on which this process accepts the links of others, and forwards between them.
        tls: False: endpoints may be ``tcp/HOST:PORT``, without TLS, also beyond this machine.
        tls_ca, tls_certificate, tls_key: files in PEM of the authority, and of this process; see docs/wan.md.
        tls_clients: those that dial ``listen`` must show a certificate of ``tls_ca``.
        fast: force (True) or forbid (False) the path around the binding; None: use it if its self-test passes.
        faults: for tests: rules of what goes wrong with what is sent, see :mod:`gradbus.runtime.testing.faults`;
            ``bus.faults`` has the counts of those that fired.
        security: what protects the data, see docs/security.md. ``user`` takes the key that ``GRADBUS_KEY_FILE`` or
            ``GRADBUS_KEY`` give, else that of this user, which is for one machine; ``psk`` needs one to be given;
            ``none`` protects nothing; a :class:`Security` says more, as ``identity`` needs.
        load_actors: whether to load, on a thread, what Controller, Client and Worker need, so that the event loop does
            not wait where they are first used. False saves a program that sends and receives messages only some
            seconds, and the memory of torch. ``gradbus-core`` alone has none of them.

    Raises:
        ConfigError: a setting is wrong, or data would leave the machine without protection. BusError: DDS cannot be
            started. ImportError: a package is missing or broken.
    """
    await loading.load_on_thread(loading.load_bus)
    from gradbus.runtime.bus.bus import connect as join  # loaded by now
    from gradbus.runtime.bus.transport_factory import network_config

    chosen = network_config(
        network,
        interface=interface,
        peers=peers,
        lease_s=lease_s,
        shared_memory=shared_memory,
        connect=connect,
        listen=listen,
        tls=tls,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_clients=tls_clients,
    )
    transport = [] if loading.has_transport(chosen) else [partial(loading.load_transport, chosen)]
    await loading.load_on_thread(*transport, *([loading.load_actors] if load_actors else []))
    async with join(
        job,
        domain=domain,
        network=chosen,
        stall_timeout_s=stall_timeout_s,
        fast=fast,
        faults=faults,
        security=security,
    ) as bus:
        yield bus
