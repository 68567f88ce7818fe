"""A page of figures and tables: what it consists of, and how it becomes one HTML file.

jinja2 is an extra, and is imported where it is needed. The page needs no network, no script and no other file; a policy
in its head forbids them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradbus.experiments.report import style
from gradbus.experiments.report.svg import Picture
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.needs import install_line
from gradbus.runtime.plain_text import plain_text

DASH = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number that is shown large. ``note``: a few words below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture with a title and a caption; who cannot see it hears the title. None as a picture: there is nothing."""

    picture: Picture | None
    title: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text.

    Attributes:
        name: its id on the page. head: names of the columns. rows: cells.
        numbers: columns from this one on hold numbers, and stand to the right; None: none.
        marked: numbers of rows that stand out.
    """

    name: str
    title: str = ""
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numbers: int | None = 1
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page: its figures, then its tables. One that has nothing is left out."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @property
    def shown(self) -> list[Figure]:
        """Those that there is a picture of."""
        return [figure for figure in self.figures if figure.picture is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole report.

    Attributes:
        lead: one line below the title. state: how the run ended, in a word or two; good: whether that is well.
        notes: what is missing.
    """

    title: str
    lead: str
    state: str = ""
    good: bool = True
    tiles: Sequence[Tile] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=tuple)


def need_extras() -> None:
    """Raises ConfigError, which says what to install, if a report cannot be made."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"a report needs jinja2, which is not installed: {install_line('jinja2', 'matplotlib')}"
        ) from None
    style.need_matplotlib()


def render(page: Page) -> str:
    """The page as HTML. Whatever the run's files say is text in it, never markup; figures are put in as they are."""
    import jinja2

    folder = files("gradbus.experiments.report") / "templates"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_plain
    )
    template = environment.from_string((folder / "report.html").read_text(encoding="utf-8"))
    css = (folder / "report.css").read_text(encoding="utf-8")
    return template.render(page=page, css=css, colors=_colors())


def _plain(value: Any) -> Any:
    return plain_text(value) if type(value) is str else value  # what is marked as safe is of another type


def _colors() -> dict[str, str]:
    """The CSS variables of figures, by name, as they are on white."""
    return {variable: color for color, variable in style.PAGE_COLORS.items()}


def write(page: Page, out: Path) -> int:
    """Write it, whole or not at all. Returns its bytes. Raises ConfigError: that cannot be done."""
    data = render(page).encode("utf-8")
    temporary = out.with_name(f"{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"report {out} cannot be written: {error.strerror}. Name another file (--out)") from None
    return len(data)


def duration(seconds: float | None) -> str:
    """A time as a person reads it: 3 digits, and a unit that fits."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def text_of(value: Any) -> str:
    """A setting as one cell."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(text_of(entry) for entry in value) or "none"
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Numbers of a table in one unit, which stands in the head.

    Attributes:
        values: None and NaN become a dash. unit: of the values as they are shown. factor: of that unit.
        digits: behind the point.
    """

    name: str
    values: Sequence[float | None]
    unit: str = ""
    factor: float = 1.0
    digits: int = 0

    @classmethod
    def of_bytes(cls, name: str, values: Sequence[float]) -> Column:
        """In the unit that fits the largest."""
        unit = style.byte_unit(max(values, default=0))
        return cls(
            name=name,
            values=values,
            unit=unit.name,
            factor=unit.factor,
            digits=_digits(max(values, default=0) / unit.factor),
        )

    @classmethod
    def of_times(cls, name: str, values: Sequence[float | None]) -> Column:
        """In seconds, or less where none is as long as that."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        unit = style.time_unit(max(known, default=0.0))
        largest = max(known, default=0.0) / unit.factor
        return cls(name=name, values=values, unit=unit.name, factor=unit.factor, digits=_digits(largest))

    @property
    def head(self) -> str:
        """Name and unit, which the page puts below it."""
        return f"{self.name}\n{self.unit}"

    def cells(self) -> list[str]:
        """As text."""
        return [
            DASH if value is None or not math.isfinite(value) else f"{value / self.factor:,.{self.digits}f}"
            for value in self.values
        ]


def _digits(largest: float) -> int:
    """Behind the point, so that there are three that count in the largest."""
    return 2 if largest < 10 else 1 if largest < 1000 else 0


def rows_of(columns: Sequence[Column]) -> list[list[str]]:
    """Cells, row by row."""
    return [list(row) for row in zip(*(column.cells() for column in columns), strict=True)]


def settings_tables(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Table]:
    """A table for each section of a configuration; what is not as by default stands out."""
    tables = []
    for section, values in config.items():
        if not isinstance(values, Mapping):
            continue
        usual = defaults.get(section, {})
        marked = frozenset(i for i, (key, value) in enumerate(values.items()) if usual.get(key) != value)
        rows = [[str(key), text_of(value)] for key, value in values.items()]
        tables.append(
            Table(name=f"settings-{section}", title=section, head=("setting", "value"), rows=rows, numbers=None,
                  marked=marked)
        )  # fmt: skip
    return tables


def facts_table(summary: Mapping[str, Any]) -> Table:
    """With what, and where the run was done."""
    rows = [[str(name), text_of(version)] for name, version in _mapping(summary, "versions").items()]
    rows += [[_FACTS.get(key, str(key)), _fact(key, value)] for key, value in _mapping(summary, "machine").items()]
    rows += [[name, text_of(summary[key])] for key, name in _OF_SUMMARY.items() if summary.get(key) is not None]
    return Table(name="versions", head=("what", "value"), rows=rows, numbers=None)


_FACTS = {"cpu": "processor", "cores": "cores", "memory_bytes": "memory"}
_OF_SUMMARY = {"platform": "system", "data": "data", "finished": "written"}


def _fact(key: str, value: Any) -> str:
    return f"{value / 2**30:.1f} GiB" if key == "memory_bytes" and isinstance(value, int) else text_of(value)


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def thinned(rows: Sequence[Sequence[str]], most: int) -> tuple[list[Sequence[str]], int]:
    """The first and the last rows of a long table, and how many are left out between them."""
    if len(rows) <= most:
        return list(rows), 0
    left_out = len(rows) - most
    gap = ["…", *[""] * (len(rows[0]) - 1)]
    return [*rows[: most // 2], gap, *rows[-(most - most // 2) :]], left_out


def listed(values: Iterable[Any], most: int = 8) -> str:
    """Some of many: "1, 2, 3 and 7 more"."""
    found = [str(value) for value in values]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
