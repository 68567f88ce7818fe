"""The two distributions: which file goes where, and that the core works without torch."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer.main
from distributions import (
    CORE,
    ROOT,
    Distribution,
    as_toml,
    core_modules,
    core_packages,
    distributions,
    modules_of,
    project_of,
    read_pyproject,
    write,
)
from source_imports import imports

# Packages that an installation of the core only does not have.
ABSENT = {"torch", "torchvision", "cyclonedds", "safetensors", "zstandard", "PIL", "aiohttp", "matplotlib", "simpy"}
# Modules of the core that need the package of an extra.
NEED_AN_EXTRA = {"gradbus.actors.flower.": "flwr", "gradbus.runtime.transport.dds.": "cyclonedds"}
# Commands that work with gradbus-core only. Not all of them exist yet. All others report that they need gradbus.
CORE_COMMANDS = {
    "doctor", "flower node", "flower run", "keys allow", "keys new", "keys remove", "keys show", "keys tls", "relay",
    "service install", "status",
}  # fmt: skip

PYPROJECT = read_pyproject()
MODULES = modules_of(PYPROJECT)
CORE_MODULES = core_modules(PYPROJECT, MODULES)


@pytest.fixture(scope="module")
def both() -> tuple[Distribution, Distribution]:
    return distributions(PYPROJECT)


@pytest.fixture(scope="module")
def folders(both: tuple[Distribution, Distribution], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the two are built from."""
    place = tmp_path_factory.mktemp("distributions")
    for one in both:
        write(one, PYPROJECT, place / one.name)
    return place / both[0].name, place / both[1].name


