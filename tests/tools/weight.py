"""Lines of Python in the wheels, by folder, and how many of them are no growth of what was built since a release.

    PYTHONPATH=tests/tools .venv/bin/python -P -m weight                  # lines by folder: gradbus-core, gradbus
    PYTHONPATH=tests/tools .venv/bin/python -P -m weight --added FROM..TO # less what these commits added to them, net

``--added`` names a range of commits and may be given several times. A line counts as the file has it: blank lines,
comments and docstrings are lines, too. A file that was moved counts for what changed in it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from distributions import ROOT, distributions, folder_of, read_pyproject

_MOVED = re.compile(r"\{[^}]* => ([^}]*)\}")


def wheel_folders(project: Mapping[str, object]) -> set[str]:
    """Return the folders whose files the wheels hold, from the root of the repository. ``project``: pyproject.toml."""
    setuptools = project["tool"]["setuptools"]  # type: ignore[index]
    mapped: dict[str, str] = setuptools["package-dir"]
    return {folder_of(package, mapped) for package in setuptools["packages"]}


def lines_by_folder(root: Path, files: Iterable[Path]) -> Counter[str]:
    """Return the lines of Python of these files by the folder that each is in, from ``root``."""
    found: Counter[str] = Counter()
    for file in files:
        if file.suffix == ".py":
            found[file.parent.relative_to(root).as_posix()] += file.read_bytes().count(b"\n")
    return found


def net_lines(numstat: str, folders: Iterable[str]) -> int:
    """Return the lines that files of these folders gained: added less deleted.

    Args:
        numstat: of ``git diff --numstat -M``: added, deleted and path in each line, as in ``{former => present}/x.py``
            of a file that was moved.
    """
    tops = {name.partition("/")[0] for name in folders}
    return sum(added - deleted for added, deleted, path in _changes(numstat) if path.partition("/")[0] in tops)


def _changes(numstat: str) -> Iterator[tuple[int, int, str]]:
    for line in numstat.splitlines():
        added, deleted, path = line.split("\t")
        if path.endswith((".py", ".py}")):
            place = _MOVED.sub(r"\1", path).replace("//", "/").rpartition(" => ")[2]
            yield int(added), int(deleted), place


def _difference(commits: str) -> str:
    command = ["git", "diff", "--numstat", "-M", "-l10000", commits, "--", "*.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--added", metavar="FROM..TO", action="append", default=[], help="commits that added lines")
    chosen = parser.parse_args(arguments)
    pyproject = read_pyproject()
    wheels = {one.name: lines_by_folder(ROOT, one.files.values()) for one in distributions(pyproject)}
    print("".join(f"{name:>13}" for name in wheels))
    for folder in sorted(set().union(*wheels.values())):
        print("".join(f"{lines[folder]:13,}" for lines in wheels.values()), f" {folder}")
    print("".join(f"{lines.total():13,}" for lines in wheels.values()), " lines of Python in the wheel")
    rest = sum(lines.total() for lines in wheels.values())
    print(f"{rest:13,}  in both")
    folders = wheel_folders(pyproject)
    for commits in chosen.added:
        net = net_lines(_difference(commits), folders)
        rest -= net
        print(f"{net:13,}  net, of {commits}")
    if chosen.added:
        print(f"{rest:13,}  without these")


if __name__ == "__main__":
    main()
