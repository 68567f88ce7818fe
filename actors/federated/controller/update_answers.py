"""What clients are told of their updates: which of each client counts, which one was refused last, and why.

A client repeats its request until it has an answer, so the same update gets the same answer each time: one that counts
is never refused, and one that was refused never counts, although it might be admitted by now.
"""

from __future__ import annotations

from gradbus.actors.federated.controller.participation import MAX_KNOWN
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.update_admission import UpdateRefusal
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Body
from gradbus.runtime.wire.frames import FrameKey

_NOTED = 100  # refusals of one kind in a round that a journal lists

log = get_logger("controller")


class UpdateAnswers:
    """Sends receipts, and remembers what they said. All methods are called on the loop.

    Attributes:
        counted: by client, the update that counts. Checkpoints have it, too.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._dropped = context.dropped
        self.counted = context.state.counted
        # By client: the update that was refused last, which stays so, and why.
        self._refused: dict[int, tuple[FrameKey, UpdateRefusal]] = {}

    def is_counted(self, update: RequestedUpload) -> bool:
        """Return whether this update counts."""
        return self.counted.get(update.client_id) == update.whole_key

    def earlier_refusal(self, update: RequestedUpload) -> UpdateRefusal | None:
        """Return the reason why an update that was refused is refused again, although it might be admitted by now;
        None: it was not.

        Its client may have repeated the request before the answer came, and have taken the codec's residual back since.
        """
        key, refusal = self._refused.get(update.client_id, (None, None))
        return refusal if key == update.whole_key else None

    async def refuse(self, update: RequestedUpload, refusal: UpdateRefusal) -> None:
        """Refuse an update for good, and tell its client why."""
        self._refused.pop(update.client_id, None)
        self._refused[update.client_id] = update.whole_key, refusal._replace(is_strike=False)
        if len(self._refused) > MAX_KNOWN:
            del self._refused[next(iter(self._refused))]
        self._dropped[refusal.reason] += 1
        if self._dropped[refusal.reason] <= _NOTED:  # endless requests fill no disk; the count is noted with the round
            facts = {"client": update.client_id, "incarnation": update.incarnation, "reason": refusal.reason}
            self._context.history.note("refused", round=update.request.round_id, **facts)
        await self.send_receipt(update, refusal.text or refusal.reason)

    async def send_receipt(self, update: RequestedUpload, refusal: str = "") -> None:
        """Tell a client that its update counts, or why it does not. ``refusal``: why; empty: it counts."""
        await self.send(update.receipt(refusal))

    async def send(self, body: Body) -> None:
        """Send an answer. Where it cannot be sent the client repeats its request, unless the bus is closed."""
        try:
            await self._context.publish(body)
        except BusError as error:
            if self._context.bus.is_closed:
                raise
            log.warning("message not sent", message=type(body).__name__, reason=str(error))
