"""Packages that gradbus needs and that are missing or broken: one sentence that says which, and how to install it.

Nothing is imported here that may itself be missing.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from types import TracebackType

_MODULES = {"pillow": "PIL"}  # projects whose module has another name
_FOLDER = re.compile(r"[/\\](?:site|dist)-packages[/\\]([A-Za-z0-9_]+)")


def requirements() -> dict[str, str]:
    """Return what gradbus is built on, as it asks for it: ``{"torch": "torch>=2.6"}``, extras too. By project name."""
    try:
        lines = requires("gradbus") or []
    except PackageNotFoundError:  # run from the tree by a tool
        lines = []
    asked = [line.partition(";")[0].strip() for line in lines]
    return {_project(line): line for line in reversed(asked) if _project(line) != "gradbus"}


def install_line(*projects: str, again: bool = False) -> str:
    """The command that installs them into this Python. ``again``: also what is there already."""
    asked = requirements()
    named = " ".join(f"'{asked.get(project, project)}'" for project in projects)
    return f"{sys.executable} -m pip install {'--force-reinstall --no-cache-dir ' * again}{named}"


def explain(error: BaseException) -> str:
    """A sentence about a package that is missing or cannot be loaded, where that is what went wrong; else empty."""
    projects = {_MODULES.get(project, project): project for project in requirements()}
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        project = projects.get(error.name.partition(".")[0])
        if project is not None:
            return f"the package {project} is not installed here. Install it: {install_line(project)}"
    module = _loading(error.__traceback__)
    project = projects.get(module)
    if project is None:
        return ""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return (
        f"the package {_named(project)} cannot be loaded: {what}. Install it anew: {install_line(project, again=True)}"
    )


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


def _project(line: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].replace("-", "_").lower()


def _named(project: str) -> str:
    try:
        return f"{project} {version(project)}"
    except PackageNotFoundError:
        return project
