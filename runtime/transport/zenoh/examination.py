"""What the doctor looks at on links: each endpoint by itself, and how long certificates last."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace

from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.network.endpoints import LinkEndpoint
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.examination import LinkReport
from gradbus.runtime.transport.zenoh.certificates import (
    WARNING_DAYS,
    CertificateFile,
    certificate_files,
    check_certificates,
    in_utc,
)
from gradbus.runtime.transport.zenoh.link_probe import find_fault, why_not_listening
from gradbus.runtime.transport.zenoh.session import open_session


def examine_links(links: LinkConfig) -> list[LinkReport]:
    """Return what is found in certificates and at each endpoint; endpoints are left out where certificates are wrong.

    Raises:
        ConfigError: the library of Zenoh is missing.
    """
    reports = []
    try:
        reports += [_until(file) for file in certificate_files(links)]
        check_certificates(links)
    except ConfigError as error:
        name, _, text = str(error).partition(" ")
        return [*reports, LinkReport(name=name, value="cannot be used", cure=text, is_fault=True)]
    dialled = replace(links, listen=(), requires_client_certificate=False) if links.connect else links
    reports += [_dial(replace(dialled, connect=(text,))) for text in links.connect]
    return [*reports, *(_listen(endpoint) for endpoint in links.listens)]


def _until(file: CertificateFile) -> LinkReport:
    """Return until when a certificate is valid; a warning where that is soon."""
    left = file.ends - datetime.datetime.now(datetime.UTC)
    value = f"{file.path}, valid until {in_utc(file.ends)}"
    if left > datetime.timedelta(days=WARNING_DAYS):
        return LinkReport(name=file.setting, value=value)
    many = max(left.days, 0)
    cure = (
        "an authority: make a new one ('gradbus keys tls HOST --out DIR'), and copy its ca.pem to all"
        if file.setting == "bus.tls_ca"
        else "make a new one with the same authority ('gradbus keys tls HOST', in the folder of its ca.key)"
    )
    return LinkReport(name=file.setting, value=value, cure=f"it ends in {many} day{'s' * (many != 1)}: {cure}")


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
    return LinkReport(name=name, value=f"Zenoh answers, {took_ms:.0f} ms{_protection(endpoint)}")


def _listen(endpoint: LinkEndpoint) -> LinkReport:
    name = f"bus.listen {endpoint}"
    if fault := why_not_listening((endpoint,)):
        return LinkReport(name=name, value="cannot be listened on now", cure=fault.rpartition(f"{endpoint}: ")[2])
    return LinkReport(name=name, value=f"free{_protection(endpoint)}")


def _protection(endpoint: LinkEndpoint) -> str:
    return ", TLS" if endpoint.scheme == "tls" else ", without TLS"
