"""Asks a Prometheus on 127.0.0.1:9090, for prometheus.sh: until each query of a dashboard has data, or an alert fires.

Prints what is missing when the time is over, and ends with 1.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DEADLINE_S = 90.0
_ASK_S = 0.5


def main(what: str, *of: str) -> int:
    """``dashboard FILE``, or ``alert NAME LABEL=VALUE``."""
    missing: Callable[[], list[str]]
    if what == "dashboard":
        panels = json.loads(Path(of[0]).read_text(encoding="utf-8"))["panels"]
        queries = [target["expr"] for panel in panels for target in panel["targets"]]

        def missing() -> list[str]:
            return [query for query in queries if not _result(query)]
    else:
        label, _, value = of[1].partition("=")
        query = f'ALERTS{{alertname="{of[0]}",alertstate="firing",{label}="{value}"}}'

        def missing() -> list[str]:
            return [] if _result(query) else [query]

    end_s = time.monotonic() + _DEADLINE_S
    while lacking := missing():
        if time.monotonic() > end_s:
            raise SystemExit("\n  ".join([f"after {_DEADLINE_S:g} s there is no data for", *lacking]))
        time.sleep(_ASK_S)
    return 0


def _result(query: str) -> list[Any]:
    """Return the samples of a query of Grafana, whose variables stand for what a user would choose."""
    query = query.replace("$__rate_interval", "1m").replace("$job", ".+")
    url = "http://127.0.0.1:9090/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{query}: {error.read(2000).decode(errors='replace')}") from None
    except OSError:  # it has not started yet
        return []


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
