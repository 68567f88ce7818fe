"""What DDS asks of a machine: ports by the domain, buffers by the profile, addresses for names of peers."""

from __future__ import annotations

import socket

import pytest

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds.examination import examination_of, peer_names_of
from gradbus.runtime.transport.dds.network import port_range


def test_ports_follow_from_the_domain_and_end_where_udp_has_no_more() -> None:
    assert port_range(0) == examination_of(0, NetworkConfig()).ports == "7410-7649"
    assert port_range(232) == "65410-65535"


def test_spare_ports_are_the_last_two_of_the_domain_and_one_of_each_other() -> None:
    found = examination_of(3, NetworkConfig())
    assert found.spare_ports == (8398, 8399)
    assert found.spare_ports_elsewhere[:3] == (7648, 7898, 8148)
    assert len(set(found.spare_ports_elsewhere)) == 232
    assert not set(found.spare_ports) & set(found.spare_ports_elsewhere)
    assert examination_of(232, NetworkConfig()).spare_ports[1] == 65535


def test_a_buffer_to_send_is_asked_for_on_a_network_only() -> None:
    loopback, network = (examination_of(0, NetworkConfig(profile=profile)) for profile in ("loopback", "network"))
    assert (loopback.receive_buffer_bytes, loopback.send_buffer_bytes) == (16 << 20, None)
    assert (network.receive_buffer_bytes, network.send_buffer_bytes) == (16 << 20, 2 << 20)


def test_a_wrong_interface_is_no_error_before_anything_is_looked_at() -> None:
    """The doctor prints what it knows of a machine also where the settings are wrong."""
    nowhere = NetworkConfig(interface="nowhere0")
    assert examination_of(0, nowhere).ports == "7410-7649"
    with pytest.raises(ConfigError, match="nowhere0"):
        peer_names_of(nowhere)


def test_names_are_those_of_settings_and_document_and_the_addresses_decide_the_version_of_ip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)
    found = peer_names_of(NetworkConfig(peers=("192.0.2.1", "robot-7", "robot-7:7410")))
    assert (found.names, found.ipv6, found.family) == (("robot-7",), False, socket.AF_INET)
    found = peer_names_of(NetworkConfig(peers=("2001:db8::1", "robot-7")))
    assert (found.names, found.ipv6, found.family) == (("robot-7",), True, socket.AF_INET6)
    peers = '<Discovery><Peers><Peer Address="robot-8"/></Peers></Discovery>'
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain>{peers}</Domain></CycloneDDS>")
    assert peer_names_of(NetworkConfig()).names == ("robot-8",)
