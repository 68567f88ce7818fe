"""The launcher's pieces that need no process: lines, last lines, and which rank failed first."""

from __future__ import annotations

import os
import threading

import pytest

from gradbus.commands.launch.first_failure import RankExit, first_failure
from gradbus.commands.launch.output import LineSplitter, OutputWriter, Tail, prefix


def lines(*chunks: bytes, limit: int = 100) -> list[bytes]:
    splitter = LineSplitter(limit)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_come_out_the_same_however_they_come_in(size: int) -> None:
    text = b"one\n\ntwo\r\nthree \xc3\xa9\n10 %\r50 %\r100 %\nno end"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert lines(*chunks) == [b"one", b"", b"two", b"three \xc3\xa9", b"100 %", b"no end"]


def test_a_long_line_is_broken_between_characters_and_nothing_is_lost() -> None:
    text = ("x" + "é" * 300).encode()
    pieces = lines(text + b"\n", b"next\n")
    assert pieces.pop() == b"next"
    assert b"".join(pieces) == text
    assert all(len(piece) <= 100 for piece in pieces)
    assert [piece.decode() for piece in pieces]


def test_a_line_without_an_end_takes_no_more_memory_than_the_limit() -> None:
    splitter = LineSplitter(100)
    shown = [line for _ in range(1000) for line in splitter.feed(b"y" * 60)]
    assert sum(map(len, shown)) >= 60_000 - 100
    assert sum(map(len, splitter.close())) <= 100


def test_a_progress_bar_that_never_ends_its_line_takes_no_memory_and_shows_its_last_state() -> None:
    splitter = LineSplitter(100)
    for percent in range(100):
        assert splitter.feed(b"\r%3d %% %s" % (percent, b"#" * 50)) == []
    assert splitter.close() == [b" 99 % " + b"#" * 50]


def test_the_last_lines_begin_with_the_traceback() -> None:
    tail = Tail()
    for number in range(1000):
        tail.add(b"noise %d" % number)
    assert tail.excerpt()[-1] == b"noise 999"
    assert len(tail.excerpt()) == 15
    for line in (b"Traceback (most recent call last):", b"  File x", b"KeyError: 1", b"after"):
        tail.add(line)
    assert tail.excerpt() == [
        b"noise 999",
        b"Traceback (most recent call last):",
        b"  File x",
        b"KeyError: 1",
        b"after",
    ]
    tail.add(b"x" * 20_000)
    tail.add(b"x" * 20_000)
    assert len(tail.excerpt()) == 1


def test_a_crash_of_the_interpreter_is_a_traceback_too() -> None:
    tail = Tail()
    assert not tail.has_traceback
    for line in (b"before", b"Fatal Python error: Segmentation fault", *[b"  File x"] * 30):
        tail.add(line)
    assert tail.has_traceback
    assert tail.excerpt()[:2] == [b"before", b"Fatal Python error: Segmentation fault"]
    assert len(tail.excerpt()) == 32


def test_the_first_rank_to_fail_is_the_first_failure() -> None:
    assert first_failure([]) is None
    assert first_failure([RankExit(0, 0)]) is None
    assert first_failure([RankExit(0, 0), RankExit(2, -11), RankExit(1, 1)]) == RankExit(2, -11)


@pytest.mark.parametrize(
    "consequence", [RankExit(0, 9), RankExit(0, -15, was_asked=True), RankExit(0, 143, was_asked=True)]
)
def test_a_rank_that_only_missed_another_or_was_ended_is_not_the_first_failure(consequence: RankExit) -> None:
    assert first_failure([consequence, RankExit(1, 1, was_asked=True)]) == RankExit(1, 1, was_asked=True)
    assert first_failure([consequence]) == consequence


def test_a_rank_with_a_traceback_is_the_first_failure_even_if_it_had_to_be_ended() -> None:
    ended = RankExit(1, -15, was_asked=True, has_traceback=True)
    assert first_failure([RankExit(0, 9), ended]) == ended
    assert "failed" in str(ended)
    assert ended.exit_code == 1


@pytest.mark.parametrize(
    "reason", [RankExit(1, 1, has_traceback=True), RankExit(1, -11), RankExit(1, 143, True, has_traceback=True)]
)
def test_a_rank_that_waited_for_it_in_vain_is_not_the_first_failure(reason: RankExit) -> None:
    assert first_failure([RankExit(0, 4), reason]) == reason
    assert first_failure([RankExit(0, 4), RankExit(2, 9)]) == RankExit(0, 4)


def test_a_rank_that_somebody_else_stops_is_the_first_failure() -> None:
    assert first_failure([RankExit(0, 143), RankExit(1, 9)]) == RankExit(0, 143)


def test_the_exit_code_of_a_killed_rank_is_that_of_a_shell() -> None:
    assert (RankExit(0, -9).exit_code, RankExit(0, 3).exit_code) == (137, 3)
    assert str(RankExit(0, -11)) == "was killed by SIGSEGV"
    assert str(RankExit(0, -64)) in ("was killed by SIGRTMAX", "was killed by signal 64")


def test_prefixes_without_colours_are_plain() -> None:
    assert prefix(12, "rank 12", colour=False) == b"[rank 12] "
    assert prefix(12, "rank 12", colour=True).endswith(b"m[rank 12]\x1b[0m ")


def test_a_sink_writes_all_before_it_closes() -> None:
    reader, writer = os.pipe()
    sink, closed = OutputWriter(writer), threading.Event()
    for number in range(3):
        sink.put(b"%d" % number)
    sink.start()
    sink.close(closed.set)
    assert closed.wait(10)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"0\n1\n2\n"


def test_a_sink_waits_for_a_reader_that_made_it_non_blocking() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sink, closed = OutputWriter(writer), threading.Event()
    sink.start()
    for _ in range(100):
        sink.put(b"z" * 9_999)
    sink.close(closed.set)
    with os.fdopen(reader, "rb") as file:
        assert len(file.read(1_000_000)) == 1_000_000
        assert closed.wait(10)
    os.close(writer)
