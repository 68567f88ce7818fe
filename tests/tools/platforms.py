"""Writes docs/platforms.md: on which platforms gradbus was run, can be installed, or was never tried.

    python -m platforms --write        (make docs does it)

Nothing of the table is typed: what was run is what ``.ci/run`` starts and what docs/nightly.md has as green, and what
can be installed is what the markers of the requirements in pyproject.toml say.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nightly
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "platforms.md"
OTHERS = (
    ("Linux", "linux", "ARM64", "aarch64"),
    ("macOS", "darwin", "ARM64", "arm64"),
    ("macOS", "darwin", "x86-64", "x86_64"),
    ("Windows", "win32", "x86-64", "AMD64"),
    ("Windows", "win32", "ARM64", "ARM64"),
)
"""Platforms that users ask about: system, as Python names it, processor, as its system names it."""

_HEAD = """\
# Platforms

Where gradbus was run, where it can be installed, and where it was never tried. `make docs` writes this page, from what
`.ci/run` starts, the outcomes in [nightly.md](nightly.md), and the requirements in `pyproject.toml`.

| state | meaning |
|---|---|
| run | its tests pass there: each time `.ci/run` passes, or at the commit in [nightly.md](nightly.md) |
| failed | the nightly part has failed when it was run last |
| built | wheels of the transport are required and expected there, and nothing was run |
| never tried | nothing was run; for DDS, Cyclone DDS and its Python package would have to be built from source |

| system | processor | Python | GPU | transport | state | by |
|---|---|---|---|---|---|---|
"""
_TAIL = """
"emulated": by qemu, which shows that the code runs, and says nothing about speed. [arm.md](arm.md) has more on boards,
[operations.md](operations.md#boards-macs-and-other-systems) what a system may lack, and [wan.md](wan.md) which
transport a bus uses. Members on different transports do not meet.
"""


class Row(NamedTuple):
    """A line of the table."""

    system: str
    processor: str
    python: str
    gpu: str
    transport: str
    state: str
    by: str


def rows(root: Path = ROOT) -> list[Row]:
    """Return all lines: what is run at each change, what is run by night, and what is not run."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*_of_each_change(root, project), *_of_nights(root), *_not_run(project)]


def _of_each_change(root: Path, project: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what ``.ci/run`` starts. The lowest versions are tested under the Python that test_part.sh finds."""
    started = (root / ".ci" / "run").read_text(encoding="utf-8")
    script = (root / "tests" / "tools" / "test_part.sh").read_text(encoding="utf-8")
    if re.search(r"^part suite .* make test ", started, re.MULTILINE):
        python = f"the machine's, {project['requires-python'].replace('>=', 'at least ')}"
        yield Row("Linux", "x86-64", python, "no", "DDS, Zenoh", "run", "`.ci/run`: `make test`, all but nightly tests")
    oldest = re.search(r"^oldest\).*?find_python ([\d.]+)", script, re.MULTILINE | re.DOTALL)
    assert oldest is not None, "test_part.sh names no Python for the lowest versions"
    pythons = {oldest[1]: "PART=oldest"} if "PART=oldest" in started else {}
    pythons |= {found: f"PART=python PYTHON={found}" for found in re.findall(r"PYTHON=([\d.]+)", started)}
    for python, part in sorted(pythons.items()):
        yield Row("Linux", "x86-64", python, "no", "DDS", "run", f"`.ci/run`: `make test {part}`")


def _of_nights(root: Path) -> Iterator[Row]:
    """Yield what the nightly parts run that are of a platform."""
    lines = nightly.Page(root / "docs" / "nightly.md", nightly.PARTS).read()
    for part in nightly.PARTS:
        if part.platform is None:
            continue
        outcome = lines[part.name].outcome if part.name in lines else ""
        state = "run" if outcome == nightly.GREEN else "failed" if outcome else "never tried"
        place, by = part.platform, f"`make nightly PART={part.name}`: {part.covers}"
        yield Row(place.system, place.processor, place.python, place.gpu, place.transport, state, by)


def _not_run(project: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the platforms that nothing is run on."""
    pythons = [found[1] for one in project["classifiers"] if (found := re.fullmatch(r".*:: Python :: (3\.\d+)", one))]
    packages = {"DDS": "cyclonedds", "Zenoh": "eclipse-zenoh"}
    required = {one.name: one for one in map(Requirement, project["dependencies"])}
    for system, sys_platform, processor, machine in OTHERS:
        for transport, package in packages.items():
            marker = required[package].marker
            built = [
                python
                for python in pythons
                if marker is None
                or marker.evaluate(
                    {"sys_platform": sys_platform, "platform_machine": machine, "python_version": python}
                )
            ]
            missing = [python for python in pythons if python not in built]
            real = (
                "real machines, such as a Jetson or a Raspberry Pi" if (system, processor) == ("Linux", "ARM64") else ""
            )
            for state, names in (("built", built), ("never tried", missing)):
                if names:
                    yield Row(system, processor, _span(names), "no", transport, state, real)


def _span(pythons: Sequence[str]) -> str:
    return pythons[0] if len(pythons) == 1 else f"{pythons[0]} to {pythons[-1]}"


def page(root: Path = ROOT) -> str:
    """Return the text of the page."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows(root)) + _TAIL


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
