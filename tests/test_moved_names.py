"""Names that have moved: the old ones go on working for one release, in a checkout and in an installed gradbus."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbus.moved import MovedModuleFinder

MOVED = {"old_place": "new_place", "old_place.lone": "elsewhere"}


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
