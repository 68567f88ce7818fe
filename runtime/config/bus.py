"""Settings of a bus: how a process reaches the others of its job; and the default name of a job, which two users of a
machine do not share."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gradbus.runtime.config.settings import Duration, Settings
from gradbus.runtime.fast_paths import LOOPBACK

USER = "{user}"  # in a name that a configuration gives
_MAX_CHARS = 32
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@cache
def user_name() -> str:
    """Return the user of this process, from the system: anybody can set variables of the environment."""
    try:
        import pwd  # not on every platform

        name = pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):  # a container may run as a number that has no name
        name = str(os.geteuid()) if hasattr(os, "geteuid") else "user"
    return _NOT_IN_NAMES.sub("-", name)[:_MAX_CHARS]


def default_job() -> str:
    """Return the name of a job that the settings do not name."""
    return f"default-{user_name()}"


def with_user(job: str) -> str:
    """Put the user's name in the place of ``{user}``, as in the configurations of this package."""
    return job.replace(USER, user_name())


class BusSettings(Settings):
    """How to reach the other processes of a job; see :func:`gradbus.connect`, and docs/security.md for what protects
    it."""

    job: Annotated[str, AfterValidator(with_user)] = Field(default=f"default-{USER}", validate_default=True)
    """Name of the job. Only processes with the same job and domain see each other. `{user}` stands for the name of the
    user who runs this process."""
    transport: Literal["auto", "dds", "zenoh"] = "auto"
    """What carries the data. `auto`: Zenoh where `bus.connect` or `bus.listen` is set, otherwise DDS; it never depends
    on which packages are installed. Processes on different transports do not meet."""
    domain: Annotated[int, Field(ge=0, le=232)] = 0
    """Number of the DDS domain. It decides the UDP ports."""
    network: Literal["loopback", "network"] = "loopback"
    """Network profile: `loopback` for one machine, `network` for several, with packets that fit an Ethernet frame."""
    datagram_bytes: Annotated[int, Field(ge=1_200, le=65_500)] | None = None
    """Most bytes of a datagram. null: 1400 with `network`, 65500 with `loopback`. Between machines of one wired network
    14700 makes large messages faster; a lost packet then costs ten. See docs/operations.md."""
    interface: str = LOOPBACK
    """Name of the network interface that leads to the others. With `lo`, nothing leaves this machine."""
    peers: tuple[str, ...] = ()
    """Machines of the job, this one included, for discovery without multicast; the same list on each. IP addresses
    or host names, each with or without a port (`robot-7:7410`). A name that does not resolve yet is looked up again.
    With an IPv6 address among them the bus uses IPv6, else IPv4."""
    multicast: bool = False
    """Whether discovery and data use multicast."""
    connect: tuple[str, ...] = ()
    """Endpoints to dial, of relays or of a controller that listens, such as `tls/relay.example.org:443`; the first
    that answers is used. With one, the bus uses Zenoh, and this process needs no open port of its own."""
    listen: tuple[str, ...] = ()
    """Endpoints on which this process accepts the links of others and forwards between them, such as
    `tls/0.0.0.0:443`. With one, the bus uses Zenoh."""
    tls: bool = True
    """With false, `bus.connect` and `bus.listen` may have `tcp/HOST:PORT`, without TLS, also beyond this machine. What
    `bus.security` encrypts stays encrypted."""
    tls_ca: Path | None = None
    """File of the authority that signs the certificates of relays, and of clients where `bus.tls_clients` is set, in
    PEM. `gradbus keys tls HOST` makes one. For relays the authorities that every browser trusts are accepted as well,
    with this setting or without it."""
    tls_certificate: Path | None = None
    """File of this process's certificate, in PEM: needed to listen on `tls/`, and to dial a relay that asks for one."""
    tls_key: Path | None = None
    """File of the private key of `bus.tls_certificate`, in PEM and without a password."""
    tls_clients: bool = False
    """Whether those that dial `bus.listen` must show a certificate of `bus.tls_ca` (mutual TLS)."""
    lease_s: Annotated[float, Field(ge=0.01, le=3_600, allow_inf_nan=False)] | None = None
    """Silence, in seconds, after which a process on another machine counts as dead. null: 60 with the profile
    `loopback`, 10 with `network`, or 4 for the ranks of an elastic run. Over Zenoh 10, or 60 where all endpoints are on
    this machine; the end of a link by itself does not count as the end of the process."""
    stall_timeout_s: Duration = 30.0
    """Seconds for which a reader may take no data before sending to it is an error."""
    shared_memory: bool = True
    """Whether processes of one machine pass large data through memory that they share."""
    security: Literal["user", "none", "psk", "identity"] = "user"
    """What protects the data. `user`: encryption with the key that the process is given, else with that of its user,
    which is for one machine. `psk`: encryption with the key of the job, which must be given. `identity`: each node has
    a key of its own. `none`: no protection. See docs/security.md."""
    key_file: Path | None = None
    """File of the key: that of the job, or with `identity` that of this node. null: the file that the environment
    variable GRADBUS_KEY_FILE names."""
    controller_key: str = ""
    """With `identity`, the public key that the controller, or rank 0, must have."""
    allow_file: Path | None = None
    """With `identity`, at the controller or rank 0, the file that lists the nodes that may take part."""
    insecure: bool = False
    """Whether unprotected data may leave this machine."""
    faults: str = ""
    """Faults to inject into what this process sends, for tests; see docs/reliability.md. Empty: none."""
