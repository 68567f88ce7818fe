"""The mapped layout: what must hold so that the editable install, the wheel and the tests all see the same packages."""

import codecs
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

Make = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("actors", "codecs", "commands", "experiments", "models", "runtime")
INSTALLED = tuple(name for name in FOLDERS if name != "experiments")  # which is part of a checkout, and of no wheel
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
# A reader's machine has neither these folders nor these registries.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:root|work|home/\w+)/\w")
REGISTRY = re.compile(r"(?:index-url|find-links|INDEX_URL|DEFAULT_INDEX)[ =\"']*\w+://|://[^\s/]+/(?:\S+/)?\+?simple\b")


MAPPED = {("runtime", "_front"): (), ("runtime", "_torch"): ("torch",)}  # folders that are no part of gradbus.runtime


def package_name(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(["gradbus", *MAPPED.get(parts[:2], parts[:2]), *parts[2:]])


def repository_files() -> Iterator[Path]:
    """What git tracks or would track; outside of a git checkout (an unpacked sdist), what does not look made."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=False
    )
    if listing.returncode == 0 and listing.stdout:
        yield from (ROOT / name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file())
        return
    made = {"build", "dist", "runs", "__pycache__"}
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in made and not name.startswith(".") and "egg-info" not in name]
        yield from (Path(folder, name) for name in files)


def repository_texts() -> Iterator[tuple[Path, str]]:
    for file in repository_files():
        data = file.read_bytes()
        if b"\0" not in data[:8192] and len(data) < 1 << 20:
            yield file.relative_to(ROOT), data.decode("utf-8", errors="replace")


def python(code: str, *flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_folder_with_an_init_is_a_listed_package() -> None:
    folders = [file.parent for top in INSTALLED for file in (ROOT / top).rglob("__init__.py")]
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_name(folder) for folder in folders)


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {file.parent for top in FOLDERS for file in (ROOT / top).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_mapping_names_folders_that_exist() -> None:
    mapped = {".".join(["gradbus", *name]): "/".join(folder) for folder, name in MAPPED.items()}
    assert SETUPTOOLS["package-dir"] == mapped | {f"gradbus.{name}": name for name in FOLDERS}
    assert all((ROOT / folder).is_dir() for folder in SETUPTOOLS["package-dir"].values())


def test_package_data_covers_every_file_that_is_not_python() -> None:
    patterns = SETUPTOOLS["package-data"]["*"]
    others = [f for f in repository_files() if f.relative_to(ROOT).parts[0] in INSTALLED and f.suffix != ".py"]
    assert [str(file) for file in others if not any(file.match(pattern) for pattern in patterns)] == []


def test_nothing_at_the_root_hides_the_installed_package() -> None:
    assert not (ROOT / "gradbus").exists()
    assert not (ROOT / "gradbus.py").exists()
    assert not (ROOT / "__init__.py").exists()


def test_no_test_or_conftest_lives_inside_a_package() -> None:
    patterns = ("conftest.py", "test_*.py", "*_test.py")
    assert [str(file) for top in FOLDERS for pattern in patterns for file in (ROOT / top).rglob(pattern)] == []


def test_pytest_leaves_out_no_folder_of_tests(request: pytest.FixtureRequest) -> None:
    """Its patterns match the last name alone: "codecs" would leave out tests/codecs."""
    folders = {file.parent for file in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}
    patterns = request.config.getini("norecursedirs")
    assert [str(folder) for folder in folders for pattern in patterns if fnmatch(folder.name, pattern)] == []


def test_codecs_is_still_the_standard_librarys() -> None:
    assert codecs.lookup("utf-8").name == "utf-8"
    assert ROOT not in Path(codecs.__file__).resolve().parents
    assert sys.modules["codecs"] is codecs


def test_no_package_is_imported_a_second_time_from_the_root() -> None:
    """Two copies of a module mean two copies of each class, and isinstance fails between them."""
    doubled = {name for name, module in sys.modules.items() if module and "gradbus" not in name and is_ours(module)}
    assert doubled == set()
    assert not {"gradbus.runtime._front", "gradbus.runtime._torch"} & sys.modules.keys()


def is_ours(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and any(ROOT / folder in Path(file).parents for folder in FOLDERS)


def test_import_from_the_root_finds_the_installed_package() -> None:
    result = python("import codecs, gradbus; codecs.lookup('utf-8'); print(gradbus.__file__)")
    assert result.returncode == 0, result.stderr
    assert "_front" in result.stdout or "site-packages" in result.stdout


IMPORT_ALL_WITHOUT_TORCHVISION = """
import importlib, pkgutil, sys
sys.modules["torchvision"] = None
import gradbus
for layer in ("codecs", "runtime", "models", "actors", "torch"):
    package = importlib.import_module("gradbus." + layer)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for_those_who_have_it = (
            "torch.torchft", "actors.flower.apps", "actors.flower.grid", "actors.flower.payload",
            "actors.trainers.lightning_callback", "actors.trainers.transformers_callback",
        )
        if "._" not in found.name and not found.name.endswith(for_those_who_have_it):
            importlib.import_module(found.name)
for name in getattr(gradbus, "__all__", ()):
    getattr(gradbus, name)
print("imported")
"""


def test_a_machine_without_torchvision_can_import_everything(tmp_path: Path) -> None:
    result = python(IMPORT_ALL_WITHOUT_TORCHVISION, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "imported\n"), result.stderr


def strangers(text: str) -> list[str]:
    """Paths and registries that only the writer's machine has."""
    return [found.group() for pattern in (MACHINE_PATH, REGISTRY) for found in pattern.finditer(text)]


def test_no_file_names_a_machine_or_a_registry() -> None:
    assert [f"{path}: {found}" for path, text in repository_texts() for found in strangers(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("see " + "/".join(["", top, "main", "x.py"]) for top in ("root", "work", "home")),
        "--extra-" + "index-url https" + "://pypi.example/x",
        "https" + "://mirror.example/root/pypi/+" + "simple/",
    ],
)
def test_a_machine_or_a_registry_would_be_found(text: str) -> None:
    assert strangers(text)


def test_constraints_pin_every_dependency_and_name_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .+)?", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        # Flower asks for older versions than these, and lives in an environment of its own: make setup-flower.
        *(text for name, extra in project["optional-dependencies"].items() if name != "flower" for text in extra),
    ]
    names = {re.split(r"[^\w-]", text, maxsplit=1)[0].lower() for text in wanted} - {"gradbus"}
    assert names - {pin.split("==")[0] for pin in pins} == set(), "run: make lock"


