"""The DDS configuration: built by us, checked by us, never left to Cyclone's defaults.

By default Cyclone talks multicast on the first real interface it finds. Ours is the opposite: interface ``lo``, no
multicast, and nothing leaves the machine unless the user names an interface or peers.

Cyclone reports a configuration error only on stderr, and accepts an unclosed document *silently* with its defaults in
force. So a document from the user (``CYCLONEDDS_URI``) is parsed here first and merged into ours.

Cyclone resolves the host names of peers by itself, and ends the process (``abort``) at the first that has no address,
or that is no address at all. So it gets numbers alone: names are looked up by
:mod:`gradbus.runtime.network.host_names`, and those that have no address yet wait in :mod:`.late_peers`.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.nearest import nearest
from gradbus.runtime.network.addresses import FAMILIES, PeerAddress, address_of, check_interface, interfaces, parse_peer
from gradbus.runtime.network.host_names import LOOKUPS, describe_missing
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.dds.fatal_values import check_fatal_values

RECEIVE_BUFFER_BYTES = 16 << 20  # a model's worth of datagrams may wait while Python is busy
# Two samples of 1 MiB, as the kernel counts. Of what does not fit the rest waits in DDS's write, and DDS's heartbeats,
# from another thread, overtake it: the reader then asks for what is still to come. At 50 Mbit/s that was a quarter of
# all traffic or more. All that the process sends waits behind a full one, 2 s at 10 Mbit/s, so it is not larger.
SEND_BUFFER_BYTES = 2 << 20
# Who has just come announces itself so long to every port of each peer: for as long as a process waits for others by
# default. Later only the first process of a machine is tried, so that two that could not reach each other all that time
# still meet if one of them is the first, and the other answers; each further port would have every machine say, in
# another 0.2 kB/s, that nobody is there. Processes that are known, or were until their lease ended, are told for ever.
SEARCH_S = 600.0
# Each fragment is followed by a HEARTBEAT_FRAG of 28 bytes, which is to have room beside it: else that is a packet of
# 90 bytes (Ethernet) more, which is as many packets again and 6 % of a link with datagrams of 1,400 B.
_BESIDE_FRAGMENT_BYTES = 84

PORTS_OF_A_DOMAIN = 250
MAX_PROCESSES = 120  # of a machine and domain

_OTHER_TRANSPORT = "A process with bus.connect or bus.listen uses Zenoh, and cannot be met here"

# Sections that a document of Cyclone 11 may have under <Domain>.
_SECTIONS = (
    "Compatibility", "Discovery", "General", "Internal", "Partitioning", "SharedMemory", "Sizing", "TCP", "Threads",
    "Tracing",
)  # fmt: skip


def first_port(domain_id: int) -> int:
    """Return the first port of a domain, as RTPS has it."""
    return 7400 + PORTS_OF_A_DOMAIN * domain_id


def discovery_ports(domain_id: int) -> range:
    """Ports at which participants of a domain listen for announcements, as RTPS has it."""
    first = first_port(domain_id) + 10
    return range(first, first + 2 * 121, 2)


def port_range(domain: int) -> str:
    """Return the ports that DDS processes of this domain listen on: two each, for up to 120 processes of a machine.

    That is RTPS's formula for participant indices 0 to MaxAutoParticipantIndex - 1; docs/operations.md tells more.
    """
    first = discovery_ports(domain)[0]
    return f"{first}-{min(first + 2 * MAX_PROCESSES - 1, 65535)}"


def announcement_s(lease_s: float) -> float:
    """How often DDS announces a participant by itself, with a datagram for each process that it knows and each port
    that it tries. Whoever comes is announced at once; so this is for what is lost, and for those that were cut off."""
    return min(max(lease_s / 5, 0.2), 2.0)


def build_xml(config: NetworkConfig, *, domain_id: int = 0, user_document: str | None = None) -> str:
    """The configuration document for Cyclone DDS.

    Args:
        config: the settings. domain_id: that it is for, which ports follow from.
        user_document: what ``CYCLONEDDS_URI`` holds: XML text, a path, or a ``file://`` address. Its elements replace
            ours, element by element below the sections (General, Discovery ...).

    Raises:
        ConfigError: the interface does not exist, or the user's document is not a well-formed Cyclone document.
    """
    loopback = config.profile == "loopback"
    user = _parse_user(user_document) if user_document and user_document.strip() else None
    tree = _base(config, loopback, domain_id, "127.0.0.1" if user is None or not _asks_for_ipv6(user) else "::1")
    if user is not None:
        _merge(tree, user)
    expand_peers(tree, "CYCLONEDDS_URI")  # ours have been checked
    choose_transport(tree, "peers (bus.peers)" if user is None else "CYCLONEDDS_URI and peers (bus.peers)")
    for element in tree.iter("NetworkInterface"):
        name = element.get("name")
        if name:
            check_interface(name)
    return ET.tostring(tree, encoding="unicode")


def leaves_machine(document: str) -> bool:
    """Whether data can reach another machine under this configuration, which may hold a document of the user."""
    listed = list(ET.fromstring(document).iter("NetworkInterface"))
    return not listed or any(element.get("name") != LOOPBACK for element in listed)


def is_exposed(document: str) -> bool:
    """Whether data can reach another machine, or is meant to, under this configuration."""
    return leaves_machine(document) or has_peers_elsewhere(document)


def has_peers_elsewhere(document: str) -> bool:
    """Whether the configuration names machines that are not this one."""
    return not all(_is_here(peer.host) for peer in peers_in(document))


def _is_here(host: str) -> bool:
    """Whether a host is this machine's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def uses_ipv6(document: str) -> bool:
    """Whether the domain of a configuration of Cyclone uses IPv6."""
    transport = ET.fromstring(document).find("Domain/General/Transport")
    return transport is not None and (transport.text or "").strip().casefold() == "udp6"


