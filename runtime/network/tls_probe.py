"""Find what is wrong with TLS at the other end of a connection, by the steps of a client that sees all octets."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography import x509

from gradbus.runtime.network.certificates import date_fault, is_authority, names_of
from gradbus.runtime.network.endpoints import LinkEndpoint
from gradbus.runtime.network.links import LinkConfig

T = TypeVar("T")

Wrong = tuple[str, str]
"""A sentence that names the fault and what to do about it."""

HANDSHAKE_S = 3.0
_ALERT_S = 0.7  # a server of TLS 1.3 refuses a client's certificate after the client takes the handshake for done
_CHUNK_BYTES = 16_384
_REFUSED = re.compile(
    "BAD_CERTIFICATE|CERTIFICATE_(REVOKED|EXPIRED|UNKNOWN)|UNKNOWN_CA|UNSUPPORTED_CERT|ACCESS_DENIED|DECRYPT_ERROR"
)
_WRONG_NAME = (62, 64)  # OpenSSL's codes: of a host name, of an IP address
_OUT_OF_DATE = (9, 10)  # not valid yet, expired
_WRONG_USE = 26  # as a client's where a server's is needed


class Greeting:
    """Runs a client's side of TLS on a connection, up to its first octets of data.

    Attributes:
        first: the first octets that have come, whatever they are.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self.first = b""
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host or None)

    def shake_hands(self, timeout_s: float) -> None:
        """Do the handshake. Raises ssl.SSLError: it fails; TimeoutError: nothing more comes; other OSError: the
        connection ends."""
        self._do(self._tls.do_handshake, timeout_s)

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        """Send octets, if there are any, and return the first that come back; none if it stays silent. Raises as
        :meth:`shake_hands`."""
        if request:
            self._tls.write(request)
        try:
            return self._do(lambda: self._tls.read(_CHUNK_BYTES), timeout_s)
        except TimeoutError:
            return b""

    def certificate(self) -> x509.Certificate | None:
        """Return the certificate of the other end, once the handshake is done."""
        der = self._tls.getpeercert(binary_form=True)
        return None if der is None else x509.load_der_x509_certificate(der)

    def _do(self, step: Callable[[], T], timeout_s: float) -> T:
        """Call a step of TLS until it is done, and carry its octets."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive(until_s)
            finally:
                self._flush()  # an alert, too

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._connection.sendall(self._outgoing.read())

    def _receive(self, until_s: float) -> None:
        self._connection.settimeout(max(until_s - time.monotonic(), 0.001))
        data = self._connection.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        self.first = (self.first + data)[:64] if len(self.first) < 64 else self.first
        self._incoming.write(data)


def tls_fault(connection: socket.socket, endpoint: LinkEndpoint, links: LinkConfig) -> Wrong | None:
    """Look for a fault of TLS on a new connection, for some seconds; None: there is none, or none that shows.

    Raises:
        TimeoutError: the other end says nothing at all.
    """
    greeting = Greeting(connection, _context(links), endpoint.host)
    try:
        greeting.shake_hands(HANDSHAKE_S)
    except ssl.SSLCertVerificationError as error:
        return _distrusted(error, endpoint, links)
    except (ssl.SSLError, OSError) as error:
        if found := _not_tls(greeting.first) or _refused(error, links):
            return found
        if isinstance(error, TimeoutError):
            raise
        return f"TLS fails there ({_reason(error)})", "Is that port a relay's, and not another service's?"
    return _after_handshake(greeting, endpoint, links)


def plain_fault(connection: socket.socket, timeout_s: float) -> Wrong | None:
    """Look for what is at the other end of a new connection that should have no TLS; None: it does not show."""
    first = first_octets(connection, timeout_s)
    if first[:1] in (b"\x15", b"\x16") and first[1:2] == b"\x03":
        return "it expects TLS, and this endpoint has none", "Write tls/ instead of tcp/, and set bus.tls_ca"
    return _not_tls(first)


def first_octets(connection: socket.socket, timeout_s: float) -> bytes:
    """Return the first octets of an answer to a greeting of TLS; none: there is no answer."""
    greeting = Greeting(connection, _unchecked(), "")
    with contextlib.suppress(ssl.SSLError, OSError):
        greeting.shake_hands(timeout_s)
    return greeting.first


def _after_handshake(greeting: Greeting, endpoint: LinkEndpoint, links: LinkConfig) -> Wrong | None:
    """Return what shows once the handshake is done for the client: a refusal, or another protocol within TLS."""
    certificate = greeting.certificate()
    if certificate is not None and is_authority(certificate):
        return (
            "its certificate is an authority's, which no link accepts",
            "Make one for that host there: 'gradbus keys tls HOST'",
        )
    try:
        greeting.exchange(b"", _ALERT_S)
        host = endpoint.host.encode("ascii")
        answer = greeting.exchange(b"GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host, _ALERT_S)
    except (ssl.SSLError, OSError) as error:
        return _refused(error, links)
    return _not_tls(answer)


def _distrusted(error: ssl.SSLCertVerificationError, endpoint: LinkEndpoint, links: LinkConfig) -> Wrong:
    """Return what is wrong with the certificate of the other end, with its own facts where they can be read."""
    shown = certificate_at(endpoint)
    if error.verify_code in _WRONG_NAME:
        names = ", ".join(names_of(shown)) if shown is not None else ""
        return (
            f"its certificate is not for {endpoint.host}, but for {names or 'no name at all'}",
            f"Dial one of these names, or make a certificate there: 'gradbus keys tls {endpoint.host}'",
        )
    if error.verify_code in _OUT_OF_DATE:
        why = date_fault(shown) if shown is not None else ""
        return (
            why or f"a certificate there is out of date ({error.verify_message})",
            "Make a new one there ('gradbus keys tls HOST'), or set the clock of this machine right",
        )
    if error.verify_code == _WRONG_USE:
        return (
            "its certificate is a client's, and no machine's that is dialled (extendedKeyUsage without serverAuth)",
            f"Make one there: 'gradbus keys tls {endpoint.host}'",
        )
    issuer = f", by {shown.issuer.rfc4514_string()[:100]}" if shown is not None else ""
    authority = f"that of bus.tls_ca ({links.ca})" if links.ca is not None else "one of those that browsers trust"
    cure = (
        "Copy ca.pem of the relay here, and set bus.tls_ca to it"
        if links.ca is None
        else "Copy the relay's ca.pem here again. If the issuer is a company's proxy, that opens TLS on the way: ask "
        "for this port to be let through unopened"
    )
    return f"its certificate is signed by another authority than {authority}{issuer} ({error.verify_message})", cure


def certificate_at(endpoint: LinkEndpoint) -> x509.Certificate | None:
    """Return the certificate of an endpoint without a look at who has signed it; None: it cannot be had. Takes some
    seconds where nothing answers."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), HANDSHAKE_S) as connection:
            greeting = Greeting(connection, _unchecked(), endpoint.host)
            greeting.shake_hands(HANDSHAKE_S)
            return greeting.certificate()
    except (ssl.SSLError, OSError, ValueError):
        return None


