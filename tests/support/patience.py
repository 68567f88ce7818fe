"""For a busy machine, on which a process may stand still for seconds."""

from __future__ import annotations

from collections.abc import Callable

PATIENT_S = 20.0
"""For a silence that is no death, where a test is not about deaths."""

PATIENT = {"GRADBUS_BUS__LEASE_S": f"{PATIENT_S:g}", "GRADBUS_FEDERATED__DEAD_AFTER_S": f"{PATIENT_S:g}"}
"""The same in the environment of commands."""


def soonest(limit_s: float, attempt: Callable[[], float], tries: int = 3) -> float:
    """The least of what some attempts took, which ends with the first one within the limit: a busy machine makes single
    ones worse, never better."""
    best_s = attempt()
    while best_s >= limit_s and (tries := tries - 1):
        best_s = min(best_s, attempt())
    return best_s
