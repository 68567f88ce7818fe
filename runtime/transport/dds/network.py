"""The DDS configuration: built by us, checked by us, never left to Cyclone's defaults.

By default Cyclone talks multicast on the first real interface it finds. Ours is the opposite: interface ``lo``, no
multicast, and nothing leaves the machine unless the user names an interface or peers.

Cyclone reports a configuration error only on stderr, and accepts an unclosed document *silently* with its defaults in
force. So a document from the user (``CYCLONEDDS_URI``) is parsed here first and merged into ours.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.nearest import nearest
from gradbus.runtime.transport.dds.fatal_values import check_fatal_values
from gradbus.runtime.transport.dds.peers import (
    PeerAddress,
    check_peers,
    choose_transport,
    expand_peers,
    parse_peer,
    peers_in,
)
from gradbus.runtime.transport.dds.spdp import discovery_ports

if TYPE_CHECKING:
    from gradbus.runtime.config.bus import BusSettings

Profile = Literal["loopback", "network"]

RECEIVE_BUFFER_BYTES = 16 << 20  # a model's worth of datagrams may wait while Python is busy
# Two samples of 1 MiB, as the kernel counts. Of what does not fit the rest waits in DDS's write, and DDS's heartbeats,
# from another thread, overtake it: the reader then asks for what is still to come. At 50 Mbit/s that was a quarter of
# all traffic or more. All that the process sends waits behind a full one, 2 s at 10 Mbit/s, so it is not larger.
SEND_BUFFER_BYTES = 2 << 20
LEASES_S: dict[Profile, float] = {"loopback": 60.0, "network": 10.0}
# Who has just come announces itself so long to every port of each peer: for as long as a process waits for others by
# default. Later only the first process of a machine is tried, so that two that could not reach each other all that time
# still meet if one of them is the first, and the other answers; each further port would have every machine say, in
# another 0.2 kB/s, that nobody is there. Processes that are known, or were until their lease ended, are told for ever.
SEARCH_S = 600.0
MIN_LEASE_S, MAX_LEASE_S = 0.01, 3_600.0  # Cyclone takes no longer one; a shorter one ends before it is renewed
# With 65,500 B datagrams on MTU 1500, 1 % packet loss makes a transfer collapse: the halves of datagrams that did
# arrive fill the kernel's reassembly memory.
DATAGRAM_BYTES: dict[Profile, int] = {"loopback": 65_500, "network": 1_400}
# Each fragment is followed by a HEARTBEAT_FRAG of 28 bytes, which is to have room beside it: else that is a packet of
# 90 bytes (Ethernet) more, which is as many packets again and 6 % of a link with datagrams of 1,400 B.
_BESIDE_FRAGMENT_BYTES = 84

# Sections that a document of Cyclone 11 may have under <Domain>.
_SECTIONS = (
    "Compatibility", "Discovery", "General", "Internal", "Partitioning", "SharedMemory", "Sizing", "TCP", "Threads",
    "Tracing",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Holds what decides how DDS uses the network.

    Attributes:
        profile: ``loopback`` (one machine, or a lossless network with jumbo frames: 65,500 B datagrams) or ``network``
            (anything real: 1,400 B datagrams, so that one lost packet costs one packet).
        datagram_bytes: most bytes of a datagram, 1,200 to 65,500; None: as the profile has it. One that is larger than
            a packet of the network costs less processor time, and is lost with any of its packets.
        interface: name of the network interface.
        peers: IP addresses or host names of all machines, this one included, see :func:`.peers.parse_peer`; empty: this
            machine alone (or everybody, with multicast). Names without an address yet are looked up again.
        multicast: let discovery and data use multicast on the interface.
        lease_s: a process of another machine that is silent for so long is gone. The lease that counts is the silent
            one's own. DDS's own threads renew it, so a busy process does not lose it. Of a process of this machine the
            kernel tells, at once; there it is how long a process that was stopped may lose nothing. By default 60 s
            with ``loopback``, and 10 s with ``network``; at most an hour.
        shared_memory: large data between processes of one machine (of a group; updates and models of a federated run)
            goes through memory they share, DDS says where it lies. False: everything goes over DDS.
        loss_per_mille: drop so many of 1,000 outgoing packets (tests of loss).
    """

    profile: Profile = "loopback"
    datagram_bytes: int | None = None
    interface: str = LOOPBACK
    peers: tuple[str, ...] = ()
    multicast: bool = False
    lease_s: float | None = None
    shared_memory: bool = True
    loss_per_mille: int = 0

    def __post_init__(self) -> None:
        if self.profile not in LEASES_S:
            raise ConfigError(f"network {self.profile!r}: expected 'loopback' or 'network'")
        size = self.datagram_bytes
        if size is not None and not (isinstance(size, int) and 1_200 <= size <= 65_500):
            raise ConfigError(f"datagram_bytes must be 1,200 to 65,500, got {self.datagram_bytes}")
        self._check_types()
        check_peers(self.peers)

    def _check_types(self) -> None:
        """Raise ConfigError: a value could not be written into Cyclone's configuration, or Cyclone would refuse it."""
        if not (isinstance(self.interface, str) and self.interface):
            raise ConfigError(
                f"interface (bus.interface): {self.interface!r} is no name. This machine has: {', '.join(interfaces())}"
            )
        if not isinstance(self.multicast, bool):
            raise ConfigError(f"multicast (bus.multicast) must be true or false, got {self.multicast!r}")
        lease_s, per_mille = self.lease_s, self.loss_per_mille
        if lease_s is not None and not (_is_number(lease_s) and MIN_LEASE_S <= lease_s <= MAX_LEASE_S):
            raise ConfigError(
                f"lease_s (bus.lease_s) must be {MIN_LEASE_S:g} to {MAX_LEASE_S:,g} seconds, got {lease_s!r}"
            )
        if not (isinstance(per_mille, int) and not isinstance(per_mille, bool) and 0 <= per_mille <= 1_000):
            raise ConfigError(f"loss_per_mille must be an integer of 0 to 1,000, got {per_mille!r}")

    @classmethod
    def of(cls, settings: BusSettings) -> NetworkConfig:
        """Return what the settings of a bus say about the network."""
        return cls(
            profile=settings.network,
            datagram_bytes=settings.datagram_bytes,
            interface=settings.interface,
            peers=settings.peers,
            multicast=settings.multicast,
            lease_s=settings.lease_s,
            shared_memory=settings.shared_memory,
        )

    @property
    def effective_lease_s(self) -> float:
        """The lease in force."""
        return self.lease_s if self.lease_s is not None else LEASES_S[self.profile]

    @property
    def effective_datagram_bytes(self) -> int:
        """Return the most bytes of a datagram in force."""
        return DATAGRAM_BYTES[self.profile] if self.datagram_bytes is None else self.datagram_bytes

    @property
    def leaves_machine(self) -> bool:
        """Whether data of this bus can reach another machine."""
        return self.interface != LOOPBACK


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def announcement_s(lease_s: float) -> float:
    """How often DDS announces a participant by itself, with a datagram for each process that it knows and each port
    that it tries. Whoever comes is announced at once; so this is for what is lost, and for those that were cut off."""
    return min(max(lease_s / 5, 0.2), 2.0)


def interfaces() -> list[str]:
    """Names of the network interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def check_interface(name: str) -> None:
    """Raise ConfigError if there is no such interface; the text lists those that there are."""
    known = interfaces()
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near!r}?" if near else "."
        raise ConfigError(f"network interface {name!r} does not exist here{hint} This machine has: {', '.join(known)}")


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
    # So much may be unacknowledged before a writer waits; long fat links need it (50 ms delay: 4 -> 17 MB/s).
    # And a model of up to this size reaches the healthy readers at once although a dead one still holds its lease.
    marks = ET.SubElement(internal, "Watermarks")
    _texts(marks, {"WhcHigh": "16MB", "WhcHighInit": "16MB", "WhcLow": "1MB"})
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
