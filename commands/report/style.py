"""How all figures look: one style sheet, and the colour, marker and unit of each quantity.

The colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any common colour blindness can
tell apart; a marker or a hatch repeats the distinction for print in black and white. A codec has one colour and one
marker in every figure, a phase of a round has one colour.

Colours are named by their place in the colour cycle of the style sheet (``figures.mplstyle``), which ``dark.mplstyle``
replaces by lighter ones: one drawing function serves both themes. Every drawing of a report, of the dashboard, of a run
directory and of an experiment becomes an image here: by :func:`image_of`, or by :func:`save` within :func:`drawing`.

matplotlib is an extra and is imported inside functions. Nothing here touches pyplot, which keeps global state.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import text_inside
from gradbus.runtime.needs import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY, YELLOW, BLACK = (f"C{index}" for index in range(9))
SERIES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY)  # of series without a colour of their own: runs, ranks
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_SETTINGS, _MAX_SETTINGS_BYTES = "matplotlibrc", 1 << 20

WIDTH_IN, HEIGHT_IN = 7.2, 3.6  # at half of this size the smallest text is 7 px high
MAX_SVG_BYTES = 150_000  # of one figure of a page in one theme; a larger one becomes a PNG


class Look(NamedTuple):
    """Tells how one series is drawn.

    Attributes:
        color: as matplotlib takes it. marker: matplotlib's letter. label: for legends.
    """

    color: str
    marker: str
    label: str

    @property
    def line(self) -> dict[str, Any]:
        """Arguments for ``axes.plot``."""
        return self._asdict()


CODECS: dict[str, Look] = {
    "fp32": Look(BLUE, "o", "fp32"),
    "q8": Look(ORANGE, "s", "q8"),
    "s4": Look(GREEN, "^", "s4"),
    "sq8": Look(VERMILLION, "D", "sq8"),
    "dgc": Look(PURPLE, "v", "dgc"),
    "q4": Look(GREY, "X", "q4"),
    "q2": Look("#a8842c", "<", "q2"),  # the yellow of the palette is too light for white paper
    "loco": Look(BLACK, ">", "loco"),
    "int8": Look(SKY, "P", "int8 baseline"),  # quantized gradients, sent to all
}
"""By codec, and by exchange. The data-parallel exchange ``dense`` sends fp32 and looks like it."""

REFERENCE = Look(BLACK, "*", "published")  # numbers published by others: marks, never lines

PHASES: dict[str, str] = {
    "send": SKY,
    "wait": BLACK,
    "train": GREEN,
    "encode": ORANGE,
    "queue": GREY,
    "upload": BLUE,
    "decode": PURPLE,
    "aggregate": VERMILLION,
    "checkpoint": YELLOW,
}
"""The colours of the phases of a round, in the order of the phases."""

OLD_VERSION = {"hatch": "////", "edgecolor": "white"}  # bars of wire format 1, beside those of 2 in the same colour


def plain(text: str) -> str:
    """A name from outside as text for matplotlib, which takes ``$`` for mathematics and hides labels with ``_``."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def look_of(codec: str) -> Look:
    """The look of a codec or an exchange; the first of :func:`nth_look` where it has none of its own."""
    if codec == "dense":
        return CODECS["fp32"]._replace(label="dense fp32")
    return CODECS.get(codec) or nth_look(0, codec)


def nth_look(index: int, label: str) -> Look:
    """The look of the n-th series of a figure whose series are no codecs. Looks repeat after seven."""
    return Look(SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)], plain(label))


class Image(NamedTuple):
    """A drawing as a page has it. ``kind``: its media type. ``size``: width and height in CSS pixels."""

    kind: str
    data: bytes
    size: tuple[int, int]


class Unit(NamedTuple):
    """A unit to show amounts in: ``amount / factor`` is the number to write before ``name``."""

    name: str
    factor: float


def byte_unit(largest: float) -> Unit:
    """The unit for amounts of bytes up to this one: B, kB, MB or GB, in powers of 1000."""
    return _unit(largest, (Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("B", 1.0)))


def time_unit(largest_s: float) -> Unit:
    """The unit for times in seconds up to this one: s, ms or µs."""
    return _unit(largest_s, (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6)))


def _unit(largest: float, units: Sequence[Unit]) -> Unit:
    if largest <= 0:
        return next(unit for unit in units if unit.factor == 1)
    return next((unit for unit in units if largest >= unit.factor), units[-1])


