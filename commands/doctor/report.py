"""``gradbus doctor``: this machine and the way to others, measured on the spot.

Modules that need packages which may be missing are imported after those have been checked.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradbus.commands.buses import examination_of, peer_names_of, reach_of, uses_links
from gradbus.commands.choices import LoopName
from gradbus.commands.doctor.links import OTHER_JOBS, upstream_links
from gradbus.commands.doctor.machine import Finding, Severity, machine, packages
from gradbus.commands.doctor.settings import is_trusted
from gradbus.commands.lifecycle import run_loop
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.needs import install_line
from gradbus.runtime.network.addresses import address_of
from gradbus.runtime.plain_text import plain_text

if TYPE_CHECKING:
    from gradbus.commands.doctor.local_bus import LocalMeasurement

DEFAULT_WAIT_S = 60.0  # for the doctor of another machine to be started
_STYLES = {Severity.OK: "green", Severity.ADVICE: "yellow", Severity.BAD: "red"}


def examine(
    settings: BusSettings,
    loop: LoopName,
    *,
    wait_s: float | None = None,
    trusted: bool = False,
    config: Path | None = None,
) -> bool:
    """Print the report. True: nothing is bad.

    Args:
        wait_s: look for other doctors for so long, also without peers; None: not at all.
        trusted: no key is needed on the network.
        config: that the settings are from, for the timeouts of the job and the level above a site; None: there is none.

    Raises:
        ConfigError: the configuration or the environment holds wrong settings.
    """
    console = Console()
    findings = [*packages(settings), *machine(settings)]
    if all(finding.severity is not Severity.BAD for finding in findings):
        from gradbus.commands.doctor.timeouts import job_of, timeouts

        findings += timeouts(job_of(config).model_copy(update={"bus": settings}))
        trusted = trusted or is_trusted(config)
        if uses_links(settings):
            findings += _over_links(settings, loop, trusted)
        else:
            findings += _on_the_bus(console, settings, loop, wait_s, trusted)
        findings += upstream_links(config)
    _print(console, findings)
    return all(finding.severity is not Severity.BAD for finding in findings)


def _over_links(settings: BusSettings, loop: LoopName, trusted: bool) -> list[Finding]:
    """Return the findings about links, and where one that is dialled is well, about a bus that uses it."""
    from gradbus.commands.doctor.links import links
    from gradbus.commands.doctor.local_bus import measure
    from gradbus.commands.doctor.security import measurable, protection, security

    findings = links(settings)
    if any(finding.severity is Severity.BAD for finding in findings):
        return findings
    if not settings.connect:
        cure = "run the doctor where others dial this process, while it listens: that measures the way as well"
        unmeasured = Finding("data bus", "not measured: this configuration listens", Severity.OK, cure)
        return [*findings, protection(settings, trusted=trusted), unmeasured]
    settings = settings.model_copy(update={"listen": (), "tls_clients": False})  # as one of those that dial
    findings.append(run_loop(lambda: security(settings, trusted=trusted), loop))
    try:
        with measurable(settings) as measured:
            return findings + judge(run_loop(lambda: measure(measured), loop), settings)
    except (ConfigError, BusError) as error:
        return [*findings, Finding("data bus", "cannot be opened", Severity.BAD, str(error))]


def _on_the_bus(
    console: Console, settings: BusSettings, loop: LoopName, wait_s: float | None, trusted: bool
) -> list[Finding]:
    from gradbus.commands.doctor.local_bus import measure
    from gradbus.commands.doctor.peer_names import unresolved
    from gradbus.commands.doctor.peers import look_for
    from gradbus.commands.doctor.security import measurable, security

    asked = settings
    own = address_of(settings.interface, ipv6=peer_names_of(settings).ipv6)
    if own is not None and reach_of(settings).leaves_machine:
        # Without multicast a bus finds only the peers in its settings; here the second one runs on this machine.
        settings = settings.model_copy(update={"peers": (*settings.peers, own)})
    findings = [run_loop(lambda: security(settings, trusted=trusted), loop)]
    try:
        with measurable(settings) as measured:
            findings += judge(run_loop(lambda: measure(measured), loop), settings)
        if wait_s is not None:
            print_line = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            findings += run_loop(lambda: look_for(asked, wait_s=wait_s, say=print_line), loop)
        findings += unresolved(asked)
    except (ConfigError, BusError) as error:
        findings.append(Finding("data bus", "cannot be opened", Severity.BAD, str(error)))
    return findings


def judge(found: LocalMeasurement, settings: BusSettings) -> list[Finding]:
    """The findings of a measurement."""
    on_links = uses_links(settings)
    calls = Finding("calls into DDS", "direct: samples go to libddsc without the GIL")
    if not found.fast_path and not on_links:
        cure = f"install the version of cyclonedds that gradbus asks for: {install_line('cyclonedds')}"
        calls = Finding("calls into DDS", "slow: samples go through the Python binding", Severity.ADVICE, cure)
    calls_into = [] if on_links else [calls]
    peer = found.peer
    if peer is None:
        cure = f"the second process ended with: {found.fault}" if found.fault else _not_found(settings, on_links)
        return [*calls_into, Finding("discovery", "failed", Severity.BAD, cure)]
    findings = [*calls_into, Finding("discovery", f"{1000 * peer.discovery_s:.0f} ms")]
    if peer.round_trip_s is None or peer.there is None:
        fault = peer.fault or "no answer in time"
        cure = f"{fault}: the machine is overloaded, or large datagrams are lost (try --network network)"
        return [*findings, Finding("measurement", "broken off", Severity.BAD, cure)]
    return [
        *findings,
        Finding("round trip, 64 B", f"{1e6 * peer.round_trip_s:.0f} us (median)"),
        Finding("throughput, 1 MiB frames", f"{peer.there / 1e6:.0f} MB/s"),
    ]


def _not_found(settings: BusSettings, on_links: bool) -> str:
    """Return what to do where two processes of this machine have not found each other."""
    if on_links:
        through = reach_of(settings).attachment
        return (
            f"two processes of this machine did not find each other in time through {through}: see the log there. "
            f"{OTHER_JOBS}"
        )
    return (
        f"two processes of this machine did not find each other on {settings.interface} in time: let UDP ports "
        f"{examination_of(settings).ports} through the firewall, and check the interface and the peers"
    )


def _print(console: Console, findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(
            finding.name, Text(plain_text(finding.value)), Text(finding.severity.value, style=_STYLES[finding.severity])
        )
    console.print(table)
    for finding in findings:
        if finding.cure:
            text = Text(f"{finding.name}: ", style=_STYLES[finding.severity])
            console.print(text.append(plain_text(finding.cure), style="default"), soft_wrap=True)
    well = all(finding.severity is not Severity.BAD for finding in findings)
    console.print("all well" if well else "not well: see above", style="green" if well else "red")
