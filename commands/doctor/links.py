"""The links of a bus that uses Zenoh: each endpoint and certificate, for the doctor's report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import ConfigDict

from gradbus.commands.buses import link_reports, uses_links
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import Settings, load_settings

OTHER_JOBS = (
    "Where the relay has access.jobs, it passes on the jobs that this node has there and no others, also not the "
    "doctor's own (doctor-...): then this says nothing about the job, and 'Zenoh answers' shows that the link is well. "
    'A node that has "*" there can be measured'
)


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