def own_address(document: str) -> str:
    """Return the address of this machine on the first interface of a configuration of Cyclone.

    Raises:
        OSError: it has none, or a document of the user gives it one that is none.
    """
    interface = next(ET.fromstring(document).iter("NetworkInterface"), None)
    given = {} if interface is None else interface.attrib
    if given.get("address"):
        try:
            return str(ipaddress.ip_address(given["address"]))
        except ValueError:
            raise OSError(f"the interface address {given['address']!r} is no IP address") from None
    name, ipv6 = given.get("name", LOOPBACK), uses_ipv6(document)
    address = "127.0.0.1" if name == LOOPBACK and not ipv6 else address_of(name, ipv6=ipv6)
    if address is None:
        raise OSError(f"interface {name} has no {'IPv6' if ipv6 else 'IPv4'} address")
    return address


def _asks_for_ipv6(user: ET.Element) -> bool:
    return any((element.text or "").strip().casefold() == "udp6" for element in user.iter("Transport"))


def _base(config: NetworkConfig, loopback: bool, domain_id: int = 0, this_machine: str = "127.0.0.1") -> ET.Element:
    """``this_machine``: the peer where none is given and no other machine can be reached."""
    multicast = "true" if config.multicast else "false"
    document = ET.Element("CycloneDDS")
    domain = ET.SubElement(document, "Domain", Id="any")
    general = ET.SubElement(domain, "General")
    listed = ET.SubElement(general, "Interfaces")
    ET.SubElement(listed, "NetworkInterface", name=config.interface, multicast=multicast)
    _texts(
        general,
        {
            "AllowMulticast": multicast,
            "MaxMessageSize": f"{config.effective_datagram_bytes}B",
            "FragmentSize": f"{min(config.effective_datagram_bytes - _BESIDE_FRAGMENT_BYTES, 65_000)}B",
        },
    )
    discovery = ET.SubElement(domain, "Discovery")
    # With the defaults of the last three a partition of 80 s never heals.
    _texts(
        discovery,
        {
            "ParticipantIndex": "auto",
            "MaxAutoParticipantIndex": "120",
            "LeaseDuration": f"{config.effective_lease_s:g}s",
            "SPDPInterval": f"{announcement_s(config.effective_lease_s):g}s",
            "InitialLocatorPruneDelay": f"{SEARCH_S:g}s",
            "DiscoveredLocatorPruneDelay": "inf",
        },
    )
    peers = config.peers or (() if config.multicast else (this_machine,) if config.interface == LOOPBACK else ())
    if peers:
        element = ET.SubElement(discovery, "Peers")
        for address in peers:
            peer = parse_peer(address, "peers (bus.peers)")
            first = peer
            if peer.port is None:  # else it is the only one
                ET.SubElement(element, "Peer", Address=peer.host)
                first = PeerAddress(peer.host, discovery_ports(domain_id)[0])
            ET.SubElement(element, "Peer", Address=first.at(first.host), PruneDelay="inf")
    internal = ET.SubElement(domain, "Internal")
    ET.SubElement(internal, "SocketReceiveBufferSize", min="default", max=f"{RECEIVE_BUFFER_BYTES >> 20}MiB")
    if not loopback:
        ET.SubElement(internal, "SocketSendBufferSize", min="default", max=f"{SEND_BUFFER_BYTES >> 20}MiB")
    # The window of the contract: so much may be unacknowledged before a writer waits (50 ms delay: 4 -> 17 MB/s).
    marks, window = ET.SubElement(internal, "Watermarks"), f"{WINDOW_BYTES >> 20}MB"
    _texts(marks, {"WhcHigh": window, "WhcHighInit": window, "WhcLow": "1MB"})
    if config.loss_per_mille:
        _texts(ET.SubElement(internal, "Test"), {"XmitLossiness": str(config.loss_per_mille)})
    return document


