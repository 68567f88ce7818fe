"""`gradbus keys tls`: an authority, certificates, and the settings that name them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gradbus.runtime.network.certificates import certificate_files, check_certificates
from gradbus.runtime.network.links import LinkConfig


def test_the_first_call_makes_an_authority_and_later_ones_use_it(invoke, tmp_path: Path) -> None:
    made = invoke("keys", "tls", "relay.example.org", "10.0.0.7")
    assert made.code == 0
    assert "tls/ca.pem: a new authority, valid until " in made.out
    assert "a certificate for relay.example.org, 10.0.0.7, valid until " in made.out
    before = (tmp_path / "tls/ca.pem").read_bytes()
    other = invoke("keys", "tls", "--client", "site-1")
    assert other.code == 0
    assert "a new authority" not in other.out
    assert (tmp_path / "tls/ca.pem").read_bytes() == before
    for key in (tmp_path / "tls").glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == [
        "ca.key",
        "ca.pem",
        "client-site-1.key",
        "client-site-1.pem",
        "relay.example.org.key",
        "relay.example.org.pem",
    ]


def test_the_printed_settings_are_those_of_links_that_work(invoke, tmp_path: Path) -> None:
    out = invoke("keys", "tls", "relay.example.org", "10.0.0.7").out
    for line in (
        'listen = ["tls/0.0.0.0:443"]',
        'tls_certificate = "tls/relay.example.org.pem"',
        'tls_key = "tls/relay.example.org.key"',
        'connect = ["tls/relay.example.org:443"]',
        'tls_ca = "tls/ca.pem"',
    ):
        assert line in out
    out = invoke("keys", "tls", "--client", "site-1").out
    assert 'tls_certificate = "tls/client-site-1.pem"' in out
    assert "tls_clients = true" in out
    listens = LinkConfig(
        listen=("tls/0.0.0.0:443",),
        ca=tmp_path / "tls/ca.pem",
        certificate=tmp_path / "tls/relay.example.org.pem",
        key=tmp_path / "tls/relay.example.org.key",
        requires_client_certificate=True,
    )
    check_certificates(listens)
    assert len(list(certificate_files(listens))) == 2


def test_nothing_is_overwritten(invoke, tmp_path: Path) -> None:
    invoke("keys", "tls", "relay")
    before = {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    again = invoke("keys", "tls", "relay")
    assert again.code == 2
    assert "tls/relay.key exists already, and is left as it is. Move it away first" in again.err
    assert {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()} == before


def test_another_folder_has_another_authority(invoke, tmp_path: Path) -> None:
    invoke("keys", "tls", "relay")
    assert "a new authority" in invoke("keys", "tls", "relay", "--out", "other").out
    assert (tmp_path / "other/ca.pem").read_bytes() != (tmp_path / "tls/ca.pem").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "for whom? Give either the names of a machine that listens"),
        (("relay", "--client", "a"), "for whom?"),
        (("relay:443",), "expected a host name or IP address that others dial, without a port"),
        (("2001:db8::1",), "over TLS, Zenoh dials no IPv6 address itself. Give a host name as well"),
        (("--client", "a/b"), "client name 'a/b'"),
    ],
)
def test_what_cannot_be_made_is_an_error(invoke, tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    refused = invoke("keys", "tls", *arguments)
    assert refused.code == 2
    assert text in refused.err
    assert not (tmp_path / "tls").exists()


def test_a_host_cannot_take_the_files_of_the_authority(invoke, tmp_path: Path) -> None:
    refused = invoke("keys", "tls", "ca")
    assert refused.code == 2
    assert "tls/ca.key exists already" in refused.err
