"""A figure as a part of a page: SVG in the page itself, PNG where that would be large."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, NamedTuple

from gradbus.experiments.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SVG_BYTES = 250_000  # of one figure; a page has about eight


class Picture(NamedTuple):
    """A figure of a page.

    Attributes:
        name: its id there. body: HTML that can be put into a page as it is.
    """

    name: str
    body: str


def new_figure(rows: int = 1, cols: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """As :func:`style.new_figure`, as wide as a page."""
    return style.new_figure(rows, cols, width_in=style.PAGE_WIDTH_IN, **options)


def picture_of(figure: Figure, name: str) -> Picture:
    """The figure; within :func:`style.drawing`. ``name``: letters, digits and ``-``, unique on its page."""
    svg = style.to_svg(figure, name)
    if len(svg.encode()) <= MAX_SVG_BYTES:
        return Picture(name, svg)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=style.DPI, metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Picture(name, f'<img alt="" src="data:image/png;base64,{data}">')
