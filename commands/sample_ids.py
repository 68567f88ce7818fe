"""To which writer, patient or site each sample belongs, from a file: for ``partition = {"kind": "natural"}``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json, read_text

MAX_BYTES = 1 << 30
_MAX_ID_CHARS = 256


def with_ids(partition: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """The partition with the ids that are in its file, if it names one: ``path``, and of a CSV file perhaps ``column``.

    Raises:
        ConfigError: the file cannot be read, or is not one of ids.
    """
    if isinstance(partition, str) or partition.get("kind") != "natural" or "path" not in partition:
        return partition
    others = {key: value for key, value in partition.items() if key not in ("path", "column")}
    if "ids" in others:
        raise ConfigError("task.partition natural: give ids or path, not both")
    return {**others, "ids": read_ids(Path(str(partition["path"])), partition.get("column"))}


def read_ids(path: Path, column: str | None = None) -> Sequence[int | str]:
    """One id for each sample, in the order of the training set.

    Args:
        path: a JSON list of numbers and texts (``.json``); else CSV: with ``column`` its first line has names, and
            without it each line has an id in its first field.

    Raises:
        ConfigError: as the text says.
    """
    where = f"task.partition natural: {path}"
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if path.suffix == ".json":
        try:
            found = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(found, list):
            raise ConfigError(f"{where}: expected a list of ids, one for each sample, got {type(found).__name__}")
    else:
        found = _of_csv(text, column, where)
    for number, one in enumerate(found):
        if isinstance(one, bool) or not isinstance(one, int | str) or len(str(one)) > _MAX_ID_CHARS or one == "":
            raise ConfigError(f"{where}: sample {number}: expected a number or a text, got {str(one)[:40]!r}")
    return found


def _of_csv(text: str, column: str | None, where: str) -> list[Any]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ConfigError(f"{where}: not CSV: {error}") from None
    place = 0
    if column is not None:
        names, rows = (rows[0] if rows else []), rows[1:]
        if column not in names:
            raise ConfigError(f"{where}: no column {column!r}; there are {', '.join(names)[:200] or 'none'}")
        place = names.index(column)
    return [row[place] if place < len(row) else "" for row in rows if row]
