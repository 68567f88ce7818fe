"""A package that is missing or broken is one line that says which, and how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradbus.runtime.needs import explain, install_line, requirements

CONTROLLER = "import sys; sys.argv = ['gradbus', {arguments}]; from gradbus.__main__ import main; main()"


def run(code: str, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a program that has none of these packages."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr


def without(name: str, code: str) -> str:
    return f"import sys; sys.modules[{name!r}] = None; {code}"


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("cyclonedds", "'status', 'x'"), ("torch", "'demo', '--data', 'glyphs'"), ("typer", "'--version'")],
)
def test_a_command_without_a_package_says_how_to_install_it(package: str, arguments: str, tmp_path: Path) -> None:
    code, err = run(without(package, CONTROLLER.format(arguments=arguments)), GRADBUS_RUN_DIR=str(tmp_path))
    assert code == (1 if package == "typer" else 14), err
    (line,) = err.splitlines()
    assert f"the package {package} is not installed here. Install it: {install_line(package)}" in line
    assert requirements()[package] in line


def test_status_reports_and_the_processes_of_a_flower_app_need_no_torch() -> None:
    modules = "experiments.run.status", "experiments.report.build", "actors.flower.hub", "actors.flower.node"
    assert run(without("torch", "import " + ", ".join(f"gradbus.{one}" for one in modules))) == (0, "")


def test_the_doctor_runs_without_them_and_reports_them() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", without("cyclonedds", "sys.modules['torch'] = None; ")
         + CONTROLLER.format(arguments="'doctor'")],
        capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 8, done.stderr
    for package in ("torch", "cyclonedds"):
        assert (
            f"{package}: the package {package} is not installed here. Install it: {install_line(package)}"
            in done.stdout
        )
    assert "UDP ports" in done.stdout
    assert done.stdout.endswith("not well: see above\n")


@pytest.mark.parametrize("name", ["connect", "Controller"])
def test_a_program_that_imports_gradbus_without_a_package_is_told_the_same(name: str) -> None:
    package = "cyclonedds" if name == "connect" else "torch"
    code, err = run(without(package, f"import gradbus; gradbus.{name}"))
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith(f"ImportError: gradbus: the package {package} is not installed here. Install it: ")
    assert len(err.splitlines()) < 12  # no chain of causes


def test_importing_gradbus_alone_needs_nothing() -> None:
    assert run(without("cyclonedds", "sys.modules['torch'] = None; import gradbus; print(gradbus.__version__)")) == (
        0,
        "",
    )


def test_a_package_that_cannot_be_loaded_is_to_be_installed_anew(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "cyclonedds"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise OSError('libddsc.so.0: cannot open shared object file')\n")
    code, err = run(CONTROLLER.format(arguments="'status', 'x'"), PYTHONPATH=str(folder.parent))
    assert code == 14
    (line,) = err.splitlines()
    assert "cannot be loaded: OSError: libddsc.so.0: cannot open shared object file" in line
    assert line.endswith(f"Install it anew: {install_line('cyclonedds', again=True)}")


def test_other_errors_are_not_explained_away() -> None:
    assert explain(ModuleNotFoundError("no module", name="my_package")) == ""
    assert explain(ValueError("x")) == ""
