"""docs/operations.md and docs/tuning.md name settings, ports, files and log lines that exist."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree as ET

import psutil
import pytest
from dds_domains import new_domain
from doc_pages import fenced_blocks, rows, section

from gradbus.commands import exit_codes
from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile, load
from gradbus.commands.settings_reference import sections
from gradbus.runtime.bus.bus import connect
from gradbus.runtime.config.bus import BusSettings, with_user
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.shm import layout
from gradbus.runtime.transport.dds.network import (
    MAX_PROCESSES,
    RECEIVE_BUFFER_BYTES,
    SEND_BUFFER_BYTES,
    build_xml,
    port_range,
)

KINDS = (ControllerFile, ClientFile, WorkerFile)
PAGES = ("operations.md", "tuning.md", "robust.md", "tutorial-federated.md", "tutorial-data-parallel.md")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "operations.md").read_text(encoding="utf-8")


def settings_there_are() -> dict[str, Any]:
    """Default by name: ``federated.rounds`` and so on."""
    return {
        setting.name: json.loads(with_user(setting.default)) for section in sections() for setting in section.settings
    }


def named_settings(text: str) -> set[str]:
    """What stands in backticks, after ``--set``, or in the environment, and looks like a setting."""
    names = "|".join(name.partition(".")[0] for name in settings_there_are() if "." in name)
    named = set(re.findall(rf"(?:`|--set )'?((?:{names})\.(?!json\b)[\w.]+)(?==|'|`| )", text))
    return named | {name.lower().replace("__", ".") for name in re.findall(r"\bGRADBUS_((?:[A-Z]+)__[A-Z_]+)", text)}


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_that_a_page_names_exists(root: Path, name: str) -> None:
    text = (root / "docs" / name).read_text(encoding="utf-8")
    named = named_settings(text)
    assert len(named) > 3
    assert named - settings_there_are().keys() == set()


def test_a_setting_that_does_not_exist_would_be_found() -> None:
    assert named_settings("`bus.leese_s`, `--set parallel.lrr=1`, GRADBUS_BUS__JOBB") == {
        "bus.leese_s",
        "parallel.lrr",
        "bus.jobb",
    }


@pytest.mark.parametrize("name", [*PAGES, "torch.md", "profile.md", "embedding.md"])
def test_every_option_that_a_page_names_exists(root: Path, name: str) -> None:
    import typer.main

    from gradbus.commands.cli.main import app

    group: Any = typer.main.get_command(app)
    known = {
        opt for command in group.commands.values() for one in command.params for opt in (*one.opts, *one.secondary_opts)
    }
    text = (root / "docs" / name).read_text(encoding="utf-8")
    for line in re.findall(r"\bgradbus (?:demo|controller|client|worker|run|doctor|status)\b[^`\n]*", text):
        options = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", re.sub(r" -- .*", "", line)))  # what follows is a script's
        assert options - known - {"--bind"} == set(), line


def test_what_two_settings_take_is_what_they_take(page: str, root: Path) -> None:
    """Values given with a name: `bus.shared_memory=false` and so on."""
    texts = [page, (root / "docs" / "tuning.md").read_text(encoding="utf-8")]
    given = [pair for text in texts for pair in re.findall(r"`((?:bus|parallel|federated)\.[\w.]+=[^`]+)`", text)]
    assert len(given) > 4
    for pair in given:
        kind = WorkerFile if pair.startswith("parallel") else ControllerFile
        chosen = ["parallel.algorithm=dgc"] if re.match(r"parallel\.algorithm\.(density|warmup|value)", pair) else []
        load(kind, None, overrides=[*chosen, pair])


def test_the_defaults_are_those_of_the_code(page: str) -> None:
    defaults = settings_there_are()
    for names, told, _ in rows(section(page, "Timeouts"), "setting"):
        for name, value in zip(re.findall(r"`([\w.]+)`", names), re.findall(r"[\d.]+", told), strict=False):
            assert defaults[name] in (None, float(value)), name
    leases = [NetworkConfig(profile=profile).effective_lease_s for profile in ("loopback", "network")]
    assert leases == [60.0, 10.0]
    assert get_args(BusSettings.model_fields["network"].annotation) == ("loopback", "network")


def test_the_profiles_are_those_of_the_code(page: str) -> None:
    for column, profile in ((1, "loopback"), (2, "network")):
        document = ET.fromstring(build_xml(NetworkConfig(profile=profile)))  # type: ignore[arg-type]
        told = {row[0]: row[column] for row in rows(section(page, "The two profiles"), "")}
        size = int((document.findtext(".//MaxMessageSize") or "").removesuffix("B"))
        assert f"up to {size:,} B" in told["datagrams"]
        assert document.findtext(".//LeaseDuration") == told["`bus.lease_s`"].replace(" ", "")
        assert document.findtext(".//SPDPInterval") == "2s"
        assert document.findtext(".//MaxAutoParticipantIndex") == str(MAX_PROCESSES) == "120"


def ports_of(page: str, domain: int, process: int) -> tuple[int, int]:
    """As the page's formula says."""
    (block,) = [block for block in fenced_blocks(section(page, "Ports and firewalls"), "") if "process p" in block]
    formulas = re.findall(r"7400 \+ 250 d \+ (\d+) \+ 2 p", block)
    return tuple(7400 + 250 * domain + int(offset) + 2 * process for offset in formulas)  # type: ignore[return-value]


