"""What a client reports when it fails: before its first round, in a round, and as the reason why it leaves.

What of an error may leave this client, ``client.report_failures`` says: its text, or its kind alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from gradbus.actors.federated.task_results import reason_of
from gradbus.actors.secure_aggregation.masked_values import TooLarge
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import BusError, GradbusError, JoinDeclined, RunAborted, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_line, plain_text
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.user_errors import summary_of, traceback_with_place, user_error
from gradbus.runtime.wire.control import (
    BEFORE_FIRST_ROUND,
    FAILED,
    NOT_WELCOMED,
    RunEnded,
    Status,
    TrainingFailure,
)
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message

FIND_S = 1.0  # for which a client that has failed looks for a controller
HEARTBEATS_S = 2.0  # for which it waits for that one's heartbeat
MAX_TEXT = 8000  # characters of a traceback, from its end
NO_ROOM = "its update has no room in the sum of all members: see its log"

log = get_logger("client")


class ClientFailures:
    """Keeps what one client has failed with, and reports it.

    Attributes:
        leaving: why the client leaves, unless the run has ended.
        in_training: the newest failure of a training, in one line; empty: there was none.
    """

    def __init__(self, bus: Bus, config: ClientConfig) -> None:
        self._bus = bus
        self._config = config
        self.leaving = "stopped"
        self.in_training = ""
        self._declined: tuple[JoinDeclined, int] | None = None  # why it does not take part in a run, and in which

    def summarize(self, error: Exception) -> str:
        """Return what of an error may leave this client, in one line."""
        return plain_line(summary_of(error)) if self._config.report_failures else type(error).__name__

    def leave_because(self, reason: str) -> None:
        """Note why the client leaves, as its program has it."""
        self.leaving = reason

    def leave_with(self, error: Exception) -> None:
        """Note that the client leaves because of an error."""
        self.leaving = f"{FAILED}{self.summarize(error)}"

    def decline(self, error: JoinDeclined, run_id: int) -> None:
        """Note that the client does not take part in a run, which asks for what it does not give."""
        self._declined = error, run_id
        self.leave_with(error)

    # Before the first round

    async def report_declined(self, identity: Identity) -> None:
        """Report to the controller of the run that this client has declined, if it has declined one."""
        if self._declined is not None:
            await self.report(identity, "", *self._declined)

    async def report(self, identity: Identity, name: str, error: Exception, run_id: int) -> None:
        """Report the error to the controller of a run, which has welcomed this client.

        ``name``: of a client that has no id yet; else empty.
        """
        text = type(error).__name__
        if self._config.report_failures:
            is_own = user_error(error).is_own or not isinstance(error, GradbusError)
            text = self.summarize(error)
            if is_own:
                text = plain_text(traceback_with_place(error, full=self._config.full_traceback))
        failure = TrainingFailure(run_id, BEFORE_FIRST_ROUND, text[-MAX_TEXT:], name=name)
        with contextlib.suppress(BusError):
            await self._bus.publish(identity, failure)

    async def report_unwelcomed(self, identity: Identity, name: str, error: Exception) -> None:
        """Report the error to the controller of the job, if there is one: this client has not met it yet."""
        with contextlib.suppress(BusError, TimeoutError):
            await self._find_controller()
            await self.report(identity, name, error, NOT_WELCOMED)

    async def _find_controller(self) -> None:
        """Wait until the controller of the job knows the writer here. Raises TimeoutError: there is no controller."""
        bus = self._bus
        for kind in (ToController, ClientUpdate):  # it reads updates, and no other member does
            bus.open_writer(kind)
        with bus.subscribe(ToClients, only=_is_of_controller) as inbox:
            await bus.matched(lambda: bus.matched_readers(ClientUpdate) > 0, timeout_s=FIND_S)
            # What it sends arrives, so it knows the reader here, and the writer, which is older.
            async with asyncio.timeout(HEARTBEATS_S):
                await inbox.get()

    # In a round

    def note_training(
        self, error: Exception, run_id: int, round_id: int, facts: Mapping[str, Any], *, is_masked: bool
    ) -> TrainingFailure:
        """Log what a training has failed with. Returns the message for the controller.

        Args:
            facts: of the client, for the log. is_masked: updates are, so that the text must not say how large this is.
        """
        text = plain_text(traceback_with_place(error, full=self._config.full_traceback))
        summary = plain_line(str(user_error(error)))
        facts = {**facts, "round": round_id, "error": summary}
        if summary == self.in_training:  # in the next attempt, or in the next round
            log.info("training failed again", **facts)
        else:
            log.error("training failed", **facts, traceback=text)
        self.in_training = summary
        sent = text[-MAX_TEXT:] if self._config.report_failures else type(error).__name__
        if is_masked and isinstance(error, TooLarge):
            sent = NO_ROOM
        return TrainingFailure(run_id, round_id, sent, reason_of(error))

    def note_failed_client(self, text: str) -> None:
        """Note that a client failed that a process of another kind has trained, as a host's pool does."""
        self.in_training = text

    def make_error(self, end: RunEnded, client_id: int) -> TrainingFailed:
        """Return the error that a run which a failure has ended is for this client."""
        if not self.in_training:
            return RunAborted(f"the run has ended: {plain_line(end.reason)}")
        return TrainingFailed(
            f"training failed here: {self.in_training}. That has ended the run. Mend it, start the clients and then "
            f"the controller again: the run goes on from the last committed model",
            [client_id],
        )


def _is_of_controller(message: Message) -> bool:
    return isinstance(message, Control) and message.sender == CONTROLLER and isinstance(message.body, Status)
