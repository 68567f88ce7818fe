"""The certificates and the key of links, read and checked before Zenoh sees them: it names no file in its errors."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import read_beginning
from gradbus.runtime.network.links import LinkConfig

WARNING_DAYS = 30  # before a certificate ends, the doctor warns
_MAX_FILE_BYTES = 1 << 20  # of all authorities of a system it is 0.2 MB
# What reading an extension raises where a certificate, which may come from the network, is malformed.
_UNREADABLE = (x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)
_NEW = "'gradbus keys tls HOST' makes one"


@dataclass(frozen=True, slots=True)
class CertificateFile:
    """Holds the certificates of a file.

    Attributes:
        setting: that names the file. path: of it. certificates: in the order of the file, one at least.
    """

    setting: str
    path: Path
    certificates: tuple[x509.Certificate, ...]

    @property
    def ends(self) -> datetime.datetime:
        """Return when the first of them ends."""
        return min(one.not_valid_after_utc for one in self.certificates)


def check_certificates(links: LinkConfig) -> None:
    """Check the files that links use, and that certificates are valid now, fit their key and are fit for their end.

    Raises:
        ConfigError: one is missing, unreadable, no PEM, of another key, outside its time, or no server's.
    """
    for file in certificate_files(links):
        if file.setting == "bus.tls_certificate":
            check_dates(file.certificates[0], f"{file.setting} {file.path}")
            if links.listens:
                _check_server(file)
    if links.certificate is not None and links.key is not None:
        _check_key(links.certificate, links.key)


def certificate_files(links: LinkConfig) -> Iterator[CertificateFile]:
    """Read the files of certificates that links name. Raises ConfigError: one cannot be read, or holds none."""
    for setting, path in (("bus.tls_ca", links.ca), ("bus.tls_certificate", links.certificate)):
        if path is None:
            continue
        data = _read(path, setting)
        try:
            certificates = tuple(x509.load_pem_x509_certificates(data))
        except ValueError:
            raise ConfigError(
                f"{setting} {path}: expected certificates in PEM ('-----BEGIN CERTIFICATE-----'), got "
                f"{len(data)} bytes of something else. {_NEW}"
            ) from None
        yield CertificateFile(setting, path, certificates)


def check_dates(certificate: x509.Certificate, where: str) -> None:
    """Raise ConfigError: a certificate is not valid yet or any more."""
    if fault := date_fault(certificate):
        raise ConfigError(f"{where}: {fault}. Is the clock of this machine right? Otherwise use another: {_NEW}")


def date_fault(certificate: x509.Certificate) -> str:
    """Return why a certificate is not valid now, with both times; empty: it is."""
    now = datetime.datetime.now(datetime.UTC)
    if now < certificate.not_valid_before_utc:
        return f"the certificate begins on {in_utc(certificate.not_valid_before_utc)}, and it is {in_utc(now)}"
    if now > certificate.not_valid_after_utc:
        return f"the certificate ended on {in_utc(certificate.not_valid_after_utc)}, and it is {in_utc(now)}"
    return ""


def in_utc(moment: datetime.datetime) -> str:
    """Return a moment as a text, to the minute."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether a certificate may sign others: Zenoh refuses such a one at the end of a link."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return False


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names and IP addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return ()
    addresses = (str(address) for address in found.get_values_for_type(x509.IPAddress))
    return (*found.get_values_for_type(x509.DNSName), *addresses)


def common_name_of(certificate: x509.Certificate) -> str:
    """Return the common name of whom a certificate is for; empty: it has none."""
    for attribute in certificate.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME):
        if isinstance(attribute.value, str):
            return attribute.value
    return ""


def serves(certificate: x509.Certificate) -> bool:
    """Return whether a certificate may be shown by an end that is dialled: it is for servers, or says no use."""
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    except _UNREADABLE:
        return False
    # Zenoh's TLS (webpki) does not accept anyExtendedKeyUsage.
    return x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in uses


def _check_server(file: CertificateFile) -> None:
    """Raise ConfigError: those that dial would refuse this certificate."""
    certificate = file.certificates[0]
    if is_authority(certificate):
        raise ConfigError(
            f"{file.setting} {file.path} is the certificate of an authority, which those that dial refuse. Use one "
            f"that it has signed: {_NEW}"
        )
    if not serves(certificate):
        raise ConfigError(
            f"{file.setting} {file.path} is a client's certificate (extendedKeyUsage without serverAuth), so those "
            f"that dial refuse it. Use one of this machine: {_NEW}"
        )
    if not names_of(certificate):
        raise ConfigError(
            f"{file.setting} {file.path} is for no host name or IP address (subjectAltName), so those that dial refuse "
            f"it. {_NEW}"
        )


def _check_key(certificate: Path, key: Path) -> None:
    """Raise ConfigError: the key cannot be read, is open to other users, or does not fit the certificate."""
    _read(key, "bus.tls_key", secret=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate.expanduser(), key.expanduser(), password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        fits = "MISMATCH" not in reason
        what = (
            f"is no key that can be used: {reason}" if fits else f"is not the key of bus.tls_certificate {certificate}"
        )
        raise ConfigError(
            f"bus.tls_key {key} {what}. Name the two files that were made together, the key in PEM and without a "
            f"password"
        ) from None


def _no_password() -> str:
    raise ValueError("it is encrypted with a password")


def _read(path: Path, setting: str, *, secret: bool = False) -> bytes:
    """Return the content of a file. Raises ConfigError: it cannot be read, is too large, or is a secret that all users
    of this machine can read."""
    try:
        mode, data = read_beginning(path.expanduser(), _MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}. {_NEW}") from None
    if not stat.S_ISREG(mode.st_mode) or len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{setting} {path}: expected a regular file of at most {_MAX_FILE_BYTES:,} bytes")
    if secret and (mode.st_mode & 0o037 or mode.st_uid not in (0, os.getuid())):
        # A group may read it: so system administrators give the keys of a machine to its services.
        raise ConfigError(
            f"{setting} {path}: other users of this machine can read or replace it. Run: chmod 600 {path}"
        )
    return data
