"""Holding the updates of a round until it is known what is typical of them, with ``limits.trust = adversarial``.

    requests -> typical weights
    requests -> grants -> updates, measured -> typical norms, in a first round

Until then no update is added. Uploads go on meanwhile, as far as ``limits.receive_budget_bytes`` has room: what is
complete stays in memory, and counts as on its way. Announcements are all that is needed to know how updates weigh, so
later rounds never need more room. A first round needs the norm of every update: where they do not fit, one that has
been measured gives up its place to the next, and is sent once more when the bounds are known.

No client can hold a round for ever: after half of its time the announcements that have arrived are enough, and after
three quarters the updates that have been measured, if they are as many as the round needs anyway. With fewer, the
liars among them might be the majority, and the honest clients that are slower would be bounded by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from gradbus.actors.aggregation.bounds import Bounds, Norms
from gradbus.actors.aggregation.updates import Facts
from gradbus.actors.federated.controller.rounds import Round
from gradbus.runtime.wire.frames import FrameKey

_MEASURED_BY = 0.75  # share of the time of a round


class Settling(Enum):
    """Says whether updates may be added."""

    WAIT = "for more requests, or updates"
    TOO_FEW = "there will be no more in this attempt, and the round needs more"
    SETTLED = "the bounds are known"


class HeldUpdates:
    """Decides when the updates of a round may be added. Pure: no bus, no clock, no tensors."""

    def __init__(self, bounds: Bounds) -> None:
        """``bounds``: of the strategy."""
        self._bounds = bounds
        self._norms: dict[FrameKey, Norms] = {}  # of updates that have been measured

    @property
    def is_settled(self) -> bool:
        """Return whether updates may be added."""
        return self._bounds.is_settled

    @property
    def must_measure(self) -> bool:
        """Return whether updates are measured before any is added."""
        return not self._bounds.is_settled and self._bounds.needs_norms

    def begin(self) -> None:
        """Forget what was measured, for a new round."""
        self._norms.clear()

    def note(self, key: FrameKey, norms: Norms) -> None:
        """Note the norms of an update."""
        self._norms[key] = norms

    def is_measured(self, key: FrameKey) -> bool:
        """Return whether the norms of this update are known."""
        return key in self._norms

    def may_settle(self, round_: Round, waiting: int, now_s: float) -> bool:
        """Return whether :meth:`settle` can come to anything with so many updates, without a look at each of them."""
        if self.must_measure and len(self._norms) < waiting and now_s < round_.time_at_s(_MEASURED_BY):
            return False
        return waiting >= round_.fewest_requests or now_s >= round_.time_at_s(0.5)

    def settle(self, round_: Round, announced: Mapping[FrameKey, Facts], now_s: float) -> Settling:
        """Set the bounds of a round, once enough clients have ``announced`` their updates, and where it is a first one
        these are measured. Each client has one update among them."""
        clients = {facts.client_id for facts in announced.values()}
        if not round_.has_enough_requests(clients, now_s):
            return Settling.WAIT
        if len(clients | round_.accepted) < round_.fewest_clients:
            # By themselves these would set their own bounds, in a round that cannot be committed with them.
            return Settling.TOO_FEW if round_.open <= clients else Settling.WAIT
        measured = [self._norms[key] for key in announced if key in self._norms]
        if self._bounds.needs_norms and len(measured) < len(announced):
            enough = len(measured) >= max(1, round_.fewest_clients)
            if not enough or now_s < round_.time_at_s(_MEASURED_BY):
                return Settling.WAIT
        self._bounds.settle(announced.values(), measured)
        return Settling.SETTLED if self._bounds.is_settled else Settling.WAIT
