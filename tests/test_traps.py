"""docs/traps.md names each place that another package's next release may break, and nothing that is gone."""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "traps.md"
FOLDERS = ("actors", "codecs", "commands", "experiments", "models", "runtime")

# Modules without an underscore that their package does not document.
INTERNAL = (
    "cyclonedds.internal", "cyclonedds.builtin_types", "flwr.common", "flwr.proto", "flwr.supercore",
    "torch.distributed.distributed_c10d",
)  # fmt: skip
# Calls and attributes without an underscore that reach into the interpreter.
REACHING = {
    "gc.disable", "gc.freeze", "gc.set_threshold", "sys.setswitchinterval", "signal.pthread_kill", "sys.setprofile",
    "sys.settrace", "multiprocessing.forkserver",
}  # fmt: skip
DUNDERS = {"__code__", "__class__"}  # what a function or an object is, when it is replaced
PLACES = re.compile(r"(/proc|/sys)(?=/)")  # what the kernel shows, as text

# Private names of classes of ours that another file of ours uses, each with its reason beside the line.
OURS = {
    ("actors/aggregation/merged_buffers.py", "_by_name"), ("runtime/_torch/elastic/generation_store.py", "_link"),
    ("runtime/_torch/groups.py", "_engine"), ("runtime/_torch/groups.py", "_membership"),
    ("runtime/collectives/aggregators.py", "_joined"), ("experiments/bench/sealing.py", "_transport"),
    ("experiments/bench/sealing.py", "_ports"), ("runtime/_torch/optimizer.py", "_reduction"),
}  # fmt: skip
# Texts that begin so and are no names: suffixes, folders of ours, labels.
NO_NAMES = {"_ms", "_mean", "_shared", "_front", "_torch", "_coalesced", "_sealed"}
NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}  # public by Python's documentation


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def sources() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


_LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)  # a third of all nodes


@functools.cache  # several rules go by these, and to walk through the whole tree takes seconds
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(ast.parse(source)) if not isinstance(node, _LEAVES))


@functools.cache
def defined_in(source: str) -> frozenset[str]:
    """Names that a file defines: functions, classes, variables, attributes of self, slots."""
    return definitions(nodes(source))


def definitions(among: Iterable[ast.AST]) -> frozenset[str]:
    found: set[str] = set()
    for node in among:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {one.value for one in ast.walk(value) if isinstance(one, ast.Constant)}
    return frozenset(found)


def private_part(dotted: str) -> str:
    """The name up to its last private part: of ``torch._C.x`` it is ``torch._C``; empty: it has none."""
    parts = dotted.split(".")
    last = max((at for at, part in enumerate(parts) if is_private(part)), default=-1)
    return ".".join(parts[: last + 1])


@functools.cache
def foreign_imports(source: str) -> dict[str, str]:
    """What local names stand for, of modules that are not ours."""
    found: dict[str, str] = {}
    for node in nodes(source):
        match node:
            case ast.Import(names=names):
                for one in names:
                    first = one.name.split(".")[0]
                    found[one.asname or first] = one.name if one.asname else first
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
    return {name: full for name, full in found.items() if full.split(".")[0] != "gradbus"}


