"""Places where a process can be made to die, to test that nothing is lost there.

A fail point is named in the code's own words, ``after_aggregate_before_commit``, and armed with the round (for workers:
the step) in which it fires: ``after_aggregate_before_commit:3``. In front of it may stand who is to die,
``rank-1/after_send:5`` or ``client-3/after_offer:2``; without that whoever gets there first of those that read it.
Several are separated by commas. Nothing is armed unless somebody asks for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

ENVIRONMENT = "GRADBUS_FAIL_AT"

PLACES = {
    "controller": (
        "before_command", "after_command", "mid_collect", "after_collect_before_aggregate",
        "after_aggregate_before_commit", "after_commit_before_note", "after_commit_before_publish", "after_publish",
    ),
    "client": (
        "before_training", "between_packets", "after_training_before_offer", "after_offer",
        "after_grant_before_upload", "after_receipt_before_residual", "after_residual",
    ),
    "rank": ("before_step", "after_send", "after_step", "before_save", "after_save"),
}  # fmt: skip


def kill_self() -> None:
    """Die at once, as by ``kill -9``: no cleanup, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at(rank: int, step: int, place: str = "after_send") -> str:
    """The fail point at which this rank dies in this step: by default with its gradients on their way."""
    return f"rank-{rank}/{place}:{step}"


class FailPoint:
    """The places at which one process is to die."""

    def __init__(self, spec: str | None = None, action: Callable[[], None] = kill_self, *, who: str = "") -> None:
        """Arm some of them.

        Args:
            spec: ``[who/]name:round``, several with commas, or None for nothing.
            action: what happens there.
            who: this process: ``controller``, ``client-3``, ``rank-1``. What is meant for others is not armed.

        Raises:
            ValueError: the spec is malformed, or no such place is known.
        """
        self._armed: set[tuple[str, int]] = set()
        self._action = action
        for part in (spec or "").split(","):
            if part.strip():
                self._arm(part.strip(), who)

    def _arm(self, part: str, who: str) -> None:
        whom, _, rest = part.rpartition("/")
        name, _, number = rest.partition(":")
        if not name or not (number.isascii() and number.isdigit()):
            raise ValueError(
                f"fail point {part!r}: expected [who/]name:round, for example after_command:2 or rank-1/after_send:5"
            )
        role = (whom or who).partition("-")[0]
        if whom and role not in PLACES:
            raise ValueError(f"fail point {part!r}: expected controller, client-N or rank-N before the slash")
        known = PLACES.get(role, tuple(place for places in PLACES.values() for place in places))
        if name not in known and not (not whom and any(name in places for places in PLACES.values())):
            raise ValueError(f"fail point {part!r}: no such place; {role or 'known'}: {', '.join(known)}")
        if whom in ("", who):
            self._armed.add((name, int(number)))

    @property
    def is_armed(self) -> bool:
        """Return whether there is a place left at which something is to happen."""
        return bool(self._armed)

    def reached(self, name: str, round_id: int) -> None:
        """The program is at this place in this round."""
        if (name, round_id) in self._armed:
            self._armed.discard((name, round_id))
            self._action()