def test_the_lock_has_the_pinned_versions_each_with_hashes_and_names_no_registry() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "//" not in text
    assert "--index" not in text
    entries = [entry.split() for entry in text.replace("\\\n", " ").splitlines() if not entry.startswith("#")]
    pins = {entry[0] for entry in entries}
    known = set(
        re.findall(r"^[a-z0-9-]+==[\w.]+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert pins - known == set(), "run: make lock"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    apart = {re.split(r"[^\w-]", text, maxsplit=1)[0] for name in ("fuzz", "integrations") for text in extras[name]}
    assert apart <= {pin.split("==")[0] for pin in known - pins}  # targets of their own take these
    for entry in entries:
        assert any(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in entry), entry[0]


def test_the_classifiers_name_the_versions_of_python_that_tests_are_run_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = project["requires-python"].removeprefix(">=")
    of_ci = re.findall(r"PYTHON=(3\.\d+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    nightly = re.findall(
        r"^\| python-(3\.\d+) \|", (ROOT / "docs" / "nightly.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    of_project = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in project["classifiers"]]
    assert {found[1] for found in of_project if found is not None} == {lowest, *of_ci, *nightly}


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, flags=re.MULTILINE))


def commands(markdown: str) -> Iterator[list[str]]:
    """The words of every command in the shell blocks of a text."""
    for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", markdown, flags=re.MULTILINE | re.DOTALL):
        if language not in ("", "sh", "bash", "shell", "console", "text"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            except ValueError:  # prose or output
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                yield [words[0].rsplit("/", maxsplit=1)[-1], *words[1:]]


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def wrong_targets(markdown: str) -> set[str]:
    named = {
        word for name, *rest in commands(markdown) if name == "make" for word in rest if re.fullmatch("[a-z-]+", word)
    }
    return {word for word in named if not word.startswith("-")} - make_targets()


def wrong_subcommands(markdown: str) -> set[str]:
    named = {rest[0] for name, *rest in commands(markdown) if name == "gradbus" and rest and rest[0][0].isalpha()}
    return named - subcommands() if named else set()


def subcommands() -> set[str]:
    import typer.main

    from gradbus.commands.cli.main import app

    return set(getattr(typer.main.get_command(app), "commands", ()))


def test_every_command_of_the_documents_exists() -> None:
    found = {
        str(file.relative_to(ROOT)): wrong_targets(text) | wrong_subcommands(text)
        for file in documents()
        for text in [file.read_text(encoding="utf-8")]
    }
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_a_command_that_does_not_exist_would_be_found() -> None:
    assert wrong_targets("```sh\n$ WORLD=2 make moonshine ARGS='-x'  # why\nmake test\n```\n") == {"moonshine"}


def test_every_target_is_phony_and_explained() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    phony = {word for line in re.findall(r"^\.PHONY:(.*)$", makefile, flags=re.MULTILINE) for word in line.split()}
    explained = set(re.findall(r"^([a-z-]+):[^#\n]*## ", makefile, flags=re.MULTILINE))
    assert make_targets() == phony == explained


def test_the_targets_are_few() -> None:
    assert len(make_targets()) <= 35


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Runs make with an environment whose programs note what they are given, in the file ``given``."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "pytest"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nprintf "<%s>" {name} "$@" >>"{tmp_path}/given"\n')
        program.chmod(0o755)
    (tmp_path / ".set-up").touch()  # newer than what it is made of
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PART"))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["make", f"VENV={tmp_path}", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("bench-parameter-server", "bench PART=parameter-server"),
        ("test-again", "test PART=again"),
        ("faults", "test PART=faults"),
        ("setup-flower-simulation", "setup-flower FLOWER=simulation"),
    ],
)
def test_a_former_name_of_a_target_prints_the_new_one_and_runs_it(make: Make, former: str, name: str) -> None:
    lines = make("-n", former).stdout.splitlines()
    assert shlex.split(lines[0])[1] == f"make {former}: the name is now: make {name}"
    assert lines[1] == f"make --no-print-directory {name}"
    assert make("-n", *name.split()).returncode == 0


def test_a_part_that_does_not_exist_lists_those_that_do(make: Make) -> None:
    done = make("test", "PART=agian")
    assert done.returncode == 2
    assert "make test: there is no part 'agian'. The parts: again, slice," in done.stderr


@pytest.mark.parametrize("words", ["bench PART=federated", "bench-federated", "bench PART=pauses", "test PART=faults"])
def test_options_reach_the_program_of_a_part_word_by_word(make: Make, tmp_path: Path, words: str) -> None:
    """They pass make and two shells, with quotes of their own."""
    done = make(*words.split(), """ARGS=-k "a and b" 'c d'""")
    assert done.returncode == 0, done.stdout + done.stderr
    given = (tmp_path / "given").read_text()
    assert given.endswith("<-k><a and b><c d>")
    assert given.startswith("<pytest>" if words.startswith("test") else "<python>")


def test_hooks_of_pre_commit_fetch_nothing() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^ *- repo: *(.*)$", text, re.MULTILINE) == ["local"]
    assert set(re.findall(r"^ *language: *(.*)$", text, re.MULTILINE)) == {"system"}
    assert set(re.findall(r"^ *entry: (\S+)", text, re.MULTILINE)) == {".venv/bin/ruff"}
