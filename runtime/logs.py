"""Logging with structlog: readable on a terminal, one JSON object a line when redirected. Configured only here.

A program that embeds gradbus and says nothing about it sees warnings and errors alone, on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Literal, TextIO, cast, get_args

import structlog

from gradbus.runtime.plain_text import plain_but_colours, plain_line, plain_text

_Level = Literal["debug", "info", "warning", "error"]
_Style = Literal["auto", "console", "json"]
_MANY_LINES = ("traceback", "exception", "stack")


def get_logger(name: str, **bound: Any) -> Any:
    """A logger of this package: it writes where :func:`log_to` says; else as the program's structlog configuration
    says; where there is neither, warnings and errors to stderr."""
    return _Logger(source=name, **bound)


class _Logger:
    """Looks up at each event where it goes: a program may say so at any time."""

    def __init__(self, **bound: Any) -> None:
        self._bound = bound

    def bind(self, **more: Any) -> _Logger:
        """Return a logger whose events have these facts as well."""
        return _Logger(**{**self._bound, **more})

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):  # what Python itself and its tools look for
            raise AttributeError(method)
        make = _chosen or (structlog.get_logger if structlog.is_configured() else _to_stderr)
        return getattr(make(**self._bound), method)


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


def writes_json(style: _Style) -> bool:
    """Return whether a log of this style has JSON lines: ``auto`` is console on a terminal and JSON elsewhere."""
    return style == "json" or (style == "auto" and not sys.stderr.isatty())


class _Stderr:
    """The stderr of the moment: notebooks and tests replace it."""

    def write(self, text: str) -> int:
        return _Lenient(sys.stderr).write(text) if sys.stderr is not None else len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            _Lenient(sys.stderr).flush()

    def isatty(self) -> bool:
        return sys.stderr is not None and sys.stderr.isatty()


def log_to(
    target: TextIO | str | os.PathLike[str] | logging.Logger | None,
    *,
    level: _Level = "info",
    style: _Style = "auto",
) -> None:
    """Choose where the events of this package go, in a program that embeds it. The program's own configuration of
    structlog stays as it is, and holds for its own loggers only.

    Args:
        target: a stream such as ``sys.stdout``; a file, to which lines are added; a logger of the standard library,
            whose level and handlers decide; None: as if this had not been called.
        level: debug, info, warning or error. The rounds themselves are "info".
        style: ``auto`` is console on a terminal, and in a notebook, and JSON elsewhere. A logger gets one line of text
            with the facts as ``key=value``.

    Raises:
        ValueError: there is no such level or style. OSError: the file cannot be opened.
    """
    global _chosen, _file
    if level not in get_args(_Level) or style not in get_args(_Style):
        raise ValueError(
            f"expected a level of {', '.join(get_args(_Level))} and a style of {', '.join(get_args(_Style))}, got "
            f"{level!r} and {style!r}"
        )
    opened: TextIO | None = None
    if isinstance(target, str | os.PathLike):
        target = opened = open(target, "a", encoding="utf-8")  # noqa: SIM115 - held until the next call
    if target is None:
        chosen = None
    elif isinstance(target, logging.Logger):
        chosen = partial(structlog.wrap_logger, target, **_settings_for_logging(level))
    else:
        chosen = partial(
            structlog.wrap_logger, structlog.PrintLogger(_stream(target)), **_settings(target, level, style)
        )
    before, _chosen, _file = _file, chosen, opened
    if before is not None:
        before.close()


def _stream(stream: Any) -> TextIO:
    lenient: Any = _Lenient(stream)
    return cast(TextIO, lenient)


def _settings(stream: Any, level: str, style: str) -> dict[str, Any]:
    """Return what structlog needs to write to this stream."""
    is_terminal = bool(getattr(stream, "isatty", bool)())
    as_json = style == "json" or (style == "auto" and not is_terminal and not _is_notebook(stream))
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
        as_text = structlog.dev.plain_traceback  # what format_exc_info has made; with another, some versions warn
        processors.append(structlog.dev.ConsoleRenderer(24, colors=is_terminal, exception_formatter=as_text))
    return {"processors": processors, "wrapper_class": _at_least(level)}


def _settings_for_logging(level: str) -> dict[str, Any]:
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            _plain_values,
            structlog.processors.KeyValueRenderer(key_order=["event"], repr_native_str=False),
        ],
        "wrapper_class": _at_least(level),
    }


def _at_least(level: str) -> Any:
    return structlog.make_filtering_bound_logger(getattr(logging, level.upper()))


def _is_notebook(stream: Any) -> bool:
    """Whether a stream is that of a cell of a notebook."""
    return type(stream).__module__.startswith("ipykernel.")


_chosen: Callable[..., Any] | None = None  # makes a logger that writes where log_to says
_file: TextIO | None = None  # that log_to has opened


def _to_stderr(**bound: Any) -> Any:
    settings = _settings(sys.stderr, "warning", "console")
    return structlog.wrap_logger(structlog.PrintLogger(_stream(_Stderr())), **settings, **bound)


def configure(*, level: str = "info", style: Literal["auto", "console", "json"] = "auto") -> None:
    """Set structlog up for a command of gradbus. Programs that embed gradbus configure structlog themselves.

    Args:
        level: debug, info, warning or error.
        style: ``auto`` is console on a terminal and JSON elsewhere.
    """
    structlog.configure(
        **_settings(sys.stderr, level, style),
        logger_factory=structlog.PrintLoggerFactory(_stream(sys.stderr)),
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
