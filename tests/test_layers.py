"""Who may import whom, and what nobody may do: each rule takes a file's path and source and returns its complaints."""

import ast
import codecs
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
from source_imports import MAPPED, called, calls, important, imports, layer_of, tree_of

ROOT = Path(__file__).resolve().parents[1]
ALL = {"codecs", "runtime", "models", "actors", "commands", "experiments", "torch", "front"}
MAY_IMPORT = {
    "codecs": {"codecs"},
    "runtime": {"runtime", "codecs"},
    "models": {"models"},
    "actors": {"actors", "runtime", "codecs"},
    "torch": {"torch", "runtime", "codecs"},
    "commands": ALL - {"experiments"},
    "experiments": ALL,
    "front": ALL - {"experiments"},
}
FOLDERS = sorted(ALL - {"front", "torch"})
DDS_ONLY_IN = {
    f"runtime/transport/dds/{name}.py"
    for name in ("participant", "libddsc", "discovery", "domains", "native_topics", "idl_types")
}
DDS_FOLDER = "runtime/transport/dds"
ZENOH_WITHOUT_IO = {
    f"runtime/transport/zenoh/{name}.py"
    for name in ("inlet", "keys", "messages", "outlet", "place", "session_api", "transport")
}
DDS_PACKAGE = "gradbus.runtime.transport.dds"
# Who imports the transport on DDS although it is not of it: file, and why.
KNOWS_DDS = {
    "runtime/bus/transport_factory.py": "describes the transport before it is open, and opens it",
    "experiments/bench/bare_dds.py": "measures DDS alone, as a reference for the bus",
    "experiments/bench/idle.py": "measures what DDS sends while it searches for others, and how soon it finds them",
}
# Where names of network interfaces are known: their settings, their addresses, and the transports that use them.
KNOW_INTERFACES = ("runtime/network", "runtime/config", "runtime/transport/dds")
NAMES_INTERFACES = {
    "runtime/fast_paths.py": "has the name of the loopback interface, which the system decides",
    "runtime/bus/transport_factory.py": "makes the network's settings, and their default",
    "commands/run/cores.py": "finds the network card behind an interface by its name",
    "commands/lab/namespaces.py": "sets up the loopback interface of a network namespace",
    "experiments/bench/processes.py": "tells gloo of torch which interface to use",
}
LOOPBACK_NAMES = {"lo", "lo0", b"lo", b"lo0"}
MAY_NAME_INTERFACES = re.compile(r"LOOPBACK|['\"]lo0?['\"]|\binterface\b")  # quick: most files hold none
ABOVE_ANY_TRANSPORT = ("runtime/security", "runtime/testing")
OF_ANY_TRANSPORT = {"access_policy", "api", "channels", "sample_layout", "samples", "wrappers"}
# Parts of names that only DDS has: ids and messages of its protocol, its settings, its library.
DDS_WORDS = {
    "dds", "ddsc", "libddsc", "ddsi", "cyclone", "cyclonedds", "guid", "guids", "qos", "rtps", "sedp", "serdata",
    "sertype", "spdp",
}  # fmt: skip
DDS_PHRASES = ("own_prefix", "domain_participant", "DomainParticipant")
MAY_HOLD_DDS_WORDS = re.compile(rf"(?i){'|'.join([*DDS_WORDS, *DDS_PHRASES])}")  # quick: most files hold none
# Files and folders that use such words for something else: where, and for what.
NAMED_AFTER_DDS = {
    "runtime/_torch": "torch.distributed knows the backend by the name 'dds', whatever carries its bytes",
    "experiments/examples": "takes the class of torchft's process group, which is named after the backend",
    "experiments/figures": "draws the time of updates in DDS, a column of files that are stored",
    "experiments/bench": "compares DDS alone, and a machine without shared memory, which it calls dds-only",
}
LOGGING_SET_UP_ONLY_IN = {"runtime/logs.py"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "cPickle", "dill", "cloudpickle", "joblib", "yaml", "torch.package"}
# What runs or unpickles what it is given. torch's own object collectives do.
UNSAFE_CALLS = {
    "eval", "exec", "builtins.eval", "builtins.exec", "torch.hub.load", "torch.jit.load", "dist.all_gather_object",
    "dist.gather_object", "dist.broadcast_object_list", "dist.scatter_object_list", "dist.send_object_list",
    "dist.recv_object_list",
}  # fmt: skip
# What makes more of its input than it is, and the one file that does so within limits. Benchmarks read their own files.
LIMITED_BY = {
    "msgpack.unpackb": "runtime/wire/bounded_msgpack.py", "msgpack.unpack": "",
    "msgpack.Unpacker": "runtime/wire/bounded_msgpack.py", "json.loads": "runtime/json_text.py", "json.load": "",
    "tomllib.loads": "runtime/config/settings.py", "tomllib.load": "",
    "gzip.decompress": "", "zlib.decompress": "", "bz2.decompress": "", "lzma.decompress": "",
}  # fmt: skip
# The folders of runtime: each imports from itself and from those before it in this list.
RUNTIME_ORDER = (
    "runtime", "runtime/optimization", "runtime/in_network", "runtime/algorithms", "runtime/wire", "runtime/config",
    "runtime/network", "runtime/profiling",
    "runtime/shm", "runtime/transport", "runtime/transport/memory", "runtime/transport/dds",
    "runtime/transport/zenoh", "runtime/testing",
    "runtime/security", "runtime/security/identity", "runtime/bus", "runtime/collectives",
    "runtime/_torch/store", "runtime/_torch", "runtime/_torch/elastic", "runtime/_front",
)  # fmt: skip
# Files that still import each other in a ring, also inside functions and for types alone. This set may only shrink.
IN_A_RING: set[str] = set()
READ_THEIR_OWN = ("experiments/bench",)
NEED_THE_TORCH_BACKEND = {"experiments/bench", "experiments/examples"}
NOQA = re.compile(r"#\s*(ruff:\s*)?noqa(:\s*[A-Z]+\d+([,\s]\s*[A-Z]+\d+)*)?(?P<reason>.*)", re.IGNORECASE)

