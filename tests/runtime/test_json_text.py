"""JSON from files: within a size, and one kind of error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from gradbus.runtime.json_text import parse_json, read_text
from gradbus.runtime.profiling.summary import read_summary

DEEP = "[" * 100_000


def test_json_comes_back_and_constants_as_they_are_asked_for() -> None:
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert parse_json("[NaN, -Infinity]", parse_constant=lambda name: name) == ["NaN", "-Infinity"]


@pytest.mark.parametrize("text", ["", "{", "1 2", DEEP, '{"a":' * 100_000, "1" * 5000])
def test_what_is_no_json_or_too_deep_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the decoder's words, in part
        parse_json(text)


def test_values_are_counted_before_they_take_memory() -> None:
    text = "[" + "{}," * 100_000 + "0]"
    assert len(parse_json(text, max_values=200_001)) == 100_001
    tracemalloc.start()
    with pytest.raises(ValueError, match="it has 200,001 values, at most 200,000 are read"):
        parse_json(text, max_values=200_000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("größe".encode())
    assert read_text(path, 7) == "größe"
    with pytest.raises(ValueError, match="more than 6 bytes"):
        read_text(path, 6)
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(path, 6)


def test_an_endless_file_takes_no_more_memory_than_the_limit() -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_text(Path("/dev/zero"), 1000)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


AMOUNTS = '"mean": {}, "max": {}, "total": {}, "outside": {}'


@pytest.mark.parametrize(
    "bad",
    [
        DEEP,
        '{"kind": "start", "rank": 1e400}',
        '{"kind": "window", "rank": Infinity}',
        '{"kind": "start", "rank": -1}',
        f'{{"kind": "summary", "rank": [], {AMOUNTS}}}',
        f'{{"kind": "summary", "rank": {10**400}, {AMOUNTS}}}',
        f'{{"kind": "window", "rank": 3, "first_step": 0, "last_step": 1, "steps": {10**400}, {AMOUNTS}}}',
    ],
)
def test_a_line_of_a_profile_that_cannot_be_is_left_out(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "profile-rank-0.jsonl"
    path.write_text(f'{bad}\n{{"kind": "start", "rank": 3}}\n{bad}\n', encoding="utf-8")
    summary = read_summary(path)
    assert summary is not None
    assert (summary.rank, summary.steps) == (3, 0)
