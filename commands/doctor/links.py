"""The links of a bus that uses Zenoh: each endpoint and certificate, for the doctor's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from gradbus.commands.buses import link_reports, uses_links
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.commands.run.status import BusFile, refuse_relay_file
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import Settings, load_settings

_NAMES = (
    "transport", "connect", "listen", "tls", "tls_ca", "tls_certificate", "tls_key", "tls_clients", "lease_s",
    "security", "key_file", "controller_key", "allow_file",
)  # fmt: skip
OTHER_JOBS = (
    "Where the relay has access.jobs, it passes on the jobs that this node has there and no others, also not the "
    "doctor's own (doctor-...): then this says nothing about the job, and 'Zenoh answers' shows that the link is well. "
    'A node that has "*" there can be measured'
)


def with_links(settings: BusSettings, config: Path | None, options: Mapping[str, Any]) -> BusSettings:
    """Return settings with links, and with them the keys, of a configuration and of the environment; options are
    stronger. Where there are no links the settings are returned as they are.

    Raises:
        ConfigError: something is wrong with them, or the configuration is that of a relay.
    """
    refuse_relay_file(
        config,
        "'gradbus doctor --connect tls/HOST:PORT --tls-ca ca.pem', where a client runs, tries the relay and looks at "
        "its certificate",
    )
    found = load_settings(BusFile, config).bus
    update = {name: getattr(found, name) for name in _NAMES if name in found.model_fields_set} | dict(options)
    if "connect" in options:  # as one of those that dial, also with the configuration of one that listens
        update |= {"listen": (), "tls_clients": False}
    is_asked_for = any(update.get(name) for name in ("connect", "listen")) or found.transport == "zenoh"
    return settings.model_copy(update=update) if is_asked_for else settings


def is_trusted(config: Path | None) -> bool:
    """Return whether a configuration, or the environment, lets data leave this machine without protection. Raises
    ConfigError: something is wrong with it."""
    return load_settings(BusFile, config).bus.insecure


class _Upstream(Settings):
    model_config = ConfigDict(extra="ignore")

    bus: BusSettings = BusSettings()


class _SiteFile(Settings):
    """The part of a site's configuration that describes the way to the level above; other parts are ignored."""

    model_config = ConfigDict(extra="ignore")

    upstream: _Upstream = _Upstream()


def upstream_links(config: Path | None) -> list[Finding]:
    """Return the findings about the links of a site to the level above; none where it has no such links.

    Raises:
        ConfigError: something is wrong with the configuration. ImportError: the library of Zenoh is missing.
    """
    bus = load_settings(_SiteFile, config).upstream.bus
    if not uses_links(bus):
        return []
    return [replace(finding, name=f"upstream.{finding.name}") for finding in links(bus)]


def links(settings: BusSettings) -> list[Finding]:
    """Return the findings about each endpoint and certificate. Takes some seconds for each that does not answer.

    Raises:
        ConfigError: the settings contradict each other. ImportError: the library of Zenoh is missing.
    """
    findings = []
    for report in link_reports(settings):
        severity = Severity.BAD if report.is_fault else Severity.ADVICE if report.cure else Severity.OK
        findings.append(Finding(report.name, report.value, severity, report.cure))
    return findings
