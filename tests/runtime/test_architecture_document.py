"""docs/architecture.md names files and threads that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_and_folder_that_it_names_is_there(root: Path, page: str) -> None:
    folder = ""
    missing = []
    for name in re.findall(r"`([\w/.]+(?:\.py|\.toml|/))`", page):
        if "/" in name:
            folder = name.rpartition("/")[0]
        candidates = [root / name, root / folder / name, *(root / part / name for part in ("runtime", "actors"))]
        if not any(path.exists() for path in candidates):
            missing.append(name)
    assert missing == []


def test_every_file_of_the_collectives_is_named(root: Path, page: str) -> None:
    files = {path.name for path in (root / "runtime" / "collectives").glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if not re.search(rf"[`/]{name}`", page)] == []


def test_every_link_leads_somewhere(root: Path, page: str) -> None:
    for page_name in ("architecture.md", "wire.md", "collectives.md"):
        text = (root / "docs" / page_name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (root / "docs" / target).exists(), (page_name, target)


def test_every_thread_that_the_runtime_starts_is_named(root: Path, page: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (root / "runtime").rglob("*.py"))
    started = set(re.findall(r'(?:name|thread_name_prefix)=f?"(gradbus-[\w{}]+)"', sources))
    assert started == {
        "gradbus-receive",
        "gradbus-write",
        "gradbus-processes",
        "gradbus-close",
        "gradbus-delete",
        "gradbus-late",
        "gradbus-memory",
        "gradbus-names",
        "gradbus-probe",
        "gradbus-trial",
        "gradbus-unmap",
        "gradbus-load",
        "gradbus-zenoh",
        "gradbus-side",
        "gradbus-links",
        "gradbus-put",
        "gradbus-{name}",
    }
    for name in started - {"gradbus-{name}"}:
        assert f"`{name}`" in page