Rule = Callable[[PurePosixPath, str], list[str]]


def arrows_go_down(path: PurePosixPath, source: str) -> list[str]:
    layer = layer_of(path)
    found = []
    for line, name, lazy in imports(path, source):
        parts = name.split(".")
        if parts[0] in FOLDERS and not is_of_the_standard_library(parts):
            found.append(f"line {line}: {name} works only with the root on sys.path; write gradbus.{name}")
        if parts[0] != "gradbus":
            continue
        if MAPPED.keys() & set(parts):
            found.append(f"line {line}: {name} would be a second copy of a package")
        target = parts[1] if len(parts) > 1 and parts[1] in ALL else "front"
        if target not in MAY_IMPORT[layer]:
            found.append(f"line {line}: {layer} imports {name}")
        elif layer == "front" and target == "commands" and not lazy:
            found.append(f"line {line}: {name} must be imported inside the function that needs it")
    return found


def folders_of_runtime_keep_their_order(path: PurePosixPath, source: str) -> list[str]:
    if path.parts[0] != "runtime":
        return []
    own = str(path.parent)
    if own not in RUNTIME_ORDER:
        return [f"{own} has no place in RUNTIME_ORDER"]
    found = []
    for line, name, _ in imports(path, source):
        file = file_of(name)
        folder = str(PurePosixPath(file).parent) if file else own
        if folder.startswith("runtime") and RUNTIME_ORDER.index(folder) > RUNTIME_ORDER.index(own):
            found.append(f"line {line}: {name} is above {own}")
    return found


def is_of_the_standard_library(parts: list[str]) -> bool:
    return parts[0] == "codecs" and all(hasattr(codecs, part) for part in parts[1:])


def dds_stays_behind_the_bus(path: PurePosixPath, source: str) -> list[str]:
    if str(path) in DDS_ONLY_IN:
        return []
    return [f"line {line}: {name}" for line, name, _ in imports(path, source) if name.split(".")[0] == "cyclonedds"]


def zenoh_stays_behind_the_door(path: PurePosixPath, source: str) -> list[str]:
    """Benchmarks may measure Zenoh alone, as a reference."""
    if str(path.parent) in ("runtime/transport/zenoh", "experiments/bench"):
        return []
    return [f"line {line}: {name}" for line, name, _ in imports(path, source) if name.split(".")[0] == "zenoh"]


def what_is_said_on_zenoh_needs_no_library(path: PurePosixPath, source: str) -> list[str]:
    """So it runs over a simulated relay in virtual time: time is its schedule's, and so are threads."""
    if str(path) not in ZENOH_WITHOUT_IO:
        return []
    return [
        f"line {line}: {name}"
        for line, name, _ in imports(path, source)
        if name.split(".")[0] in ("zenoh", "threading", "time", "queue", "socket", "asyncio")
    ]


def imports_of_the_transport_on_dds(path: PurePosixPath, source: str) -> list[str]:
    return [
        f"line {line}: {name}; use runtime/transport/api.py, or ask runtime/bus/transport_factory.py"
        for line, name, _ in imports(path, source)
        if f"{name}.".startswith(f"{DDS_PACKAGE}.")
    ]


def who_is_not_of_the_transport_knows_it_by_its_protocols(path: PurePosixPath, source: str) -> list[str]:
    """runtime/transport/api.py has them."""
    if str(path).startswith(f"{DDS_FOLDER}/") or str(path) in KNOWS_DDS:
        return []
    return imports_of_the_transport_on_dds(path, source)


@functools.cache
def names_with_dds_words(source: str) -> list[str]:
    """Names that a file defines or uses, of which a part is a word of DDS. Texts and modules do not count."""
    if not MAY_HOLD_DDS_WORDS.search(source):
        return []
    return sorted({name for node in ast.walk(tree_of(source)) for name in names_of(node) if has_dds_word(name)})


