"""The authority of links, and what it signs."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.tls_authority import authority_in


def extension(certificate: x509.Certificate, kind: type[x509.ExtensionType]) -> x509.ExtensionType:
    return certificate.extensions.get_extension_for_class(kind).value


def test_a_server_certificate_is_for_its_names_and_is_no_authority(tmp_path: Path) -> None:
    authority, is_new = authority_in(tmp_path)
    certificate = authority.server(["relay.example.org", "10.0.0.7", "::1"]).certificate
    names = extension(certificate, x509.SubjectAlternativeName)
    assert is_new
    assert isinstance(names, x509.SubjectAlternativeName)
    assert names.get_values_for_type(x509.DNSName) == ["relay.example.org"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "::1"]
    assert extension(certificate, x509.BasicConstraints) == x509.BasicConstraints(ca=False, path_length=None)
    assert extension(authority.certificate, x509.BasicConstraints) == x509.BasicConstraints(ca=True, path_length=0)
    certificate.verify_directly_issued_by(authority.certificate)


def test_a_client_certificate_cannot_be_a_servers(tmp_path: Path) -> None:
    certificate = authority_in(tmp_path)[0].client("site-1").certificate
    assert extension(certificate, x509.ExtendedKeyUsage) == x509.ExtendedKeyUsage(
        [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    assert certificate.subject.rfc4514_string() == "CN=site-1"


def test_an_authority_is_kept_and_signs_later_ones_too(tmp_path: Path) -> None:
    first, _ = authority_in(tmp_path / "tls")
    again, is_new = authority_in(tmp_path / "tls")
    assert not is_new
    assert again.certificate == first.certificate
    again.client("late").certificate.verify_directly_issued_by(first.certificate)
    assert stat.S_IMODE((tmp_path / "tls/ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700


def test_a_certificate_has_begun_a_little_before_it_was_made(tmp_path: Path) -> None:
    certificate = authority_in(tmp_path)[0].server(["a"]).certificate
    assert certificate.not_valid_before_utc < datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=30)


def test_half_an_authority_is_not_made_anew(tmp_path: Path) -> None:
    authority_in(tmp_path)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca.key is missing, and the other file of the authority is there"):
        authority_in(tmp_path)
    assert not (tmp_path / "ca.key").exists()


def test_the_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        authority_in(tmp_path / name)
    (tmp_path / "a/ca.key").write_bytes((tmp_path / "b/ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"a/ca.key is not the key of .*a/ca.pem"):
        authority_in(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"no key at all\n"])
def test_files_that_are_no_authority_are_refused(tmp_path: Path, content: bytes) -> None:
    authority_in(tmp_path)
    (tmp_path / "ca.key").write_bytes(content)
    with pytest.raises(ConfigError, match="expected a certificate and its key in PEM"):
        authority_in(tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_the_key_of_an_authority_is_its_owners_alone(tmp_path: Path, mode: int) -> None:
    authority_in(tmp_path)
    (tmp_path / "ca.key").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        authority_in(tmp_path)


@pytest.mark.parametrize("host", ["", "a b", "relay:443", "300.1.1.1", "0.0.0.0", "-a", "a" * 300, "fe80::1"])
def test_what_is_no_host_gets_no_certificate(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="expected a host name or IP address that others dial"):
        authority_in(tmp_path)[0].server([host])


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "a" * 65, "ä"])
def test_what_is_no_name_of_a_client_gets_no_certificate(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="client name"):
        authority_in(tmp_path)[0].client(name)


def test_no_file_is_overwritten_and_no_key_is_left_without_its_certificate(tmp_path: Path) -> None:
    issued = authority_in(tmp_path)[0].server(["a"])
    (tmp_path / "a.pem").write_text("precious")
    with pytest.raises(ConfigError, match=r"a.pem exists already"):
        issued.write(tmp_path / "a.pem", tmp_path / "a.key")
    assert not (tmp_path / "a.key").exists()
    assert (tmp_path / "a.pem").read_text() == "precious"
