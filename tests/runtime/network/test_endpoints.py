"""Endpoints of links: ``tls/HOST:PORT`` and ``tcp/HOST:PORT``."""

from __future__ import annotations

import re

import pytest

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.endpoints import LinkEndpoint, parse_endpoint, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tls/relay.example.org:443", LinkEndpoint("tls", "relay.example.org", 443)),
        ("tcp/127.0.0.1:7447", LinkEndpoint("tcp", "127.0.0.1", 7447)),
        ("tcp/[::1]:7447", LinkEndpoint("tcp", "::1", 7447)),
        ("tcp/[2001:DB8:0::1]:65535", LinkEndpoint("tcp", "2001:db8::1", 65535)),
        ("tls/robot_7:1", LinkEndpoint("tls", "robot_7", 1)),
    ],
)
def test_an_endpoint_has_a_scheme_a_host_and_a_port(text: str, endpoint: LinkEndpoint) -> None:
    parsed = parse_endpoint(text, "connect")
    assert parsed == endpoint
    assert parse_endpoint(str(parsed), "connect") == parsed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("relay.example.org:443", "expected tls/ or tcp/ in front of HOST:PORT"),
        ("quic/relay:443", "expected tls/ or tcp/ in front"),
        ("TLS/relay:443", "expected tls/ or tcp/ in front"),
        ("https://relay:443", "expected tls/ or tcp/ in front"),
        ("tls/relay", "expected a port behind the host"),
        ("tls/[::1]", "expected a port behind the host"),
        ("tls/relay:", "expected HOST:PORT"),
        ("tls/relay:443x", "expected HOST:PORT"),
        ("tls/::1:443", "expected HOST:PORT"),
        ("tls/relay:443#enable_mtls=false", "expected HOST:PORT"),
        ("tls/relay:443?x=1", "expected HOST:PORT"),
        ("tls/relay:0", "expected a port of 1 to 65535"),
        ("tls/relay:65536", "expected a port of 1 to 65535"),
        ("tls/:443", "expected a host name or an IP address"),
        ("tls/-relay:443", "expected a host name or an IP address"),
        ("tls/300.1.1.1:443", "expected a host name or an IP address"),
        ("tls/[relay]:443", "expected a host name or an IP address"),
        ("tls/[127.0.0.1]:443", "expected brackets around an IPv6 address, and none around another one"),
        ("tls/0.0.0.0:443", "it stands for no single machine"),
        ("tls/[fe80::1]:443", "needs a zone"),
        ("tls/ré:443", "expected a host name or an IP address"),
        ("tls/relay:443\n", "expected HOST:PORT"),
        ("tls/" + "a" * 5_000 + ":443", "expected HOST:PORT"),
        (443, "expected a text"),
        (None, "expected a text"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_what_was_expected_and_given(text: object, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        parse_endpoint(text, "connect (bus.connect)")
    assert str(caught.value).startswith("connect (bus.connect): ")
    assert repr(text)[:20] in str(caught.value)
    assert "tls/relay.example.org:443" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_all_addresses_of_this_machine_can_be_listened_on_and_not_dialled() -> None:
    for text in ("tls/0.0.0.0:443", "tls/[::]:443"):
        assert parse_endpoint(text, "listen", listens=True).host in ("0.0.0.0", "::")
        with pytest.raises(ConfigError, match="stands for no single machine"):
            parse_endpoint(text, "connect")


def test_loopback_is_told_from_what_leaves_this_machine() -> None:
    local = ["tcp/127.0.0.1:1", "tcp/127.8.8.8:1", "tcp/[::1]:1", "tcp/localhost:1"]
    away = ["tcp/10.0.0.1:1", "tcp/[2001:db8::1]:1", "tcp/relay:1", "tcp/localhost.example.org:1"]
    assert [parse_endpoint(text, "").is_loopback for text in local + away] == [True] * 4 + [False] * 4
    assert not parse_endpoint("tcp/0.0.0.0:1", "", listens=True).is_loopback


@pytest.mark.parametrize("given", ["tls/a:1", None, 7, {"tls/a:1"}])
def test_a_setting_is_a_list_of_endpoints(given: object) -> None:
    with pytest.raises(ConfigError, match="expected a list of endpoints"):
        parse_endpoints(given, "connect")


def test_there_is_a_bound_on_the_endpoints_of_a_setting() -> None:
    assert len(parse_endpoints(["tls/a:1"] * 4, "connect")) == 4
    with pytest.raises(ConfigError, match="expected at most 4 endpoints, got 5"):
        parse_endpoints(["tls/a:1"] * 5, "connect")