def test_every_file_of_a_package_is_in_one_of_the_two_and_none_is_in_both(
    both: tuple[Distribution, Distribution],
) -> None:
    core, rest = both
    assert core.files.keys() & rest.files.keys() == set()
    tops = ("actors", "codecs", "commands", "models", "runtime")
    packages = [file.parent for top in tops for file in (ROOT / top).rglob("__init__.py")]
    installed = {*core.files.values(), *rest.files.values()}
    files = {file for folder in packages for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert files == installed


def test_an_installed_file_lies_where_its_module_is_looked_for(both: tuple[Distribution, Distribution]) -> None:
    core, rest = both
    assert core.files["gradbus/__init__.py"] == ROOT / "runtime/_front/__init__.py"
    assert core.files["gradbus/runtime/gradbus.idl"] == ROOT / "runtime/gradbus.idl"
    assert rest.files["gradbus/torch/store/__init__.py"] == ROOT / "runtime/_torch/store/__init__.py"
    assert rest.files["gradbus/commands/report/templates/report.css"].is_file()
    assert "gradbus.commands.report" in rest.packages
    assert "gradbus.commands.report.templates" not in rest.packages


@functools.cache
def imported(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Modules of gradbus, and packages of others, that are imported when a module is."""
    file = MODULES[module]
    path = PurePosixPath(file.relative_to(ROOT))
    names = {item.name for item in imports(path, file.read_text(encoding="utf-8")) if not item.lazy}
    own = {found for name in names if (found := nearest_module(name)) is not None}
    return frozenset(own), frozenset(name.partition(".")[0] for name in names if name.partition(".")[0] != "gradbus")


def nearest_module(name: str) -> str | None:
    """The module that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def test_a_module_of_a_package_of_the_core_is_excepted_where_it_loads_torch_and_only_there() -> None:
    packages = core_packages(PYPROJECT)
    candidates = {name for name in MODULES if (name if is_package(name) else name.rpartition(".")[0]) in packages}
    able = candidates | CORE_MODULES
    while unable := {name for name in able if not imported(name)[0] <= able or imported(name)[1] & {"torch"}}:
        able -= unable
    listed, excepted = PYPROJECT["tool"]["gradbus"]["core"]["except"], sorted(candidates - able)
    assert listed == excepted, {"missing": set(excepted) - set(listed), "not needed": set(listed) - set(excepted)}
    assert able >= CORE_MODULES, f"they load torch, or what only gradbus has: {sorted(CORE_MODULES - able)}"


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def test_single_modules_of_the_core_are_all_needed_there() -> None:
    """By another of its modules, or by one of its commands."""
    needed = {name for module in CORE_MODULES for name in imported(module)[0]}
    needed |= {name for command in CORE_COMMANDS for name in modules_of_command(command)}
    assert set(PYPROJECT["tool"]["gradbus"]["core"]["modules"]) - needed == set()


IMPORT_ALL = """
import importlib, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

folder, absent, modules = json.load(sys.stdin)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.meta_path.insert(0, Absent())
sys.path.insert(0, folder)
"""

REPORT_FAULTS = """
faults = {}
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        faults[name] = error.name
import gradbus
json.dump([gradbus.__file__, faults], sys.stdout)
"""


def in_core_alone(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program where there is the core, and nothing of gradbus or of its packages."""
    given = json.dumps([str(folder), sorted(ABSENT), sorted(CORE_MODULES - {"gradbus.__main__"})])
    command = [sys.executable, "-P", "-c", IMPORT_ALL + program, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=100, check=False)


def test_every_module_of_the_core_can_be_imported_without_torch_and_without_the_rest(
    folders: tuple[Path, Path],
) -> None:
    done = in_core_alone(folders[0], REPORT_FAULTS)
    assert done.returncode == 0, done.stderr
    file, faults = json.loads(done.stdout)
    assert Path(file).is_relative_to(folders[0])
    assert {name: missing for name, missing in faults.items() if not needs_extra(name, missing)} == {}


def needs_extra(module: str, missing: str) -> bool:
    return any(module.startswith(top) and missing.startswith(package) for top, package in NEED_AN_EXTRA.items())


def all_commands() -> dict[str, Any]:
    """The function of each command of the command line, by the words that it is started with."""
    from gradbus.commands.cli.main import app

    def walk(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*words, name))
            else:
                yield " ".join((*words, name)), inspect.unwrap(command.callback)

    return dict(walk(typer.main.get_command(app), ()))


def modules_of_command(command: str) -> set[str]:
    """Modules that the function of a command imports when it runs."""
    function = all_commands().get(command)
    if function is None:
        return set()
    source = textwrap.dedent(inspect.getsource(function))
    names = {
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return {found for name in names if (found := nearest_module(name)) is not None}


def test_a_command_of_the_core_imports_nothing_that_only_gradbus_has() -> None:
    named = {name: modules_of_command(name) - CORE_MODULES for name in CORE_COMMANDS}
    assert {name: modules for name, modules in named.items() if modules} == {}


OTHER_COMMANDS = {
    "aggregator": "CONFIG", "check": "RUN", "client": "CONFIG --id 0", "config reference": "",
    "config schema": "controller", "controller": "CONFIG", "dashboard": "", "data inspect": "CONFIG", "demo": "",
    "export": "RUN", "host": "CONFIG --ids 0", "lab": "true", "matrix": "", "parameter-server": "CONFIG",
    "report": "RUN", "run": "-n 2 -- CONFIG", "simulate": "CONFIG", "virtual": "CONFIG --clients 2", "worker": "CONFIG",
}  # fmt: skip


def test_every_command_is_the_cores_or_is_known_to_need_gradbus() -> None:
    assert all_commands().keys() - CORE_COMMANDS - OTHER_COMMANDS.keys() == set()


RUN_EACH = """
import contextlib, io

from gradbus.__main__ import main

ended = {}
for words in sys.argv[1:]:
    sys.argv[:] = ["gradbus", *words.split()]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as end:
            ended[words] = [end.code, said.getvalue()]
json.dump(ended, sys.__stdout__)
sys.__stdout__.flush()
os._exit(0)
"""


def test_a_command_that_only_gradbus_has_says_so_in_one_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    config.write_text("{}")
    words = {
        name: f"{name} {arguments}".replace("CONFIG", str(config)).replace("RUN", str(tmp_path))
        for name, arguments in OTHER_COMMANDS.items()
    }
    done = in_core_alone(folders[0], f"import os\n{RUN_EACH}", *words.values())
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    for name, line in words.items():
        code, said = ended[line]
        named = name.partition(" ")[0]
        told = f"gradbus {named}: this needs the package gradbus; only gradbus-core is installed here. Install it "
        assert (code, said.startswith(told), said.count("\n")) == (14, True, 1), f"{name}: {code} {said}"
        assert said.rstrip().endswith(f"'gradbus=={PYPROJECT['project']['version']}'")


PROGRAM = """
import asyncio, gradbus

async def main():
    async with gradbus.connect("core", domain=0):
        pass

try:
    asyncio.run(main())
except ImportError as error:
    print(error)
try:
    gradbus.Controller
except ImportError as error:
    print(error)

from gradbus.runtime.needs import explain

for line in ("import gradbus.models", "from gradbus.runtime import checkpoint", "import torch.nn",
             "from gradbus.runtime.logs import nothing", "import nothing"):
    try:
        exec(line)
    except ImportError as error:
        print(bool(explain(error)))
"""


def test_a_program_with_the_core_only_needs_no_actors_for_a_bus_and_is_told_what_a_controller_needs(
    folders: tuple[Path, Path],
) -> None:
    """The library of DDS is absent here, so that is what it is told of the bus. `make smoke` joins one."""
    done = in_core_alone(folders[0], PROGRAM)
    assert done.returncode == 0, done.stderr
    bus, controller, *explained = done.stdout.splitlines()
    assert explained == ["True", "True", "True", "False", "False"]
    assert "cyclonedds" in bus
    assert controller.startswith("gradbus: this needs the package gradbus; only gradbus-core is installed here.")


@pytest.fixture(scope="module")
def metadata(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Message, Message]:
    """The METADATA that the build makes of each."""

    def made(folder: Path) -> Message:
        into = tmp_path_factory.mktemp("metadata")
        code = "import sys; from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"
        command = [sys.executable, "-P", "-c", code, str(into)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        (file,) = into.glob("*.dist-info/METADATA")
        return Parser().parsestr(file.read_text(encoding="utf-8"))

    return made(folders[0]), made(folders[1])


def required(metadata: Message) -> dict[str, str]:
    """Requirements without those of extras, by project."""
    lines = metadata.get_all("Requires-Dist") or []
    return {project_of(line): line for line in lines if "extra ==" not in line}


def test_the_core_asks_for_no_torch_and_gradbus_for_the_core_of_its_version(metadata: tuple[Message, Message]) -> None:
    core, rest = metadata
    assert (core["Name"], rest["Name"]) == ("gradbus-core", "gradbus")
    assert core["Version"] == rest["Version"] == PYPROJECT["project"]["version"]
    assert required(core).keys() & ABSENT == set()
    assert {"numpy", "cryptography", "msgpack", "typer"} <= required(core).keys()
    assert required(rest)[CORE] == f"gradbus-core=={rest['Version']}"
    assert {"torch", "torchvision", "cyclonedds"} <= required(rest).keys()
    both = {project_of(line) for line in PYPROJECT["project"]["dependencies"]}
    assert required(core).keys() | required(rest).keys() == both | {CORE}
    assert set(core.get_all("Provides-Extra")) == {"dds", "flower"}


# Where the package index has a wheel of cyclonedds 11.0, as its list of files shows.
PLATFORMS = [
    ("3.11", "linux", "x86_64", True), ("3.13", "linux", "x86_64", True), ("3.14", "linux", "x86_64", False),
    ("3.11", "linux", "aarch64", False), ("3.13", "darwin", "arm64", True), ("3.13", "darwin", "x86_64", True),
    ("3.14", "darwin", "arm64", False), ("3.13", "win32", "AMD64", True), ("3.13", "win32", "ARM64", False),
]  # fmt: skip


@pytest.mark.parametrize(("python", "system", "processor", "has_wheel"), PLATFORMS)
def test_gradbus_asks_for_cyclonedds_only_where_there_is_a_wheel_of_it(
    metadata: tuple[Message, Message], python: str, system: str, processor: str, has_wheel: bool
) -> None:
    from packaging.requirements import Requirement

    place = {"python_version": python, "sys_platform": system, "platform_machine": processor}
    asked = Requirement(required(metadata[1])["cyclonedds"])
    assert asked.marker is not None
    assert asked.marker.evaluate(place) == has_wheel


def test_the_command_is_the_cores_and_the_backend_of_torch_is_not(folders: tuple[Path, Path]) -> None:
    core, rest = (tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in folders)
    assert core["project"]["scripts"] == PYPROJECT["project"]["scripts"]
    assert "scripts" not in rest["project"]
    assert rest["project"]["entry-points"] == PYPROJECT["project"]["entry-points"]
    assert "entry-points" not in core["project"]


def test_what_is_written_as_toml_is_read_as_it_was() -> None:
    tables: Mapping[str, Any] = {
        "project": {"name": 'a "quoted" \\ name', "list": ["é", "x"], "inner": {"a.b": {"key": "1"}}},
        "tool": {"empty": {"y": "z"}},
    }
    assert tomllib.loads(as_toml(tables)) == tables


def test_a_name_in_the_table_that_is_not_in_the_tree_is_an_error() -> None:
    def changed(**more: list[str]) -> dict[str, Any]:
        core = PYPROJECT["tool"]["gradbus"]["core"]
        return PYPROJECT | {"tool": PYPROJECT["tool"] | {"gradbus": {"core": core | more}}}

    with pytest.raises(ValueError, match=r"has package 'gradbus\.nothing\.\*', which is not in the tree"):
        core_modules(changed(packages=["gradbus.nothing.*"]), MODULES)
    for names in (["gradbus.nothing"], ["gradbus.runtime.logs"]):
        with pytest.raises(ValueError, match=rf"{names[0]}: 'modules' must name"):
            core_modules(changed(modules=names), MODULES)
    with pytest.raises(ValueError, match=r"gradbus\.codecs\.q8: 'modules' must name"):
        core_modules(changed(**{"except": ["gradbus.codecs.q8"]}), MODULES)
