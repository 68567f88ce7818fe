"""A package that is missing or broken is one line that says which, and how to install it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gradbus.runtime import needs
from gradbus.runtime.needs import explain, extra_with, how_to_install, import_module, install_line, requirements

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
    modules = "commands.run.status", "commands.report.build", "actors.flower.hub", "actors.flower.node"
    assert run(without("torch", "import " + ", ".join(f"gradbus.{one}" for one in modules))) == (0, "")


def test_the_doctor_runs_without_them_and_reports_them() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            without("cyclonedds", "sys.modules['torch'] = None; ") + CONTROLLER.format(arguments="'doctor'"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )
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
    use = "asyncio.run(gradbus.connect('a').__aenter__())" if name == "connect" else f"gradbus.{name}"
    code, err = run(without(package, f"import asyncio, gradbus; {use}"))
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith(f"ImportError: gradbus: the package {package} is not installed here. Install it: ")
    assert not any(chained in err for chained in ("direct cause", "During handling"))


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("lightning", "lightning", ("lightning",)), ("transformers", "transformers", ("accelerate", "transformers"))],
)
def test_a_callback_without_its_library_is_told_the_same(module: str, package: str, extra: tuple[str, ...]) -> None:
    code, err = run(without(package, f"sys.modules['pytorch_lightning'] = None; import gradbus.{module}"))
    assert code == 1
    assert err.splitlines()[-1] == (
        f"ImportError: gradbus.{module}: the package {package} is not installed here. Install it, which is what the "
        f"extra gradbus[{module}] does: {install_line(*extra)}"
    )


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


def test_an_error_that_was_put_in_place_of_a_missing_package_is_explained_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_cyclonedds.py").write_text("import cyclonedds", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cyclonedds", None)
    with pytest.raises(ImportError) as raised:
        import_module("needs_cyclonedds")
    assert str(raised.value) == f"gradbus: {explain(raised.value)}"
    assert explain(raised.value).startswith("the package cyclonedds is not installed here. Install it: ")


@pytest.mark.parametrize(
    ("module", "project", "other"),
    [
        ("cyclonedds", "cyclonedds", "Or use the other transport, Zenoh, which needs none of it: set bus.connect or"),
        ("zenoh", "eclipse-zenoh", "Or leave bus.connect and bus.listen out, on all members of the job: then the bus"),
    ],
)
def test_a_missing_transport_is_said_with_the_other_one(
    monkeypatch: pytest.MonkeyPatch, module: str, project: str, other: str
) -> None:
    monkeypatch.setattr(needs, "requires", lambda name: ["cyclonedds<11.1,>=11.0", "eclipse-zenoh<2,>=1.9"])
    text = explain(ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.domain"))
    assert text.startswith(f"the package {project} is not installed here. Install it: ")
    assert f". {other}" in text


def test_other_errors_are_not_explained_away() -> None:
    assert explain(ModuleNotFoundError("no module", name="my_package")) == ""
    assert explain(ValueError("x")) == ""


def environment(folder: Path, *, made_by_uv: bool = False) -> Path:
    """The interpreter of a new environment without pip."""
    venv.create(folder, with_pip=False)
    if made_by_uv:
        with (folder / "pyvenv.cfg").open("a", encoding="utf-8") as file:
            file.write("uv = 0.9.1\n")
    return folder / "bin" / "python"


def said_in(python: Path, *, path: Path, call: str = "install_line('matplotlib')") -> str:
    """What this file of gradbus says in another environment, with these programs."""
    file = Path(__file__).resolve().parents[2] / "runtime" / "needs.py"
    code = (
        f"import importlib.util as u; s = u.spec_from_file_location('needs', {str(file)!r}); "
        f"m = u.module_from_spec(s); s.loader.exec_module(m); print(m.{call})"
    )
    environ = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PATH": str(path)}
    # -P: a folder of a clone may hold the metadata of an installation of gradbus.
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True, env=environ)
    return done.stdout.strip()


@pytest.mark.parametrize("where", ["PATH", "beside", "made by it"])
def test_an_environment_without_pip_is_installed_into_by_uv(where: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", made_by_uv=where == "made by it")
    (tmp_path / "bin").mkdir()
    uv = {"PATH": tmp_path / "bin" / "uv", "beside": python.with_name("uv")}.get(where)
    if uv is not None:
        uv.write_text("#!/bin/sh\n")
        uv.chmod(0o755)
    command = uv if where == "beside" else "uv"
    assert said_in(python, path=tmp_path / "bin") == f"{command} pip install --python {python} 'matplotlib'"
    again = said_in(python, path=tmp_path / "bin", call="install_line('mlflow_skinny', again=True)")
    assert again == (
        f"{command} pip install --python {python} --no-cache --reinstall-package mlflow-skinny 'mlflow_skinny'"
    )


def test_an_environment_without_pip_and_uv_gets_pip_first(tmp_path: Path) -> None:
    python = environment(tmp_path / "a venv")
    command = said_in(python, path=tmp_path)
    assert command == f"'{python}' -m ensurepip && '{python}' -m pip install 'matplotlib'"
    subprocess.run([*shlex.split(command.partition(" && ")[0])], check=True, capture_output=True)
    assert said_in(python, path=tmp_path) == f"'{python}' -m pip install 'matplotlib'"


def test_a_package_of_an_extra_is_installed_with_the_rest_of_it() -> None:
    assert how_to_install("jinja2") == (
        f"Install it, which is what the extra gradbus[figures] does: {install_line('matplotlib', 'jinja2')}"
    )
    assert extra_with("mlflow_skinny") == "mlflow"  # and of integrations, behind it
    assert extra_with("torch") == ""
    assert how_to_install("torch") == f"Install it: {install_line('torch')}"
    assert how_to_install("pytest") == f"Install it: {install_line('pytest')}"  # not the 12 others of gradbus[dev]