def _texts(parent: ET.Element, items: Mapping[str, str]) -> None:
    for tag, text in items.items():
        ET.SubElement(parent, tag).text = text


def _read_user(document: str) -> tuple[str, str]:
    """The text of the user's document, which CYCLONEDDS_URI holds or names, and where it is from."""
    text = document.strip()
    if text.startswith("<"):
        return text, "CYCLONEDDS_URI"
    parts = urlsplit(text)
    path = Path(unquote(parts.path) if parts.scheme == "file" else text)
    where = f"CYCLONEDDS_URI ({path})"
    try:
        return path.read_text(encoding="utf-8"), where
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{where}: cannot be read: {reason}. Unset it, or name a readable file") from None


def _parse_user(document: str) -> ET.Element:
    text, where = _read_user(document)
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ConfigError(f"{where} is not well-formed XML: {error}. Unset it, or close every element") from None
    except UnicodeEncodeError:  # octets of the environment that are no text
        raise ConfigError(f"{where} is not UTF-8 text. Unset it, or write it in ASCII") from None
    _check_ascii(root, where)
    for element in root.iter():  # Cyclone's own examples declare a namespace
        element.tag = element.tag.rpartition("}")[2]
    if root.tag == "Domain":  # Cyclone takes a document without the outermost element, too
        outer = ET.Element("CycloneDDS")
        outer.append(root)
        root = outer
    if root.tag != "CycloneDDS":
        raise ConfigError(f"{where}: expected the root element <CycloneDDS>, got <{root.tag}>")
    check_fatal_values(root, where)
    for domain in root:
        if domain.tag != "Domain":
            raise ConfigError(f"{where}: expected <Domain> below <CycloneDDS>, got <{domain.tag}>")
        for section in domain:
            _check_section(section, where)
    return root


def _check_ascii(root: ET.Element, where: str) -> None:
    """Raise ConfigError: the binding of Cyclone DDS takes ASCII alone. Comments are dropped before."""
    for element in root.iter():
        for text in (element.tag, element.text, element.tail, *element.keys(), *element.attrib.values()):
            if text and not text.isascii():
                raise ConfigError(
                    f"{where}: Cyclone DDS takes ASCII characters alone, got {text.strip()!r} in <{element.tag}>. "
                    f"Write it in ASCII; a file or folder of such a name can have a symbolic link with another one"
                )


def _check_section(section: ET.Element, where: str) -> None:
    if section.tag not in _SECTIONS:
        near = nearest(section.tag, _SECTIONS)
        hint = f"; did you mean <{near}>?" if near else ""
        raise ConfigError(f"{where}: unknown section <{section.tag}> below <Domain>{hint}")
    for element in section.iter():
        # Cyclone ignores capitals, and so must the check of what leaves the machine.
        element.tag = _names().get(element.tag.casefold(), element.tag)
        if element.tag.casefold() == "networkinterfaceaddress":
            raise ConfigError(
                f"{where}: <{element.tag}> is the old way to name an interface; write <Interfaces>"
                f'<NetworkInterface name="..."/></Interfaces> below <General>'
            )


@functools.cache
def _names() -> dict[str, str]:
    """Elements of our own document as they are written, by their names without capitals."""
    ours = _base(NetworkConfig(peers=("127.0.0.1",), loss_per_mille=1), loopback=False)  # has all of them
    return {"transport": "Transport", **{element.tag.casefold(): element.tag for element in ours.iter()}}


