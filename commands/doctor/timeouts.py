"""The timeouts of a job, and whether they are in the order that they need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from gradbus.commands.buses import elastic_bus, lease_of
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.settings import Settings, load_settings
from gradbus.runtime.config.timeouts import federated_timeouts, out_of_order, parallel_timeouts


class JobTimeouts(Settings):
    """The parts of any configuration that have timeouts; other parts are ignored."""

    model_config = ConfigDict(extra="ignore")
    renamed: ClassVar[Mapping[str, str]] = {"worker": "parallel"}

    bus: BusSettings = BusSettings()
    parallel: DataParallelConfig = DataParallelConfig()
    federated: FederatedConfig = FederatedConfig()


def job_of(config: Path | None) -> JobTimeouts:
    """Read a configuration, and the environment. Raises ConfigError: something is wrong with them."""
    return load_settings(JobTimeouts, config)


def timeouts(job: JobTimeouts) -> list[Finding]:
    """Those of the kind of training that a job is of; of both kinds where its settings name none."""
    ranks_bus = elastic_bus(job.bus) if job.parallel.elastic.is_on else job.bus
    found = {
        "parallel": ("timeouts of ranks", parallel_timeouts(job.parallel, lease_s=lease_of(ranks_bus))),
        "federated": ("timeouts of rounds", federated_timeouts(job.federated, lease_s=lease_of(job.bus))),
    }
    findings = []
    for name, of_kind in [found[kind] for kind in found if kind in job.model_fields_set] or found.values():
        faults = out_of_order(of_kind)
        severity = Severity.ADVICE if faults else Severity.OK
        findings.append(Finding(name, ", ".join(map(str, of_kind)), severity, "; ".join(faults)))
    return findings