def names_of(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return (name,)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.ImportFrom(names=aliases):
            return tuple(alias.asname or alias.name for alias in aliases)
        case ast.Import(names=aliases):
            return tuple(alias.asname for alias in aliases if alias.asname)
    return ()


def has_dds_word(name: str) -> bool:
    words = {word.lower() for word in re.findall(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+", name)}
    return bool(words & DDS_WORDS) or any(phrase in name for phrase in DDS_PHRASES)


def words_of_dds_stay_behind_the_door(path: PurePosixPath, source: str) -> list[str]:
    """Settings keep their names (``bus.domain``, ``CYCLONEDDS_URI``), and texts may say DDS."""
    where = str(path)
    if where.startswith((f"{DDS_FOLDER}/", *(f"{place}/" for place in NAMED_AFTER_DDS))):
        return []
    return [f"{name} has a word of DDS" for name in names_with_dds_words(source)]


def how_far_a_bus_reaches_is_asked(path: PurePosixPath, source: str) -> list[str]:
    """The name of an interface does not say it: a document of the user, or another transport, may reach further."""
    if str(path.parent) in KNOW_INTERFACES or str(path) in NAMES_INTERFACES:
        return []
    return uses_of_interface_names(path, source)


@functools.cache
def uses_of_interface_names(path: PurePosixPath, source: str) -> list[str]:
    """Return where a file takes the name of the loopback interface, or compares the name of any."""
    cure = "ask the transport: reach_of(settings).leaves_machine or .is_exposed"
    found = [line for line, name, _ in imports(path, source) if name == "gradbus.runtime.fast_paths.LOOPBACK"]
    if MAY_NAME_INTERFACES.search(source):
        nodes = (node for node in ast.walk(tree_of(source)) if isinstance(node, ast.expr))
        found += [node.lineno for node in nodes if names_an_interface(node)]
    return [f"line {line}: {cure}" for line in sorted(set(found))]


def names_an_interface(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str() | bytes() as value):
            return value in LOOPBACK_NAMES
        case ast.Attribute(attr="LOOPBACK"):
            return True
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()], comparators=others):
            return any(last_name(one) == "interface" for one in (left, *others))
    return False


def security_and_faults_work_over_any_transport(path: PurePosixPath, source: str) -> list[str]:
    """They wrap a transport: what they know of it is its contract, and how a sample is laid out."""
    if not str(path.parent).startswith(ABOVE_ANY_TRANSPORT):
        return []
    found = [(line, name, name.split(".")) for line, name, _ in imports(path, source)]
    return [
        f"line {line}: {name}"
        for line, name, parts in found
        if parts[:3] == ["gradbus", "runtime", "transport"] and not OF_ANY_TRANSPORT.issuperset(parts[3:4] or [""])
    ]


def logging_is_set_up_once(path: PurePosixPath, source: str) -> list[str]:
    if str(path) in LOGGING_SET_UP_ONLY_IN:
        return []
    found = [f"line {call.lineno}" for call, name in calls(source) if name.startswith("structlog.configure")]
    return found + [f"line {line}" for line, name, _ in imports(path, source) if name.startswith("structlog.configure")]


def nothing_runs_foreign_code(path: PurePosixPath, source: str) -> list[str]:
    found = [
        f"line {line}: {name}"
        for line, name, _ in imports(path, source)
        if name.split(".")[0] in UNSAFE_MODULES or name in UNSAFE_MODULES
    ]
    for call, name in calls(source):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in UNSAFE_CALLS:
            found.append(f"line {call.lineno}: {name}")
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"line {call.lineno}: allow_pickle")
    return found


def what_comes_from_outside_is_read_within_limits(path: PurePosixPath, source: str) -> list[str]:
    """docs/fuzzing.md: one reader for each format, which knows how much it may take."""
    if str(path).startswith(READ_THEIR_OWN):
        return []
    found = []
    for call, name in calls(source):
        reader = LIMITED_BY.get(name)
        if reader is not None and str(path) != reader:
            found.append(f"line {call.lineno}: {name}" + (f"; take {reader}" if reader else ""))
        if name.endswith("ZstdDecompressor().decompress") and "max_output_size" not in {
            keyword.arg for keyword in call.keywords
        }:
            found.append(f"line {call.lineno}: decompress without max_output_size")
    return found


def torchvision_is_lazy(path: PurePosixPath, source: str) -> list[str]:
    """A controller's host needs no vision package."""
    found = [item for item in imports(path, source) if item.name.split(".")[0] == "torchvision"]
    match layer_of(path):
        case "experiments":
            return []
        case "models" | "commands":
            return [f"line {item.line}: {item.name} outside of a function" for item in found if not item.lazy]
        case layer:
            return [f"line {item.line}: {item.name} in {layer}" for item in found]


def commands_work_without_the_backend_of_torch(path: PurePosixPath, source: str) -> list[str]:
    """gradbus.torch needs a newer torch than everything else: only what measures or shows it imports it."""
    if layer_of(path) == "torch" or str(path.parent) in NEED_THE_TORCH_BACKEND:
        return []
    return [
        f"line {item.line}: {item.name}"
        for item in imports(path, source)
        if item.name == "gradbus.torch" or item.name.startswith("gradbus.torch.")
    ]


def task_groups_leave_no_cycle(path: PurePosixPath, source: str) -> list[str]:
    """runtime/tasks.py says why. Examples and benchmarks are written as their users would write them."""
    if path.parts[0] == "experiments":
        return []
    return [f"line {call.lineno}: {name}" for call, name in calls(source) if name.endswith("asyncio.TaskGroup")]


def exceptions_from_the_linter_have_a_reason(_: PurePosixPath, source: str) -> list[str]:
    """On the line, or in a comment on the line above."""
    if "noqa" not in source.lower():  # to split a file into tokens takes long
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    lines = ["", *source.splitlines()]

    def above(line: int) -> str:
        return lines[line - 1].strip() if lines[line - 1].lstrip().startswith("#") else ""

    return [
        f"line {line}: {text}"
        for line, text in comments.items()
        if (found := NOQA.search(text)) and not re.search(r"\w{2}", found["reason"] + NOQA.sub("", above(line)))
    ]


