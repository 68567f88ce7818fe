"""Compression with ZeRO-1, FSDP and tensor parallel: each cell of the matrix in docs/torch.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doc_pages import rows, section
from torch_node import play

pytestmark = pytest.mark.slow


def test_with_zero_1_each_way_of_compression_gives_the_bits_that_it_gives_with_the_whole_optimizer() -> None:
    first, second = play("sharded_scenes", "zero")
    before, after = first.pop("not finite")[0]
    assert torch.equal(before, after)
    second.pop("not finite")
    for name, (whole, sharded) in first.items():
        assert all(map(torch.equal, whole, sharded)), name
        assert all(map(torch.equal, sharded, second[name][1])), f"{name}: the ranks differ"
    assert len({whole[0].sum().item() for whole, _ in first.values()}) == len(first)  # each is another training


COLUMNS = (
    ("DDP", []),
    ("ZeRO-1", ["ZeRO-1"]),
    ("overlap", ["ZeRO-1 with overlap"]),
    ("shards", ["FSDP2", "HSDP", "tensor parallel"]),
    ("FSDP1", ["FSDP1", "FSDP1 with original parameters", "FSDP1 without shards"]),
)
ROWS = {
    "`with_algorithm`, gradients": "with_algorithm",
    "`hooks`": "hooks",
    "`DistributedOptimizer`": "DistributedOptimizer",
    "`with_algorithm`, weights (`local-sgd` ...)": "weights",
    "`DiLoCo`": "DiLoCo",
}


def test_what_cannot_be_right_is_refused_on_all_ranks_as_the_page_says(root: Path) -> None:
    results = play("sharded_scenes", "refused")
    for result in results:
        told_nothing = [what for what, text in result.items() if not text.startswith(REFUSALS)]
        assert {what: result[what] for what in told_nothing} == {}
    page = (root / "docs" / "torch.md").read_text(encoding="utf-8")
    table = rows(section(page, "With sharded optimizers and models"), "")
    assert [row[0] for row in table] == list(ROWS)
    for row, *cells in table:
        for (_, models), cell in zip(COLUMNS, cells, strict=True):
            refused = [f"{model}, {ROWS[row]}" in results[0] for model in models]
            assert all(refused) == ("refused" in cell or cell == "as `DiLoCo`" or not models), (row, cell)


REFUSALS = ("ConfigError: ", "RuntimeError: register_comm_hook")  # the second one is torch's


def test_a_model_in_shards_exchanges_weights_in_the_group_that_holds_the_same_shard() -> None:
    for result in play("sharded_scenes", "replicas"):
        assert result["DiLoCo"] == result["local-sgd"] == [True, False]
