"""Whatever a setting holds, a process that uses the library goes on or gets a ConfigError: Cyclone DDS would end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120.0
TRIES = 20
Case = dict[str, Any]


def outcomes(cases: list[Case], domain: int) -> list[str]:
    """What comes of a participant with each of these settings, in a process of its own."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hostile_child.py"))],
        input=json.dumps({"domain": domain, "cases": cases}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    sys.stderr.write(child.stderr)  # the reasons, for a test that fails
    assert child.returncode == 0
    found: list[str] = json.loads(child.stdout)
    assert len(found) == len(cases)
    return found


def network(**settings: Any) -> Case:
    return {"network": settings}


def peers(*addresses: object) -> Case:
    return network(peers=list(addresses))


def document(inner: str) -> Case:
    return {"network": {}, "document": f"<CycloneDDS><Domain>{inner}</Domain></CycloneDDS>"}


def thread(inner: str) -> Case:
    return document(f'<Threads><Thread name="tev"><Scheduling>{inner}</Scheduling></Thread></Threads>')


def discovery(inner: str) -> Case:
    return document(f"<Discovery>{inner}</Discovery>")


def partition(address: str) -> Case:
    one = f'<NetworkPartition name="a" address="{address}"/>'
    mapped = '<PartitionMappings><PartitionMapping DCPSPartitionTopic="*.*" NetworkPartition="a"/></PartitionMappings>'
    return document(f"<Partitioning><NetworkPartitions>{one}</NetworkPartitions>{mapped}</Partitioning>")


RUN = [
    peers("127.0.0.1"), peers("127.0.0.1:7410"), peers("127.0.0.1:65535"), peers("localhost"), peers("239.255.0.1"),
    peers("::1"), peers("[::1]:7410"), peers("::1", "robot-7"), peers("ff02::1"),
    document("<General><Transport>udp6</Transport></General>"), discovery('<Peers><Peer Address="::1"/></Peers>'),
    peers("robot-7"), peers("robot-7:7410"), peers("127.0.0.1", "robot-7"), peers("a" * 63), peers("robot-7."),
    peers(*(f"robot-{number}" for number in range(200))), peers(*(f"127.0.0.{number}" for number in range(1, 200))),
    # What names resolve to may be anything.
    *(peers(f"{address}.invalid") for address in ("0.0.0.0", "255.255.255.255", "127.0.0.1", "0", "127.1", "1.2.3")),
    *(peers("::1", f"{address}.invalid") for address in ("0--0", "0--ffff-127.0.0.1", "127.0.0.1")),
    network(peers=["robot-7"], multicast=True), {**peers("127.0.0.1", "robot-7"), "domain": 232},
    network(lease_s=0.01), network(lease_s=3_600), network(datagram_bytes=1_200), network(loss_per_mille=1_000),
    discovery('<Peers><Peer Address="robot-7"/></Peers>'),
    discovery('<Peers><Peer Address="127.0.0.1"/></Peers><Peers><Peer Address="robot-7"/></Peers>'),
    discovery('<Peers><Peer Address="${NONE_SUCH:-robot-7}"/></Peers>'),
    partition("127.0.0.1"), document("<General><FragmentSize>1.5kB</FragmentSize></General>"),
    document("<General><FragmentSize>1B</FragmentSize></General>"), discovery("<SPDPInterval>1ms</SPDPInterval>"),
    document("<General><Transport>udp</Transport></General>"),
]  # fmt: skip

REFUSED = [
    *(peers(text) for text in (
        "fe80::1", "fe80::1%lo", "::", "[::]:7410", "::ffff:127.0.0.1", "[::1]:0", "[::1", "[]", "0.0.0.0",
        "0.0.0.0:7410",
        "255.255.255.255", "300.1.1.1", "1.2.3", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:99999999",
        "127.0.0.1:-1", "127.0.0.1:abc", "127.0.0.1:", "127.0.0.1:07410", ":7410", "", " ", "127.0.0.1 ",
        "127.0.0.1;127.0.0.2", "127.0.0.1@1", "127.0.0.1/8", "a" * 64, "a" * 5_000, "${HOME}", "${", "$HOME", "%s%n",
        "a b", "x&y", "<Peer/>", '"', "-", "*", "tcp/127.0.0.1:7410", "foo/127.0.0.1", "robot\n", "robot\x00", 7, None,
    )),
    peers("127.0.0.1", "::1"), {**document("<General><Transport>udp</Transport></General>"), **peers("::1")},
    {**document("<General><Transport>udp6</Transport></General>"), **peers("127.0.0.1")},
    network(peers="127.0.0.1"), network(peers=7), network(peers=["127.0.0.1"] * 5_000),
    network(interface=""), network(interface=" lo"), network(interface="x" * 300), network(interface="${HOME}"),
    network(interface=None), network(interface=7), network(interface="lo\x00"),
    *(network(lease_s=value) for value in (0, -1, 1e-12, 3_601, 1e30, float("nan"), float("inf"), "3", True)),
    *(network(datagram_bytes=value) for value in (0, 1_300.5, "1400", True, float("nan"))),
    *(network(loss_per_mille=value) for value in (-1, 0.5, 1_001, 10**12, "5", True)),
    *(network(multicast=value) for value in ("yes", 1, None)),
    discovery('<Peers><Peer Address="::"/></Peers>'), discovery('<Peers><Peer Address="0.0.0.0"/></Peers>'),
    discovery("<Peers><Peer/></Peers>"), discovery('<Peers><Peer Address="${NONE_SUCH}"/></Peers>'),
    *(
        discovery(f"<SPDPInterval>{value}</SPDPInterval>")
        for value in ("0s", "1ns", "0.001us", "0.0000001s", "${X:-0s}")
    ),
    discovery("<MaxAutoParticipantIndex>2000000000</MaxAutoParticipantIndex>"),
    discovery("<ParticipantIndex>-5</ParticipantIndex>"), discovery("<Ports><Base>70000</Base></Ports>"),
    *(document(f"<General><Transport>{value}</Transport></General>") for value in ("tcp", "tcp6", "raweth", "x")),
    *(
        document(f"<General><FragmentSize>{value}</FragmentSize></General>")
        for value in ("0B", "0kB", "0.4B", "+0B", "-0B", "-1B", "${X:-0B}", "default", "70000B")
    ),
    document("<General><fragmentsize>0</fragmentsize></General>"),
    document('<General><Interfaces><NetworkInterface address="999.1.1.1"/></Interfaces></General>'),
    {**document('<General><Interfaces><NetworkInterface address="x"/></Interfaces></General>'), **peers("robot-7")},
    document('<General><Interfaces><NetworkInterface name="lo"/><NetworkInterface name="lo"/></Interfaces></General>'),
    thread("<Class>realtime</Class><Priority>9999</Priority>"), thread("<Class>realtime</Class>"),
    thread("<Priority>5</Priority>"), partition("none such"),
    *(
        partition(address)
        for address in ("0.0.0.0", "0.0.0.0:1", "0", "0.0", "0x0", "127.0.0.1,0.0.0.0", "${X:-0.0.0.0}", "robot-7")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "expected"), [(RUN, "runs"), (REFUSED, "ConfigError")], ids=["run", "refused"])
def test_hostile_settings_run_or_are_refused_and_never_end_the_process(
    cases: list[Case], expected: str, domain: int
) -> None:
    assert len(cases) >= TRIES
    found = outcomes(cases, domain)
    assert [(case, outcome) for case, outcome in zip(cases, found, strict=True) if outcome != expected] == []


def test_a_name_that_does_not_resolve_ends_no_process_in_twenty_tries(domain: int) -> None:
    assert outcomes([peers("robot-7.invalid", "127.0.0.1")] * TRIES, domain) == ["runs"] * TRIES
