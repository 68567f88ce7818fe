"""Split this tree into the two distributions that are built from it: ``gradbus-core`` and ``gradbus``.

    PYTHONPATH=tests/tools .venv/bin/python -P -m distributions build/distributions      # make wheel runs it

``gradbus-core`` takes part in a job without torch: bus, transports, security, relay, doctor, keys, Flower nodes.
``gradbus`` holds everything else and requires ``gradbus-core`` of the same version. Both install into the import
package ``gradbus``, and no file is in both, so that installing or removing one leaves the other's files alone. The
program writes a folder for each, with a ``pyproject.toml`` of its own, from which any build tool makes an sdist and a
wheel.

One table decides which module goes where, ``[tool.gradbus.core]`` of pyproject.toml:

- ``packages``: all modules of these packages go to the core, except those in ``except``. ``x.*`` means ``x`` and every
  package below it.
- ``modules``: single modules of other packages that go to the core, too.
- The ``__init__.py`` of each package above a module of the core goes to the core. Everything else goes to ``gradbus``.

``tests/test_distributions.py`` checks ``except`` against its definition: the modules that, when they are imported, load
torch or a module that only ``gradbus`` has.

A module that a release had in ``gradbus`` must not move to ``gradbus-core`` under the same name. On an upgrade, pip
first installs the new core and then removes the files of the old ``gradbus``, and with them the module.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORE = "gradbus-core"
_BESIDE = ("README.md", "LICENSE")  # in each of the folders


@dataclass(frozen=True)
class Distribution:
    """What one distribution is built from.

    Attributes:
        project: the ``[project]`` table of its pyproject.toml.
        files: installed path, such as ``gradbus/runtime/logs.py``, to the file of this tree.
    """

    project: Mapping[str, Any]
    files: Mapping[str, Path]

    @property
    def name(self) -> str:
        """Return its name on a package index."""
        return str(self.project["name"])

    @property
    def packages(self) -> list[str]:
        """Return the names of the packages that it has modules of, sorted."""
        folders = {place.rpartition("/")[0] for place in self.files if place.endswith(".py")}
        return sorted(folder.replace("/", ".") for folder in folders)


def read_pyproject(root: Path = ROOT) -> dict[str, Any]:
    """Return the content of a tree's pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def folder_of(package: str, mapped: Mapping[str, str]) -> str:
    """Return the folder of a package, relative to the root of the tree. ``mapped``: ``package-dir`` of setuptools.

    Raises:
        ValueError: no folder is mapped to it, or to a package above it.
    """
    parts = package.split(".")
    for end in range(len(parts), 0, -1):
        if (folder := mapped.get(".".join(parts[:end]))) is not None:
            return "/".join([folder, *parts[end:]])
    raise ValueError(f"pyproject.toml has package {package!r}, and no folder for it in package-dir")


def modules_of(pyproject: Mapping[str, Any], root: Path = ROOT) -> dict[str, Path]:
    """Return the file of each installed module, by import name."""
    setuptools = pyproject["tool"]["setuptools"]
    found = {}
    for package in setuptools["packages"]:
        for file in sorted((root / folder_of(package, setuptools["package-dir"])).glob("*.py")):
            found[package if file.stem == "__init__" else f"{package}.{file.stem}"] = file
    return found


def core_packages(pyproject: Mapping[str, Any]) -> set[str]:
    """Return the packages that go to the core as a whole. Raises ValueError: one of them is not in the tree."""
    every, found = pyproject["tool"]["setuptools"]["packages"], set()
    for name in pyproject["tool"]["gradbus"]["core"]["packages"]:
        top = name.removesuffix(".*")
        if top not in every:
            raise ValueError(f"[tool.gradbus.core] of pyproject.toml has package {name!r}, which is not in the tree")
        found |= {one for one in every if one == top or (top != name and one.startswith(f"{top}."))}
    return found


def core_modules(pyproject: Mapping[str, Any], modules: Mapping[str, Path]) -> set[str]:
    """Return the names of the modules that go to the core. ``modules``: as :func:`modules_of` returns them.

    Raises:
        ValueError: ``[tool.gradbus.core]`` names a module that is not in the tree, or that its place does not fit.
    """
    core, packages = pyproject["tool"]["gradbus"]["core"], core_packages(pyproject)
    single, without = set(core["modules"]), set(core["except"])
    of_packages = {name for name in modules if _package_of(name, modules) in packages}
    if wrong := (single - modules.keys()) | (without - of_packages) | (single & of_packages):
        raise ValueError(
            f"[tool.gradbus.core] of pyproject.toml: {', '.join(sorted(wrong))}: 'modules' must name modules of the "
            "tree that are in none of 'packages', and 'except' modules that are in one of them. Correct the table"
        )
    chosen = (of_packages - without) | single
    return chosen | {name for module in chosen for name in _above(module)}


