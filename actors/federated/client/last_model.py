"""The model after the last round, which a client waits for once the run has ended well."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable

from gradbus.actors.federated.client.client_models import ClientModels
from gradbus.actors.federated.client.session import ClientContext
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.wait_log import EVERY_S
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import TrainCmd

LAST_MODEL_S = 30.0  # without a new frame, after which the end waits no longer for the model after the last round
CONTROLLER_GONE_S = 1.0  # and without a controller: one that has just started is found topic by topic

log = get_logger("client")


class LastModelDeadline:
    """Tells when to give up the model after the last round: nothing new of it has come for LAST_MODEL_S, or the
    controller has been gone for CONTROLLER_GONE_S.

    A model is given up for a lack of progress, never for its size or a slow link: each new frame begins the time again,
    and a model has a bounded number of them.
    """

    def __init__(self, bus: Bus, progressed_s: Callable[[], float] = lambda: -math.inf) -> None:
        """Begin now. ``progressed_s``: returns when the last new frame came, by ``time.monotonic``."""
        self._bus = bus
        self._progressed_s = progressed_s
        self._seen_s = self._began_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether to wait no longer. Asked about twice a second."""
        now_s = time.monotonic()
        if self._bus.matched_writers(TrainCmd):
            self._seen_s = now_s
        since_s = max(self._began_s, self._progressed_s())
        return now_s >= since_s + LAST_MODEL_S or now_s >= self._seen_s + CONTROLLER_GONE_S


async def fetch_last_model(
    context: ClientContext,
    models: ClientModels,
    wait: Callable[[float], Awaitable[None]],
    is_wanted: Callable[[Welcome], bool],
) -> None:
    """Wait until the model after the last round is here, while it makes progress (:class:`LastModelDeadline`). Its
    controller waits as long.

    Args:
        wait: waits for a message, at most for so many seconds; raises BarrierTimeout.
        is_wanted: returns whether this client has a use for it.
    """
    current, replica, last = context.session, models.replica, 0
    deadline = LastModelDeadline(context.bus, lambda: replica.progress_s)
    with contextlib.suppress(BarrierTimeout):
        while current.run_id and not deadline.is_over():  # else no controller has welcomed this client
            context.changed.clear()
            welcome = current.welcome
            if welcome is None:  # a later start of the controller was heard, and its Welcome is on its way
                await wait(EVERY_S)
                continue
            if not is_wanted(welcome):
                return
            # Whom a start has welcomed that found all rounds done has no command of it.
            last = welcome.next_round - 1 if current.command is None else current.command.round_id
            context.status.resume()
            await models.fetch_round(
                welcome,
                last,
                lambda: deadline.is_over() or current.welcome is not welcome,  # noqa: B023 - awaited here
            )
            if replica.round_id >= last:
                return
    if last:
        log.warning("last model not received", **context.facts(), round=last, held=replica.round_id)
