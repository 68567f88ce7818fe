"""What may be a peer: an IP address or a host name, with or without a port."""

from __future__ import annotations

import asyncio
import re

import pytest

import gradbus
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.addresses import MAX_PEERS, PeerAddress, parse_peer
from gradbus.runtime.network.network_config import NetworkConfig


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


def test_addresses_of_both_versions_of_ip_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"IPv4 or IPv6, and there are addresses of both: 192\.0\.2\.1, ::1"):
        NetworkConfig(peers=("192.0.2.1", "::1"))


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
