"""JSON from files that others may have written: within a size, and with one kind of error. JSON for other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MAX_DIGITS = 40  # of a whole number: 64 bits have 20
_STEP_BYTES = 1 << 20


def parse_json(text: str, *, parse_constant: Callable[[str], Any] | None = None, max_values: int | None = None) -> Any:
    """The value in ``text``.

    Raises:
        ValueError: it is not JSON, lists and objects lie too deep in each other, a whole number has so many digits
            that floats have no place for it, or there are too many values.

    Args:
        parse_constant: what to make of ``NaN`` and ``Infinity``, which JSON does not have; by default those floats.
        max_values: that there may be, as :func:`count_values` counts; by default any number.
    """
    if max_values is not None and (found := count_values(text)) > max_values:
        raise ValueError(f"it has {found:,} values, at most {max_values:,} are read: no run leaves so many there")
    try:
        return json.loads(text, parse_constant=parse_constant, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def count_values(text: str) -> int:
    """Return how many lists, objects and commas a text has: JSON has about so many values. Each takes up to some 100
    bytes as an object, and a text of 3 bytes has one."""
    return text.count("{") + text.count("[") + text.count(",")


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a whole number has {len(digits)} digits, at most {_MAX_DIGITS} are taken")
    return int(digits)


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text in a file that the user has named for this command, which may be a pipe.

    What lies in a run directory is read with :mod:`gradbus.runtime.foreign_files`, which waits for none.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has more bytes, or is not UTF-8 (UnicodeDecodeError).
    """
    data = bytearray()
    with path.open("rb") as file:
        while some := file.read(_STEP_BYTES):
            data += some
            if len(data) > max_bytes:
                raise ValueError(f"more than {max_bytes} bytes")
    return data.decode("utf-8")


def json_text(values: Any, *, indent: int | None = None) -> str:
    """JSON that every program can read: it has no NaN and no infinity, so null stands for them."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
