"""How a client that fails before its first round reports it: its controller need not guess why it is missing."""

from __future__ import annotations

import asyncio
import contextlib

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import BusError, GradbusError
from gradbus.runtime.plain_text import plain_line, plain_text
from gradbus.runtime.user_errors import summary_of, traceback_with_place, user_error
from gradbus.runtime.wire.control import BEFORE_FIRST_ROUND, NOT_WELCOMED, Status, TrainingFailure
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message

FIND_S = 1.0  # for which a client that has failed looks for a controller
HEARTBEATS_S = 2.0  # for which it waits for that one's heartbeat
MAX_TEXT = 8000  # characters of a traceback, from its end


class EarlyFailures:
    """Reports what a client fails with before its first round, as far as ``client.report_failures`` lets it leave."""

    def __init__(self, bus: Bus, identity: Identity, config: ClientConfig, name: str = "") -> None:
        """``name``: of a client that has no id yet; else empty."""
        self._bus = bus
        self._identity = identity
        self._config = config
        self._name = name

    def summary(self, error: Exception) -> str:
        """Return what of an error may leave this client, in one line."""
        return plain_line(summary_of(error)) if self._config.report_failures else type(error).__name__

    async def report(self, error: Exception, run_id: int) -> None:
        """Report the error to the controller of a run, which has welcomed this client."""
        text = type(error).__name__
        if self._config.report_failures:
            is_own = user_error(error).is_own or not isinstance(error, GradbusError)
            text = self.summary(error)
            if is_own:
                text = plain_text(traceback_with_place(error, full=self._config.full_traceback))
        failure = TrainingFailure(run_id, BEFORE_FIRST_ROUND, text[-MAX_TEXT:], name=self._name)
        with contextlib.suppress(BusError):
            await self._bus.publish(self._identity, failure)

    async def report_unwelcomed(self, error: Exception) -> None:
        """Report the error to the controller of the job, if there is one: this client has not met it yet."""
        with contextlib.suppress(BusError, TimeoutError):
            await self._find_controller()
            await self.report(error, NOT_WELCOMED)

    async def _find_controller(self) -> None:
        """Wait until the controller of the job knows the writer here. Raises TimeoutError: there is no controller."""
        bus = self._bus
        for kind in (Control, ClientUpdate):  # it reads updates, and no other member does
            bus.open_writer(kind)
        with bus.subscribe(Control, only=_is_of_controller) as inbox:
            await bus.matched(lambda: bus.matched_readers(ClientUpdate) > 0, timeout_s=FIND_S)
            # What it sends arrives, so it knows the reader here, and the writer, which is older.
            async with asyncio.timeout(HEARTBEATS_S):
                await inbox.get()


def _is_of_controller(message: Message) -> bool:
    return isinstance(message, Control) and message.sender == CONTROLLER and isinstance(message.body, Status)
