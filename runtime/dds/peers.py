"""Addresses of peers: what a setting or a document may name, and what Cyclone DDS gets of it.

Cyclone resolves the host names in its configuration by itself, and ends the process (``abort``) at the first that has
no address, or that is no address at all. So it gets numbers alone: names are looked up by :mod:`.host_names`, and those
that have no address yet wait in :mod:`.late_peers`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from gradbus.runtime.errors import ConfigError

MAX_PEERS = 1_024  # Cyclone announces a process to 121 ports of each, and takes seconds to start with 5,000
MAX_NAME = 253  # RFC 1035
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_DIGITS_ALONE = re.compile(r"[0-9.]+|0[xX][0-9a-fA-F]*", re.ASCII)  # such a "name" is a mistyped address
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_BROADCAST = ipaddress.IPv4Address(0xFFFF_FFFF)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")  # as Cyclone expands them, and a default


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A machine, or one port of it.

    Attributes:
        host: an IPv4 address, or a host name. port: the only one that is tried; None: those of all its processes.
    """

    host: str
    port: int | None = None

    @property
    def is_name(self) -> bool:
        """Whether the host has to be looked up."""
        return not _is_ipv4(self.host)

    def at(self, address: str) -> str:
        """Return the text that Cyclone takes, with an address of the host."""
        return address if self.port is None else f"{address}:{self.port}"


def parse_peer(text: object, where: str) -> PeerAddress:
    """Return the peer that a setting names. ``where``: the setting, for the error.

    Raises:
        ConfigError: it is no IPv4 address and no host name, or its port is none. IPv6 addresses are refused: discovery,
            the exclusion of foreign readers and the restriction to ``lo`` know IPv4 alone.
    """
    if not isinstance(text, str) or not (text.isascii() and text.isprintable()):
        raise _refused(text, where, "expected printable ASCII characters")
    if _is_ipv6(text):
        raise ConfigError(
            f"{where}: {text!r} is an IPv6 address, and the bus uses IPv4 alone. Give the machine's IPv4 address, or a "
            f"name that has one"
        )
    host, colon, port = text.removeprefix("udp/").partition(":")
    if colon and not (_PORT.fullmatch(port) and int(port) <= 0xFFFF):
        raise _refused(text, where, "expected a port of 1 to 65535 behind the colon")
    if _is_ipv4(host):
        address = ipaddress.IPv4Address(host)
        if address.is_unspecified or address == _BROADCAST:
            raise _refused(text, where, "it stands for no single machine")
    elif not _is_host_name(host):
        raise _refused(text, where, "expected an IPv4 address or a host name, which may have a port (robot-7:7410)")
    return PeerAddress(host, int(port) if colon else None)


def _refused(text: object, where: str, why: str) -> ConfigError:
    shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:77]}..."
    return ConfigError(f"{where}: {shown} is no address: {why}. Name the machine by its IP address")


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    """Whether it is one, with or without brackets, a port, a zone, or Cyclone's name of the transport."""
    inner = re.fullmatch(r"(?:udp6/)?\[([^\]]*)\](?::.*)?", text)
    try:
        ipaddress.IPv6Address(inner[1] if inner else text.removeprefix("udp6/"))
    except ValueError:
        return False
    return True


def _is_host_name(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    return len(host) <= MAX_NAME and not _DIGITS_ALONE.fullmatch(host) and all(map(_LABEL.fullmatch, labels))


def check_peers(addresses: Sequence[str]) -> None:
    """Raise ConfigError: one of the addresses of ``bus.peers`` is none, or there are too many of them."""
    where = "peers (bus.peers)"
    if isinstance(addresses, str):  # its characters would be taken for addresses
        raise ConfigError(f"{where}: expected a list of addresses, got the text {addresses!r}. Write [{addresses!r}]")
    if not isinstance(addresses, Sequence):
        raise ConfigError(f"{where}: expected a list of addresses, got {addresses!r}")
    if len(addresses) > MAX_PEERS:
        raise ConfigError(f"{where}: at most {MAX_PEERS} addresses, got {len(addresses)}. Use bus.multicast instead")
    for address in addresses:
        parse_peer(address, where)


def peers_in(document: str) -> list[PeerAddress]:
    """Return the peers of a configuration of Cyclone that :func:`expand_peers` has checked."""
    return [parse_peer(element.get("Address"), "peers") for element in ET.fromstring(document).iter("Peer")]


def names_in(document: str) -> dict[str, list[int | None]]:
    """Return the host names among the peers of a configuration, and the ports to try of each (None: all)."""
    found: dict[str, list[int | None]] = {}
    for peer in peers_in(document):
        if peer.is_name:
            found.setdefault(peer.host, []).append(peer.port)
    return found


def expand_peers(tree: ET.Element, where: str) -> None:
    """Bring the peers of a merged configuration into one form: an element with the attribute ``Address`` for each.

    Cyclone takes several in one element, and variables of the environment, which it would expand after this check.

    Args:
        tree: it is changed. where: the setting or variable that the peers are from, for errors.

    Raises:
        ConfigError: one of them is no address.
    """
    for parent in [one for one in tree.iter() if any(child.tag == "Peer" for child in one)]:
        children = list(parent)
        for child in children:
            parent.remove(child)
        for child in children:
            parent.extend(_expanded(child, where) if child.tag == "Peer" else [child])


def _expanded(element: ET.Element, where: str) -> list[ET.Element]:
    attributes = {name: value for name, value in element.items() if name.casefold() != "address"}
    given = ",".join(value for name, value in element.items() if name.casefold() == "address")
    peers = [parse_peer(part, where) for part in _VARIABLE.sub(_value, given).split(",")]
    return [ET.Element("Peer", {"Address": peer.at(peer.host), **attributes}) for peer in peers]


def _value(variable: re.Match[str]) -> str:
    return os.environ.get(variable[1]) or variable[2] or ""


def with_addresses(document: str, known: Mapping[str, Sequence[str]], relay: str | None) -> str:
    """Return the configuration with numbers in place of names, which is what Cyclone may get.

    Args:
        known: addresses of names; what is not in it is left out. relay: one more peer, which never ends.
    """
    tree = ET.fromstring(document)
    for parent in [one for one in tree.iter() if any(child.tag == "Peer" for child in one)]:
        for element in [child for child in parent if child.tag == "Peer"]:
            peer = parse_peer(element.get("Address"), "peers")
            if not peer.is_name:
                continue
            at = list(parent).index(element)
            parent.remove(element)
            for address in reversed(known.get(peer.host, ())):
                parent.insert(at, ET.Element("Peer", {**element.attrib, "Address": peer.at(address)}))
        if relay is not None:
            ET.SubElement(parent, "Peer", Address=relay, PruneDelay="inf")
            relay = None
    return ET.tostring(tree, encoding="unicode")
