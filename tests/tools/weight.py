"""Lines of Python that a wheel holds, by folder, and how many of them are no growth of what was built since a release.

    PYTHONPATH=tests/tools .venv/bin/python -P -m weight                  # lines by folder
    PYTHONPATH=tests/tools .venv/bin/python -P -m weight --added FROM..TO # less what these commits added to them, net

``--added`` names a range of commits and may be given several times. A line counts as the file has it: blank lines,
comments and docstrings are lines, too. A file that was moved counts for what changed in it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MOVED = re.compile(r"\{[^}]* => ([^}]*)\}")


def wheel_folders(project: Mapping[str, object]) -> set[str]:
    """Return the folders whose files a wheel holds, from the root of the repository. ``project``: pyproject.toml."""
    setuptools = project["tool"]["setuptools"]  # type: ignore[index]
    mapped: dict[str, str] = setuptools["package-dir"]
    return {_folder_of(package, mapped) for package in setuptools["packages"]}


def _folder_of(package: str, mapped: Mapping[str, str]) -> str:
    parts = package.split(".")
    for end in range(len(parts), 0, -1):
        if (folder := mapped.get(".".join(parts[:end]))) is not None:
            return "/".join([folder, *parts[end:]])
    raise ValueError(f"pyproject.toml has package {package!r}, and no folder for it in package-dir")


def lines_by_folder(root: Path, folders: Iterable[str]) -> Counter[str]:
    """Return the lines of Python of each folder, without those of folders in it."""
    return Counter(
        {name: sum(path.read_bytes().count(b"\n") for path in (root / name).glob("*.py")) for name in sorted(folders)}
    )


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
    folders = wheel_folders(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    found = lines_by_folder(ROOT, folders)
    for name, lines in found.items():
        print(f"{lines:8,}  {name}")
    print(f"{found.total():8,}  lines of Python in the wheel")
    rest = found.total()
    for commits in chosen.added:
        net = net_lines(_difference(commits), folders)
        rest -= net
        print(f"{net:8,}  net, of {commits}")
    if chosen.added:
        print(f"{rest:8,}  without these")


if __name__ == "__main__":
    main()
