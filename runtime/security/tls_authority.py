"""An authority for the links of one federation, and the certificates that it signs: what TLS needs, and nothing more.

The authority is a key and a certificate in one folder, kept so that hosts and clients which come later get certificates
of the same one. Its key never has to leave that folder; what is copied is ``ca.pem`` and the files of each host.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.addresses import address_fault, ip_address_of, is_host_name
from gradbus.runtime.security.job_key import read_secret_file, write_secret_file

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3_650, 825  # the second is the longest that Apple's systems take
AUTHORITY_CERTIFICATE, AUTHORITY_KEY = "ca.pem", "ca.key"
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_EARLIER = datetime.timedelta(hours=1)  # clocks of two machines differ
_MAX_HOSTS = 64


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates. ``certificate``: its own, which others know it by. ``key``: its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def server(self, hosts: Sequence[str], *, days: float = CERTIFICATE_DAYS) -> Issued:
        """Make a certificate for a host with these names and IP addresses. Raises ConfigError: one is neither."""
        names = names_of_hosts(hosts)
        # A relay that dials another one is a client there, with the same certificate.
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(hosts[0][:64], uses, days, names)

    def client(self, name: str, *, days: float = CERTIFICATE_DAYS) -> Issued:
        """Make a certificate for one that dials. ``name``: its common name, by which a relay knows it. Raises
        ConfigError: that is no name."""
        check_client_name(name)
        return self._issue(name, [ExtendedKeyUsageOID.CLIENT_AUTH], days, [x509.DNSName(name)])

    def _issue(
        self, name: str, uses: Sequence[x509.ObjectIdentifier], days: float, names: Sequence[x509.GeneralName]
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = _begun(subject, self.certificate.subject, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(signer, critical=False)
        return Issued(builder.sign(self.key, hashes.SHA256()), key)


@dataclass(frozen=True, slots=True)
class Issued:
    """Holds a certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """Write two new files in PEM, the key with mode 0600. Raises ConfigError: one exists, or cannot be made."""
        for path in (key, certificate):
            _check_new(path)
        write_secret_file(key, _key_text(self.key))
        _write_new(certificate, self.certificate.public_bytes(serialization.Encoding.PEM))


def names_of_hosts(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return hosts as a certificate has them. Raises ConfigError: one is no host name and no address of a machine, or
    there are none, or too many."""
    if not 1 <= len(hosts) <= _MAX_HOSTS:
        raise ConfigError(f"hosts: expected 1 to {_MAX_HOSTS} host names or IP addresses, got {len(hosts)}")
    return [_general_name(host) for host in hosts]


def check_client_name(name: str) -> None:
    """Raise ConfigError: a client cannot have this name."""
    if not _CLIENT_NAME.fullmatch(name):
        raise ConfigError(
            f"client name {name!r}: expected 1 to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit"
        )


def new_authority(name: str, *, days: float = AUTHORITY_DAYS) -> Authority:
    """Make an authority. ``name``: shown where a certificate is looked at."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = _begun(subject, subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def authority_in(folder: Path) -> tuple[Authority, bool]:
    """Return the authority of a folder, and whether it was made by this call, for want of one.

    Raises:
        ConfigError: its files cannot be read or made, or one of the two is missing.
    """
    certificate, key = folder / AUTHORITY_CERTIFICATE, folder / AUTHORITY_KEY
    if certificate.exists() or key.exists():
        return _read_authority(certificate, key), False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}. Name another folder with --out") from None
    made = new_authority(f"gradbus {folder.absolute().name}")
    Issued(made.certificate, made.key).write(certificate, key)
    return made, True


def _read_authority(certificate: Path, key: Path) -> Authority:
    missing = next((path for path in (certificate, key) if not path.exists()), None)
    if missing is not None:
        raise ConfigError(
            f"{missing} is missing, and the other file of the authority is there: put it back, or name an empty folder "
            f"with --out for a new authority, whose ca.pem must then be copied to all"
        )
    try:
        loaded = serialization.load_pem_private_key(read_secret_file(key, "key of the authority").encode(), None)
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except OSError as error:
        raise ConfigError(f"{certificate} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{certificate} and {key}: expected a certificate and its key in PEM: {error}") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != found.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}: put back the file that belongs to it")
    if found.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{certificate} ended on {found.not_valid_after_utc:%Y-%m-%d}: make another authority")
    return Authority(found, loaded)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    """Return a certificate with what each has. ``days``: it is valid for; negative: it has ended so long ago."""
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(min(now, until) - _EARLIER).not_valid_after(until)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    address = ip_address_of(host)
    if address is not None and not (fault := address_fault(host)):
        return x509.IPAddress(ipaddress.ip_address(host))
    if address is not None or not is_host_name(host):
        why = f": {fault}" if address is not None else ""
        raise ConfigError(f"host {host!r}: expected a host name or IP address that others dial, without a port{why}")
    return x509.DNSName(host)


def _check_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"{path} exists already, and is left as it is. Move it away first, with its certificate or key; another "
            f"--out makes another authority, which those who have this one's ca.pem do not trust"
        )


def _key_text(key: ec.EllipticCurvePrivateKey) -> str:
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain).decode("ascii")


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist. Raises ConfigError: it does, or cannot be made."""
    try:
        with open(path, "xb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another folder with --out") from None
