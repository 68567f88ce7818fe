"""Names that have moved: the old ones go on working for one release, in a checkout and in an installed gradbus."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from public_names import missing_extra, resolve

from gradbus import moved
from gradbus.moved import MovedModuleFinder

ROOT = Path(__file__).resolve().parents[1]
MOVED = {"old_place": "new_place", "old_place.lone": "elsewhere"}
# What pages, docstrings and examples named when `commands` was a part of `experiments`.
FORMER = {
    "buses:check": "commands.buses", "buses:open_bus": "commands.buses", "files:ControllerFile": "commands.files",
    "files:load": "commands.files", "communication_table": "experiments.studies.communication_table",
    "report.followed:Totals": "commands.report.followed", "report.metrics:JobCollector": "commands.report.metrics",
    "report.profile_table": "commands.report.profile_table", "report.scalars:Scalars": "commands.report.scalars",
    "report.trackers:TensorBoard": "commands.report.trackers",
    "run.configured_task:ConfiguredTask": "commands.configured_task", "run.lifecycle:guard": "commands.lifecycle",
    "run.lifecycle:say": "commands.lifecycle", "rundir.directory:json_text": "commands.rundir.directory",
    "simulate.claims": "experiments.studies.claims", "simulate.lockstep:Lockstep": "experiments.bench.lockstep",
    "simulate.network:NetworkModel": "commands.simulate.network",
    "simulate.printed_forms": "experiments.studies.printed_forms",
    "simulate.sizes:size_only": "commands.simulate.sizes", "simulate.topology:LinkSpec": "commands.simulate.topology",
    "simulate.topology:cluster": "commands.simulate.topology", "simulate.trace": "commands.simulate.trace",
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``new_place`` and a module ``elsewhere``, known by their former names as well."""
    package = tmp_path / "new_place"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("LIMIT = 3\n")
    (package / "tool.py").write_text("class Tool: ...\nif __name__ == '__main__':\n    print('the tool has run')\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "part.py").write_text("from new_place.tool import Tool\n")
    (tmp_path / "elsewhere.py").write_text("LONE = 1\n")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, MovedModuleFinder(MOVED, "workshop")])
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("old_place", "new_place", "elsewhere", "workshop"):
            del sys.modules[name]


@pytest.mark.usefixtures("places")
def test_a_module_is_the_same_under_both_names_and_the_old_one_warns_once_with_the_new() -> None:
    with pytest.warns(DeprecationWarning, match=r"old_place\.tool has moved to new_place\.tool") as warned:
        old = importlib.import_module("old_place.tool")
    assert len(warned) == 1
    new = importlib.import_module("new_place.tool")
    assert importlib.import_module("old_place.tool") is old is new  # a second warning would be an error here
    assert new.__spec__.name == new.__name__ == "new_place.tool"


@pytest.mark.usefixtures("places")
def test_modules_deep_in_a_package_are_not_loaded_a_second_time() -> None:
    with pytest.warns(DeprecationWarning, match="moved to") as warned:
        old = importlib.import_module("old_place.inner.part")
    assert [str(one.message).partition(" ")[0] for one in warned] == ["old_place.inner.part"]
    assert old.Tool is importlib.import_module("new_place.tool").Tool
    assert not [name for name in sys.modules if name in ("old_place.tool",)]


@pytest.mark.usefixtures("places")
def test_a_warning_is_of_the_line_that_imports() -> None:
    with pytest.warns(DeprecationWarning, match="moved to") as warned:
        from old_place.tool import Tool  # type: ignore[import-not-found]  # noqa: F401 - the import is what is tested
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.usefixtures("places")
def test_names_of_a_package_are_found_by_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="old_place has moved to new_place"):
        from old_place import LIMIT  # type: ignore[import-not-found]
    assert LIMIT == 3
    with pytest.raises(ImportError, match="NOTHING"):
        from old_place import NOTHING  # noqa: F401 - there is none


@pytest.mark.usefixtures("places")
def test_a_longer_old_name_counts_before_a_shorter() -> None:
    with pytest.warns(DeprecationWarning, match="old_place.lone has moved to elsewhere"):
        assert importlib.import_module("old_place.lone").LONE == 1


