"""The figures of a live page: those of the report, drawn anew as a run goes on, in a bounded share of a core."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradbus.commands.report import figures as draw
from gradbus.commands.report import parallel, style
from gradbus.commands.report.federated import client_figures, cross_site_figures
from gradbus.commands.report.metric_parts import quality_name
from gradbus.commands.report.page import PageFigure
from gradbus.commands.rundir.reading import RunFiles

REST = 8.0  # a figure is drawn again after so many times the time that drawing took, a ninth of a core at most
_MIN_REST_S = 1.0
_MAX_KEPT = 64


def figures_of(run: RunFiles) -> list[PageFigure]:
    """Return what is drawn of a run, also of one that has only begun."""
    return _of_rounds(run) if run.kind == "federated" else _of_epochs(run)


def _of_rounds(run: RunFiles) -> list[PageFigure]:
    reports = run.rounds
    if not reports:
        return []
    up, down = (
        style.look_of(str(run.setting("federated", key, "fp32"))) for key in ("codec.name", "downlink_codec.name")
    )
    newest = next((report for report in reversed(reports) if report.timeline), None)
    curve = draw.curve_of_rounds(reports, up, run.spent)
    shown = [
        PageFigure(
            "learning", partial(draw.draw_curves, [curve], counted="round", sent="sent"),
            f"{quality_name(reports)} and loss over rounds, bytes and time",
        ),
        *client_figures(run),
        PageFigure("round-times", partial(draw.draw_round_times, reports), "Time of each round"),
    ]  # fmt: skip
    if newest is not None:
        title = f"Where the time went in round {newest.round_id}"
        shown.append(PageFigure("timeline", partial(draw.draw_timeline, newest, run.names), title))
    title = "Bytes of each round, up and down"
    shown.append(PageFigure("bytes", partial(draw.draw_bytes, reports, up=up, down=down), title))
    return [*shown, *cross_site_figures(run)]


def _of_epochs(run: RunFiles) -> list[PageFigure]:
    look = style.look_of(parallel.algorithm_of(run) or "dense")
    curve = draw.curve_of_epochs(run.epochs, look, run.spent)
    shown = [
        PageFigure(
            "learning", partial(draw.draw_curves, [curve], counted="epoch", sent="sent by a rank"),
            f"{quality_name(run.epochs)} and loss over epochs, bytes and time",
        ),
        PageFigure("windows", partial(draw.draw_windows, run.windows), "Step time, wait and bytes over the run"),
        PageFigure("step-parts", partial(draw.draw_step_parts, run.profiles), "Where the time of a step goes"),
        PageFigure("bytes", partial(draw.draw_step_bytes, run.epochs, look), "Bytes of a step"),
    ]  # fmt: skip
    there = {
        "learning": run.epochs,
        "windows": any(run.windows.values()),
        "step-parts": run.profiles,
        "bytes": run.epochs,
    }
    return [figure for figure in shown if there[figure.name]]


@dataclass(slots=True)
class _Pace:
    version: int
    next_s: float


class Drawings:
    """Draws on the thread that asks, one figure at a time, as matplotlib's settings are those of the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str, int], style.Image] = OrderedDict()
        self._paces: dict[str, _Pace] = {}

    def version_to_show(self, name: str, version: int) -> int:
        """The version of the run whose figures a page is to show: the newest, or an older one while drawing rests."""
        with self._lock:
            pace = self._paces.get(name)
            if pace is None or (version != pace.version and self._clock() >= pace.next_s):
                self._paces[name] = pace = _Pace(version, self._clock() + _MIN_REST_S)
            return pace.version

    def image(self, run: RunFiles, figure: str, theme: style.Theme, version: int) -> style.Image | None:
        """The figure of this name; no data: there is nothing to draw. None: the run has none of that name."""
        key = (run.name, figure, theme, version)
        with self._drawing:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            found = next((one for one in figures_of(run) if one.name == figure), None)
            if found is None:
                return None
            began_s = self._clock()
            image = style.image_of(found.draw, theme) or style.Image("", b"", (0, 0))
            with self._lock:
                rest_s = REST * (self._clock() - began_s)
                if pace := self._paces.get(run.name):
                    pace.next_s = max(pace.next_s, self._clock()) + rest_s
            self._kept[key] = image
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return image