def private_names_stay_in_their_file(path: PurePosixPath, source: str) -> list[str]:
    """The linter looks at ``a._b`` alone. Names of packages, such as ``runtime._torch``, are not private."""
    packages = {*MAPPED, "_gradbus", "__main__"}
    return [
        f"line {line}: {name}"
        for line, name, _ in imports(path, source)
        if name.startswith("gradbus.")
        if any(part.startswith("_") and part not in packages for part in name.split("."))
    ]


def the_formatter_leaves_tables_alone_and_nothing_else(_: PurePosixPath, source: str) -> list[str]:
    """``# fmt: skip`` is for a table of literals, whose rows would else be torn apart."""
    marked = {number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# fmt: skip")}
    if not marked:
        return []
    tables = {
        node.end_lineno
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Dict | ast.List | ast.Tuple | ast.Set)
    }
    return [f"line {number} skips the formatter, and no table ends there" for number in sorted(marked - tables)]


SEALED_FOLDERS = ("actors/federated",)
OF_TENSORS = {"data", "grad"}
# Objects, by their name there, that others than their own file change. This list may only shrink.
CHANGED_FROM_OUTSIDE = {
    "progress": "Progress shows where a run stands: each part writes what it does where it does it, displays read it",
}


def parts_are_not_changed_from_outside(path: PurePosixPath, source: str) -> list[str]:
    """A part gets what it needs when it is made, and has methods for what changes. A field is set on ``self`` alone, or
    on an object of another class of the same file, which is the record of the class that does so."""
    if not str(path).startswith(SEALED_FOLDERS):
        return []
    return [
        f"line {one.lineno}: {ast.unparse(one)} is set from outside"
        for one in set_from_outside(source)
        if last_name(one.value) not in CHANGED_FROM_OUTSIDE
    ]


@functools.cache
def set_from_outside(source: str) -> tuple[ast.Attribute, ...]:
    """The fields that are set on anything but ``self``, where no other class of this file has a field of that name."""
    tree = tree_of(source)
    fields = {kind: fields_of(kind) for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef)}
    waiting: list[tuple[ast.AST, ast.ClassDef | None]] = [(tree, None)]
    found = []
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and called(node.value) != "self":
            of_others = set().union(*(own for kind, own in fields.items() if kind is not inside))
            if node.attr not in of_others | OF_TENSORS:
                found.append(node)
        inside = node if isinstance(node, ast.ClassDef) else inside
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return tuple(found)


