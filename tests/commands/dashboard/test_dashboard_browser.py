"""The live page in a real browser, of a run that goes on beside it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Forked
from patience import soonest, until

from gradbus.commands.dashboard.server import serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)"),
]
SHOWN_WITHIN_S = 2.0
DONE = "Number(document.getElementById('now')?.dataset.done || 0)"
DRAWN = "['learning', 'bytes'].every(one => document.querySelector(`#${one} img`)?.naturalWidth > 0)"


@pytest.mark.timeout(240)
def test_rounds_of_a_running_job_are_shown_within_two_seconds(
    fork: Callable[..., Forked], domain: int, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "live"
    bus, few = {"job": "live", "domain": domain}, {"train": 400, "test": 40}
    task = {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": few, "threads": 1}
    rules = {"rounds": 50_000, "clients": {"min": 1}, "training": {"subset_size": 64}, "eval_every": 10}
    (tmp_path / "controller.json").write_text(json.dumps({"bus": bus, "task": task, "federated": rules}))
    (tmp_path / "client.json").write_text(json.dumps({"bus": bus, "task": task}))
    controller = fork("controller", tmp_path / "controller.json", "--run-dir", run, "--no-live")
    fork("client", tmp_path / "client.json", "--id", 0)
    reports = run / "rounds.jsonl"

    def committed() -> int:
        return reports.read_bytes().count(b"\n") if reports.exists() else 0

    said: list[str] = []
    asked: list[str] = []
    with serving_when_there(run.parent) as dashboard, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(dashboard.url)
        until(lambda: committed() > 0 or controller.poll() is not None, timeout_s=60.0)
        page.get_by_role("link", name="live").click(timeout=10_000)

        def shown_after_s() -> float:
            before = committed()
            until(lambda: committed() > before, timeout_s=30.0)
            now, at_s = committed(), time.monotonic()
            # Asked from here, as the policy of the page forbids what wait_for_function does.
            until(lambda: page.evaluate(DONE) >= now)
            return time.monotonic() - at_s

        for _ in range(2):
            assert soonest(shown_after_s, SHOWN_WITHIN_S) < SHOWN_WITHIN_S
        until(lambda: bool(re.match(r"round \d+: training", page.locator("#doing").text_content())), timeout_s=20.0)
        until(lambda: page.evaluate(DRAWN), timeout_s=20.0)
        assert controller.poll() is None, controller.communicate()
        assert page.locator("#state").text_content() == "running"
        assert page.locator(".chips li").count() <= 1
        assert page.evaluate("document.documentElement.scrollWidth") == 1100
        page.set_viewport_size({"width": 390, "height": 844})  # a phone
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        browser.close()
    assert said == []
    assert all(url.startswith((dashboard.url, "data:")) for url in asked)


def serving_when_there(folder: Path) -> Any:
    """The dashboard of a folder that may be empty still."""
    folder.mkdir(parents=True, exist_ok=True)
    return serving(folder)