def _package_of(module: str, modules: Mapping[str, Path]) -> str:
    return module if modules[module].name == "__init__.py" else module.rpartition(".")[0]


def _above(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module


def distributions(pyproject: Mapping[str, Any], root: Path = ROOT) -> tuple[Distribution, Distribution]:
    """Return ``gradbus-core`` and ``gradbus``. Raises ValueError: as :func:`core_modules`."""
    modules = modules_of(pyproject, root)
    core = core_modules(pyproject, modules)
    whole = core_packages(pyproject)
    data = dict(_data_of(pyproject, root))
    return tuple(  # type: ignore[return-value] # mypy does not count the two
        Distribution(
            project(pyproject),
            {_place(name, file): file for name, file in modules.items() if (name in core) == is_core}
            | {place: file for place, (package, file) in data.items() if (package in whole) == is_core},
        )
        for project, is_core in ((core_project, True), (rest_project, False))
    )


def _place(module: str, file: Path) -> str:
    folder = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return f"{folder.replace('.', '/')}/{file.name}"


def _data_of(pyproject: Mapping[str, Any], root: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield the installed path of each data file, with its package and its file in the tree."""
    setuptools = pyproject["tool"]["setuptools"]
    for package in setuptools["packages"]:
        folder = root / folder_of(package, setuptools["package-dir"])
        for file in sorted({file for pattern in setuptools["package-data"]["*"] for file in folder.glob(pattern)}):
            yield f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}", (package, file)


def core_project(pyproject: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``[project]`` table of ``gradbus-core``."""
    project, core = dict(pyproject["project"]), pyproject["tool"]["gradbus"]["core"]
    every = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    # Without markers: a user who asks for an extra gets its packages or an error of the installer, never nothing.
    bare = {project_of(line): line.partition(";")[0].strip() for line in reversed(every)}
    extras = {extra: [bare[name] for name in names] for extra, names in core["extras"].items()}
    needed = [line for line in project["dependencies"] if project_of(line) not in core["without"]]
    project |= {"name": CORE, "description": core["description"]}
    project |= {"dependencies": needed, "optional-dependencies": extras}
    project.pop("entry-points")
    return project


def rest_project(pyproject: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``[project]`` table of ``gradbus``."""
    project, without = dict(pyproject["project"]), pyproject["tool"]["gradbus"]["core"]["without"]
    more = [line for line in project["dependencies"] if project_of(line) in without]
    project["dependencies"] = [f"{CORE}=={project['version']}", *more]
    project.pop("scripts")
    return project


def project_of(requirement: str) -> str:
    """Return the project name in a requirement such as ``torch>=2.6``, in lower case."""
    name = requirement
    for sign in "[<>=!~; ":
        name = name.partition(sign)[0]
    return name.lower()


def write(distribution: Distribution, pyproject: Mapping[str, Any], folder: Path) -> None:
    """Write a tree to build a distribution from, and replace the folder. ``pyproject``: that of this tree."""
    shutil.rmtree(folder, ignore_errors=True)
    for place, file in distribution.files.items():
        copy = folder / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    for name in _BESIDE:
        shutil.copy2(ROOT / name, folder / name)
    setuptools = {
        "packages": distribution.packages,
        "package-data": pyproject["tool"]["setuptools"]["package-data"],
    }
    text = as_toml(
        {
            "build-system": pyproject["build-system"],
            "project": distribution.project,
            "tool": {"setuptools": setuptools},
        }
    )
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def as_toml(tables: Mapping[str, Any], above: Sequence[str] = ()) -> str:
    """Return tables of strings and lists of strings as TOML, which writes these two as JSON does."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in ([f"[{'.'.join(map(_key, above))}]"] if lines else []) + lines)
    inner = [as_toml(value, [*above, key]) for key, value in tables.items() if isinstance(value, Mapping)]
    return "\n".join(filter(None, [text, *inner]))


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _value(value: str | Collection[str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def main(arguments: Iterable[str] | None = None) -> None:
    """Write both folders and print their paths, that of the core first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the two folders")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    pyproject = read_pyproject()
    for distribution in distributions(pyproject):
        write(distribution, pyproject, chosen.folder / distribution.name)
        print(chosen.folder / distribution.name)


if __name__ == "__main__":
    main()