def fields_of(kind: ast.ClassDef) -> set[str]:
    """The names that a class annotates, or sets on ``self``."""
    annotated = [line.target for line in kind.body if isinstance(line, ast.AnnAssign)]
    stored = [one for one in ast.walk(kind) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
    names = {one.id for one in annotated if isinstance(one, ast.Name)}
    return names | {one.attr for one in stored if called(one.value) == "self"}


def last_name(value: ast.expr) -> str:
    """The name behind the last dot, without the underscore of a private one."""
    return called(value).rpartition(".")[2].removeprefix("_")


RULES: list[Rule] = [
    parts_are_not_changed_from_outside,
    the_formatter_leaves_tables_alone_and_nothing_else,
    private_names_stay_in_their_file,
    exceptions_from_the_linter_have_a_reason,
    arrows_go_down,
    folders_of_runtime_keep_their_order,
    dds_stays_behind_the_bus,
    zenoh_stays_behind_the_door,
    what_is_said_on_zenoh_needs_no_library,
    who_is_not_of_the_transport_knows_it_by_its_protocols,
    words_of_dds_stay_behind_the_door,
    how_far_a_bus_reaches_is_asked,
    security_and_faults_work_over_any_transport,
    logging_is_set_up_once,
    nothing_runs_foreign_code,
    what_comes_from_outside_is_read_within_limits,
    torchvision_is_lazy,
    commands_work_without_the_backend_of_torch,
    task_groups_leave_no_cycle,
]


def sources(folder: str) -> Iterator[tuple[PurePosixPath, str]]:
    for file in sorted((ROOT / folder).rglob("*.py")):
        yield PurePosixPath(file.relative_to(ROOT).as_posix()), file.read_text(encoding="utf-8")


def test_every_file_keeps_the_rules() -> None:
    files = [item for folder in FOLDERS for item in sources(folder)]
    assert len(files) >= len(FOLDERS)
    found = [
        f"{path}: {text} ({rule.__name__})" for path, source in files for rule in RULES for text in rule(path, source)
    ]
    assert found == []


def test_the_list_of_what_is_changed_from_outside_has_nothing_that_is_not() -> None:
    files = [source for folder in SEALED_FOLDERS for _, source in sources(folder)]
    found = {last_name(one.value) for source in files for one in set_from_outside(source)}
    assert found == CHANGED_FROM_OUTSIDE.keys(), "take what is no longer changed from outside off CHANGED_FROM_OUTSIDE"


def test_tests_reach_into_what_is_private_with_a_reason_only() -> None:
    rules = (
        exceptions_from_the_linter_have_a_reason,
        private_names_stay_in_their_file,
        the_formatter_leaves_tables_alone_and_nothing_else,
    )
    found = [f"{path}: {text}" for path, source in sources("tests") for rule in rules for text in rule(path, source)]
    assert found == []


def test_each_exception_from_the_door_is_still_needed() -> None:
    files = {str(path): source for folder in FOLDERS for path, source in sources(folder)}
    importing = {path for path in files if imports_of_the_transport_on_dds(PurePosixPath(path), files[path])}
    speaking = [path for path, source in files.items() if names_with_dds_words(source)]
    naming = {path for path in files if uses_of_interface_names(PurePosixPath(path), files[path])}
    over = "no longer needed: take these off the list"
    assert NAMES_INTERFACES.keys() - naming == set(), over
    assert KNOWS_DDS.keys() - importing == set(), over
    assert [place for place in NAMED_AFTER_DDS if not any(path.startswith(f"{place}/") for path in speaking)] == [], (
        over
    )


def needs(path: str) -> set[str]:
    """The files of actors that this one imports, by itself or through others."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        here = PurePosixPath(waiting.pop())
        for item in imports(here, (ROOT / here).read_text(encoding="utf-8")):
            file = file_of(item.name)
            if file and file.startswith("actors/") and not item.lazy and file not in found:
                found.add(file)
                waiting.append(file)
    return found


def in_rings(imported: Mapping[str, set[str]]) -> set[str]:
    """Those that import themselves through others. ``imported``: what each imports."""

    def reaches_itself(start: str) -> bool:
        seen, waiting = set[str](), list(imported[start])
        while waiting:
            here = waiting.pop()
            if here not in seen:
                seen.add(here)
                waiting += imported.get(here, ())
        return start in seen

    return {one for one in imported if reaches_itself(one)}


def imported_files(folders: Iterable[str]) -> dict[str, set[str]]:
    """The files that each file of these folders imports, also inside functions and for types alone."""
    found: dict[str, set[str]] = {}
    for path, source in (item for folder in folders for item in sources(folder)):
        files = {file_of(item.name) for item in imports(path, source)}
        found[str(path)] = {file for file in files if file is not None and file != str(path)}
    return found


def test_no_files_import_each_other_in_a_ring() -> None:
    """What imports what includes imports inside functions and those for types alone."""
    rings = in_rings(imported_files(FOLDERS))
    assert rings - IN_A_RING == set(), "files that import each other: have one of them given what it needs"
    assert IN_A_RING - rings == set(), "no longer in a ring: take them out of IN_A_RING"


def folders_between(files: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What each folder (or lone file) of a layer imports of the others, from what each file imports."""
    found: dict[str, set[str]] = {}
    for path, imported in files.items():
        here = "/".join(path.split("/")[:2])
        found.setdefault(here, set()).update({"/".join(file.split("/")[:2]) for file in imported} - {here})
    return found


@pytest.mark.parametrize("layer", ["commands", "experiments"])
def test_no_folders_import_each_other_in_a_ring(layer: str) -> None:
    assert in_rings(folders_between(imported_files([layer]))) == set(), "put what both need in a file of its own"


def test_folders_that_import_each_other_are_found() -> None:
    files = {"commands/run/a.py": {"commands/cli/b.py", "commands/lone.py"}, "commands/cli/c.py": {"commands/run/d.py"}}
    assert in_rings(folders_between(files)) == {"commands/run", "commands/cli"}


def class_names_in_two_files(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of classes, also those inside of functions, that more than one of these sources defines, with the paths.
    A class inside a class is named with it, as in ``Dense.Options``."""
    places: dict[str, set[str]] = {}
    for path, source in files.items():
        classes = [node for node, _ in important(source) if isinstance(node, ast.ClassDef)]
        inside = {inner for node in classes for inner in node.body}
        for node in classes:
            if node not in inside and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(path)
    return {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}


def test_a_class_name_stands_for_one_thing() -> None:
    """A name with an underscore is private to its file, and may be used in others."""
    found = class_names_in_two_files({str(path): source for folder in FOLDERS for path, source in sources(folder)})
    assert found == {}, "rename one of the classes, or have both files use the same"


def test_a_class_name_in_two_files_is_found() -> None:
    files = {
        "a.py": "class One: ...\nclass _Own: ...\nclass Three:\n    class Four: ...",
        "b.py": "def f():\n    class One: ...\nclass _Own: ...\nclass Two:\n    class Four: ...",
    }
    assert class_names_in_two_files(files) == {"One": ["a.py", "b.py"]}


def file_of(name: str) -> str | None:
    """The file of the tree that a dotted import loads last; None for a package or what is not of this tree."""
    parts = name.replace("gradbus.torch.", "gradbus.runtime._torch.").split(".")
    for end in range(len(parts), 1, -1):
        file = "/".join(parts[1:end]) + ".py"
        if parts[0] == "gradbus" and (ROOT / file).exists():
            return file
    return None


def test_the_wings_of_a_federated_run_stand_apart() -> None:
    """The programs of a controller and of a client, and what both are built on; a site has a part of each."""
    wings = [f"actors/federated/{wing}/" for wing in ("controller", "client", "site")]
    own: dict[str, set[str]] = {wing: set() for wing in wings}
    shared: set[str] = set()
    for file in (str(path) for path, _ in sources("actors/federated")):
        next((own[wing] for wing in wings if file.startswith(wing)), shared).add(file)
    controller, client, site = own.values()
    imported = imported_files(["actors/federated"])
    for files, others in (
        (controller, client | site),
        (client, controller | site),
        (shared, controller | client | site),
    ):
        found = {file: imported[file] & others for file in files if imported[file] & others}
        assert found == {}, "what both wings need is a file of actors/federated, or of its model/"
    for wing in own.values():
        assert len(wing) > 1
    assert needs("actors/federated/client/client.py") & controller == set()  # nor by way of other folders


BAD = [
    (
        the_formatter_leaves_tables_alone_and_nothing_else,
        "codecs/q8.py",
        "x = [\n    1,\n]  # fmt: skip\nf(\n    1,\n)  # fmt: skip",
    ),
    (private_names_stay_in_their_file, "tests/codecs/test_top_k.py", "from gradbus.codecs.sparse import _by_numpy"),
    (parts_are_not_changed_from_outside, "actors/federated/client/client.py", "self._training.keeps = True"),
    (parts_are_not_changed_from_outside, "actors/federated/model/named_model.py", "def f(x):\n    x.number += 1"),
    (
        parts_are_not_changed_from_outside,
        "actors/federated/controller/controller.py",
        "class A:\n    n: int = 0\n\n    def f(self, part):\n        self.x = part.n = part.x = 1",
    ),
    (private_names_stay_in_their_file, "models/task.py", "import gradbus.models._mine"),
    (private_names_stay_in_their_file, "models/task.py", "from gradbus.codecs._mine import thing"),
    (exceptions_from_the_linter_have_a_reason, "codecs/q8.py", "x = a._b  # noqa: SLF001"),
    (exceptions_from_the_linter_have_a_reason, "codecs/q8.py", "x = a._b  # noqa: SLF001, B023 -\ny = 1  # a reason"),
    (exceptions_from_the_linter_have_a_reason, "codecs/q8.py", "x = a._b  # noqa: SLF001,B023"),
    (exceptions_from_the_linter_have_a_reason, "codecs/q8.py", "x = a._b  #NOQA: SLF001"),
    (exceptions_from_the_linter_have_a_reason, "codecs/q8.py", "# ruff: noqa: SLF001\nx = a._b"),
    (exceptions_from_the_linter_have_a_reason, "codecs/q8.py", "#\nx = a._b  # noqa"),
    (arrows_go_down, "codecs/q8.py", "from gradbus.runtime import errors"),
    (arrows_go_down, "codecs/q8.py", "from ..runtime.errors import GradbusError"),
    (arrows_go_down, "codecs/q8.py", "from .. import runtime"),
    (arrows_go_down, "codecs/q8.py", "import gradbus"),
    (arrows_go_down, "codecs/q8.py", "def f():\n    import gradbus.runtime.bus.bus"),
    (arrows_go_down, "codecs/q8.py", "import importlib\nimportlib.import_module('gradbus.actors')"),
    (arrows_go_down, "codecs/sub/q8.py", "from ...actors import client"),
    (arrows_go_down, "runtime/bus/bus.py", "from gradbus import Controller"),
    (arrows_go_down, "runtime/bus/bus.py", "from gradbus.actors.federated.client.client import Client"),
    (arrows_go_down, "runtime/bus/bus.py", "from gradbus.models.networks import Cnn"),
    (arrows_go_down, "models/data.py", "from gradbus.runtime import logs"),
    (arrows_go_down, "actors/federated/client/client.py", "from gradbus.models import task"),
    (arrows_go_down, "actors/federated/client/client.py", "if TYPE_CHECKING:\n    from gradbus.models import task"),
    (arrows_go_down, "actors/federated/client/client.py", "from gradbus.commands import cli"),
    (arrows_go_down, "commands/run/demo.py", "def f():\n    from gradbus.experiments.bench import cells"),
    (arrows_go_down, "actors/federated/client/client.py", "from runtime import bus"),
    (arrows_go_down, "actors/federated/client/client.py", "import models.cnn"),
    (arrows_go_down, "actors/federated/client/client.py", "from codecs import get"),
    (arrows_go_down, "commands/cli.py", "from gradbus.runtime._front import connect"),
    (arrows_go_down, "runtime/_front/__init__.py", "from gradbus.commands import cli"),
    (arrows_go_down, "runtime/_front/__init__.py", "def f():\n    from gradbus.experiments import bench"),
    (arrows_go_down, "runtime/_front/__main__.py", "from .commands.cli import main"),
    (arrows_go_down, "runtime/_torch/work.py", "from gradbus.actors.data_parallel.worker import Worker"),
    (arrows_go_down, "runtime/_torch/work.py", "from gradbus.runtime._torch import register"),
    (arrows_go_down, "runtime/bus/bus.py", "from gradbus.torch import register"),
    (folders_of_runtime_keep_their_order, "runtime/transport/channels.py", "from gradbus.runtime.bus.bus import Bus"),
    (folders_of_runtime_keep_their_order, "runtime/security/peers.py", "def f():\n    import gradbus.runtime.bus.bus"),
    (folders_of_runtime_keep_their_order, "runtime/checkpoint.py", "from gradbus.runtime.wire import frames"),
    (folders_of_runtime_keep_their_order, "runtime/new/file.py", ""),
    (dds_stays_behind_the_bus, "runtime/bus/bus.py", "from cyclonedds.domain import DomainParticipant"),
    (dds_stays_behind_the_bus, "commands/doctor.py", "def f():\n    import cyclonedds"),
    (zenoh_stays_behind_the_door, "commands/relay.py", "def f():\n    from zenoh.handlers import Callback"),
    (what_is_said_on_zenoh_needs_no_library, "runtime/transport/zenoh/outlet.py", "import threading"),
    (
        who_is_not_of_the_transport_knows_it_by_its_protocols,
        "runtime/bus/bus.py",
        f"from {DDS_PACKAGE}.participant import Writer",
    ),
    (
        who_is_not_of_the_transport_knows_it_by_its_protocols,
        "commands/doctor/machine.py",
        f"def f():\n    import {DDS_PACKAGE}.network",
    ),
    (
        who_is_not_of_the_transport_knows_it_by_its_protocols,
        "runtime/transport/wait_log.py",
        "if TYPE_CHECKING:\n    from gradbus.runtime.transport import dds",
    ),
    (who_is_not_of_the_transport_knows_it_by_its_protocols, "actors/serve.py", "from ..runtime.transport.dds import x"),
    (words_of_dds_stay_behind_the_door, "runtime/bus/liveness.py", "def f(guid_prefix): ..."),
    (words_of_dds_stay_behind_the_door, "runtime/bus/liveness.py", "x.own_prefixes()"),
    (words_of_dds_stay_behind_the_door, "actors/serve.py", "class DDSPeer: ..."),
    (words_of_dds_stay_behind_the_door, "actors/serve.py", "f(reader_qos=1)"),
    (how_far_a_bus_reaches_is_asked, "commands/buses.py", "from gradbus.runtime.fast_paths import LOOPBACK"),
    (how_far_a_bus_reaches_is_asked, "commands/buses.py", "alone = fast_paths.LOOPBACK"),
    (how_far_a_bus_reaches_is_asked, "actors/serve.py", "alone = name in ('lo', 'lo0')"),
    (how_far_a_bus_reaches_is_asked, "runtime/bus/bus.py", "if settings.interface != other: pass"),
    (words_of_dds_stay_behind_the_door, "commands/doctor/machine.py", "import x as cyclone"),
    (words_of_dds_stay_behind_the_door, "commands/doctor/machine.py", "from x import spdp_port"),
    (
        security_and_faults_work_over_any_transport,
        "runtime/security/identity/admission.py",
        "def f():\n    from gradbus.runtime.transport.dds import libddsc",
    ),
    (security_and_faults_work_over_any_transport, "runtime/testing/faults.py", f"import {DDS_PACKAGE}.participant"),
    (security_and_faults_work_over_any_transport, "runtime/security/sealed.py", "import gradbus.runtime.transport"),
    (words_of_dds_stay_behind_the_door, "actors/serve.py", "dds2 = knownGUIDs"),
    (logging_is_set_up_once, "actors/serve.py", "import structlog\nstructlog.configure(processors=[])"),
    (logging_is_set_up_once, "actors/serve.py", "from structlog import configure"),
    (nothing_runs_foreign_code, "runtime/wire/messages.py", "import pickle"),
    (nothing_runs_foreign_code, "runtime/wire/messages.py", "from marshal import loads"),
    (nothing_runs_foreign_code, "runtime/wire/messages.py", "import shelve as s"),
    (nothing_runs_foreign_code, "models/task.py", "x = eval('1')"),
    (nothing_runs_foreign_code, "models/task.py", "exec('x = 1')"),
    (nothing_runs_foreign_code, "runtime/checkpoint.py", "torch.load(path)"),
    (nothing_runs_foreign_code, "runtime/checkpoint.py", "torch.load(path, weights_only=False)"),
    (nothing_runs_foreign_code, "models/data.py", "np.load(path, allow_pickle=True)"),
    (nothing_runs_foreign_code, "runtime/config/settings.py", "import yaml"),
    (nothing_runs_foreign_code, "runtime/_torch/work.py", "dist.all_gather_object(found, mine)"),
    (nothing_runs_foreign_code, "models/task.py", "from torch import package"),
    (what_comes_from_outside_is_read_within_limits, "runtime/wire/control.py", "msgpack.unpackb(data)"),
    (what_comes_from_outside_is_read_within_limits, "runtime/wire/bounded_msgpack.py", "json.loads(text)"),
    (what_comes_from_outside_is_read_within_limits, "models/mnist_files.py", "gzip.decompress(data)"),
    (what_comes_from_outside_is_read_within_limits, "codecs/s4.py", "zstandard.ZstdDecompressor().decompress(x)"),
    (torchvision_is_lazy, "actors/federated/client/client.py", "def f():\n    import torchvision"),
    (commands_work_without_the_backend_of_torch, "commands/run/commands.py", "def f():\n    import gradbus.torch"),
    (commands_work_without_the_backend_of_torch, "runtime/_front/__init__.py", "from gradbus.torch import register"),
    (task_groups_leave_no_cycle, "actors/federated/client/client.py", "async with asyncio.TaskGroup() as group: ..."),
    (torchvision_is_lazy, "runtime/_front/__init__.py", "import torchvision"),
    (torchvision_is_lazy, "models/data.py", "from torchvision import datasets"),
    (torchvision_is_lazy, "models/data.py", "class A:\n    from torchvision import datasets"),
]
GOOD = [
    (
        the_formatter_leaves_tables_alone_and_nothing_else,
        "codecs/q8.py",
        "x = {\n    1: 2, 3: 4,\n}  # fmt: skip\nf(1)",
    ),
    (private_names_stay_in_their_file, "codecs/q8.py", "from torch import _C\nfrom gradbus.runtime._torch import work"),
    (
        exceptions_from_the_linter_have_a_reason,
        "codecs/q8.py",
        "x = a._b  # noqa: SLF001 - torch has no public name for it\n# Here it stands above.\ny = a._b  # noqa: SLF001",
    ),
    (
        arrows_go_down,
        "codecs/q8.py",
        "import codecs, math, torch\nfrom .base import Codec\nfrom gradbus.codecs import s4",
    ),
    (arrows_go_down, "codecs/q8.py", "from codecs import lookup"),
    (folders_of_runtime_keep_their_order, "runtime/bus/bus.py", "from gradbus.runtime.transport import channels"),
    (folders_of_runtime_keep_their_order, "runtime/transport/channels.py", "from gradbus.codecs import base"),
    (
        arrows_go_down,
        "runtime/bus/bus.py",
        "from gradbus.codecs import base\nfrom .errors import GradbusError\nfrom . import net",
    ),
    (
        arrows_go_down,
        "actors/federated/client/client.py",
        "from gradbus.runtime.bus import Bus\nfrom ..codecs import q8\nfrom . import rounds",
    ),
    (
        arrows_go_down,
        "commands/cli.py",
        "import gradbus\nfrom gradbus.actors import Client\nfrom gradbus.models import cnn",
    ),
    (arrows_go_down, "runtime/_front/__init__.py", "from .actors import Client\nfrom . import codecs"),
    (arrows_go_down, "runtime/_front/__main__.py", "def main():\n    from gradbus.commands.cli.main import main"),
    (
        arrows_go_down,
        "runtime/_torch/work.py",
        "import torch.distributed\nfrom gradbus.torch.calls import Task\nfrom gradbus.runtime.errors import BusClosed\n"
        "from .task import Task",
    ),
    (dds_stays_behind_the_bus, "runtime/transport/dds/participant.py", "import cyclonedds"),
    (zenoh_stays_behind_the_door, "runtime/transport/zenoh/zenoh_session.py", "import zenoh"),
    (what_is_said_on_zenoh_needs_no_library, "runtime/transport/zenoh/zenoh_session.py", "import zenoh, threading"),
    *(
        (
            who_is_not_of_the_transport_knows_it_by_its_protocols,
            where,
            f"from {DDS_PACKAGE}.participant import Participant",
        )
        for where in (*KNOWS_DDS, f"{DDS_FOLDER}/new.py")
    ),
    (
        who_is_not_of_the_transport_knows_it_by_its_protocols,
        "runtime/bus/bus.py",
        "from gradbus.runtime.transport.api import Outlet\nfrom gradbus.runtime.transport import ddsx",
    ),
    (
        words_of_dds_stay_behind_the_door,
        "runtime/bus/bus.py",
        "import cyclonedds\nfrom a.dds.b import c\nadds_up(domain, adds=0, guide='a DDS domain', x='CYCLONEDDS_URI')",
    ),
    (words_of_dds_stay_behind_the_door, "runtime/_torch/backend.py", "class DdsBackend: ..."),
    (
        how_far_a_bus_reaches_is_asked,
        "commands/run/status.py",
        "say(f'on {settings.interface}')\nif interface is None or reach_of(settings).leaves_machine: pass",
    ),
    (how_far_a_bus_reaches_is_asked, "runtime/network/network_config.py", "alone = self.interface == LOOPBACK"),
    (
        security_and_faults_work_over_any_transport,
        "runtime/security/sealed.py",
        "from gradbus.runtime.transport import api\nfrom gradbus.runtime.transport.sample_layout import LAYOUTS",
    ),
    (logging_is_set_up_once, "runtime/logs.py", "import structlog\nstructlog.configure(processors=[])"),
    (
        nothing_runs_foreign_code,
        "models/task.py",
        "model.eval()\ntorch.load(path, weights_only=True)\nnp.load(p, allow_pickle=False)",
    ),
    (
        what_comes_from_outside_is_read_within_limits,
        "runtime/wire/bounded_msgpack.py",
        "msgpack.unpackb(data)\njson.dumps(x)",
    ),
    (
        what_comes_from_outside_is_read_within_limits,
        "codecs/s4.py",
        "zstandard.ZstdDecompressor().decompress(x, max_output_size=9)",
    ),
    (
        parts_are_not_changed_from_outside,
        "actors/federated/client/client.py",
        "class A:\n    n: int = 0\n\n    def g(self):\n        self.x = 0\n\n"
        "class B:\n    def f(self, a):\n        self.y, a.n, a.x = 0, 1, 2\n        a.grad = None",
    ),
    (torchvision_is_lazy, "models/data.py", "def f():\n    from torchvision import datasets"),
    (torchvision_is_lazy, "models/data.py", "if TYPE_CHECKING:\n    import torchvision"),
    (task_groups_leave_no_cycle, "actors/federated/client/client.py", "from gradbus.runtime.tasks import TaskGroup"),
    (commands_work_without_the_backend_of_torch, "runtime/_torch/work.py", "from gradbus.torch.calls import Task"),
    (commands_work_without_the_backend_of_torch, "experiments/examples/local_updates.py", "import gradbus.torch"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_the_rule_finds_a_bad_sample(rule: Rule, path: str, source: str) -> None:
    assert rule(PurePosixPath(path), source)


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_the_rule_lets_a_good_sample_pass(rule: Rule, path: str, source: str) -> None:
    assert rule(PurePosixPath(path), source) == []


def test_every_rule_has_a_bad_and_a_good_sample() -> None:
    assert {rule for rule, _, _ in BAD} == {rule for rule, _, _ in GOOD} == set(RULES)
