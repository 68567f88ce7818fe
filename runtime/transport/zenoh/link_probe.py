"""Why a link does not come up: found with plain sockets (:mod:`~gradbus.runtime.network.port_probe`) and TLS, step by
step as a link does it.

Zenoh has one error for all of that.
"""

from __future__ import annotations

import contextlib
import os
import socket

from gradbus.runtime.network.endpoints import LinkEndpoint
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.port_probe import STEP_S, LinkFault, connect
from gradbus.runtime.network.tls_probe import Wrong, plain_fault, tls_fault

_PLAIN_S = 1.0  # after which an end of a link without TLS has shown that it does not answer to TLS
# Zenoh's first message: its kind, the version of the protocol, and the id of a client, of 16 bytes; an answer has the
# same kind and a flag. No extension: nothing is offered.
_INIT, _IS_ANSWER, _KIND, _VERSION, _CLIENT_ID_16 = 0x01, 0x20, 0x1F, 9, 0xF2
_LENGTH_BYTES = 2  # before each message on TCP
_NO_TLS = (
    "the port is open, and nothing there answers to TLS",
    "Is host and port right? It must be a relay's. One that very many dial at the same time answers late",
)


def find_fault(endpoint: LinkEndpoint, links: LinkConfig) -> LinkFault:
    """Look for what has kept a link from coming up, for some seconds. Not for the event loop.

    Where the way is open and TLS is well, the fault is that no session of Zenoh comes of it.
    """
    connection = connect(endpoint)
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
    connection = connect(endpoint)
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
