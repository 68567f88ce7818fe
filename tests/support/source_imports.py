"""What a source file imports, and which calls it makes: read, not run."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

MAPPED = {"_front": "front", "_torch": "torch"}  # folders of runtime that are packages of their own


class Import(NamedTuple):
    line: int
    name: str  # dotted; ``from a import b`` gives "a.b"
    lazy: bool  # inside a function or ``if TYPE_CHECKING``: importing the file does not run it


def layer_of(path: PurePosixPath) -> str:
    return MAPPED.get(path.parts[1], path.parts[0]) if path.parts[0] == "runtime" else path.parts[0]


def package_of(path: PurePosixPath) -> list[str]:
    """The dotted package that relative imports in the file start from."""
    if layer_of(path) == "front":
        return ["gradbus", *path.parts[2:-1]]
    if layer_of(path) == "torch":
        return ["gradbus", "torch", *path.parts[2:-1]]
    return ["gradbus", *path.parts[:-1]]


@functools.lru_cache(maxsize=1)  # one file after the other is read by all rules; the trees of all would fill the memory
def tree_of(source: str) -> ast.Module:
    """Return the syntax tree of a file, which is not to be changed."""
    return ast.parse(source)


_IMPORTANT = (ast.Import, ast.ImportFrom, ast.Call, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVES = (ast.Constant, ast.Name, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


@functools.cache  # all rules go by these, and to walk through the whole tree takes seconds
def important(source: str) -> tuple[tuple[ast.AST, bool], ...]:
    """Imports, calls and classes, and whether importing the file does not run them."""
    found: list[tuple[ast.AST, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(tree_of(source), False)]
    while waiting:
        node, lazy = waiting.pop()
        if isinstance(node, _IMPORTANT):
            found.append((node, lazy))
        if isinstance(node, ast.If) and called(node.test).endswith("TYPE_CHECKING"):
            waiting += [(child, True) for child in node.body]
            waiting += [(child, lazy) for child in node.orelse]
            continue
        inside = lazy or isinstance(node, _FUNCTIONS)
        waiting += [(child, inside) for child in ast.iter_child_nodes(node) if not isinstance(child, _LEAVES)]
    return tuple(found)


@functools.cache
def imports(path: PurePosixPath, source: str) -> tuple[Import, ...]:
    package = package_of(path)

    def made_by(node: ast.AST, lazy: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name, lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                prefix = ".".join([*base, *([module] if module else [])])
                yield from (Import(node.lineno, f"{prefix}.{alias.name}", lazy) for alias in names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if called(node.func).split(".")[-1] in (
                "import_module",
                "__import__",
            ):
                yield Import(node.lineno, name, lazy)

    return tuple(sorted(item for node, lazy in important(source) for item in made_by(node, lazy)))


def called(function: ast.expr) -> str:
    """The name, with dots, of what is called: the same as of ast.unparse, which takes far longer."""
    match function:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{called(value)}.{name}"
    return ast.unparse(function)


@functools.cache
def calls(source: str) -> tuple[tuple[ast.Call, str], ...]:
    """Each call with the name of what it calls."""
    return tuple((node, called(node.func)) for node, _ in important(source) if isinstance(node, ast.Call))