def have_matplotlib() -> bool:
    """Whether figures can be drawn."""
    if _fault_of_settings():
        return False
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def need_matplotlib() -> None:
    """Raises ConfigError, with what to do, if figures cannot be drawn."""
    if fault := _fault_of_settings():
        raise ConfigError(
            f"figures: matplotlib would read {_SETTINGS} of the folder in which this command was started, and that "
            f"{fault}. Start the command in another folder, or remove the file"
        )
    if not have_matplotlib():
        raise ConfigError(f"figures need matplotlib, which is not installed. {how_to_install('matplotlib')}")


def _fault_of_settings() -> str:
    """Return why matplotlib must not be loaded here; empty: it may be.

    It takes a file ``matplotlibrc`` of the working directory before all others, and that may be a run directory that
    somebody has sent: a pipe would hold it up for ever. What a sound one sets has no effect on our figures.
    """
    if "matplotlib" in sys.modules:
        return ""
    try:
        text_inside(Path(), _SETTINGS, _MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror)
    except ValueError:
        return "is not UTF-8"
    return ""


@contextlib.contextmanager
def drawing(theme: Theme = "light") -> Iterator[None]:
    """Apply the style sheet to what is drawn and saved inside. The settings of others are the same afterwards.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need_matplotlib()
    import matplotlib

    folder = files("gradbus.commands.report")
    with matplotlib.rc_context():
        with as_file(folder / "figures.mplstyle") as sheet:
            matplotlib.rc_file(sheet)  # on top of the defaults, not of a matplotlibrc of the user
        if theme == "dark":
            with as_file(folder / "dark.mplstyle") as sheet:
                matplotlib.rc_file(sheet, use_default_template=False)
        yield


def new_figure(
    rows: int = 1, cols: int = 1, *, width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. ``subplots``: further arguments of ``Figure.subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, list(figure.subplots(rows, cols, squeeze=False, **subplots).flat)


def label(axes: Axes, *, x: str, y: str, x_unit: str = "", y_unit: str = "") -> None:
    """Name both axes as ``quantity / unit``. Without a unit it is a count or a name."""
    axes.set_xlabel(f"{x} / {x_unit}" if x_unit else x)
    axes.set_ylabel(f"{y} / {y_unit}" if y_unit else y)


def whole_numbers(axis: Axis, *, most: int = 8) -> None:
    """Put at most so many ticks, at whole numbers only: rounds, epochs, clients."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=most, min_n_ticks=1))


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at 0, with room above the largest value."""
    axes.set_ylim(0.0, 1.05 * axes.get_ylim()[1])


def bar_width(count: int) -> float:
    """The width of one of so many bars side by side, so that few of them are no walls."""
    return 0.75 * min(1.0, max(2, count) / 8)


def legend_above(axes: Axes, *, columns: int = 7) -> None:
    """Put a legend in one row over the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=min(columns, len(handles)),
            columnspacing=1.2,
            handletextpad=0.5,
            borderaxespad=0.2,
        )


def legend_of_colors(figure: Figure, colors: Mapping[str, str]) -> None:
    """Put a legend of coloured areas over the whole figure, in as many rows as it takes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    letters = sum(len(label) + 4 for label in colors)  # 4: for the patch and the gap
    rows = max(1, math.ceil(letters / (11 * figure.get_figwidth())))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=max(1, math.ceil(len(handles) / rows)),
        columnspacing=1.0,
        handlelength=0.9,
        handletextpad=0.4,
    )


def save(figure: Figure, *paths: Path) -> None:
    """Write the figure to PNG or SVG files, by their suffix. No time is written into them."""
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
        figure.set_layout_engine("none")  # to arrange it anew for each file takes a third of the time


def image_of(draw: Callable[[], Figure | None], theme: Theme) -> Image | None:
    """The drawing in this theme, for a page: SVG with its text as text, PNG where that would be large. None: there is
    nothing to draw. Raises ConfigError: matplotlib is not installed."""
    with drawing(theme):
        figure = draw()
        if figure is None:
            return None
        import matplotlib

        matplotlib.rcParams["svg.fonttype"] = "none"
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        kind = "svg+xml"
        if len(buffer.getvalue()) > MAX_SVG_BYTES:
            kind, buffer = "png", io.BytesIO()
            figure.savefig(buffer, format="png", transparent=True, metadata={"Software": None})
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
        return Image(f"image/{kind}", buffer.getvalue(), (width, height))
