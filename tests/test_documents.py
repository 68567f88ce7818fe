"""Every relative link of the documentation leads to a file, and to a heading in it; the README's commands work as they
stand in a fresh shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import typer.main

from gradbus.commands.cli.main import app

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def prose(path: Path) -> str:
    """Without blocks of code, where nothing is a link or a heading."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them: the second one of a name gets ``-1``."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(next(name for name in (anchor, *(f"{anchor}-{n}" for n in range(1, 100))) if name not in found))
    return found


def links(text: str) -> list[tuple[str, str]]:
    """File and anchor of each link and picture that is not an address."""
    bare = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", bare) + re.findall(r"^\[[^\]]+\]: *(\S+)", bare, re.MULTILINE)
    return [
        (file, anchor)
        for target in targets
        if not re.match(r"[a-z][a-z+.-]*:", target)
        for file, _, anchor in [target.partition("#")]
    ]


def broken(path: Path, root: Path = ROOT) -> list[str]:
    wrong = []
    for file, anchor in links(prose(path)):
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or not target.is_relative_to(root):
            wrong.append(file)
        elif anchor and (target.suffix != ".md" or anchor not in anchors(prose(target))):
            wrong.append(f"{file}#{anchor}")
    return wrong


def test_every_relative_link_resolves() -> None:
    found = {str(path.relative_to(ROOT)): broken(path) for path in documents()}
    assert sum(len(links(prose(path))) for path in documents()) > 50
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `x`: two\n[a](#one-x-two) [b](#three) [c](https://x.org/y)\n```\n[d](e.md)\n```\n`[f](g.md)`\n"
    )
    assert links(prose(page)) == [("", "one-x-two"), ("", "three")]
    assert broken(page, tmp_path) == ["#three"]


def test_every_page_is_in_the_index_and_the_index_in_the_readme() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {file for file, _ in links(prose(index))}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed
    named = {file for file, _ in links(prose(ROOT / "README.md"))}
    assert {"docs/README.md", "docs/tutorial-federated.md", "docs/operations.md", "docs/comparison.md"} <= named


# The README's commands


def shell_lines(text: str) -> list[str]:
    """Lines of its blocks of shell, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (line.partition("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def wrong_command(line: str) -> str:
    """Why a command does not work in a fresh shell at the root of a clone that was set up; empty: it does."""
    words = shlex.split(line)
    if words[0] == "make":
        clean = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), "NO_UV": "1"}
        done = subprocess.run(
            ["make", "-n", *words[1:]], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=30
        )
        return "" if done.returncode == 0 else done.stderr.strip()
    if words[0] == "cp":
        return "" if (ROOT / words[1]).is_file() else f"no {words[1]}"
    if words[0] == ".venv/bin/torchrun":
        at = words.index(".venv/bin/gradbus")
        return wrong_command(shlex.join(words[at:]))
    if words[0] != ".venv/bin/gradbus":
        return "" if words[0] == "scp" else f"{words[0]} is not there in a fresh shell"
    group: Any = typer.main.get_command(app)
    try:
        with group.make_context("gradbus", words[1:]) as context:
            given = [*context._protected_args, *context.args]  # noqa: SLF001 - the public name warns that it will go
            name, command, rest = group.resolve_command(context, given)
            while hasattr(command, "resolve_command"):
                name, command, rest = command.resolve_command(context, rest)
            command.make_context(name, list(rest), parent=context)
    except Exception as error:  # click's own, for an option or a command that does not exist
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return ""


def test_the_commands_of_the_readme_work_as_they_stand_in_a_fresh_shell() -> None:
    lines = shell_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(lines) > 12
    assert {line: why for line in lines if (why := wrong_command(line))} == {}


def bare_lines(text: str) -> list[str]:
    """Lines of blocks of code that only work where the environment is active."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (line.partition("  #")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines())
    return [line for line in lines if line.startswith(("gradbus ", "torchrun "))]


def test_pages_with_bare_commands_say_how_a_shell_finds_them() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    bare = {name: text for name, text in pages.items() if bare_lines(text)}
    assert {"tutorial-federated.md", "tutorial-data-parallel.md", "operations.md", "security.md"} <= bare.keys()
    silent = []
    for name, text in bare.items():
        before = text[: re.search(r"^(\$ )?(gradbus|torchrun) ", text, re.MULTILINE).start()]  # type: ignore[union-attr]
        if ". .venv/bin/activate" not in before:
            silent.append(name)
    assert silent == []


def test_the_commands_of_the_tutorials_exist_with_their_options() -> None:
    for name in ("tutorial-federated.md", "tutorial-data-parallel.md"):
        lines = [line for line in bare_lines((ROOT / "docs" / name).read_text(encoding="utf-8")) if "gradbus" in line]
        assert len(lines) > 3
        assert {line: why for line in lines if (why := wrong_command(f".venv/bin/{line}"))} == {}


def test_a_command_that_does_not_work_would_be_found() -> None:
    assert wrong_command("gradbus doctor") == "gradbus is not there in a fresh shell"
    assert "No such option" in wrong_command(".venv/bin/gradbus doctor --peeers x")
    assert "No such command" in wrong_command(".venv/bin/gradbus doctr")
    assert "no-such-target" in wrong_command("make no-such-target")
    assert wrong_command("cp experiments/configs/absent.json x.json") == "no experiments/configs/absent.json"


def test_no_page_installs_a_package_of_our_name_from_a_registry() -> None:
    for path in documents():
        assert not re.search(r"pip install [^`\n]*\bgradbus\b", path.read_text(encoding="utf-8")), path.name
