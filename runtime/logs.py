"""Logging with structlog: readable on a terminal, one JSON object a line when redirected. Configured only here."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from typing import Any, Literal, TextIO

import structlog

_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")


def get_logger(name: str, **bound: Any) -> Any:
    """A logger of this package. In a program that embeds gradbus it follows that program's structlog configuration."""
    return structlog.get_logger(source=name, **bound)


class _Lenient:
    """A stream that takes every line. One that cannot be written, as nobody reads the pipe any more, the disk is full
    or the stream is closed, must not end the work that it tells of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(*, level: str = "info", style: Literal["auto", "console", "json"] = "auto") -> None:
    """Set structlog up for a command of gradbus. Programs that embed gradbus configure structlog themselves.

    Args:
        level: debug, info, warning or error.
        style: ``auto`` is console on a terminal and JSON elsewhere.
    """
    as_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S.%f", utc=as_json),
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        processors += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event=24))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(_Lenient(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


def plain_text(text: str) -> str:
    """Without what a terminal would obey: for text that comes from elsewhere."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
