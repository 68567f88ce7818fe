"""Lines that Cyclone DDS writes, read by the threads of several buses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from gradbus.runtime.transport.dds import log_sink
from gradbus.runtime.transport.dds.log_sink import DdsLog

HEADER = b"1712345678.123456 [7]       recv: "
sink = DdsLog()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end that Cyclone writes to, of the log that is read. To its own one the C library alone writes, in lines."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr(sink, "_read", read)
    yield write
    os.close(read)
    os.close(write)


def test_of_a_long_line_that_comes_in_parts_the_beginning_is_kept(pipe: int) -> None:
    os.write(pipe, HEADER + b"a" * 500)
    lines = sink.lines()
    for _ in range(5):
        os.write(pipe, b"b" * log_sink.READ_BYTES)
        lines += sink.lines()
    os.write(pipe, b"\n" + HEADER + b"next\n")
    assert lines + sink.lines() == ["a" * log_sink.MAX_LINE, "next"]


def test_a_line_whose_parts_are_read_by_two_threads_is_one_line(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread comes while the first one has read, and has not kept the rest yet."""
    read_on: list[Callable[[], object]] = []

    class Data(bytes):
        def __radd__(self, before: bytes) -> Data:
            return Data(before + bytes(self))

        def split(self, *arguments: object) -> list[bytes]:  # type: ignore[override]
            if read_on:
                read_on.pop()()
            return bytes(self).split(b"\n")

    def second_comes() -> None:
        second.start()
        second.join(0.2)  # it has to wait for the first one

    read = os.read
    monkeypatch.setattr(os, "read", lambda *arguments: Data(read(*arguments)))
    lines: list[str] = []
    second = threading.Thread(target=lambda: lines.extend(sink.lines()))
    read_on.append(second_comes)
    os.write(pipe, HEADER + b"first\n" + HEADER + b"sec")
    monkeypatch.setattr(log_sink, "READ_BYTES", 2 * len(HEADER) + len("first\nsec"))
    os.write(pipe, b"ond\n")
    assert sink.lines() == ["first"]
    second.join(30)
    assert lines == ["second"]
