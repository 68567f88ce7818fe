"""Where the numbers of a run go: ``from gradbus.metrics import JobCollector, Scalars, TensorBoard``.

``JobCollector`` serves the numbers of a controller to Prometheus. ``Scalars`` is a callback that writes the numbers of
each round or epoch to a tracker: ``TensorBoard``, ``Mlflow``, ``WeightsAndBiases``, or a ``Tracker`` of your own. Each
name is loaded when it is first used, because some need packages that gradbus itself does not need.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradbus.commands.report.followed import Totals
    from gradbus.commands.report.metrics import JobCollector
    from gradbus.commands.report.scalars import Scalars
    from gradbus.commands.report.trackers import Mlflow, TensorBoard, TrackedRun, Tracker, WeightsAndBiases

_WHERE = {
    "JobCollector": "gradbus.commands.report.metrics",
    "Mlflow": "gradbus.commands.report.trackers",
    "Scalars": "gradbus.commands.report.scalars",
    "TensorBoard": "gradbus.commands.report.trackers",
    "Totals": "gradbus.commands.report.followed",
    "TrackedRun": "gradbus.commands.report.trackers",
    "Tracker": "gradbus.commands.report.trackers",
    "WeightsAndBiases": "gradbus.commands.report.trackers",
}

__all__ = ["JobCollector", "Mlflow", "Scalars", "TensorBoard", "Totals", "TrackedRun", "Tracker", "WeightsAndBiases"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gradbus.metrics' has no attribute {name!r}")
    from gradbus.loading import load

    load((_WHERE[name],))
    return getattr(sys.modules[_WHERE[name]], name)


def __dir__() -> list[str]:
    return sorted(__all__)
