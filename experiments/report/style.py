"""How all figures look: colours, markers, sizes, axes with units. Files of figures look alike because they start here.

The eight colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any common colour
blindness can tell apart; a marker or a hatch says the same once more, for print in black and white. A codec has one
colour and one marker in every figure, a phase of a round has one colour.

Sizes are for a figure of :data:`WIDTH_IN`: its smallest text is 7 px high when it is shown at half its size.

matplotlib is an extra and is imported inside functions; nothing here touches pyplot, which keeps global state and looks
for a screen. Draw within :func:`drawing`, start with :func:`new_figure`, end with :func:`save` or :func:`to_svg`.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.needs import install_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#0a0a0a", "#e69f00", "#56b4e9", "#009e73"  # of true black an SVG has no word: no dark page
YELLOW, BLUE, VERMILLION, PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#7f7f7f"  # waiting, and what is there for comparison only

INK, FAINT, PAPER = "#1b1f24", "#d8dbe0", "#ffffff"  # text and axes, grid lines, background

WIDTH_IN, HEIGHT_IN = 7.2, 3.6
PAGE_WIDTH_IN = 9.0  # of figures in a page, which shows them a little larger
DPI = 150  # of PNG files: 1080 pixels wide


class Look(NamedTuple):
    """How one series is drawn.

    Attributes:
        color: as matplotlib takes it. marker: matplotlib's letter. label: for legends.
    """

    color: str
    marker: str
    label: str

    @property
    def line(self) -> dict[str, Any]:
        """Arguments for ``axes.plot``."""
        return {"color": self.color, "marker": self.marker, "label": self.label}


CODECS: dict[str, Look] = {
    "fp32": Look(BLUE, "o", "fp32"),
    "q8": Look(ORANGE, "s", "q8"),
    "s4": Look(GREEN, "^", "s4"),
    "sq8": Look(VERMILLION, "D", "sq8"),
    "dgc": Look(PURPLE, "v", "dgc"),
    "int8": Look(SKY, "P", "int8 baseline"),  # quantized gradients, sent to all
}
"""By codec; of exchanges that are no codec of ours too. Data parallel ``dense`` sends fp32, so it looks like that."""

REFERENCE = Look(BLACK, "*", "published")  # numbers that others have published: marks, never lines

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
"""Parts of a round, in their order, and their colours."""

SERIES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY)  # for series that are neither: runs, ranks, seeds
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

OLD_VERSION = {"hatch": "////", "edgecolor": PAPER}  # bars of wire format 1, beside those of 2 in the same colour


def plain(text: str) -> str:
    """A name from outside as text for matplotlib, which takes ``$`` for mathematics and hides labels with ``_``."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def look_of(codec: str) -> Look:
    """Of a codec or an exchange by its name; ``dense`` looks like fp32. Raises KeyError: it has none."""
    return CODECS["fp32"]._replace(label="dense fp32") if codec == "dense" else CODECS[codec]


def nth_look(index: int, label: str) -> Look:
    """Of the n-th series of a figure whose series are no codecs. They repeat after seven."""
    return Look(SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)], plain(label))


class Unit(NamedTuple):
    """A unit to show amounts in: ``amount / factor`` is the number to write before ``name``."""

    name: str
    factor: float


def byte_unit(largest: float) -> Unit:
    """For amounts of bytes up to this one: B, kB, MB or GB, in powers of 1000."""
    return _unit(largest, (Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("B", 1.0)))


def time_unit(largest_s: float) -> Unit:
    """For times in seconds up to this one: s, ms or µs."""
    return _unit(largest_s, (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6)))


def _unit(largest: float, units: Sequence[Unit]) -> Unit:
    if largest <= 0:
        return next(unit for unit in units if unit.factor == 1)
    return next((unit for unit in units if largest >= unit.factor), units[-1])


