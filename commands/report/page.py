"""A page of figures and tables, and how it becomes one HTML file.

The page needs no network, no script and no other file; a policy in its head forbids them. Each figure is drawn twice,
for a light and for a dark page, and the browser takes the one that fits. jinja2 is an extra, imported where needed.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradbus.commands.amounts import DASH
from gradbus.commands.report import style
from gradbus.commands.rundir.directory import replaced
from gradbus.commands.rundir.reading import RunFiles
from gradbus.runtime.config.settings import flat
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.needs import how_to_install
from gradbus.runtime.plain_text import plain_text

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure as Drawing
    from pydantic import BaseModel

THEMES: tuple[style.Theme, ...] = ("light", "dark")
MAX_ROWS = 400  # of one table


class Tile(NamedTuple):
    """A number that is shown large. ``note``: a few words below it."""

    name: str
    value: str
    note: str = ""


class PageFigure(NamedTuple):
    """A drawing with a title and a caption. The title is its text for readers who cannot see it.

    Attributes:
        name: its id on the page: letters, digits and ``-``.
        draw: makes the drawing; None where there is nothing to draw, and then there is no figure.
    """

    name: str
    draw: Callable[[], Drawing | None]
    title: str
    caption: str = ""


class Images(NamedTuple):
    """A drawing for a light and for a dark page as ``data:`` addresses, and its size in CSS pixels."""

    light: str
    dark: str
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Rows of text.

    Attributes:
        name: its id on the page. head: names of the columns, with a unit behind a line end. rows: cells.
        numbers: columns from this one on hold numbers and are right-aligned; None: no column does.
        marked: numbers of rows in bold.
    """

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    numbers: int | None = None
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page: its text, its figures, then its tables. An empty one is left out."""

    title: str
    text: str = ""
    figures: Sequence[PageFigure] = ()
    tables: Sequence[PageTable] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole report.

    Attributes:
        lead: one line below the title. state: how the run ended, in a word or two; good: whether it ended well.
        notes: what is missing.
    """

    title: str
    lead: str
    state: str = ""
    good: bool = True
    tiles: Sequence[Tile] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()


def need_extras() -> None:
    """Raises ConfigError, with the command that installs what is missing, if a report cannot be made."""
    try:
        import jinja2  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError(f"a report needs jinja2, which is not installed. {how_to_install('jinja2')}") from None
    style.need_matplotlib()


def render(page: Page) -> str:
    """The page as HTML, with its figures drawn. Whatever the files of a run contain is text in it, never markup."""
    drawn = [
        (section, [(figure, images) for figure in section.figures if (images := images_of(figure)) is not None])
        for section in page.sections
    ]
    sections = [(section, figures) for section, figures in drawn if figures or section.tables or section.text]
    return template("report.html").render(page=page, sections=sections, css=style_sheet())


def style_sheet() -> str:
    """The CSS of the pages."""
    return (files("gradbus.commands.report") / "templates" / "report.css").read_text(encoding="utf-8")


def template(name: str, *packages: str) -> Template:
    """A template of this package, or of another that has a folder ``templates``. What is put into it is text, never
    markup."""
    import jinja2

    folders = [files(package) / "templates" for package in ("gradbus.commands.report", *packages)]

    def source(wanted: str) -> str | None:
        found = (folder / wanted for folder in folders)
        return next((file.read_text(encoding="utf-8") for file in found if file.is_file()), None)

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: plain_text(value) if type(value) is str else value,  # safe text is of another type
    )
    return environment.get_template(name)


def images_of(figure: PageFigure) -> Images | None:
    """The figure in both themes; None where there is nothing to draw."""
    drawn = [image for theme in THEMES if (image := style.image_of(figure.draw, theme)) is not None]
    if len(drawn) < len(THEMES):
        return None
    addresses = [f"data:{image.kind};base64,{base64.b64encode(image.data).decode('ascii')}" for image in drawn]
    return Images(addresses[0], addresses[-1], *drawn[-1].size)


# -- tables ------------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table. ``head``: its name, and its unit behind a line end."""

    head: str
    cells: list[str]


def column(
    name: str, values: Sequence[float | None], *, unit: str = "", factor: float = 1.0, digits: int = 0
) -> Column:
    """Numbers in one unit; a dash for None and NaN. ``factor``: of that unit."""
    return Column(
        f"{name}\n{unit}",
        [DASH if value is None or not math.isfinite(value) else f"{value / factor:,.{digits}f}" for value in values],
    )


def byte_column(
    name: str, values: Sequence[float | None], unit_for: Callable[[float], style.Unit] = style.byte_unit
) -> Column:
    """Bytes, in the unit that fits the largest."""
    largest = max((value for value in values if value is not None and math.isfinite(value)), default=0.0)
    unit = unit_for(largest)
    digits = 2 if largest / unit.factor < 10 else 1 if largest / unit.factor < 1000 else 0  # three that count
    return column(name, values, unit=unit.name, factor=unit.factor, digits=digits)


