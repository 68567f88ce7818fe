"""A target of fuzzing: a parser, inputs to start from, and the memory that it states, which is measured here."""

from __future__ import annotations

import functools
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A parser and its promises.

    Attributes:
        read: gives it an input, and catches the error that the parser may raise; any other one is a defect.
        limit_bytes: memory that an input may take, as the parser's module states it.
        seeds: inputs to start from: messages as they are sent, and some that are wrong in a way of their own.
        max_len: of an input, bytes.
    """

    read: Callable[[bytes], None]
    limit_bytes: int
    seeds: Callable[[], list[bytes]]
    max_len: int = 4096


class Broken(AssertionError):
    """The parser accepted an input that it should refuse, or returned something else than the input holds."""


def must(true: bool, what: str) -> None:
    """Raise :class:`Broken` unless so. Not an ``assert``, which ``python -O`` leaves out."""
    if not true:
        raise Broken(what)


def reads_back(
    decode: Callable[[bytes], Any],
    encode: Callable[[Any], Any],
    error: type[Exception],
    check: Callable[[Any], None] = lambda value: None,
    max_error_chars: int = 20_000,
) -> Callable[[bytes], None]:
    """A reader of inputs of which each raises ``error``, or is decoded to a value that survives another round trip.

    Args:
        encode: may raise ValueError for a value that is never sent.
        check: of the decoded value.
        max_error_chars: of the error's text, which people have to read.
    """

    def read(data: bytes) -> None:
        try:
            value = decode(data)
        except error as refusal:
            must(len(str(refusal)) < max_error_chars, "an error that is too long to read")
            return
        check(value)
        try:
            again = encode(value)
        except ValueError:
            return
        must(encode(decode(again)) == again, "a value comes back as another one")

    return read


@functools.cache
def folder() -> Path:
    """For inputs that are files."""
    return Path(tempfile.mkdtemp(prefix="gradbus-fuzz-"))


def remove_folder() -> None:
    """Remove what :func:`folder` has made, if it has."""
    if folder.cache_info().currsize:
        shutil.rmtree(folder(), ignore_errors=True)
        folder.cache_clear()


def peaks(target: Target, inputs: Iterator[bytes]) -> Iterator[int]:
    """Bytes of memory that each input takes at most: of Python and NumPy, not of torch's own."""
    target.read(next(iter(target.seeds())))  # what is made once, and stays
    tracemalloc.start()
    try:
        for data in inputs:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            target.read(data)
            yield tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


RESIDENT_SLACK_BYTES = 4 << 20  # what a process's memory moves by itself: arenas, pages counted late
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_peaks(target: Target, inputs: Iterator[bytes]) -> Iterator[int]:
    """Bytes by which the process grows at most while it reads each input: whoever takes them, torch too. To a MiB or
    so; 0 where the kernel does not say. Run it with an allocator that gives back at once what is free.
    """
    target.read(next(iter(target.seeds())))
    for data in inputs:
        try:
            _CLEAR_REFS.write_text("5", encoding="ascii")  # forget the highest so far
        except OSError:
            yield 0
            continue
        before = _resident("VmHWM")
        target.read(data)
        yield _resident("VmHWM") - before


def _resident(what: str) -> int:
    (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10