def dotted(node: ast.expr) -> list[str]:
    """The parts of ``a.b.c``; empty: it does not begin with a name."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name) if inner := dotted(value):
            return [*inner, name]
    return []


def uses_in(path: str, source: str, ours: frozenset[str]) -> set[str]:
    """What of other packages, the interpreter and the kernel a file uses though it is nobody's promise.

    Args:
        ours: names that any of our files defines.
    """
    imported, here = foreign_imports(source), defined_in(source)
    excused = {number for number, line in enumerate(source.splitlines(), 1) if "noqa: SLF001" in line}
    found: set[str] = set()
    for node in nodes(source):
        match node:
            case ast.Import(names=names):
                found |= {module for one in names for module in of_module(one.name)}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {part for one in names for part in of_module(module, one.name)}
            case ast.Attribute(ctx=ast.Store()):
                found |= of_assignment(node, imported, here)
            case ast.Attribute():
                found |= of_attribute(node, imported, here, ours, is_excused=node.lineno in excused)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[owner, ast.Constant(value=str(name)), *_]
            ):
                found |= {name} if is_private(name) and dotted(owner) != ["self"] else set()
            case ast.Constant(value=str(text)):
                found |= of_text(text, ours)
    return {name for name in found if (path, name) not in OURS}


def of_assignment(node: ast.Attribute, imported: dict[str, str], here: frozenset[str]) -> set[str]:
    """What is replaced: an attribute of another package for the whole process, or what an object is."""
    if node.attr in DUNDERS:
        return {node.attr}
    parts = dotted(node)
    if not parts or parts[0] not in imported:
        is_own = node.attr in here or parts[:-1] in (["self"], ["cls"])
        return {node.attr} if is_private(node.attr) and not is_own else set()
    full = ".".join([imported[parts[0]], *parts[1:]])
    return {node.attr if is_private(node.attr) else full} - {"os.environ"}


def of_attribute(
    node: ast.Attribute, imported: dict[str, str], here: frozenset[str], ours: frozenset[str], *, is_excused: bool
) -> set[str]:
    """A name that is read. ``is_excused``: the linter has found it private, and the line says why it is used."""
    if node.attr == "__code__":
        return {node.attr}
    parts = dotted(node)
    full = ".".join([imported[parts[0]], *parts[1:]]) if parts and parts[0] in imported else ""
    if full in REACHING:
        return {full}
    if not is_private(node.attr) or node.attr in NAMEDTUPLE:
        return set()
    is_other = is_excused and dotted(node.value) not in (["self"], ["cls"])
    return {node.attr} if full or is_other or is_foreign(node.value, node.attr, here, ours) else set()


def is_foreign(owner: ast.expr, name: str, here: frozenset[str], ours: frozenset[str]) -> bool:
    match owner:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return name not in ours  # a base in another file of ours may define it
    return name not in here


def of_module(module: str, name: str = "") -> set[str]:
    if module.split(".")[0] == "gradbus":
        return set()
    full = f"{module}.{name}" if name else module
    found = {one for one in INTERNAL if full == one or full.startswith(one + ".")} | {private_part(full)} - {""}
    return found | ({"ctypes"} if module == "ctypes" else set())


def of_text(text: str, ours: frozenset[str]) -> set[str]:
    """A text that is the name of something private, or a place in ``/proc`` and the like."""
    if re.fullmatch(r"[a-z]\w*(\.\w+)*\._[a-z]\w*", text) and not text.startswith("gradbus"):
        return {text}
    if re.fullmatch(r"_[a-z]\w+\.?", text):
        return {text.rstrip(".")} - ours - NO_NAMES
    return set(PLACES.findall(text)[:1]) if PLACES.match(text) else set()


@functools.cache
def uses() -> dict[str, set[str]]:
    """By file."""
    texts = dict(sources())
    ours = frozenset[str]().union(*map(defined_in, texts.values()))
    found = {path: uses_in(path, text, ours) for path, text in texts.items()}
    return {path: names for path, names in found.items() if names}


def overridden_in(source: str) -> set[str]:
    """Private names of a base class of another package that a class of ours defines anew. Those of packages that are
    not installed here are left out."""
    imported = foreign_imports(source)
    found: set[str] = set()
    for node in (node for node in nodes(source) if isinstance(node, ast.ClassDef)):
        bases = [dotted(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
        for base in (base for base in bases if base and base[0] in imported):
            kind = resolved(".".join([imported[base[0]], *base[1:]]))
            found |= {name for name in definitions(ast.walk(node)) if is_private(name) and hasattr(kind, name)}
    return found - NAMEDTUPLE


@functools.cache
def resolved(name: str) -> object:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


# The page

_PLACE = re.compile(r"^- `([\w./-]+\.py)`: (`[^`]+`(?:, `[^`]+`)*)$", re.MULTILINE)
_PARTS = ("**Gain:**", "**Breaks:**", "**Noticed by:**", "**Remove:**")


def listed() -> dict[str, set[str]]:
    """By file: the names that the page has."""
    found: dict[str, set[str]] = {}
    for path, names in _PLACE.findall(PAGE.read_text(encoding="utf-8")):
        found.setdefault(path, set()).update(re.findall(r"`([^`]+)`", names))
    return found


def entries() -> dict[str, str]:
    """The text of each entry, by its title."""
    parts = re.split(r"^(##+) (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        title: text for level, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True) if level == "###"
    }


def test_each_place_that_relies_on_what_its_owner_may_change_is_on_the_page() -> None:
    known = listed()
    missing = {path: sorted(names - known.get(path, set())) for path, names in uses().items()}
    assert {path: names for path, names in missing.items() if names} == {}, (
        "give each an entry in docs/traps.md, or do without it"
    )


def test_each_private_name_of_a_foreign_base_class_that_ours_defines_anew_is_on_the_page() -> None:
    known = listed()
    found = {path: sorted(overridden_in(text) - known.get(path, set())) for path, text in sources()}
    assert {path: names for path, names in found.items() if names} == {}


def test_such_a_name_is_found() -> None:
    assert overridden_in("import asyncio\nclass Q(asyncio.Queue):\n    def _put(self, item): ...") == {"_put"}


def test_the_page_names_nothing_that_is_gone() -> None:
    gone = []
    for path, names in listed().items():
        file = ROOT / path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        gone += [f"{path}: {name}" for name in names if not re.search(rf"{re.escape(name.split('.')[-1])}(?!\w)", text)]
    assert gone == []


def test_each_entry_has_its_gain_what_breaks_it_a_test_and_a_way_to_remove_it() -> None:
    found = entries()
    assert len(found) > 25
    lacking = {title: [part for part in _PARTS if part not in text] for title, text in found.items()}
    assert {title: parts for title, parts in lacking.items() if parts} == {}


def test_the_tests_that_notice_a_break_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", "".join(entries().values()))
    assert len(named) > 30
    gone = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert gone == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._x()", "_x"),
        ("from torch._C._distributed_c10d import Store", "torch._C._distributed_c10d"),
        ("import torch._dynamo", "torch._dynamo"),
        ("def f(loop):\n    return loop._ready", "_ready"),
        ("def f(loop):\n    return getattr(loop, '_ready', None)", "_ready"),
        (
            "def f(loop):\n    return loop._ready  # noqa: SLF001 - a reason\nclass A:\n    def __init__(self):\n"
            "        self._ready = 1",
            "_ready",
        ),
        ("import asyncio\nclass A(asyncio.Queue):\n    def f(self):\n        return self._getters_of", "_getters_of"),
        ("from flwr.common import serde", "flwr.common"),
        ("import ctypes as ct", "ctypes"),
        ("import gc\ngc.freeze()", "gc.freeze"),
        ("import sys\nsys.setswitchinterval(1)", "sys.setswitchinterval"),
        ("import os\nos._exit(1)", "_exit"),
        ("import torch\ntorch.autograd.backward = f", "torch.autograd.backward"),
        ("f.__code__ = g", "__code__"),
        ("x.__class__ = y", "__class__"),
        ("NAMES = ('_forward_hooks_of_all',)", "_forward_hooks_of_all"),
        ("path = f'/proc/{1}/stat'", "/proc"),
        ("modules = ['torch._inductor']", "torch._inductor"),
    ],
)
def test_such_a_place_is_found(source: str, name: str) -> None:
    assert name in uses_in("actors/x.py", source, defined_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self, other):\n        self._x = other._x",
        "class A(B):\n    def f(self):\n        return super()._f()\n    def _f(self): pass",
        "row._replace(a=1)",
        "from gradbus.runtime import forks\nforks.check(1)",
        "import ast\nast.parse('')",
        "class A:\n    __slots__ = ('_x',)",
    ],
)
def test_what_is_ours_or_public_is_not(source: str) -> None:
    assert uses_in("actors/x.py", source, defined_in(source)) == set()
