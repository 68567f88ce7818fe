"""Endpoints of links that are dialled or listened on: ``tls/HOST:PORT`` and ``tcp/HOST:PORT``.

This is the syntax of the settings ``bus.connect`` and ``bus.listen``, and the one that Zenoh takes.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.addresses import address_fault, ip_address_of, is_host_name, with_port

Scheme = Literal["tls", "tcp"]

_ENDPOINT = re.compile(r"(tls|tcp)/(?:\[([^\[\]]*)\]|([^\[\]:/]*)):([0-9]{1,5})", re.ASCII)
_EXAMPLE = "tls/relay.example.org:443"
_MAX_SHOWN = 80
MAX_ENDPOINTS = 4  # of a setting: those that do not answer are tried one after the other, some seconds each


@dataclass(frozen=True, slots=True)
class LinkEndpoint:
    """Names one end of a link.

    Attributes:
        scheme: ``tls``, or ``tcp`` for a link without TLS. host: an IP address, without brackets, or a host name.
        port: 1 to 65535.
    """

    scheme: Scheme
    host: str
    port: int

    def __str__(self) -> str:
        """Return the endpoint as settings and Zenoh write it."""
        return f"{self.scheme}/{self.place}"

    @property
    def place(self) -> str:
        """Return ``HOST:PORT``, with brackets around an IPv6 address."""
        return with_port(self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        """Return whether only processes of this machine can be at the other end."""
        address = ip_address_of(self.host)
        return self.host == "localhost" if address is None else address.is_loopback


def parse_endpoint(text: object, where: str, *, listens: bool = False) -> LinkEndpoint:
    """Return the endpoint that a setting names.

    Args:
        where: the setting, for the error. listens: this process listens there, so that ``0.0.0.0`` and ``[::]`` have a
            meaning.

    Raises:
        ConfigError: it is not ``tls/HOST:PORT`` or ``tcp/HOST:PORT``.
    """
    matched = _ENDPOINT.fullmatch(text) if isinstance(text, str) and len(text) <= 300 else None
    if matched is None:
        raise _refused(text, where, _why_not(text))
    scheme: Scheme = "tls" if matched[1] == "tls" else "tcp"
    bracketed, plain, port = matched[2], matched[3], int(matched[4])
    if not 1 <= port <= 0xFFFF:
        raise _refused(text, where, "expected a port of 1 to 65535")
    host = plain if bracketed is None else bracketed
    address = ip_address_of(host)
    if address is None:
        if bracketed is not None or not is_host_name(host):
            raise _refused(text, where, "expected a host name or an IP address in front of the port")
        return LinkEndpoint(scheme, host, port)
    if isinstance(address, ipaddress.IPv6Address) != (bracketed is not None):
        raise _refused(text, where, "expected brackets around an IPv6 address, and none around another one")
    if not (listens and address.is_unspecified) and (fault := address_fault(host)):
        raise _refused(text, where, fault)
    return LinkEndpoint(scheme, str(address), port)


def parse_endpoints(texts: object, where: str, *, listens: bool = False) -> tuple[LinkEndpoint, ...]:
    """Return the endpoints of a setting. Raises ConfigError as :func:`parse_endpoint`, or if there are too many."""
    if not isinstance(texts, list | tuple):
        raise ConfigError(f"{where}: expected a list of endpoints such as ['{_EXAMPLE}'], got {texts!r}")
    if len(texts) > MAX_ENDPOINTS:
        raise ConfigError(
            f"{where}: expected at most {MAX_ENDPOINTS} endpoints, got {len(texts)}. Leave out the last ones"
        )
    return tuple(parse_endpoint(text, where, listens=listens) for text in texts)


def _why_not(text: object) -> str:
    """Return what is wrong with the form of a text."""
    if not isinstance(text, str):
        return "expected a text"
    scheme, slash, rest = text.partition("/")
    if slash and scheme not in ("tls", "tcp"):
        return "expected tls/ or tcp/ in front"
    if not slash:
        return "expected tls/ or tcp/ in front of HOST:PORT"
    return "expected a port behind the host" if ":" not in rest.rpartition("]")[2] else "expected HOST:PORT"


def _refused(text: object, where: str, why: str) -> ConfigError:
    shown = repr(text) if len(repr(text)) <= _MAX_SHOWN else f"{repr(text)[: _MAX_SHOWN - 3]}..."
    return ConfigError(f"{where}: {shown} is no endpoint: {why}. Write it as in '{_EXAMPLE}'")
