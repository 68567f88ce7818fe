"""What a run may show by design though it looks like a fault, and in what case only.

* **A round of a site fails** with RoundTimeout, which the site and the level above log as an error, where faults and
  the leases after them have left its clients no time: a client that starts again on another machine than the site waits
  until the lease of its dead process is over. The level above begins the round again.
* **A start in the place of a controller is refused** with JobInUse by the one that was replaced. Of one run that is a
  fault. Where the first one has saved nothing before it was paused the start in its place begins another run, and if
  that one dies before the first one can receive its status, the two are any two runs of one job: the error of the next
  start names the first one, and the operator stops that and starts this one again.
* **A client is refused** with JoinRefused for a second process that has its key and was started later, though that has
  died meanwhile: both ran at one time, which is what the error says, and whoever runs the client starts it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fault_simulation.faults import CONTROLLER
from gradbus.runtime.errors import JobInUse, JoinRefused
from gradbus.runtime.security.identity.admission import SILENT_S

if TYPE_CHECKING:
    from fault_simulation.kernel import VirtualProcess

SITE_ROUND_S = 24.0  # deadline of a site's round: 0.8 of that of the level above
CALM_ROUND_S = 5.0  # in so long a time without faults a round of a site is done
FOUND_AGAIN_S = 3.0  # after a pause or a partition, until all have found each other again
LEFT_S = 2.0  # from a refusal on its way until the process that is refused has ended
MET_S = FOUND_AGAIN_S + 1.5  # until one has received two statuses of another one, which sends them every 0.5 s


class Disturbances:
    """The times in which faults may keep actors from each other."""

    def __init__(self) -> None:
        self._spans_s: list[tuple[float, float]] = []

    def add(self, from_s: float, until_s: float) -> None:
        """Note the time of a fault."""
        self._spans_s.append((from_s, until_s))

    def longest_calm_s(self, from_s: float, until_s: float, *, after_s: float) -> float:
        """Return the longest time without a fault in a span of time. ``after_s``: how long the effect of each lasts."""
        longest_s, calm_since_s = 0.0, from_s
        for begun_s, over_s in sorted(self._spans_s):
            if over_s + after_s < from_s or begun_s > until_s:
                continue
            longest_s = max(longest_s, begun_s - calm_since_s)
            calm_since_s = max(calm_since_s, over_s + after_s)
        return max(longest_s, until_s - calm_since_s)


def is_round_without_time(
    disturbances: Disturbances, event: str, facts: dict[str, Any], *, now_s: float, lease_s: float
) -> bool:
    """Return whether an event is that a site had no time for a round."""
    if event not in ("training failed", "training failed on a client"):
        return False
    if not str(facts.get("error", "")).startswith("RoundTimeout"):
        return False
    after_s = lease_s + FOUND_AGAIN_S
    return disturbances.longest_calm_s(now_s - SITE_ROUND_S, now_s, after_s=after_s) < CALM_ROUND_S


def unheard_controller(
    processes: Iterable[VirtualProcess],
    runs: dict[str, str],
    refused: VirtualProcess,
    error: Exception,
) -> VirtualProcess | None:
    """Return the controller that has refused a start in its place as of any other run; None: it had to give way.

    Args:
        processes: all of the run. runs: the run that each controller has begun, by process.
        refused: the start that has ended. error: with which.
    """
    if not isinstance(error, JobInUse) or refused.role != CONTROLLER or refused.replaced:
        return None
    controllers = [one for one in processes if one.role == CONTROLLER and one is not refused]
    later = [one for one in controllers if not one.replaced]  # of the run that the refused one continues
    for first in controllers:
        if not first.replaced or first.dead or first.name not in runs:
            continue
        is_other_run = all(runs.get(one.name) != runs[first.name] for one in later)
        if is_other_run and all(one.ended_s - first.went_on_s < MET_S for one in later):
            return first
    return None


def had_living_rival(
    processes: Iterable[VirtualProcess], refused: VirtualProcess, error: Exception, *, now_s: float
) -> bool:
    """Return whether a client was refused for a later start with its key, dead by now, that had been heard of lately.

    Args:
        processes: all of the run. refused: the process that ends now. error: with which.
    """
    if not isinstance(error, JoinRefused) or "one process, one key" not in str(error):
        return False
    later = [one for one in processes if one.role == refused.role and one.started_s > refused.started_s]
    heard_s = now_s - SILENT_S - LEFT_S
    return any(not one.is_stranger and one.ended_s > heard_s for one in later)
