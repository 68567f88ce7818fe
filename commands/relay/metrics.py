"""The counters of a relay in the text format of Prometheus, version 0.0.4.

Written by hand, so that a relay needs no further package for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gradbus.commands.relay.sessions import NodeTotals
from gradbus.runtime.plain_text import plain_line

_STATM = Path("/proc/self/statm")

Samples = list[tuple[Mapping[str, str], float]]


def render(by_node: Mapping[str, tuple[int, NodeTotals]], *, max_sessions: int, is_ready: bool) -> str:
    """Return the page ``/metrics``. ``by_node``: open sessions and totals of each node."""
    nodes = sorted(by_node.items())

    def per_node(value: str) -> Samples:
        return [({"node": node}, getattr(totals, value)) for node, (_, totals) in nodes]

    lines: list[str] = []
    lines += _family("gradbus_relay_ready", "gauge", "1 while the relay listens and does not drain", [({}, is_ready)])
    lines += _family(
        "gradbus_relay_sessions", "gauge", "Open sessions", [({"node": node}, count) for node, (count, _) in nodes]
    )
    lines += _family("gradbus_relay_sessions_max", "gauge", "Sessions that are let in", [({}, max_sessions)])
    lines += _family("gradbus_relay_sessions_opened_total", "counter", "Sessions opened", per_node("opened"))
    lines += _family("gradbus_relay_sessions_closed_total", "counter", "Sessions closed", per_node("closed"))
    lines += _family(
        "gradbus_relay_sessions_refused_total",
        "counter",
        "Sessions closed because the node had too many",
        per_node("refused"),
    )
    lines += _family(
        "gradbus_relay_received_bytes_total", "counter", "Bytes received, TLS included", per_node("received_bytes")
    )
    lines += _family(
        "gradbus_relay_sent_bytes_total", "counter", "Bytes sent and acknowledged, TLS included", per_node("sent_bytes")
    )
    lines += _family("process_cpu_seconds_total", "counter", "Processor time", [({}, time.process_time())])
    if (resident := _resident_bytes()) is not None:
        lines += _family("process_resident_memory_bytes", "gauge", "Resident memory", [({}, resident)])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Samples) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{{{shown}}} {float(value)!r}" if shown else f"{name} {float(value)!r}"


def _escaped(label: str) -> str:
    return plain_line(label).replace("\\", "\\\\").replace('"', '\\"')


def _resident_bytes() -> int | None:
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # another system than Linux
        return None