def time_column(name: str, values: Sequence[float | None]) -> Column:
    """Times in seconds, in the unit that fits the longest."""
    return byte_column(name, values, style.time_unit)


def column_table(
    name: str,
    columns: Sequence[Column],
    counted: str,
    *,
    file: str = "",
    title: str = "",
    caption: str = "",
    total: int | None = None,
) -> PageTable:
    """A table of columns, the first of which names the row. Arguments as for :func:`row_table`."""
    heads, rows = [column.head for column in columns], list(zip(*(column.cells for column in columns), strict=True))
    return row_table(name, heads, rows, counted, file=file, title=title, caption=caption, numbers=1, total=total)


def row_table(
    name: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    counted: str,
    *,
    most: int = MAX_ROWS,
    file: str = "",
    title: str = "",
    caption: str = "",
    numbers: int | None = None,
    total: int | None = None,
) -> PageTable:
    """A table that shows the first and the last rows where there are more than ``most``.

    Args:
        counted: the rows, in the plural, for the sentence on how many are left out. file: holds all of them.
        total: how many rows there are, where ``rows`` are but the first and the last, ``most`` at least.
    """
    if (left_out := (len(rows) if total is None else total) - most) > 0:
        gap = ["…", *[""] * (len(head) - 1)]
        rows = [*rows[: most // 2], gap, *rows[-(most - most // 2) :]]
        where = f"; {file} has all of them" if file else ""
        caption = f"{caption} {left_out} {counted} are left out{where}.".lstrip()
    return PageTable(name=name, head=head, rows=rows, title=title, caption=caption, numbers=numbers)


def text_of(value: Any) -> str:
    """A setting as one cell."""
    match value:
        case None:
            return DASH
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case Mapping():
            return ", ".join(f"{key}: {text_of(entry)}" for key, entry in value.items()) or "none"
        case list() | tuple():
            return ", ".join(map(text_of, value)) or "none"
    return str(value)


def settings_section(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Section:
    """A table for each section of a configuration. What differs from the default is in bold."""
    tables = []
    for section, values in config.items():
        if isinstance(values, Mapping):
            usual, rows = dict(flat(defaults.get(section, {}))), dict(flat(values))
            tables.append(
                PageTable(
                    name=f"settings-{section}",
                    title=section,
                    head=("setting", "value"),
                    rows=[[key, text_of(value)] for key, value in rows.items()],
                    marked=frozenset(i for i, (key, value) in enumerate(rows.items()) if usual.get(key) != value),
                )
            )
    text = "Settings in bold are not the default." if tables else ""
    return Section(title="Configuration", text=text, tables=tables)


def facts_section(summary: Mapping[str, Any]) -> Section:
    """Versions, machine and data of the run."""
    versions, machine = (
        found if isinstance(found := summary.get(key), Mapping) else {} for key in ("versions", "machine")
    )
    facts = {
        **versions,
        **machine,
        **{key: summary[key] for key in ("platform", "data", "finished") if summary.get(key)},
    }
    if isinstance(memory := facts.get("memory_bytes"), int):
        facts["memory_bytes"] = f"{memory / 2**30:.1f} GiB"
    titles = {"cpu": "processor", "memory_bytes": "memory", "platform": "system", "finished": "written"}
    rows = [[str(titles.get(key, key)), text_of(value)] for key, value in facts.items()]
    tables = [PageTable(name="versions", head=("what", "value"), rows=rows)] if summary else []
    return Section(title="Versions and machine", tables=tables)


def run_page(
    run: RunFiles,
    what: str,
    defaults: BaseModel,
    *,
    tiles: Sequence[Tile],
    notes: Sequence[str],
    sections: Sequence[Section],
) -> Page:
    """The page on one run: its sections, then its settings, versions and machine. ``what``: it, in a few words."""
    outcome = str(run.summary.get("outcome") or "not finished")
    settings = settings_section(run.config, defaults.model_dump(mode="json"))
    return Page(
        title=run.job,
        lead=f"{what}; {run.task}." if run.task else f"{what}.",
        state=outcome,
        good=outcome == "done",
        tiles=tiles,
        notes=notes,
        sections=[*sections, settings, facts_section(run.summary)],
    )


def write(page: Page, out: Path) -> int:
    """Write the page, whole or not at all. Returns its size in bytes. Raises ConfigError: it cannot be written."""
    data = render(page).encode("utf-8")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replaced(out) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"report {out} cannot be written: {error.strerror}. Name another file (--out)") from None
    return len(data)
