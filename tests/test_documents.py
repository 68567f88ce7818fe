"""Every relative link of the documentation leads to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

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
        (file, anchor) for target in targets if not re.match(r"[a-z][a-z+.-]*:", target)
        for file, _, anchor in [target.partition("#")]
    ]  # fmt: skip


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
