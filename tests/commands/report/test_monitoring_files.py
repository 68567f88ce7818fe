"""The alerts and the dashboard of deploy/ name metrics that exist; tests/deploy/prometheus.sh runs them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gradbus.actors import Client, ClientSummary
from gradbus.commands.report.followed import FollowedClient, FollowedJob
from gradbus.commands.report.metrics import JobCollector
from gradbus.commands.report.process_metrics import ClientCollector

_DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
_METRIC = re.compile(r"\bgradbus_\w+")


def names() -> set[str]:
    """Names of samples that a controller or a client serves."""
    followed = FollowedClient()
    done = ClientSummary(rounds=0, refused=0, bytes_up=0, train_s=0.0)
    followed.client = cast(Client, SimpleNamespace(name="site-1", client_id=0, summary=done))
    families = [*JobCollector({"x": FollowedJob()}).describe(), *ClientCollector("x", 0, followed).describe()]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((_DEPLOY / "grafana/gradbus.json").read_text(encoding="utf-8"))["panels"]
    return found


def queries() -> Iterator[str]:
    yield from re.findall(r"expr: (.*)", (_DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_a_query_names_metrics_that_gradbus_serves(query: str) -> None:
    used = set(_METRIC.findall(query.replace('"gradbus"', "")))
    assert used or query.startswith("up{")
    assert used <= names()


def test_panels_have_ids_and_places_of_their_own_and_say_what_they_show() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found) > 9
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in found)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel["title"] and panel["description"].endswith(".") for panel in found)


def test_a_metric_that_does_not_exist_is_noticed() -> None:
    assert "gradbus_rounds_total" in names()
    assert "gradbus_rounds" not in names()
