"""Settings of links, and how they choose the transport of a bus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gradbus.runtime.bus.transport_factory import network_config
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig

FAR, HERE = "tls/relay.example.org:443", "tcp/127.0.0.1:7447"
FILES = {"certificate": Path("a.pem"), "key": Path("a.key")}


def test_links_need_an_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"expected an endpoint in bus.connect or bus.listen"):
        LinkConfig()


def test_a_plain_link_leaves_this_machine_only_if_that_is_asked_for() -> None:
    for name in ("connect", "listen"):
        given: dict[str, Any] = {name: ("tcp/10.0.0.7:7447",)}
        with pytest.raises(ConfigError, match=r"tcp/10.0.0.7:7447 leaves this machine without TLS") as caught:
            LinkConfig(**given)
        assert "Write tls/10.0.0.7:7447" in str(caught.value)
        assert "bus.tls=false" in str(caught.value)
        assert LinkConfig(**given, tls=False).is_exposed
    assert not LinkConfig(connect=(HERE,), listen=("tcp/[::1]:7448", "tcp/localhost:1")).is_exposed


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"listen": ("tls/0.0.0.0:443",)}, "needs a certificate: set bus.tls_certificate and bus.tls_key"),
        ({"connect": (FAR,), "key": Path("a.key")}, "bus.tls_key is set and bus.tls_certificate is not"),
        ({"connect": (FAR,), "certificate": Path("a.pem")}, "bus.tls_certificate is set and bus.tls_key is not"),
        ({"connect": (FAR,), "requires_client_certificate": True}, "bus.tls_clients needs an endpoint tls/HOST:PORT"),
        (
            {"listen": ("tls/0.0.0.0:443",), "requires_client_certificate": True, **FILES},
            "bus.tls_clients needs the authority of the clients' certificates: set bus.tls_ca",
        ),
        ({"connect": ("tls/[2001:db8::1]:443",)}, "over TLS, Zenoh dials no IPv6 address itself. Use a host name"),
        ({"connect": (FAR,), "tls": "yes"}, "tls (bus.tls) must be true or false, got 'yes'"),
        ({"connect": (FAR,), "lease_s": 0.05}, "lease_s (bus.lease_s) must be 0.1 to 3,600 seconds on links, got 0.05"),
        ({"connect": (FAR,), "lease_s": True}, "lease_s (bus.lease_s) must be"),
        ({"connect": "tls/a:1"}, "expected a list of endpoints"),
    ],
)
def test_settings_of_links_that_do_not_fit_each_other_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        LinkConfig(**given)


def test_whoever_listens_is_a_router_and_all_others_are_clients() -> None:
    assert LinkConfig(connect=(FAR,)).mode == "client"
    assert LinkConfig(listen=(HERE,)).mode == LinkConfig(listen=(HERE,), connect=(FAR,)).mode == "router"


def test_the_lease_is_that_of_the_other_transport_unless_it_is_set() -> None:
    assert LinkConfig(connect=(FAR,)).effective_lease_s == NetworkConfig(profile="network").effective_lease_s == 10.0
    assert LinkConfig(connect=(HERE,)).effective_lease_s == NetworkConfig().effective_lease_s == 60.0
    assert NetworkConfig.of(BusSettings(connect=(FAR,), lease_s=2)).effective_lease_s == 2.0


def chosen(**settings: Any) -> str:
    """The transport of a bus with these settings."""
    return "dds" if NetworkConfig.of(BusSettings(**settings)).links is None else "zenoh"


def test_the_settings_choose_the_transport() -> None:
    assert chosen() == chosen(transport="dds") == chosen(tls_ca="ca.pem") == "dds"
    assert chosen(connect=[FAR]) == chosen(listen=[HERE]) == chosen(transport="zenoh", connect=[FAR]) == "zenoh"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"transport": "zenoh"}, "neither bus.connect nor bus.listen is set"),
        ({"transport": "dds", "connect": [FAR]}, "bus.connect is set, which only Zenoh has"),
        ({"transport": "dds", "listen": [HERE]}, "bus.listen is set, which only Zenoh has"),
        ({"connect": [FAR], "peers": ["10.0.0.2"]}, "bus.peers is for DDS"),
        ({"connect": [FAR], "interface": "eth0"}, "bus.interface is for DDS"),
        ({"connect": [FAR], "multicast": True}, "bus.multicast is for DDS"),
        ({"connect": [FAR], "datagram_bytes": 1400}, "bus.datagram_bytes is for DDS"),
        ({"listen": [HERE], "interface": "eth0", "peers": ["a"]}, "bus.interface and bus.peers are for DDS"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        NetworkConfig.of(BusSettings(**settings))


def test_the_lease_of_a_network_and_its_links_is_set_once() -> None:
    with pytest.raises(ConfigError, match=r"lease_s is 3.0 here and 2.0 in links"):
        NetworkConfig(lease_s=3.0, links=LinkConfig(connect=(FAR,), lease_s=2.0))
    with pytest.raises(ConfigError, match="links must be a LinkConfig"):
        NetworkConfig(links={"connect": [FAR]})  # type: ignore[arg-type]


def test_the_arguments_of_connect_arrive_in_the_links() -> None:
    given = network_config(
        connect=[FAR],
        listen=["tls/0.0.0.0:443"],
        lease_s=2.0,
        tls_ca="ca.pem",
        tls_certificate="a.pem",
        tls_key=Path("a.key"),
        tls_clients=True,
    )
    expected = LinkConfig(
        connect=(FAR,),
        listen=("tls/0.0.0.0:443",),
        ca=Path("ca.pem"),
        requires_client_certificate=True,
        lease_s=2.0,
        **FILES,
    )
    assert given.links == expected
    with pytest.raises(ConfigError, match="expected a list of endpoints, got the text"):
        network_config(connect=FAR)


def test_links_beside_a_network_with_all_settings_are_no_silent_choice_of_the_other_transport() -> None:
    with pytest.raises(ConfigError, match=r"NetworkConfig\(links="):
        network_config(NetworkConfig(), connect=[FAR])
