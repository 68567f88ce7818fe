"""What the page on codecs of your own says to do, in a folder with its files and nothing else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from doc_pages import fenced_blocks, python_blocks
from forked_commands import Commands

SHORT = {"controller": ["--set", "federated.rounds=1", "--set", "federated.training.subset_size=32"], "client": []}
SMALL = ["--set", "task.data=glyphs", "--set", 'task.data_options={"train": 300, "test": 100}']


@pytest.mark.slow
def test_the_commands_of_the_page_run_with_its_files(root: Path, tmp_path: Path, domain: int) -> None:
    page = (root / "docs" / "own-codec.md").read_text(encoding="utf-8")
    (tmp_path / "coarse.py").write_text(python_blocks(page)[0], encoding="utf-8")
    for name, block in zip(("controller", "client"), fenced_blocks(page, "json"), strict=True):
        (tmp_path / f"{name}.json").write_text(block, encoding="utf-8")
    (block,) = fenced_blocks(page, "sh")
    with Commands(tmp_path, domain) as commands:
        for line in block.splitlines():
            program, command, *arguments = shlex.split(line)
            assert program == "gradbus"
            commands.start([command, *arguments, *SHORT[command], *SMALL])
        commands.outputs()
    (run,) = (tmp_path / "runs").iterdir()
    report = json.loads((run / "rounds.jsonl").read_text(encoding="utf-8"))
    values = 1_199_882
    assert (report["clients"], report["bytes_up"]) == ([0], 16 + 5 + 2 * values)
    assert json.loads((run / "clients.json").read_text(encoding="utf-8"))["names"] == [
        {"clients": "0", "name": "site-1"}
    ]
