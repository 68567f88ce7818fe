"""Why a link does not come up: found with plain sockets and TLS, step by step as a link does it.

Zenoh has one error for all of that. Here each fault has its own sentence and the next step, for the error of a bus and
for the doctor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.runtime.network.addresses import family_of, ip_address_of
from gradbus.runtime.network.endpoints import LinkEndpoint
from gradbus.runtime.network.host_names import LOOKUPS
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.tls_probe import Wrong, plain_fault, tls_fault

_MAX_ADDRESSES = 3  # of a name
STEP_S = 3.0  # for a name, and for TCP: a packet that is lost is sent again within one second
_PLAIN_S = 1.0  # after which an end of a link without TLS has shown that it does not answer to TLS
# Zenoh's first message: its kind, the version of the protocol, and the id of a client, of 16 bytes; an answer has the
# same kind and a flag. No extension: nothing is offered.
_INIT, _IS_ANSWER, _KIND, _VERSION, _CLIENT_ID_16 = 0x01, 0x20, 0x1F, 9, 0xF2
_LENGTH_BYTES = 2  # before each message on TCP
_NO_TLS = (
    "the port is open, and nothing there answers to TLS",
    "Is host and port right? It must be a relay's. One that very many dial at the same time answers late",
)
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


def find_fault(endpoint: LinkEndpoint, links: LinkConfig) -> LinkFault:
    """Look for what has kept a link from coming up, for some seconds. Not for the event loop.

    Where the way is open and TLS is well, the fault is that no session of Zenoh comes of it.
    """
    connection = _connect(endpoint)
    if isinstance(connection, LinkFault):
        return connection
    with contextlib.closing(connection):
        wrong = (
            _wrong_tls(connection, endpoint, links) if endpoint.scheme == "tls" else plain_fault(connection, _PLAIN_S)
        )
    if wrong is not None:
        return LinkFault(endpoint, *wrong, may_pass=wrong == _NO_TLS)
    return LinkFault(
        endpoint,
        "the port is open, and no session of Zenoh comes of it",
        "Is it a relay of gradbus, or a controller with bus.listen, of this version? It may also be starting, or have "
        "as many sessions as it takes: its log says so",
        may_pass=True,
    )


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


def _connect(endpoint: LinkEndpoint) -> LinkFault | socket.socket:
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


def _wrong_tls(connection: socket.socket, endpoint: LinkEndpoint, links: LinkConfig) -> Wrong | None:
    try:
        return tls_fault(connection, endpoint, links)
    except TimeoutError:  # so does Zenoh without TLS: it waits for the rest of a message
        if _is_plain_zenoh(endpoint):
            return (
                "Zenoh is there without TLS",
                "Have it listen on tls/ there, with a certificate of 'gradbus keys tls HOST'. Or, on a network that is "
                "trusted, write tcp/ instead of tls/, and set bus.tls=false",
            )
        return _NO_TLS


def _is_plain_zenoh(endpoint: LinkEndpoint) -> bool:
    """Return whether Zenoh answers there without TLS. Only the first message of its handshake is sent, with a random
    id: no session opens on a link that settings want encrypted."""
    opening = bytes([_INIT, _VERSION, _CLIENT_ID_16]) + os.urandom(15) + b"\1"  # an id is not zero
    connection = _connect(endpoint)
    if isinstance(connection, LinkFault):
        return False
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.settimeout(STEP_S)
        connection.sendall(len(opening).to_bytes(_LENGTH_BYTES, "little") + opening)
        with connection.makefile("rb") as answers:
            head = answers.read(_LENGTH_BYTES + 2)
        return len(head) == _LENGTH_BYTES + 2 and _is_answer(*head[_LENGTH_BYTES:])
    return False


def _is_answer(kind: int, version: int) -> bool:
    return kind & _KIND == _INIT and bool(kind & _IS_ANSWER) and version == _VERSION
