"""The reports in a real browser: Debian's chromium, without a window and without a network."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gradbus.commands.report.build import make_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def reports(federated: Path, parallel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    other = Path(shutil.copytree(federated, folder / "other"))
    make_report(federated, (), folder / "federated.html")
    make_report(parallel, (), folder / "parallel.html")
    make_report(None, (federated, other), folder / "compared.html")
    return {name: folder / f"{name}.html" for name in ("federated", "parallel", "compared")}


@pytest.fixture(scope="module")
def browser(reports: dict[str, Path]) -> Iterator[Any]:
    """It comes after the runs: its driver has a loop of its own in this thread, and no other can run meanwhile."""
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # in a container it is root
        yield running
        running.close()


def source_of(page: Any, figure: str, theme: str) -> str:
    """The address of the drawing that is made for the theme."""
    element, attribute = ("source", "srcset") if theme == "dark" else ("img", "src")
    return str(page.locator(f"#{figure} {element}").get_attribute(attribute))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("name", "figures", "table", "rows"),
    [
        (
            "federated",
            ["learning", "client-training", "round-times", "timeline-1", "timeline-2", "bytes", "norms"],
            "rounds",
            10,
        ),
        ("parallel", ["learning", "step-parts", "windows", "step-spans", "bytes"], "epochs", 3),
        ("compared", ["learning", "parts"], "measures", 12),
    ],
)
def test_a_report_shows_its_figures_and_tables_without_an_error(
    browser: Any, reports: dict[str, Path], name: str, figures: list[str], table: str, rows: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(reports[name].as_uri())
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [reports[name].as_uri()]
    assert page.locator("figure").evaluate_all("all => all.map(one => one.id)") == figures
    for figure in figures:
        drawn = page.locator(f"#{figure} img")
        box = drawn.bounding_box()
        assert box["width"] > 600
        assert box["height"] > 100
        assert drawn.evaluate("one => one.currentSrc") == source_of(page, figure, scheme)
        left, top = int(box["x"]), int(box["y"])
        part = picture.crop((left, top, left + int(box["width"]), top + int(box["height"])))
        assert len(part.getcolors(1 << 20)) > 20, f"{figure} is empty"
    assert page.locator(f"#{table} tbody tr").count() == rows
    assert page.evaluate("document.documentElement.scrollWidth") == 1100
    assert (sum(picture.getpixel((2, 2))) < 200) == (scheme == "dark")
    page.set_viewport_size({"width": 390, "height": 844})  # a phone
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    lines = (
        "all => all.map(one => [one.textContent, document.createRange(), one]).map(([text, range, one]) => "
        "{ range.selectNodeContents(one); return [text, range.getClientRects().length] })"
    )
    names = page.locator(".settings td:first-child").evaluate_all(lines)
    assert [name for name, count in names if count > 1] == [], "names that are broken"
    page.set_viewport_size({"width": 1100, "height": 900})
    page.emulate_media(media="print")
    paper = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    assert paper.getpixel((2, 2)) == (255, 255, 255)
    for figure in figures:
        printed = source_of(page, figure, "light")
        page.wait_for_function(
            "([id, source]) => document.querySelector(id).currentSrc == source", arg=[f"#{figure} img", printed]
        )
    page.close()


@pytest.mark.parametrize("name", ["federated", "parallel", "compared"])
def test_on_a_phone_figures_fit_and_nothing_but_wide_tables_is_scrolled(
    browser: Any, reports: dict[str, Path], name: str
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, device_scale_factor=3, is_mobile=True)
    page.goto(reports[name].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for figure in page.locator("figure").all():
        assert figure.evaluate("one => one.scrollWidth <= one.clientWidth && one.clientWidth <= 390")
        box = figure.locator("img").bounding_box()
        assert box["x"] >= 0
        assert 350 < box["width"] <= 390
    page.close()


def test_no_text_of_a_figure_lies_over_another(browser: Any, reports: dict[str, Path]) -> None:
    """Fonts of a browser are not those that matplotlib has measured."""
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.goto(reports["federated"].as_uri())
    names = page.locator("figure").evaluate_all("all => all.map(one => one.id)")
    drawings = [base64.b64decode(source_of(page, name, "light").partition(",")[2]).decode() for name in names]
    for drawing in drawings:
        page.set_content(drawing[drawing.index("<svg") :])
        boxes = page.locator("text").evaluate_all(
            "all => all.map(one => { const b = one.getBoundingClientRect(); "
            "return [one.textContent.trim(), b.left, b.top, b.right, b.bottom]; })"
        )
        assert len(boxes) > 4
        for index, (text, left, top, right, bottom) in enumerate(boxes):
            for other, *box in boxes[index + 1 :]:
                wide = min(right, box[2]) - max(left, box[0])
                high = min(bottom, box[3]) - max(top, box[1])
                assert wide < 3 or high < 6, f"{text!r} over {other!r}"
    page.close()
