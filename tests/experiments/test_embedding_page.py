"""The examples of docs/embedding.md do what the page says."""

from __future__ import annotations

import ast
import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

import gradbus


@pytest.fixture(scope="module")
def blocks(root: Path) -> list[str]:
    """The page's blocks of Python."""
    page = (root / "docs" / "embedding.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def block_with(blocks: list[str], text: str) -> str:
    return next(block for block in blocks if text in block)


def run(block: str, folder: Path, name: str) -> dict[str, Any]:
    script = folder / "example.py"
    script.write_text(block, encoding="utf-8")
    return runpy.run_path(str(script), run_name=name)


def test_the_first_example_runs_as_it_is(blocks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks[0], tmp_path, "__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert len(lines) == 5
    assert lines[-1].startswith("round 5: accuracy 1.0")


def test_the_web_example_is_a_part_of_another_application(blocks: list[str], tmp_path: Path) -> None:
    app = run(block_with(blocks, "aiohttp"), tmp_path, "example")["app"]

    async def scenario() -> dict[str, Any]:
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            async with ClientSession() as session, session.get(f"http://{host}:{port}/training/status") as answer:
                found: dict[str, Any] = await answer.json()
                return found
        finally:
            await runner.cleanup()

    assert list(asyncio.run(scenario())["jobs"]) == ["left", "right"]


def test_every_example_is_python_and_names_what_there_is(blocks: list[str]) -> None:
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = __import__(node.module, fromlist=["_"])
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gradbus":
            assert hasattr(gradbus, node.attr)
