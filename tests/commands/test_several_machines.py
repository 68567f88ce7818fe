"""README's and docs' commands for several machines, as they stand, in fresh shells on two hosts of their own.

The hosts have the addresses and the interface of the text. Of what it says only this differs: the data are a few images
in a folder of the test's own, runs are short, and in place of ``scp`` a copy is made.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doc_pages import fenced_blocks, section
from fresh_shells import Clone, command_lines, write_mnist

from gradbus.commands.lab.namespaces import Host

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(300)]
ADDRESSES = ("192.0.2.10", "192.0.2.11")
SCP = """#!/bin/sh
case "$1 $3" in "-p 192.0.2.11:gradbus/") exec cp -p "$2" {folder}/;; *) echo "scp $*?"; exit 1;; esac
"""


@pytest.fixture
def clones(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[tuple[Clone, Clone]]:
    """A clone on each host."""
    for host, address in zip(hosts, ADDRESSES, strict=True):
        for change in (
            f"link set {host.interface} down",
            f"link set {host.interface} name eth0",
            "addr flush dev eth0",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
        ):
            subprocess.run(["ip", "-n", host.name, *change.split()], check=True, timeout=10)
    write_mnist(tmp_path / "data")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scp").write_text(SCP.format(folder=tmp_path / "1" / "gradbus"), encoding="utf-8")
    (tools / "scp").chmod(0o755)
    # No GRADBUS_DATA: each command of the text has to say where its data are.
    # Two machines share the cores of this one, where a thread for each core would be in the other's way.
    variables = {
        "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
        "DATA": str(tmp_path / "data"),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Clone(tmp_path / str(number) / "gradbus", host.prefix, variables))
            for number, host in enumerate(hosts)
        )
        yield first, second


def readme(root: Path) -> tuple[list[str], list[str]]:
    """The lines of the section, with their comments: those of a federated run, and those of ranks."""
    lines = command_lines(section((root / "README.md").read_text(encoding="utf-8"), "Several machines"))
    (at,) = [number for number, line in enumerate(lines) if line.startswith("cp ") and "/ddp." in line]
    return lines[:at], lines[at:]


def start_where_it_says(clones: tuple[Clone, Clone], line: str) -> None:
    """On the machine that the comment of the line names."""
    (address,) = re.findall(r"  # on ([\d.]+)\b", line)
    clones[ADDRESSES.index(address)].start(line.replace("/data ", "$DATA "))


def shorten(path: Path, part: str, **settings: object) -> None:
    """As a reader edits a configuration."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config[part] |= settings
    path.write_text(json.dumps(config), encoding="utf-8")


def have_a_key(clones: tuple[Clone, Clone], lines: list[str]) -> None:
    """Up to the key: ``cp`` on both, the rest on the first one."""
    for line in lines:
        for clone in clones if line.startswith("cp ") else clones[:1]:
            clone.run(line)
    assert (clones[1].folder / "job.key").stat().st_mode & 0o777 == 0o600


def test_a_key_doctors_and_a_federated_run_on_two_machines(clones: tuple[Clone, Clone], root: Path) -> None:
    lines, _ = readme(root)
    (at,) = [number for number, line in enumerate(lines) if " doctor " in line]
    have_a_key(clones, lines[:at])
    for clone in clones:
        clone.start(lines[at])
    for clone, other in zip(clones, reversed(ADDRESSES), strict=True):
        (told,) = clone.outputs(codes=(0, 8))  # 8: it finds that a busy machine is not well
        assert re.search(rf"peer {other} .*round trip \d+ us", told), told

    shorten(clones[0].folder / "controller.json", "federated", rounds=1, training={"subset_size": 32})
    runs = lines[at + 1 :]
    assert [line.split()[1] for line in runs] == ["controller", "client", "client"]
    for line in runs:
        start_where_it_says(clones, line)
    told, _ = clones[0].outputs()
    clones[1].outputs()
    assert "done: 1 rounds" in told
    (report,) = (clones[0].folder / "runs/mnist-two-machines/rounds.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(report)["clients"] == [0, 1]


@pytest.mark.nightly  # a dozen processes that load torch
def test_ranks_of_a_worker_and_of_torchrun_on_two_machines(clones: tuple[Clone, Clone], root: Path) -> None:
    before, (copy, *ranks) = readme(root)
    have_a_key(clones, [*(line for line in before if "job.key" in line and "doctor" not in line), copy])
    for clone in clones:
        shorten(clone.folder / "ddp.json", "parallel", epochs=1)
    assert [line.split()[1] for line in ranks] == ["worker", "worker"]
    for line in ranks:
        start_where_it_says(clones, line)
    assert "done: 1 epochs" in clones[0].outputs()[0]
    clones[1].outputs()

    page = (root / "docs" / "torch.md").read_text(encoding="utf-8")
    (block,) = [block for block in fenced_blocks(page, "sh") if "--nnodes" in block]
    shorter = 0
    tutorial = (root / "docs" / "tutorial-data-parallel.md").read_text(encoding="utf-8")
    for number, clone in enumerate(clones):
        for name, code in re.findall(r"as `(\w+\.py)`[^`]*?:\n\n```python\n(.*?)^```", tutorial, re.M | re.S):
            (clone.folder / name).write_text(code.replace("range(3)", "range(1)"), encoding="utf-8")
            shorter += "range(3)" in code
        # The text says of all pages of this kind that the environment is active.
        clone.start(". .venv/bin/activate\n" + block.replace("--node-rank 0", f"--node-rank {number}"))
    assert shorter == len(clones)
    assert "accuracy 9" in clones[0].outputs()[0]
    clones[1].outputs()
