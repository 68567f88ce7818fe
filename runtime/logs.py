"""Logging with structlog: readable on a terminal, one JSON object a line when redirected. Configured only here."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from gradbus.runtime.plain_text import plain_but_colours, plain_line, plain_text

_MANY_LINES = ("traceback", "exception", "stack")


def get_logger(name: str, **bound: Any) -> Any:
    """A logger of this package. In a program that embeds gradbus it follows that program's structlog configuration."""
    return structlog.get_logger(source=name, **bound)


def process_name() -> str:
    """This process, for a person: ``host:pid``."""
    return f"{socket.gethostname()}:{os.getpid()}"


class _Lenient:
    """A stream that takes every line. One that cannot be written, as nobody reads the pipe any more, the disk is full
    or the stream is closed, must not end the work that it tells of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(plain_but_colours(text))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def writes_json(style: Literal["auto", "console", "json"]) -> bool:
    """Return whether a log of this style has JSON lines: ``auto`` is console on a terminal and JSON elsewhere."""
    return style == "json" or (style == "auto" and not sys.stderr.isatty())


def configure(*, level: str = "info", style: Literal["auto", "console", "json"] = "auto") -> None:
    """Set structlog up for a command of gradbus. Programs that embed gradbus configure structlog themselves.

    Args:
        level: debug, info, warning or error.
        style: ``auto`` is console on a terminal and JSON elsewhere.
    """
    as_json = writes_json(style)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S.%f", utc=as_json),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    if as_json:
        processors += [structlog.processors.JSONRenderer()]
    else:
        processors.append(_plain_values)
        processors.append(_traceback_below)
        processors.append(structlog.dev.ConsoleRenderer(24, colors=sys.stderr.isatty()))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(_Lenient(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


def _plain_values(_: Any, __: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A value that a peer has said cannot colour, hide or forge lines. Others are shown by ``repr``, which escapes."""
    for key, value in entry.items():
        if isinstance(value, str):
            entry[key] = plain_text(value) if key in _MANY_LINES else plain_line(value)
    return entry


def _traceback_below(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Have the console show a traceback that came as text as it shows one that came as an exception: below the line."""
    if "traceback" in event:
        event["exception"] = event.pop("traceback")
    return event
