"""What may be a peer, and what Cyclone DDS gets of it: numbers alone."""

from __future__ import annotations

import asyncio
import re
from xml.etree import ElementTree as ET

import pytest

import gradbus
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.peers import MAX_PEERS, PeerAddress, names_in, parse_peer, with_addresses
from gradbus.runtime.transport.dds.network import NetworkConfig, build_xml


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("192.0.2.7", PeerAddress("192.0.2.7")),
        ("192.0.2.7:7412", PeerAddress("192.0.2.7", 7412)),
        ("robot-7", PeerAddress("robot-7")),
        ("robot_7.fleet.example.:1", PeerAddress("robot_7.fleet.example.", 1)),
        ("udp/192.0.2.7:65535", PeerAddress("192.0.2.7", 65535)),
        ("239.255.0.1", PeerAddress("239.255.0.1")),
        ("7up.example", PeerAddress("7up.example")),
        ("a" * 63, PeerAddress("a" * 63)),
    ],
)
def test_addresses_and_names_may_be_peers_and_may_have_a_port(text: str, peer: PeerAddress) -> None:
    assert parse_peer(text, "peers") == peer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ":7410",
        "192.0.2.7:",
        "192.0.2.7:0",
        "192.0.2.7:65536",
        "192.0.2.7:07410",
        "192.0.2.7:-1",
        "192.0.2.7:7410x",
        "192.0.2.7 ",
        "300.1.1.1",
        "1.2.3",
        "1",
        "0x7f000001",
        "0.0.0.0",
        "0.0.0.0:7410",
        "255.255.255.255",
        "-robot",
        "robot-",
        "a..b",
        "a" * 64,
        "a." * 127 + "a",
        "a" * 5_000,
        "robot/8",
        "tcp/robot",
        "robot@1",
        "robot 7",
        "%s%n",
        "${HOME}",
        "höst",
        "robot\n",
        "robot\x00",
        7,
        None,
        b"robot",
    ],
)
def test_what_can_be_no_address_is_refused_with_the_setting_and_what_to_do(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^peers \(bus\.peers\): .* Name the machine by its IP address$") as caught:
        NetworkConfig(peers=(text,))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("::1", PeerAddress("::1")),
        ("[::1]", PeerAddress("::1")),
        ("[::1]:7410", PeerAddress("::1", 7410)),
        ("2001:DB8:0::7", PeerAddress("2001:db8::7")),
        ("udp6/[2001:db8::7]:1", PeerAddress("2001:db8::7", 1)),
    ],
)
def test_ipv6_addresses_may_be_peers_in_each_of_their_texts(text: str, peer: PeerAddress) -> None:
    assert parse_peer(text, "peers") == peer
    assert parse_peer(peer.at(peer.host), "peers") == peer


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fe80::1", "needs a zone"),
        ("fe80::1%eth0", "needs a zone"),
        ("::", "no single machine"),
        ("::ffff:192.0.2.1", "the IPv4 address itself"),
        ("[::1]:0", "a port of 1 to 65535"),
        ("[::1]:", "a port of"),
        ("[192.0.2.1]x", "expected an IP"),
        ("[robot-7]", "expected an IP"),
        ("1:2:3", "expected an IP"),
    ],
)
def test_an_ipv6_address_that_cyclone_cannot_use_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        NetworkConfig(peers=(text,))


def transport(document: str) -> str | None:
    return ET.fromstring(document).findtext("Domain/General/Transport")


def test_the_peers_decide_whether_a_bus_uses_ipv4_or_ipv6() -> None:
    assert transport(build_xml(NetworkConfig(peers=("192.0.2.1", "robot-7")))) is None  # Cyclone's own: IPv4
    assert transport(build_xml(NetworkConfig(peers=("2001:db8::1", "robot-7")))) == "udp6"
    with pytest.raises(ConfigError, match=r"IPv4 or IPv6, and there are addresses of both: 192\.0\.2\.1, ::1"):
        NetworkConfig(peers=("192.0.2.1", "::1"))