@pytest.mark.usefixtures("places")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["old_place.nothing", "old_place.tool.nothing", "old_places", "unknown"])
def test_what_never_was_is_not_there(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as failed:
        importlib.import_module(name)
    assert failed.value.name == name


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("name", ["workshop.bench", "workshop.bench.part"])
def test_what_only_a_checkout_has_says_so(name: str) -> None:
    assert importlib.import_module("workshop").__path__ == []
    with pytest.raises(ImportError, match=r"workshop\.bench is not part of an installed gradbus.*checkout.*make setup"):
        importlib.import_module(name)


@pytest.mark.usefixtures("places")
def test_what_only_a_checkout_has_says_so_to_those_who_look_without_an_import() -> None:
    finder = sys.meta_path[-1]
    package = finder.find_spec("workshop", None)
    assert package is not None
    with pytest.raises(ImportError, match=r"workshop\.bench is not part of an installed gradbus"):
        finder.find_spec("workshop.bench", package.submodule_search_locations)


def test_a_moved_program_runs_and_says_where_it_is(places: Path) -> None:
    code = (
        "import runpy, sys; from gradbus.moved import MovedModuleFinder; "
        f"sys.path.insert(0, {str(places)!r}); sys.meta_path.append(MovedModuleFinder({MOVED!r})); "
        "runpy.run_module('old_place.tool', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "the tool has run\n"), done.stderr
    assert "DeprecationWarning: old_place.tool has moved to new_place.tool" in done.stderr


def test_the_finder_of_moved_names_stands_last() -> None:
    code = "import sys, gradbus; print(type(sys.meta_path[-1]).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "MovedModuleFinder\n", done.stderr


@pytest.mark.parametrize("name", ["Client", "Controller", "Site"])
def test_a_class_whose_module_has_become_a_package_is_found_there(name: str) -> None:
    package = importlib.import_module(f"gradbus.actors.federated.{name.lower()}")
    vars(package).pop(name, None)  # as in a process that has not asked yet
    with pytest.warns(DeprecationWarning, match=f"take {name} from gradbus"):
        found = getattr(package, name)
    assert getattr(package, name) is found  # a second warning would be an error here
    assert found is getattr(importlib.import_module("gradbus.actors"), name)
    assert not hasattr(package, "Nothing")


@pytest.mark.parametrize("old", FORMER)
def test_a_name_of_the_release_before_is_the_new_one(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, attribute = old.partition(":")
    monkeypatch.delitem(sys.modules, f"gradbus.experiments.{module}", raising=False)
    try:
        new = resolve(":".join(filter(None, (f"gradbus.{FORMER[old]}", attribute))))
        with pytest.warns(DeprecationWarning, match=f"has moved to gradbus.{FORMER[old]}"):
            former = resolve(f"gradbus.experiments.{old}")
    except ImportError as error:
        if (extra := missing_extra(error)) is None:
            raise
        pytest.skip(f"needs {extra}")
    assert former is new


def test_each_old_name_of_the_table_is_gone_and_each_new_one_is_there() -> None:
    def is_there(name: str) -> bool:
        path = ROOT.joinpath(*name.split(".")[1:])
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()

    assert [old for old in moved.MOVED if is_there(old)] == []
    assert [new for new in moved.MOVED.values() if not is_there(new)] == []


WITHOUT_EXPERIMENTS = """
import importlib, sys, warnings
sys.meta_path[:] = [one for one in sys.meta_path if "Editable" not in getattr(one, "__name__", "")]
warnings.simplefilter("error")
import gradbus.experiments
assert gradbus.experiments.__path__ == []
for name in ("bench", "configs", "examples.embed_aiohttp", "figures.int8", "studies.claims", "simulate.claims",
             "simulate.lockstep"):
    try:
        importlib.import_module("gradbus.experiments." + name)
    except ImportError as error:
        print(error)
warnings.simplefilter("ignore")
import gradbus.experiments.report.metrics as old, gradbus.commands.report.metrics as new
assert old is new
"""


def test_an_installed_gradbus_has_the_old_names_and_says_where_experiments_are(tmp_path: Path) -> None:
    package = tmp_path / "gradbus"
    package.mkdir()
    for path in (ROOT / "runtime" / "_front").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("actors", "codecs", "commands", "models", "runtime"):
        (package / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXPERIMENTS],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.partition(" ")[0].removeprefix("gradbus.experiments.") for line in said] == [
        "bench",
        "configs",
        "examples",
        "figures",
        "studies",
        "studies",
        "bench",
    ]
    assert all("is not part of an installed gradbus" in line and "make setup" in line for line in said)
