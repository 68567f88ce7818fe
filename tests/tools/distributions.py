"""The two distributions that are built from this tree, both parts of the import package ``gradbus``.

    PYTHONPATH=tests/tools .venv/bin/python -P -m distributions build/distributions      # make wheel does it

``gradbus-core`` is what takes part in a job without torch: the bus, its transports and security, the relay, the doctor,
the status of a job, keys, Flower nodes. ``gradbus`` is everything else, and requires a ``gradbus-core`` of its version.
The program writes a folder for each, with a ``pyproject.toml`` and files of its own, from which any build tool makes an
sdist and a wheel. No file is in both, so that each can be installed and removed without a change of the other's files.

Which module is whose is said once, in ``[tool.gradbus.core]`` of pyproject.toml:

- ``packages`` are the core's, with all their modules, but for those in ``except``; ``x.*`` is ``x`` and all packages in
  it;
- ``modules`` are single ones of other packages;
- the ``__init__.py`` of each package above one of these is the core's, too, and nothing else is.

``tests/test_distributions.py`` holds ``except`` to what it is for: the modules that load torch, or a module that only
``gradbus`` has, when they are imported.
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
    """One of the two.

    Attributes:
        project: its ``[project]``.
        files: where each file is installed, as ``gradbus/runtime/logs.py``: where the tree has it.
    """

    project: Mapping[str, Any]
    files: Mapping[str, Path]

    @property
    def name(self) -> str:
        """The name that it is installed by."""
        return str(self.project["name"])

    @property
    def packages(self) -> list[str]:
        """Return the packages that it has modules or data of, in order. Data may lie in folders below a package."""
        folders = {place.rpartition("/")[0] for place in self.files if place.endswith(".py")}
        return sorted(folder.replace("/", ".") for folder in folders)


def read_pyproject(root: Path = ROOT) -> dict[str, Any]:
    """Return what the pyproject.toml of a tree says."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def folder_of(package: str, mapped: Mapping[str, str]) -> str:
    """Return the folder of a package, from the root of the tree. ``mapped``: ``package-dir`` of setuptools.

    Raises:
        ValueError: no folder is mapped to it, or to a package above it.
    """
    parts = package.split(".")
    for end in range(len(parts), 0, -1):
        if (folder := mapped.get(".".join(parts[:end]))) is not None:
            return "/".join([folder, *parts[end:]])
    raise ValueError(f"pyproject.toml has package {package!r}, and no folder for it in package-dir")


def modules_of(pyproject: Mapping[str, Any], root: Path = ROOT) -> dict[str, Path]:
    """Return the file of each module that is installed, by the name that it is imported by."""
    setuptools = pyproject["tool"]["setuptools"]
    found = {}
    for package in setuptools["packages"]:
        for file in sorted((root / folder_of(package, setuptools["package-dir"])).glob("*.py")):
            found[package if file.stem == "__init__" else f"{package}.{file.stem}"] = file
    return found


def core_packages(pyproject: Mapping[str, Any]) -> set[str]:
    """Return the packages that are the core's as a whole. Raises ValueError: one of them is not in the tree."""
    every, found = pyproject["tool"]["setuptools"]["packages"], set()
    for name in pyproject["tool"]["gradbus"]["core"]["packages"]:
        top = name.removesuffix(".*")
        if top not in every:
            raise ValueError(f"[tool.gradbus.core] of pyproject.toml has package {name!r}, which is not in the tree")
        found |= {one for one in every if one == top or (top != name and one.startswith(f"{top}."))}
    return found


def core_modules(pyproject: Mapping[str, Any], modules: Mapping[str, Path]) -> set[str]:
    """Return those of ``modules`` that the core has.

    Raises:
        ValueError: ``[tool.gradbus.core]`` names what is not there, or the same twice.
    """
    core, packages = pyproject["tool"]["gradbus"]["core"], core_packages(pyproject)
    single, without = set(core["modules"]), set(core["except"])
    of_packages = {name for name in modules if _package_of(name, modules) in packages}
    if wrong := (single - modules.keys()) | (without - of_packages) | (single & of_packages):
        raise ValueError(
            f"[tool.gradbus.core] of pyproject.toml: {', '.join(sorted(wrong))}: modules are to name single ones that "
            "are in the tree and in none of the packages, except is to name modules of these packages"
        )
    chosen = (of_packages - without) | single
    return chosen | {name for module in chosen for name in _above(module)}


def _package_of(module: str, modules: Mapping[str, Path]) -> str:
    return module if modules[module].name == "__init__.py" else module.rpartition(".")[0]


def _above(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module


def distributions(pyproject: Mapping[str, Any], root: Path = ROOT) -> tuple[Distribution, Distribution]:
    """Return the core, and the rest. Raises ValueError: as :func:`core_modules`."""
    modules = modules_of(pyproject, root)
    core = core_modules(pyproject, modules)
    whole = core_packages(pyproject)
    data = dict(_data_of(pyproject, root))
    return tuple(  # type: ignore[return-value] # one of each
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
    """Yield where each file of a package that is not Python is installed, with the package and the file."""
    setuptools = pyproject["tool"]["setuptools"]
    for package in setuptools["packages"]:
        folder = root / folder_of(package, setuptools["package-dir"])
        for file in sorted({file for pattern in setuptools["package-data"]["*"] for file in folder.glob(pattern)}):
            yield f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}", (package, file)


def core_project(pyproject: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[project]`` of the core."""
    project, core = dict(pyproject["project"]), pyproject["tool"]["gradbus"]["core"]
    every = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    # Whoever asks for an extra has it, or an error of the installer: so without the marker.
    bare = {project_of(line): line.partition(";")[0].strip() for line in reversed(every)}
    extras = {extra: [bare[name] for name in names] for extra, names in core["extras"].items()}
    needed = [line for line in project["dependencies"] if project_of(line) not in core["without"]]
    project |= {"name": CORE, "description": core["description"]}
    project |= {"dependencies": needed, "optional-dependencies": extras}
    project.pop("entry-points")
    return project


def rest_project(pyproject: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[project]`` of the rest."""
    project, without = dict(pyproject["project"]), pyproject["tool"]["gradbus"]["core"]["without"]
    more = [line for line in project["dependencies"] if project_of(line) in without]
    project["dependencies"] = [f"{CORE}=={project['version']}", *more]
    project.pop("scripts")
    return project


def project_of(requirement: str) -> str:
    """Return the name of the project that a requirement, such as ``torch>=2.6``, asks for."""
    name = requirement
    for sign in "[<>=!~; ":
        name = name.partition(sign)[0]
    return name.lower()


def write(distribution: Distribution, pyproject: Mapping[str, Any], folder: Path) -> None:
    """Write what a distribution is built from into a folder, in place of anything in it. ``pyproject``: the tree's."""
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
    """Return TOML of texts, lists of texts, and tables of these. JSON writes the first two as TOML does."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in ([f"[{'.'.join(map(_key, above))}]"] if lines else []) + lines)
    inner = [as_toml(value, [*above, key]) for key, value in tables.items() if isinstance(value, Mapping)]
    return "\n".join(filter(None, [text, *inner]))


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _value(value: str | Collection[str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def main(arguments: Iterable[str] | None = None) -> None:
    """Write both folders, and print their paths, the core's first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the two folders go")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    pyproject = read_pyproject()
    for distribution in distributions(pyproject):
        write(distribution, pyproject, chosen.folder / distribution.name)
        print(chosen.folder / distribution.name)


if __name__ == "__main__":
    main()
