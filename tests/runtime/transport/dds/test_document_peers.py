"""What Cyclone DDS gets of the peers that settings and documents name: numbers alone."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds.network import build_xml, names_in, with_addresses


def transport(document: str) -> str | None:
    return ET.fromstring(document).findtext("Domain/General/Transport")


def test_the_peers_decide_whether_a_bus_uses_ipv4_or_ipv6() -> None:
    assert transport(build_xml(NetworkConfig(peers=("192.0.2.1", "robot-7")))) is None  # Cyclone's own: IPv4
    assert transport(build_xml(NetworkConfig(peers=("2001:db8::1", "robot-7")))) == "udp6"


def test_a_users_document_may_choose_ipv6_and_then_all_peers_are_of_it() -> None:
    chosen = "<CycloneDDS><Domain><General><transport>udp6</transport></General></Domain></CycloneDDS>"
    assert addresses(build_xml(NetworkConfig(), user_document=chosen))[0] == ("::1", "")
    with pytest.raises(ConfigError, match=r"this one uses IPv6, and its peer 192\.0\.2\.1 is IPv4"):
        build_xml(NetworkConfig(peers=("192.0.2.1",)), user_document=chosen)
    with pytest.raises(ConfigError, match=r"this one uses IPv4, and its peer ::1 is IPv6"):
        build_xml(NetworkConfig(peers=("::1",)), user_document=chosen.replace("udp6", "udp"))
    document = build_xml(NetworkConfig(), user_document=user_peers('<Peer Address="[::1]:7410"/>'))
    assert (addresses(document), transport(document)) == ([("[::1]:7410", "")], "udp6")


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
