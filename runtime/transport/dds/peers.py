"""Peers in a configuration of Cyclone DDS: what it gets of those that settings and documents name.

Cyclone resolves the host names in its configuration by itself, and ends the process (``abort``) at the first that has
no address, or that is no address at all. So it gets numbers alone: names are looked up by
:mod:`gradbus.runtime.network.host_names`, and those that have no address yet wait in :mod:`.late_peers`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.peers import PeerAddress, parse_peer

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")  # as Cyclone expands them, and a default


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


def choose_transport(tree: ET.Element, where: str) -> None:
    """Have a domain use IPv6 if the addresses among its peers are of that version, and its configuration says nothing.

    Cyclone ends the process at a peer of the other version.

    Args:
        tree: it is changed; :func:`expand_peers` has been called on it. where: as there.

    Raises:
        ConfigError: there are addresses of both versions, or not of the version of the transport.
    """
    peers = [parse_peer(element.get("Address"), where) for element in tree.iter("Peer")]
    versions = {peer.is_ipv6: peer.host for peer in peers if not peer.is_name}
    general = tree.find("Domain/General")
    assert general is not None
    transport = general.find("Transport")
    if transport is None and True in versions:
        transport = ET.SubElement(general, "Transport")
        transport.text = "udp6"
    is_ipv6 = transport is not None and (transport.text or "").strip().casefold() == "udp6"
    if (not is_ipv6) in versions:
        ours, theirs = ("IPv6", "IPv4") if is_ipv6 else ("IPv4", "IPv6")
        raise ConfigError(
            f"{where}: a bus uses IPv4 or IPv6; this one uses {ours}, and its peer {versions[not is_ipv6]} is {theirs}"
        )


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