def test_the_table_of_ports_follows_from_the_formula(page: str) -> None:
    for domain, *ranges in rows(section(page, "Ports and firewalls"), "domain"):
        for last, told in zip((MAX_PROCESSES - 1, 7), ranges, strict=True):
            assert told == f"{ports_of(page, int(domain), 0)[0]}-{ports_of(page, int(domain), last)[1]}"
        assert ranges[0] == port_range(int(domain))
    assert f"room for {(65535 - ports_of(page, 232, 0)[0] + 1) // 2} processes" in " ".join(page.split())
    assert f"udp dport {port_range(0)} accept" in page


@pytest.mark.parametrize("multicast", [False, True])
def test_the_sockets_of_a_process_are_on_these_ports(page: str, multicast: bool) -> None:
    """Two buses of one process, as the kernel sees them; other processes may be in the domain."""
    domain = new_domain()  # whose ports lie below those that the system gives to anybody

    async def scenario() -> set[int]:
        network = NetworkConfig(multicast=multicast)
        before = bound()
        async with connect("ports", domain=domain, network=network), connect("ports", domain=domain, network=network):
            return bound() - before

    def bound() -> set[int]:
        return {one.laddr.port for one in psutil.Process().net_connections("udp") if one.laddr.ip == "0.0.0.0"}

    found = asyncio.run(scenario())
    shared = {7400 + 250 * domain, 7400 + 250 * domain + 1}
    assert found & shared == (shared if multicast else set())
    assert any(found - shared == set(ports_of(page, domain, process)) for process in range(MAX_PROCESSES)), found


def test_documents_for_dds_are_well_formed(page: str) -> None:
    documents = re.findall(r"CYCLONEDDS_URI='(.*?)'", page)
    assert len(documents) == 3
    for document in documents:
        merged = build_xml(NetworkConfig(), user_document=document)
        assert all(element.text in merged for element in ET.fromstring(document).iter() if element.text)


def test_kernel_and_memory_figures_are_those_of_the_code(page: str) -> None:
    text = " ".join(page.split())
    assert f"`net.core.rmem_max` | {RECEIVE_BUFFER_BYTES} |" in page
    assert f"`net.core.wmem_max` | {SEND_BUFFER_BYTES} |" in page
    assert f"at most {layout.SLOTS} MiB of it and {layout.RING_BYTES // 1024} KiB for each other rank" in text


def test_log_lines_that_the_page_names_are_written_somewhere(page: str, root: Path) -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("actors", "runtime", "commands")
        for path in (root / folder).rglob("*.py")
    )
    named = re.findall(r"`([a-z]+ [a-z ]+)`", section(page, "When something hangs"))
    assert {"client silent", "client lost", "client refused", "no shared memory", "slow path"} <= set(named)
    for name in named:
        assert f'"{name}"' in sources, name
    for word in ("stalled", "final-ready"):
        assert f"`{word}`" in page
        assert f'"{word}' in sources


def test_the_exit_codes_are_those_of_the_program(page: str) -> None:
    told = [row[0] for row in rows(section(page, "Exit codes"), "code")]
    assert told == [*(str(code.value) for code in exit_codes.ExitCode), "130, 143"]