def _merge(ours: ET.Element, theirs: ET.Element) -> None:
    target = ours.find("Domain")
    assert target is not None
    for domain in theirs:
        for section in domain:
            mine = target.find(section.tag)
            if mine is None:
                mine = ET.SubElement(target, section.tag)
            for element in section:
                for old in mine.findall(element.tag):
                    mine.remove(old)
                mine.append(element)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Describes how far a bus on DDS reaches: the :class:`~gradbus.runtime.transport.api.Reachable` of DDS.

    Attributes:
        domain: of DDS. interface, peers, multicast: as it is set.
        leaves_machine: whether other machines can be reached at all. is_exposed: whether they can, or peers are named
            that are not this machine.
        by_document: whether ``CYCLONEDDS_URI`` has a say in that.
        names: host names among the peers of both. ipv6: whether it uses IPv6, else IPv4.
    """

    domain: int
    interface: str
    peers: tuple[str, ...]
    multicast: bool
    leaves_machine: bool
    is_exposed: bool = False
    by_document: bool = False
    names: tuple[str, ...] = ()
    ipv6: bool = False

    @classmethod
    def of(cls, domain: int, network: NetworkConfig) -> Reach:
        """Return the reach of a bus with this network. Raises ConfigError: that is wrong."""
        document = os.environ.get("CYCLONEDDS_URI")
        merged = build_xml(network, user_document=document)
        return cls(
            domain=domain,
            interface=network.interface,
            peers=network.peers,
            multicast=network.multicast,
            leaves_machine=leaves_machine(merged),
            is_exposed=is_exposed(merged),
            by_document=bool(document),
            names=tuple(names_in(merged)),
            ipv6=uses_ipv6(merged),
        )

    @property
    def meeting_place(self) -> str:
        """Return the domain, in words."""
        return f"DDS domain {self.domain}"

    @property
    def attachment(self) -> str:
        """Return the network interface."""
        return self.interface

    @property
    def unresolved(self) -> str:
        """Return a sentence about peers whose host names have no address yet; empty: none is known to have none."""
        return describe_missing(LOOKUPS.reasons(self.names, FAMILIES[self.ipv6]))

    def hint(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to look at first while processes do not come, in a few words for a line that is repeated.

        Args:
            elsewhere: as for :meth:`advice`. one: it is one process that is missing.
        """
        return _joined(self._hint(elsewhere, one), self.unresolved)

    def _hint(self, elsewhere: bool | None, one: bool) -> str:
        start = "Start it" if one else "Start them"
        if elsewhere is False:
            return f"{start} on this machine, with the same job and domain {self.domain}"
        if not self.leaves_machine:
            others = "this bus reaches only this machine (lo): see docs/operations.md, bus.interface"
            return others[0].upper() + others[1:] if elsewhere else f"{start}. If on another machine: {others}"
        if not self.peers and not self.multicast:
            return f"This bus ({self.interface}) has no peers: set bus.peers to the addresses of all machines"
        return (
            f"{start}, with the same job, domain {self.domain} and key; 'gradbus doctor' on both sides checks the way"
        )

    def advice(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to do about processes that have not come, with every setting to look at: for an error.

        Args:
            elsewhere: whether they are on other machines; None: nobody knows. one: it is one process that is missing.
        """
        others = "" if elsewhere is False else _OTHER_TRANSPORT
        return _joined(self._advice(elsewhere, one), self.unresolved, others)

    def _advice(self, elsewhere: bool | None, one: bool) -> str:
        document = ", and CYCLONEDDS_URI" if self.by_document else ""
        start, they, theirs = ("Start it", "it is", "its") if one else ("Start them", "they are", "theirs")
        if elsewhere is False:
            return f"{start}, with the same job and domain {self.domain}{document}; {they} on this machine"
        if not self.leaves_machine:
            others = [name for name in interfaces() if name != LOOPBACK and address_of(name)]
            here = f"here: {', '.join(others[:6])}" if others else "as ip -brief address shows it"
            place = "on another machine" if one else "on other machines"
            when = f"{they} {place}".capitalize() if elsewhere else f"{start}. If {they} {place}"
            return (
                f"{when}: this bus is on lo, which reaches this machine alone. Set on all of them "
                f"GRADBUS_BUS__INTERFACE=NAME ({here}), GRADBUS_BUS__NETWORK=network, "
                f"GRADBUS_BUS__PEERS='[\"ADDRESS\", ...]' with the addresses of all, and a key: "
                f"GRADBUS_BUS__SECURITY=psk and GRADBUS_BUS__KEY_FILE=FILE ('gradbus keys new FILE' makes one)"
            )
        own = address_of(self.interface, ipv6=True) if self.ipv6 else address_of(self.interface)
        at = f"{own} on {self.interface}" if own else self.interface
        if not self.peers and not self.multicast:
            return (
                f"This bus ({at}) has no peers: set GRADBUS_BUS__PEERS='[\"ADDRESS\", ...]' with the addresses of all "
                f"machines, on all of them"
            )
        return (
            f"{start}, with the same job, domain {self.domain}{document} and key. Check that bus.peers there has "
            f"this machine ({at}), that bus.peers here has {theirs} ({', '.join(self.peers) or 'multicast'}), and that "
            f"UDP ports {port_range(self.domain)} pass the firewalls: 'gradbus doctor' on both sides finds it out"
        )


def _joined(*sentences: str) -> str:
    return ". ".join(sentence for sentence in sentences if sentence)
