"""The look of figures: one for all of them."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from gradbus import codecs
from gradbus.actors import RoundReport
from gradbus.commands.report import style
from gradbus.commands.report.page import PageFigure, images_of
from gradbus.commands.report.run_accuracy import draw_rounds
from gradbus.runtime.errors import ConfigError


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2.1 defines it: 0 for black, 1 for white."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_codec_has_a_colour_and_a_marker_of_its_own() -> None:
    assert set(style.CODECS) >= {*codecs.ALL, "dgc", "int8"}
    for field in ("color", "marker", "label"):
        assert len({getattr(look, field) for look in style.CODECS.values()}) == len(style.CODECS)
    assert len(set(style.PHASES.values())) == len(style.PHASES)
    assert style.look_of("dense").color == style.look_of("fp32").color
    for look in style.CODECS.values():
        with style.drawing():
            assert luminance(to_hex(look.color)) < 0.46, f"{look.label} is too light for white paper"
        with style.drawing("dark"):
            assert luminance(to_hex(look.color)) > 0.25, f"{look.label} is too dark for a dark page"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (style.byte_unit(0), "B"),
        (style.byte_unit(999), "B"),
        (style.byte_unit(4.8e6), "MB"),
        (style.byte_unit(3e9), "GB"),
        (style.time_unit(0), "s"),
        (style.time_unit(90), "s"),
        (style.time_unit(0.02), "ms"),
        (style.time_unit(3e-6), "µs"),
        (style.time_unit(3e-9), "µs"),
    ],
)
def test_units_fit_the_largest_amount(unit: style.Unit, expected: str) -> None:
    assert unit.name == expected


def test_a_figure_of_a_page_is_drawn_in_the_colours_of_both_themes_with_its_text_as_text() -> None:
    def draw() -> Figure:
        figure, (axes,) = style.new_figure()
        axes.plot([1, 2], [3, 4], **style.look_of("q8").line)
        axes.bar(1, 2, color=style.BLUE, **style.OLD_VERSION)
        style.label(axes, x="round", y="sent", y_unit="MB")
        style.legend_above(axes)
        return figure

    first = images_of(PageFigure("a", draw, "A title"))
    assert first is not None
    assert first == images_of(PageFigure("a", draw, "A title"))
    assert (first.width, first.height) == (691, 346)
    for address, orange, blue, ink in (
        (first.light, "#e69f00", "#0072b2", "#1b1f24"),
        (first.dark, "#f0b13c", "#4aa3e0", "#e4e7eb"),
    ):
        kind, _, data = address.partition(",")
        assert kind == "data:image/svg+xml;base64"
        svg = base64.b64decode(data).decode()
        texts = {"".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter()}
        assert {"round", "sent / MB", "q8"} <= texts
        for color in (orange, blue, ink):
            assert color in svg


def test_a_very_large_figure_becomes_pixels() -> None:
    def draw() -> Figure:
        figure, (axes,) = style.new_figure()
        axes.plot(range(20_000), [i % 97 for i in range(20_000)], "o")
        return figure

    images = images_of(PageFigure("a", draw, "A title"))
    assert images is not None
    assert images.light.startswith("data:image/png;base64,")
    assert images.light != images.dark


def test_the_look_is_the_houses_and_that_of_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 3.0)
    with style.drawing():
        assert matplotlib.rcParams["font.size"] == 11
    assert matplotlib.rcParams["font.size"] == 3.0


def test_the_picture_of_a_run_is_the_same_for_the_same_run(tmp_path: Path) -> None:
    had_pyplot = "matplotlib.pyplot" in sys.modules
    reports = [RoundReport(round_id=i, accuracy=0.5 + i / 10, bytes_up=10**6) for i in range(1, 4)]
    pictures = [tmp_path / name / "accuracy.png" for name in "abc"]
    for picture in pictures:
        picture.parent.mkdir()
    assert draw_rounds(pictures[0].parent, reports, title="a job")
    assert draw_rounds(pictures[1].parent, reports, title="a job")
    first = pictures[0].read_bytes()
    assert first == pictures[1].read_bytes()
    assert Image.open(io.BytesIO(first)).size == (1080, 540)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    assert not draw_rounds(pictures[2].parent, [RoundReport(round_id=1)], title="never evaluated")
    assert not pictures[2].exists()


def test_the_picture_of_a_task_without_accuracy_is_of_its_first_metric(tmp_path: Path) -> None:
    reports = [RoundReport(round_id=i, eval_loss=1 / i, metrics={"rmse": 1 / i, "r2": 0.5}) for i in range(1, 4)]
    assert draw_rounds(tmp_path, reports, title="a job")
    assert [path.name for path in tmp_path.iterdir()] == ["metric.png"]


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"-m pip install 'matplotlib>=3.8'"), style.drawing():
        pass
    assert not draw_rounds(tmp_path, [RoundReport(round_id=1, accuracy=0.5)], title="a job")


LOADING = """
import sys
from gradbus.commands.report import style
from gradbus.runtime.errors import ConfigError
try:
    style.need_matplotlib()
except ConfigError as error:
    print(style.have_matplotlib(), error)
else:
    print("loaded" if "matplotlib" in sys.modules else "not loaded")
"""


def make_settings(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/hostname")
        case "bytes":
            path.write_bytes(b"\xff\xfe")
        case "settings":
            path.write_text("lines.linewidth: 3\n")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pipe", "is a pipe, expected a regular file. Start the command in another folder"),
        ("link", "is a link"),
        ("bytes", "is not UTF-8"),
        ("settings", "loaded"),
        ("none", "loaded"),
    ],
)
def test_settings_of_matplotlib_in_the_folder_of_a_command_neither_hold_it_up_nor_lead_it_elsewhere(
    kind: str, says: str, tmp_path: Path
) -> None:
    make_settings(kind, tmp_path / "matplotlibrc")
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADING], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert says in done.stdout
    assert done.stdout.startswith("loaded" if says == "loaded" else "False figures: matplotlib would read")
