"""The names that users were told of: what README, docs, examples and public docstrings import, call or subclass.

    python -m public_names --write        (make docs does it)

A name is in the list when a page or an example uses it, when a public package exports it, when the docstring of one of
these names it, or when a string ``gradbus.module:Name`` of the package does. Such a name is a promise: who moves it
leaves an alias for one release. Each line is ``module`` or ``module:attribute``, as :func:`pkgutil.resolve_name` reads.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gradbus.moved import new_name_of

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "public_names.txt"

_EXPORTED = (
    "gradbus",
    "gradbus.actors",
    "gradbus.codecs",
    "gradbus.metrics",
    "gradbus.models",
    "gradbus.rules",
    "gradbus.runtime",
    "gradbus.selectors",
    "gradbus.testing",
    "gradbus.torch",
)
_PAGES = ("*.md", "docs/*.md", "experiments/configs/**/*.toml", "experiments/configs/**/*.md")
_PACKAGES = ("actors", "codecs", "commands", "experiments", "models", "runtime")
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_DOTTED = re.compile(r"(?<![\w/.@-])gradbus(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?(?![\w/]|-\w)")
_BASE = re.compile(r"inherits? `(\w+)` in \[[^\]]*\]\(\.\./([\w/]+)\.py\)")
_STRING = re.compile(r"gradbus(?:\.[A-Za-z_]\w*)+:[A-Za-z_]\w*")
_HEAD = """\
# Names that README, docs, examples and public docstrings tell users to import, call, configure or subclass.
# Made by `make docs`; tests/test_public_names.py imports each. Who moves one leaves an alias for one release.
"""


def public_names(root: Path = ROOT) -> list[str]:
    """All names, sorted, as ``module`` or ``module:attribute``."""
    found: set[str] = set()
    for package in _EXPORTED:
        found |= _resolved(f"{package}.{name}" for name in _exports(package))
    for pattern in _PAGES:
        for page in sorted(root.glob(pattern)):
            found |= names_in_page(page.read_text(encoding="utf-8"))
    for example in sorted((root / "experiments" / "examples").glob("[!_]*.py")):
        found |= _resolved([f"gradbus.experiments.examples.{example.stem}"])
        found |= _resolved(_in_code(example.read_text(encoding="utf-8")))
    for source in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        found |= _resolved(_STRING.findall(source.read_text(encoding="utf-8")))
    for name in sorted(found):
        found |= _resolved(_DOTTED.findall(_docstring(name)))
    return sorted(found)


def names_in_page(text: str) -> set[str]:
    """The names of a page: of its prose, and of what its blocks of Python import and use."""
    return _resolved(_in_page(text))


def text_of(names: Iterable[str]) -> str:
    """The file docs/public_names.txt."""
    return _HEAD + "".join(f"{name}\n" for name in names)


def listed(path: Path = LIST) -> list[str]:
    """The names that the file holds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _exports(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    yield from getattr(module, "__all__", ())


def _in_page(text: str) -> Iterator[str]:
    """Dotted names of the prose, and what the blocks of Python import and use."""
    for language, block in _FENCE.findall(text):
        if language == "python":
            yield from _in_code(inspect.cleandoc(block))
    yield from _DOTTED.findall(text)
    yield from (f"gradbus.{path.replace('/', '.')}.{name}" for name, path in _BASE.findall(text))


def _in_code(text: str) -> Iterator[str]:
    """Yield what a program imports, and the attributes of it that it uses. Blocks with gaps ("...") parse, too."""
    yield from _STRING.findall(text)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "gradbus":
                    yield alias.name
                    modules[alias.asname or "gradbus"] = alias.name if alias.asname else "gradbus"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradbus":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node, modules)):
            yield dotted


def _dotted(node: ast.expr, modules: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and (start := _dotted(node.value, modules)):
        return f"{start}.{node.attr}"
    return None


def _resolved(dotted_names: Iterable[str]) -> set[str]:
    """Of each what exists: a dotted name ends where modules and classes end ("gradbus.log" of a sentence is none)."""
    return {name for dotted in dotted_names if (name := _canonical(dotted.replace(":", "."))) is not None}


def _canonical(dotted: str) -> str | None:
    """``module`` or ``module:attribute`` of a dotted name; methods and deeper attributes belong to their class. The
    changelog also has names that have moved since: these are None."""
    parts = dotted.split(".")
    if any(part.startswith("_") for part in parts) or new_name_of(dotted) is not None:
        return None
    cut = max((cut for cut in range(1, len(parts) + 1) if _is_module(".".join(parts[:cut]))), default=0)
    module = ".".join(parts[:cut])
    if cut == len(parts):
        return module if cut > 1 else None
    if not _has(module, parts[cut]):
        return None
    return f"{module}:{parts[cut]}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except ImportError as error:  # the module above needs an extra
        if missing_extra(error) is None:
            raise
        return False


def _has(module: str, name: str) -> bool:
    """Whether a module has a name; one that needs an extra which is not installed is taken at its word."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError as error:
        if missing_extra(error) is None:
            raise
        return True


def missing_extra(error: BaseException) -> str | None:
    """The package of somebody else that an import lacks, None: the error is of another kind."""
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    return name if name and name.split(".")[0] != "gradbus" else None


def resolve(name: str) -> Any:
    """The module, class or function of a line of the list."""
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def _docstring(name: str) -> str:
    try:
        return inspect.getdoc(resolve(name)) or ""
    except ImportError as error:
        if missing_extra(error) is None:
            raise
        return ""


if __name__ == "__main__":
    text = text_of(public_names())
    if "--write" in sys.argv[1:]:
        LIST.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
