"""The diff of docs/script.md, applied to a file with the lines that it names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mnist_example import changed

EXAMPLE = """import torch


def main():
    dataset1 = [1, 2]
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")
"""


def test_the_example_becomes_a_client_by_five_lines(root: Path) -> None:
    source, added = changed(EXAMPLE, (root / "docs" / "script.md").read_text(encoding="utf-8"))
    assert added == 5
    ast.parse(source)
    assert source.splitlines()[0] == "import gradbus"
    new = [line for line in source.splitlines() if line.strip() not in {one.strip() for one in EXAMPLE.splitlines()}]
    assert len(new) == 5
    assert "for epoch in" not in source
    assert source.endswith(EXAMPLE[EXAMPLE.index("    if args.save_model") :])


def test_an_example_with_other_lines_is_refused(root: Path) -> None:
    other = EXAMPLE.replace("        scheduler.step()", "        print(epoch)\n        scheduler.step()")
    with pytest.raises(ValueError, match="other lines than the diff of the page"):
        changed(other, (root / "docs" / "script.md").read_text(encoding="utf-8"))
