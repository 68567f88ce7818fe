"""Who can be met on a bus on DDS, and what to look at where nobody comes."""

from __future__ import annotations

import pytest

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds import network
from gradbus.runtime.transport.dds.network import Reach


@pytest.fixture(autouse=True)
def no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)


def test_on_lo_the_advice_names_every_variable_that_leads_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: ["lo", "eth0", "down0"])
    monkeypatch.setattr(network, "address_of", lambda name: {"lo": "127.0.0.1", "eth0": "192.0.2.1"}.get(name))
    advice = Reach.of(0, NetworkConfig()).advice()
    assert advice.startswith("Start them. If they are on other machines: this bus is on lo")
    assert "GRADBUS_BUS__INTERFACE=NAME (here: eth0)" in advice
    for name in ("GRADBUS_BUS__NETWORK=network", "GRADBUS_BUS__PEERS=", "GRADBUS_BUS__KEY_FILE=", "gradbus keys new"):
        assert name in advice
    assert Reach.of(0, NetworkConfig()).advice(elsewhere=True).startswith("They are on other machines: this bus is")
    assert "on this machine" in Reach.of(0, NetworkConfig()).advice(elsewhere=False)


def test_on_a_network_it_names_peers_ports_and_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "address_of", lambda name: "192.0.2.1")
    reach = Reach(domain=3, interface="eth0", peers=(), multicast=False, leaves_machine=True)
    assert "This bus (192.0.2.1 on eth0) has no peers" in reach.advice()
    reach = Reach(domain=3, interface="eth0", peers=("192.0.2.2",), multicast=False, leaves_machine=True)
    for text in ("192.0.2.1 on eth0", "(192.0.2.2)", "UDP ports 8160-8399", "gradbus doctor"):
        assert text in reach.advice()


@pytest.mark.parametrize("network", [NetworkConfig(), NetworkConfig(peers=("192.0.2.2",))])
def test_it_names_the_other_transport_unless_the_others_are_known_to_be_here(network: NetworkConfig) -> None:
    reach = Reach.of(0, network)
    assert reach.advice().endswith("A process with bus.connect or bus.listen uses Zenoh, and cannot be met here")
    assert "Zenoh" not in reach.advice(elsewhere=False)


def test_it_knows_where_others_are_met_and_whether_others_elsewhere_could_join_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Reach.of(3, NetworkConfig())
    assert (here.leaves_machine, here.is_exposed) == (False, False)
    assert (here.meeting_place, here.attachment) == ("DDS domain 3", "lo")
    elsewhere = Reach.of(3, NetworkConfig(peers=("192.0.2.2",)))
    assert (elsewhere.leaves_machine, elsewhere.is_exposed) == (False, True)
    peers = '<Discovery><Peers><Peer Address="192.0.2.2"/></Peers></Discovery>'
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain>{peers}</Domain></CycloneDDS>")
    assert Reach.of(3, NetworkConfig()).is_exposed
    interface = '<General><Interfaces><NetworkInterface autodetermine="true"/></Interfaces></General>'
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain>{interface}</Domain></CycloneDDS>")
    there = Reach.of(3, NetworkConfig())
    assert (there.leaves_machine, there.is_exposed) == (True, True)


@pytest.mark.parametrize("elsewhere", [None, True, False])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("leaves_machine", "peers"), [(False, ()), (True, ()), (True, ("192.0.2.2",))])
def test_the_hint_of_a_line_that_is_repeated_is_short(
    elsewhere: bool | None, one: bool, leaves_machine: bool, peers: tuple[str, ...]
) -> None:
    reach = Reach(domain=3, interface="eth0", peers=peers, multicast=False, leaves_machine=leaves_machine)
    hint = reach.hint(elsewhere=elsewhere, one=one)
    assert len(hint) < 125
    assert "them" not in hint or not one