def have_matplotlib() -> bool:
    """Whether figures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def need_matplotlib() -> None:
    """Raises ConfigError, which says what to install, if figures cannot be drawn."""
    if not have_matplotlib():
        raise ConfigError(f"figures need matplotlib, which is not installed: {install_line('matplotlib', 'jinja2')}")


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """The house's settings of matplotlib, for what is made inside. Others find theirs unchanged afterwards.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need_matplotlib()
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc of the user says: the same data, the same figure
        matplotlib.rcParams.update({
            "font.size": 11, "axes.labelsize": 12, "axes.titlesize": 12, "figure.titlesize": 13, "legend.fontsize": 11,
            "xtick.labelsize": 11, "ytick.labelsize": 11, "axes.titlelocation": "left", "axes.titleweight": "bold",
            "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
            "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
            "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.8, "axes.axisbelow": True,
            "lines.linewidth": 1.8, "lines.markersize": 6, "axes.prop_cycle": cycler(color=SERIES),
            "legend.frameon": False, "legend.handlelength": 1.6, "hatch.linewidth": 1.2,
            "axes.formatter.useoffset": False, "figure.facecolor": PAPER, "axes.facecolor": "none",
            "svg.hashsalt": "gradbus",  # the same figure gives the same file
        })  # fmt: skip
        yield


def new_figure(
    rows: int = 1, cols: int = 1, *, width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. ``subplots``: further arguments of ``Figure.subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, list(figure.subplots(rows, cols, squeeze=False, **subplots).flat)


def label(axes: Axes, *, x: str, y: str, x_unit: str = "", y_unit: str = "") -> None:
    """Name both axes, as ``quantity / unit``. Without a unit it is a count or a name."""
    axes.set_xlabel(f"{x} / {x_unit}" if x_unit else x)
    axes.set_ylabel(f"{y} / {y_unit}" if y_unit else y)


def whole_numbers(axis: Axis, *, most: int = 8) -> None:
    """Ticks at whole numbers only, not many: rounds, epochs, clients."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=most, min_n_ticks=1))


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at 0, with room above the largest value."""
    axes.set_ylim(0.0, 1.05 * axes.get_ylim()[1])


def bar_width(count: int) -> float:
    """Of so many bars side by side, so that few of them are no walls."""
    return 0.75 * min(1.0, max(2, count) / 8)


def legend_above(axes: Axes, *, columns: int = 7) -> None:
    """A legend in one row over the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(columns, len(handles)),
            columnspacing=1.2, handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip


def legend_of_colors(figure: Figure, colors: Mapping[str, str]) -> None:
    """A legend of coloured areas over the whole figure, in as many rows as it takes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    letters = sum(len(label) + 4 for label in colors)  # 4: for the patch and the gap
    rows = max(1, math.ceil(letters / (11 * figure.get_figwidth())))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=max(1, math.ceil(len(handles) / rows)), columnspacing=1.0,
        handlelength=0.9, handletextpad=0.4,
    )  # fmt: skip


def save(figure: Figure, *paths: Path) -> None:
    """Write the figure to files, by their suffix: PNG at :data:`DPI`, or SVG with its text as outlines, which looks the
    same everywhere. Nothing in it says when it was made."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    for path in paths:
        figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


PAGE_COLORS: dict[str, str] = {
    INK: "--ink", FAINT: "--faint", PAPER: "--paper", BLACK: "--black", ORANGE: "--orange", SKY: "--sky",
    GREEN: "--green", YELLOW: "--yellow", BLUE: "--blue", VERMILLION: "--vermillion", PURPLE: "--purple",
    GREY: "--grey",
}  # fmt: skip
"""Colours, and the CSS variables that stand for them in :func:`to_svg`: a dark page can give these other values."""


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element for the inside of an HTML page: transparent, its text as text, its colours as
    CSS variables with the light ones as a default.

    Args:
        name: letters, digits and ``-``; unlike that of any other figure of the page, as ids are derived from it.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r' (fill|stroke)="(#[0-9a-f]{6})"', r' style="\1: \2"', text)  # hatches have attributes, all else CSS
    for color, variable in PAGE_COLORS.items():
        text = re.sub(rf"(: ?){color}\b", rf"\1var({variable}, {color})", text)
    return text
