"""``gradbus data inspect``, and ids of samples from files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gradbus.commands.run.data_shares import Shares, draw_shares, print_shares, shares_of
from gradbus.commands.sample_ids import read_ids, with_ids
from gradbus.runtime.errors import ConfigError


def write(path: Path, **task: object) -> Path:
    data = {"data": "glyphs", "data_options": {"train": 200, "test": 10}, **task}
    path.write_text(json.dumps({"task": data, "federated": {"clients": {"num": 4}}}), encoding="utf-8")
    return path


def text_of(shares: Shares) -> str:
    told = io.StringIO()
    print_shares(shares, Console(file=told, width=100))
    return told.getvalue()


def test_it_shows_the_samples_of_each_client_by_label(tmp_path: Path) -> None:
    config = write(tmp_path / "c.json", partition={"kind": "by_label", "holds": [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]})
    shares = shares_of(config, (), None, None)
    assert int(shares.counts.sum()) == 200
    assert torch.equal((shares.counts > 0).sum(1), torch.tensor([1, 2, 3, 4]))
    text = text_of(shares)
    assert "glyphs, 4 clients" in text
    assert "labels of a client: 1 to 4, median 2" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["0"])
    assert row[1:3] == [str(int(shares.sizes[0]))] * 2, "all that client 0 has is of label 0"


def test_with_many_clients_the_table_has_the_first_and_lines_about_all(tmp_path: Path) -> None:
    text = text_of(shares_of(write(tmp_path / "c.json"), (), None, 100))
    assert "and 80 more clients" in text
    assert "samples of a client: 2 to 2, median 2" in text


def test_distance_is_0_with_the_labels_of_all_and_1_with_none_of_them() -> None:
    counts = torch.tensor([[5, 5, 0, 0], [5, 5, 0, 0], [0, 0, 10, 10], [5, 5, 5, 5]])
    shares = Shares(counts, torch.zeros(4, dtype=torch.float64), "by hand")
    assert shares.distance.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.0])
    only = Shares(torch.tensor([[1, 0], [0, 999]]), torch.zeros(2, dtype=torch.float64), "by hand")
    assert only.distance.tolist() == pytest.approx([0.999, 0.001], abs=1e-6)


@pytest.mark.parametrize("clients", [4, 100])
def test_it_draws_few_clients_as_bars_and_many_as_histograms(clients: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_shares(shares_of(write(tmp_path / "c.json"), (), None, clients), tmp_path / "shares.png")
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("ids.csv", "ann\nbob\nann\n", None),
        ("ids.csv", "image,writer\n1.png,ann\n2.png,bob\n3.png,ann\n", "writer"),
        ("ids.json", '["ann", "bob", "ann"]', None),
    ],
)
def test_ids_come_from_csv_with_or_without_names_of_columns_and_from_json(
    name: str, text: str, column: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    spec = {"kind": "natural", "path": str(tmp_path / name), **({} if column is None else {"column": column})}
    assert with_ids(spec) == {"kind": "natural", "ids": ["ann", "bob", "ann"]}


def test_clients_have_the_samples_of_their_ids(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([number % 4 for number in range(200)]), encoding="utf-8")
    config = write(tmp_path / "c.json", partition={"kind": "natural", "path": str(tmp_path / "ids.json")})
    assert shares_of(config, (), None, None).sizes.tolist() == [50] * 4


@pytest.mark.parametrize(
    ("name", "text", "column", "reason"),
    [
        ("ids.csv", "image,writer\n", "author", "no column 'author'; there are image, writer"),
        ("ids.csv", "image,writer\n1.png\n", "writer", "sample 0: expected a number or a text, got ''"),
        ("ids.json", "{}", None, "expected a list of ids"),
        ("ids.json", "[1, null]", None, "sample 1: expected a number or a text, got 'None'"),
        ("ids.json", "[1", None, "not JSON"),
        ("missing.csv", None, None, "No such file"),
    ],
)
def test_a_file_that_has_no_ids_is_refused_with_what_is_wrong(
    name: str, text: str | None, column: str | None, reason: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        read_ids(tmp_path / name, column)
