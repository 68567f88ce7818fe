"""Packages that gradbus needs and that are missing or broken: one sentence that says which, and how to install it.

Nothing is imported here that may itself be missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType, TracebackType

_MODULES = {"mlflow_skinny": "mlflow", "pillow": "PIL", "eclipse_zenoh": "zenoh"}  # whose module has another name
_INSTEAD = {
    "cyclonedds": "Or use the other transport, Zenoh, which needs none of it: set bus.connect or bus.listen, on all "
    "members of the job",
    "eclipse_zenoh": "Or leave bus.connect and bus.listen out, on all members of the job: then the bus uses DDS",
}
_OF_DEVELOPERS = ("dev", "integrations")  # extras of which nobody who lacks one package wants all
_EXTRA = re.compile(r"""\bextra == ["']([^"']+)["']""")
_FOLDER = re.compile(r"[/\\](?:site|dist)-packages[/\\]([A-Za-z0-9_]+)")


def requirements() -> dict[str, str]:
    """Return what gradbus is built on, as it asks for it: ``{"torch": "torch>=2.6"}``, extras too. By project name."""
    asked = [line.partition(";")[0].strip() for line in _lines()]
    return {_project(line): line for line in reversed(asked) if _project(line) != "gradbus"}


def extra_with(project: str) -> str:
    """The extra of gradbus that installs a project, as pyproject.toml has it first; empty: it needs none, or none has
    it."""
    owners = [_EXTRA.search(line) for line in _lines() if _project(line) == project]
    found = [owner[1] for owner in owners if owner is not None]
    return found[0] if found and len(found) == len(owners) else ""


def how_to_install(project: str, *, again: bool = False) -> str:
    """A sentence about how to install a project into this environment: "Install it: ...". Of an extra it names all.

    Args:
        project: by its name in :func:`requirements`. again: whether it is there, and broken.
    """
    extra = extra_with(project)
    if again or extra in ("", *_OF_DEVELOPERS):
        return f"Install it{' anew' * again}: {install_line(project, again=again)}"
    projects = [other for other in reversed(requirements()) if extra_with(other) == extra]
    return f"Install it, which is what the extra gradbus[{extra}] does: {install_line(*projects)}"


def install_line(*projects: str, again: bool = False) -> str:
    """The command that installs projects into this environment. ``again``: also what is there already."""
    asked = requirements()
    named = " ".join(f"'{asked.get(project, project)}'" for project in projects)
    command = _installer()
    if not again:
        return f"{command} {named}"
    if command.endswith("-m pip install"):
        return f"{command} --force-reinstall --no-cache-dir {named}"
    return f"{command} --no-cache {' '.join(f'--reinstall-package {_hyphened(one)}' for one in projects)} {named}"


def _installer() -> str:
    """The command of this environment up to the names: an environment that uv has made has no pip."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is not None:
        return f"{python} -m pip install"
    beside = shutil.which("uv", path=Path(sys.executable).parent)
    if shutil.which("uv") is not None or beside is not None or _is_made_by_uv():
        return f"{shlex.quote(beside) if beside and not shutil.which('uv') else 'uv'} pip install --python {python}"
    return f"{python} -m ensurepip && {python} -m pip install"


def _is_made_by_uv() -> bool:
    try:
        return re.search(r"^uv\s*=", Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8"), re.M) is not None
    except (OSError, UnicodeDecodeError):
        return False


def explain(error: BaseException) -> str:
    """A sentence about a package that is missing or cannot be loaded, where that is what went wrong; else empty."""
    if type(error) is ImportError and error.__suppress_context__ and error.__context__ is not None:
        error = error.__context__  # import_module has put its own error in place of this one
    projects = {_MODULES.get(project, project): project for project in requirements()}
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        project = projects.get(error.name.partition(".")[0])
        if project is not None:
            missing = f"the package {_hyphened(project)} is not installed here. {how_to_install(project)}"
            return ". ".join(filter(None, (missing, _INSTEAD.get(project))))
    module = _loading(error.__traceback__)
    project = projects.get(module)
    if project is None:
        return ""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"the package {_named(project)} cannot be loaded: {what}. {how_to_install(project, again=True)}"


def import_module(name: str) -> ModuleType:
    """Import a module of gradbus.

    Raises:
        ImportError: in one sentence, as :func:`explain` has it, where a package that the module needs is missing or
            broken; otherwise as Python raises it.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        if text := explain(error):
            raise ImportError(f"gradbus: {text}") from None
        raise


def fault_of(module: str) -> str:
    """Import a module. Returns what :func:`explain` says where that fails; empty: it works."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return explain(error) or f"the module {module} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _loading(trace: TracebackType | None) -> str:
    """The module below ``site-packages`` that failed while it was being imported; empty: none was."""
    found = ""
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
        match = _FOLDER.search(code.co_filename)
        if match and code.co_name == "<module>" and not found:
            found = match[1]
    return found


def _lines() -> list[str]:
    try:
        return requires("gradbus") or []
    except PackageNotFoundError:  # run from the tree by a tool
        return []


def _project(line: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].replace("-", "_").lower()


def _hyphened(project: str) -> str:
    return project.replace("_", "-")


def _named(project: str) -> str:
    try:
        return f"{project} {version(project)}"
    except PackageNotFoundError:
        return project
