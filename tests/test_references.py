"""What a docstring refers to is there: a module that was moved or renamed takes the references to it along."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("actors", "codecs", "commands", "experiments", "models", "runtime")
REFERENCE = re.compile(r":(mod|class|func|exc|data):`~?([\w.]+)`")
SOURCES = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def packages_of(name: str) -> str:
    """The file or folder, below the root and without its suffix, of a dotted name that starts with ``gradbus``."""
    path = name.removeprefix("gradbus").removeprefix(".").replace(".", "/")
    if "/" not in path and path not in (*FOLDERS, "torch"):
        return f"runtime/_front/{path}".rstrip("/")
    return f"runtime/_{path}" if path.split("/")[0] == "torch" else path


def names_in(path: Path) -> set[str]:
    """Names that a module has at its top level, imported ones included, and those of its classes' bodies."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)  # listed by a module that loads its names when they are asked for
    return found


def module_at(path: str) -> Path | None:
    """The source of a module or package, or None where there is none."""
    for file in (ROOT / f"{path}.py", ROOT / path / "__init__.py"):
        if file.is_file():
            return file
    return None


def is_there(source: str, kind: str, target: str) -> bool:
    """Whether a reference of a source file leads to something. One without a dot is of the file itself."""
    if target.startswith("."):
        path = Path(source).parent.as_posix() + "/" + target[1:].replace(".", "/")
    elif target.startswith("gradbus"):
        path = packages_of(target)
    elif "." not in target and kind != "mod":
        package = ROOT / Path(source).parent / "__init__.py"
        return target in names_in(ROOT / source) | names_in(package) | set(dir(builtins))
    else:
        return True  # another package's, or an attribute of a class
    if module_at(path) is not None:
        return True
    module, _, name = path.rpartition("/")
    if kind == "mod" or not module:
        return False
    if (file := module_at(module)) is not None:
        return name in names_in(file)
    module, _, owner = module.rpartition("/")  # a method, or an attribute of a class
    file = module_at(module)
    return file is not None and {owner, name} <= names_in(file)


def test_references_in_docstrings_lead_to_modules_and_names_that_exist() -> None:
    lost = []
    for source in SOURCES:
        for number, line in enumerate((ROOT / source).read_text(encoding="utf-8").splitlines(), 1):
            lost += [
                f"{source}:{number}: {target}"
                for kind, target in REFERENCE.findall(line)
                if not is_there(source, kind, target)
            ]
    assert not lost, "moved or renamed? " + ", ".join(lost)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("mod", ".ddsc"),
        ("class", ".participant.Nobody"),
        ("class", "gradbus.runtime.wire.messages.Nobody"),
        ("class", "Nobody"),
        ("mod", "gradbus.torch.nothing"),
    ],
)
def test_a_reference_to_what_is_gone_is_found(kind: str, target: str) -> None:
    assert not is_there("runtime/transport/channels.py", kind, target)
