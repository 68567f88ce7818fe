"""``gradbus doctor``: what this machine is like for gradbus, measured on the spot, and what to change."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradbus.experiments.choices import LoopName
from gradbus.experiments.doctor_facts import Finding, Verdict, machine
from gradbus.experiments.doctor_probe import MET_WITHIN_S, Measured, measure
from gradbus.experiments.doctor_security import measurable, protected, security
from gradbus.experiments.lifecycle import run_loop
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.missing_peers import address_of, port_range
from gradbus.runtime.settings import BusSettings

_STYLES = {Verdict.OK: "green", Verdict.ADVICE: "yellow", Verdict.BAD: "red"}


def examine(settings: BusSettings, loop: LoopName, key_file: Path | None = None) -> bool:
    """Print the report. True: nothing is bad.

    Args:
        key_file: measure a sealed bus, with the key in this file; None: as the environment says.

    Raises:
        ConfigError: the environment holds settings that cannot be.
    """
    console = Console()
    findings = machine(settings)
    settings = protected(settings, key_file)
    own = address_of(settings.interface)
    if settings.interface != "lo" and own is not None:
        # Without multicast a bus finds only the peers it is told of; here the second one runs on this machine.
        settings = settings.model_copy(update={"peers": (*settings.peers, own)})
    findings.append(run_loop(lambda: security(settings), loop))
    try:
        with measurable(settings) as measured:
            findings += judge(run_loop(lambda: measure(measured), loop), settings)
    except (ConfigError, BusError) as error:
        findings.append(Finding("data bus", "cannot be opened", Verdict.BAD, str(error)))
    _print(console, findings)
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def judge(found: Measured, settings: BusSettings) -> list[Finding]:
    """What the measurement means."""
    if found.fast_path:
        findings = [Finding("fast path", "works: samples go to libddsc without the GIL")]
    else:
        findings = [
            Finding(
                "fast path",
                "does not work: samples go through the Python binding",
                Verdict.ADVICE,
                "install the version of cyclonedds that gradbus asks for (pip install -U gradbus)",
            )
        ]
    if not found.met:
        cure = (
            f"two processes of this machine did not find each other on {settings.interface} within {MET_WITHIN_S:g} s: "
            f"let UDP ports {port_range(settings.domain)} through the firewall, and check the interface and the peers"
        )
        if found.fault and found.fault.startswith("the second"):
            cure = found.fault
        return [*findings, Finding("discovery", "failed", Verdict.BAD, cure)]
    if found.discovery_s is not None:
        findings.append(Finding("discovery", f"{1000 * found.discovery_s:.0f} ms"))
    if found.round_trip_s is not None:
        findings.append(Finding("round trip, 64 B", f"{1e6 * found.round_trip_s:.0f} us (median)"))
    if found.throughput is not None:
        findings.append(Finding("throughput, 1 MiB frames", f"{found.throughput / 1e6:.0f} MB/s"))
    if found.fault:
        findings.append(
            Finding(
                "measurement",
                "broken off",
                Verdict.BAD,
                f"{found.fault}: the machine is overloaded, or large datagrams are lost (try --network network)",
            )
        )
    return findings


def _print(console: Console, findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(finding.name, finding.value, Text(finding.verdict.value, style=_STYLES[finding.verdict]))
    console.print(table)
    for finding in findings:
        if finding.cure:
            text = Text(f"{finding.name}: ", style=_STYLES[finding.verdict])
            console.print(text.append(finding.cure, style="default"), soft_wrap=True)
    well = all(finding.verdict is not Verdict.BAD for finding in findings)
    console.print("all well" if well else "not well: see above", style="green" if well else "red")