def _not_tls(first: bytes) -> Wrong | None:
    """Return what is there if the first octets are those of HTTP."""
    if first[:5] != b"HTTP/":
        return None
    return (
        "it answers with HTTP: a web server, or a proxy on the way",
        "Are host and port right? A link passes a reverse proxy only where that hands TCP on (nginx: stream), and no "
        "HTTP proxy",
    )


def _refused(error: Exception, links: LinkConfig) -> Wrong | None:
    """Return what an alert of the other end says of this end's certificate; None: it says something else."""
    reason = _reason(error)
    asks = "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and links.certificate is None)
    if asks and links.certificate is None:
        return (
            "it accepts only clients with a certificate",
            "Have one made where the authority is ('gradbus keys tls --client NAME'), and set bus.tls_certificate and "
            "bus.tls_key",
        )
    if links.certificate is not None and (asks or _REFUSED.search(reason)):
        return (
            f"it refuses the certificate of this end, {links.certificate} ({reason.lower()})",
            "It must be signed by the authority that bus.tls_ca names there, and valid: 'gradbus keys tls --client "
            "NAME' makes one where that authority is",
        )
    return None


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or "no reason").strip()


def _context(links: LinkConfig) -> ssl.SSLContext:
    """Return the context of a client with the authorities and the certificate of ``links``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False  # as Zenoh
    if links.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(_expanded(links.ca))
    if links.certificate is not None and links.key is not None:
        context.load_cert_chain(_expanded(links.certificate), _expanded(links.key))
    return context


def _unchecked() -> ssl.SSLContext:
    """Return a context that checks nothing: to look at what is there, never to send data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _expanded(path: Path) -> Path:
    return path.expanduser()
