"""Checks of links for the doctor: each endpoint by itself, and how long certificates last."""

from __future__ import annotations

import datetime
import re
import time
from dataclasses import replace

from cryptography import x509

from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.network.addresses import ip_address_of, is_host_name
from gradbus.runtime.network.certificates import (
    WARNING_DAYS,
    CertificateFile,
    certificate_files,
    check_certificates,
    common_name_of,
    in_utc,
    names_of,
)
from gradbus.runtime.network.endpoints import LinkEndpoint
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.port_probe import why_not_listening
from gradbus.runtime.network.tls_probe import certificate_at
from gradbus.runtime.transport.examination import LinkReport
from gradbus.runtime.transport.zenoh.link_probe import find_fault
from gradbus.runtime.transport.zenoh.session import open_session

_NEW_AUTHORITY = "an authority: make a new one ('gradbus keys tls HOST --out DIR'), and copy its ca.pem to all"
_NEW_BUNDLE = (
    "it is the first of {count} in that file to end. Only if it has signed what is dialled, put a newer one there"
)
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)  # as 'gradbus keys tls --client' takes it
_MOST_NAMES = 8  # of a machine, in a text
_NEW_CERTIFICATE = (
    "make a new one with the same authority: move the two old files away, run 'gradbus keys tls {whom} --out DIR' "
    "with the folder of its ca.key as DIR, and restart {what}, which uses the old one until then"
)


def examine_links(links: LinkConfig) -> list[LinkReport]:
    """Return what is found in certificates and at each endpoint; endpoints are left out where certificates are wrong.

    Raises:
        ConfigError: the library of Zenoh is missing.
    """
    reports = []
    try:
        reports += [_until(file, bool(links.listens)) for file in certificate_files(links)]
        check_certificates(links)
    except ConfigError as error:
        name, _, text = str(error).partition(" ")
        return [*reports, LinkReport(name=name, value="cannot be used", cure=text, is_fault=True)]
    dialled = replace(links, listen=(), requires_client_certificate=False) if links.connect else links
    reports += [_dial(replace(dialled, connect=(text,))) for text in links.connect]
    return [*reports, *(_listen(endpoint) for endpoint in links.listens)]


def _until(file: CertificateFile, listens: bool) -> LinkReport:
    """Return until when the certificates of a file are valid; a warning where one ends soon."""
    value = f"{file.path}, valid until {in_utc(file.ends)}"
    when = _ends_soon(file.ends)
    return LinkReport(name=file.setting, value=value, cure=f"{when}: {_renewal(file, listens)}" if when else "")


def _ends_soon(ends: datetime.datetime) -> str:
    """Return when a certificate ends, in words; empty: not within ``WARNING_DAYS``."""
    left = ends - datetime.datetime.now(datetime.UTC)
    if left > datetime.timedelta(days=WARNING_DAYS):
        return ""
    if left < datetime.timedelta():
        return f"it ended on {in_utc(ends)}"
    return f"it ends in {left.days} day{'s' * (left.days != 1)}"


def _renewal(file: CertificateFile, listens: bool) -> str:
    """Return how to replace a certificate that ends. ``listens``: this process is dialled by others."""
    if file.setting == "bus.tls_ca":
        count = len(file.certificates)
        return _NEW_AUTHORITY if count == 1 else _NEW_BUNDLE.format(count=count)
    certificate = file.certificates[0]
    if listens:
        return _NEW_CERTIFICATE.format(whom=_hosts_of(certificate), what="what listens here")
    return _NEW_CERTIFICATE.format(whom=f"--client {_client_of(certificate)}", what="this process")


def _hosts_of(certificate: x509.Certificate) -> str:
    """Return the names of a machine as arguments of a command: a certificate of others may have anything for them."""
    names = names_of(certificate)
    well = all(is_host_name(name) or ip_address_of(name) is not None for name in names)
    return " ".join(names) if well and 1 <= len(names) <= _MOST_NAMES else "HOST"


def _client_of(certificate: x509.Certificate) -> str:
    """Return the name of a client as an argument of a command."""
    name = common_name_of(certificate)
    return name if _CLIENT_NAME.fullmatch(name) else "NAME"


def _dial(links: LinkConfig) -> LinkReport:
    """Open a session at one endpoint, the only one of ``links``."""
    (endpoint,) = links.dials
    name, began_s = f"bus.connect {endpoint}", time.monotonic()
    try:
        open_session(links).close()
    except BusError:
        fault = find_fault(endpoint, links)
        return LinkReport(name=name, value=fault.what, cure=fault.cure, is_fault=True)
    took_ms = 1e3 * (time.monotonic() - began_s)
    value = f"Zenoh answers, {took_ms:.0f} ms{_protection(endpoint)}"
    return LinkReport(name=name, value=value, cure=_warning_of_end(endpoint))


def _warning_of_end(endpoint: LinkEndpoint) -> str:
    """Return what to do about the certificate at an endpoint that answers, where it ends soon: nobody there may
    look."""
    certificate = certificate_at(endpoint) if endpoint.scheme == "tls" else None
    when = "" if certificate is None else _ends_soon(certificate.not_valid_after_utc)
    if certificate is None or not when:
        return ""
    renewal = _NEW_CERTIFICATE.format(whom=_hosts_of(certificate), what="what listens")
    return f"the certificate there: {when}. On that machine, {renewal}"


def _listen(endpoint: LinkEndpoint) -> LinkReport:
    name = f"bus.listen {endpoint}"
    if fault := why_not_listening((endpoint,)):
        return LinkReport(name=name, value="cannot be listened on now", cure=fault.rpartition(f"{endpoint}: ")[2])
    return LinkReport(name=name, value=f"free{_protection(endpoint)}")


def _protection(endpoint: LinkEndpoint) -> str:
    return ", TLS" if endpoint.scheme == "tls" else ", without TLS"