def test_a_users_document_may_choose_ipv6_and_then_all_peers_are_of_it() -> None:
    chosen = "<CycloneDDS><Domain><General><transport>udp6</transport></General></Domain></CycloneDDS>"
    assert addresses(build_xml(NetworkConfig(), user_document=chosen))[0] == ("::1", "")
    with pytest.raises(ConfigError, match=r"this one uses IPv6, and its peer 192\.0\.2\.1 is IPv4"):
        build_xml(NetworkConfig(peers=("192.0.2.1",)), user_document=chosen)
    with pytest.raises(ConfigError, match=r"this one uses IPv4, and its peer ::1 is IPv6"):
        build_xml(NetworkConfig(peers=("::1",)), user_document=chosen.replace("udp6", "udp"))
    document = build_xml(NetworkConfig(), user_document=user_peers('<Peer Address="[::1]:7410"/>'))
    assert (addresses(document), transport(document)) == ([("[::1]:7410", "")], "udp6")


def test_one_text_is_no_list_of_addresses_and_a_list_has_an_end() -> None:
    with pytest.raises(ConfigError, match=r"expected a list of addresses, got the text 'robot-7'"):
        NetworkConfig(peers="robot-7")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a list"):
        NetworkConfig(peers=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"at most {MAX_PEERS} addresses"):
        NetworkConfig(peers=("192.0.2.1",) * (MAX_PEERS + 1))


def test_one_text_for_the_peers_of_a_bus_is_refused_too() -> None:
    async def connect() -> None:
        async with gradbus.connect("peers", peers="robot-7"):
            pass

    with pytest.raises(ConfigError, match="expected a list of addresses, got the text 'robot-7'"):
        asyncio.run(connect())


def addresses(document: str) -> list[tuple[str, str]]:
    return [(peer.get("Address", ""), peer.get("PruneDelay", "")) for peer in ET.fromstring(document).iter("Peer")]


def test_names_become_numbers_in_their_place_and_those_without_one_are_left_to_the_relay() -> None:
    document = build_xml(NetworkConfig(peers=("192.0.2.1", "here", "late", "late:7412")), domain_id=0)
    assert names_in(document) == {"here": [None, 7410], "late": [None, 7410, 7412]}
    known = {"here": ("192.0.2.2", "198.51.100.2")}
    assert addresses(with_addresses(document, known, "192.0.2.9:40000")) == [
        ("192.0.2.1", ""),
        ("192.0.2.1:7410", "inf"),
        ("192.0.2.2", ""),
        ("198.51.100.2", ""),
        ("192.0.2.2:7410", "inf"),
        ("198.51.100.2:7410", "inf"),
        ("192.0.2.9:40000", "inf"),
    ]


def test_a_relay_is_added_where_no_name_has_an_address() -> None:
    document = build_xml(NetworkConfig(peers=("late",)))
    assert addresses(with_addresses(document, {}, "127.0.0.1:40000")) == [("127.0.0.1:40000", "inf")]


def user_peers(inner: str) -> str:
    return f"<CycloneDDS><Domain><Discovery><Peers>{inner}</Peers></Discovery></Domain></CycloneDDS>"


def test_peers_of_a_users_document_are_taken_as_cyclone_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in one element, and variables of the environment: Cyclone would expand them after our check."""
    monkeypatch.setenv("ROBOT", "robot-7")
    monkeypatch.delenv("OTHER", raising=False)
    inner = '<peer address="192.0.2.1,${ROBOT}" PruneDelay="5s"/><Peer Address="${OTHER:-robot-8}:7410"/>'
    document = build_xml(NetworkConfig(), user_document=user_peers(inner))
    assert addresses(document) == [("192.0.2.1", "5s"), ("robot-7", "5s"), ("robot-8:7410", "")]
    assert names_in(document) == {"robot-7": [None], "robot-8": [7410]}


@pytest.mark.parametrize("address", ["${NONE_SUCH}", "${", "0.0.0.0", "::", "x y", ""])
def test_a_peer_of_a_users_document_that_can_be_none_is_refused_with_the_variable(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^CYCLONEDDS_URI: "):
        build_xml(NetworkConfig(), user_document=user_peers(f'<Peer Address="{address}"/>'))
