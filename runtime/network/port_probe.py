"""Why a port is not reached, and why this process cannot listen on one: found with plain sockets, step by step.

Each fault has its own sentence and the next step, for the error of a bus and for the doctor.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.runtime.network.addresses import family_of, ip_address_of
from gradbus.runtime.network.endpoints import LinkEndpoint
from gradbus.runtime.network.host_names import LOOKUPS

_MAX_ADDRESSES = 3  # of a name
STEP_S = 3.0  # for a name, and for TCP: a packet that is lost is sent again within one second
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Says what keeps a link from coming up.

    Attributes:
        endpoint: that was tried. what: happens there. cure: what to do. may_pass: a later attempt may succeed.
    """

    endpoint: LinkEndpoint
    what: str
    cure: str
    may_pass: bool = False

    def __str__(self) -> str:
        """Return all of it in one text, for an error."""
        return f"{self.endpoint}: {self.what}. {self.cure}"


def connect(endpoint: LinkEndpoint) -> LinkFault | socket.socket:
    """Return a connection over TCP, or why there is none."""
    addresses = _addresses(endpoint.host)
    if not addresses:
        reason = LOOKUPS.reasons([endpoint.host], socket.AF_UNSPEC).get(endpoint.host, "no answer")
        return LinkFault(
            endpoint,
            f"the name {endpoint.host} has no address here ({reason})",
            f"Check DNS or /etc/hosts ('getent hosts {endpoint.host}' shows what they say)",
            may_pass=True,
        )
    errors: list[OSError] = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, endpoint.port), STEP_S)
        except OSError as error:
            errors.append(error)
            continue
        if errors and endpoint.scheme == "tls":
            connection.close()
            return _only_later(endpoint, addresses[0], errors[0], address)
        return connection
    return _no_connection(endpoint, errors[0])


def _addresses(host: str) -> Sequence[str]:
    """Return some addresses of a host: the one that the system gives first to whoever dials it, the first of the other
    family, and others."""
    if ip_address_of(host) is not None:
        return [host]
    found = LOOKUPS.look_up([host], STEP_S, socket.AF_UNSPEC).get(host, ())
    firsts: dict[socket.AddressFamily, str] = {}
    for address in found:
        firsts.setdefault(family_of(address), address)
    return [*dict.fromkeys([*firsts.values(), *found])][:_MAX_ADDRESSES]


def _only_later(endpoint: LinkEndpoint, first: str, error: OSError, address: str) -> LinkFault:
    """Return the fault of a name whose first address does not answer: Zenoh 1.10 dials no other with TLS, and with TCP
    all of them."""
    why = "nothing answers" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
    host = endpoint.host
    return LinkFault(
        endpoint,
        f"the name {host} leads to {first} first ({why}), and a link with TLS dials the first address alone. {address} "
        f"does answer",
        f"Have the name lead to {address} first: in DNS, or by the line '{address} {host}' in /etc/hosts. With "
        f"'precedence ::ffff:0:0/96 100' in /etc/gai.conf, IPv4 comes before IPv6 for all names",
        may_pass=True,
    )


def _no_connection(endpoint: LinkEndpoint, error: OSError) -> LinkFault:
    """Return what an error of ``connect`` means."""
    proxy = next((name for name in _PROXIES if os.environ.get(name)), "")
    more = f". {proxy} is set here: links do not go through a proxy" if proxy and not endpoint.is_loopback else ""
    if isinstance(error, ConnectionRefusedError):
        what = f"nothing listens on port {endpoint.port} there (connection refused)"
        cure = (
            "Start what listens there ('gradbus relay', or a controller with bus.listen), and compare the port with "
            "its bus.listen"
        )
    elif isinstance(error, TimeoutError):
        what = f"no answer within {STEP_S:g} s"
        cure = (
            f"A firewall on the way drops it, or the machine is off: TCP port {endpoint.port} must be open from here "
            f"to {endpoint.host}"
        )
    else:
        what = f"it cannot be reached ({(error.strerror or str(error)).lower()})"
        cure = f"Check the network of this machine, and the address {endpoint.host}"
    return LinkFault(endpoint, what, cure + more, may_pass=True)


def why_not_listening(endpoints: tuple[LinkEndpoint, ...]) -> str:
    """Return why this process cannot listen on endpoints, and what to do; empty: it can."""
    for endpoint in endpoints:
        try:
            with socket.socket(family_of(endpoint.host), socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((endpoint.host, endpoint.port))
        except OSError as error:
            return f"listen (bus.listen): {endpoint}: {_bind_fault(endpoint, error)}"
    return ""


def _bind_fault(endpoint: LinkEndpoint, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {endpoint.port} is taken already ('ss -ltnp' shows by which process; of a job, one process listens, "
            f"and all others dial it). End that one, or take another port here and in bus.connect of the others"
        )
    if error.errno == errno.EACCES:
        return (
            f"this user may not listen on port {endpoint.port}. Take one of 1024 or more, or give the right to it "
            f"(CAP_NET_BIND_SERVICE; systemd: AmbientCapabilities)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"this machine has no address {endpoint.host}. Take one of its own ('ip -brief address' shows them), or "
            f"0.0.0.0 for all of them"
        )
    return f"no socket can be opened there ({error.strerror or error}). Take an address and a port of this machine"
