"""A client's part in a round: from the command and the model to the receipt, and to the report for its program; and the
senders by which what it has trained goes out: in one piece, in packets or masked, one update at a time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from torch import Tensor

from gradbus.actors.federated.client.client_models import ClientModels
from gradbus.actors.federated.client.client_observer import CALLED_OFF, ClientObserver, ClientReport
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.packets_out import PacketSender
from gradbus.actors.federated.client.session import ClientContext
from gradbus.actors.federated.client.update_masks import ClientMasking
from gradbus.actors.federated.client.updates_out import EncodedUpdate, UpdateSender
from gradbus.actors.federated.model.own_tensors import PERSONAL, part_of
from gradbus.actors.federated.protocol import PAUSED, SAT_OUT
from gradbus.actors.federated.task_results import NothingToTrain
from gradbus.actors.secure_aggregation.keys import Attempt
from gradbus.actors.secure_aggregation.masked_values import TooLarge
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.testing.journal import Probe
from gradbus.runtime.wire.control import (
    Grant,
    PacketRequest,
    PacketsMissing,
    Receipt,
    RetransmitRequest,
    TrainingFailure,
    Welcome,
)
from gradbus.runtime.wire.messages import Identity, TrainCmd

log = get_logger("client")

MakeUpdate = Callable[[Welcome, TrainCmd, Tensor], Awaitable[EncodedUpdate]]


class Outbox:
    """Holds the senders of one client.

    Attributes:
        transfers: numbers of uploads, none of which this client uses twice.
        updates: sends whole updates, and the last packet of others. early: the packets before that.
        packets: decides which packets go out. masking: has the masks of this client.
        answered_by: the incarnation of the controller that has answered last about an update.
    """

    def __init__(self, bus: Bus, identity: Identity, probe: Probe, *, least_members: int) -> None:
        """``least_members``: with fewer this client takes no part in masked sums."""
        self.transfers = itertools.count(1)
        self.updates = UpdateSender(bus, identity, probe)
        self.early = UpdateSender(bus, identity, probe)
        self.packets = PacketSender(self.early, self.updates, self.transfers, probe)
        self.answered_by = 0
        self.masking = ClientMasking(bus, identity, least_members=least_members)

    @property
    def bytes_up(self) -> int:
        """Return the bytes of updates that were sent so far."""
        return self.updates.bytes_up + self.early.bytes_up

    def interrupt(self) -> None:
        """Check at once whether an update, sent or waiting for masks, is still wanted."""
        self.updates.interrupt()
        self.early.interrupt()
        self.masking.interrupt()

    def on_answer(
        self, session: int, body: Grant | RetransmitRequest | Receipt | PacketsMissing, group: asyncio.TaskGroup
    ) -> None:
        """The controller has answered about an update, or a packet of one.

        Args:
            session: its incarnation. group: tasks that send belong to it.
        """
        self.answered_by = session
        if isinstance(body, PacketsMissing):
            self.packets.on_missing(body)
        elif not self.updates.on_answer(body, group):
            self.early.on_answer(body, group)

    def close(self) -> None:
        """End. What is being made is given up."""
        self.masking.close()


class UpdateMaking(NamedTuple):
    """Makes the updates of one kind of client.

    Attributes:
        make: makes the update of a command, from the global model, float32, shape (D,). Whatever it raises is reported
            as a failure of the training.
        is_called_off: returns whether the newest call of that was asked to stop.
    """

    make: MakeUpdate
    is_called_off: Callable[[], bool]


class ClientRounds:
    """Takes part in the rounds of one client, one after the other. All methods are called on the loop.

    Attributes:
        counted, refused: updates so far that count, and that do not.
    """

    def __init__(
        self,
        context: ClientContext,
        outbox: Outbox,
        training: LocalTraining,
        models: ClientModels,
        observer: ClientObserver,
        making: UpdateMaking,
    ) -> None:
        self._context = context
        self._outbox = outbox
        self._training = training
        self._models = models
        self._observer = observer
        self._failures = context.failures
        self._making = making
        self.counted = self.refused = 0

    async def take_part(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> None:
        """Make the update of a round, send it until it is answered, and report to the program.

        Raises:
            CallbackFailed: a callback has. BarrierTimeout: there has been no controller for too long.
        """
        status, sent_before = self._context.status, self._outbox.bytes_up
        began_s = time.monotonic()
        if not await self._may_begin(command):
            return
        update, reason = await self._train(welcome, command, base)
        if update is not None:
            with status.delivering():
                update, reason = await self._deliver(welcome, command, base, update)
        seconds, sent_bytes = time.monotonic() - began_s, self._outbox.bytes_up - sent_before
        if update is None:
            report = ClientReport(
                round_id=command.round_id, counted=False, reason=reason, seconds=seconds, bytes_up=sent_bytes
            )
        else:
            report = ClientReport.of_update(update.request, reason, bytes_up=sent_bytes, seconds=seconds)
        if report.counted:
            log.info(
                "round done",
                **self._context.facts(),
                round=report.round_id,
                samples=report.num_samples,
                loss=None if report.loss is None else round(report.loss, 6),
                seconds=round(seconds, 3),
                bytes=sent_bytes,
            )
        if status.is_paused:  # while it was sent: this is said only now
            await self._context.heartbeat.send_hello()
        await self._observer.round_done(report)

    async def _may_begin(self, command: TrainCmd) -> bool:
        """Call the callbacks before a round; whether to train in it after that: not where it was paused meanwhile, also
        if it goes on already."""
        await self._observer.round_begins(command.round_id)
        return not (self._observer.ending or self._context.status.holds_back(command))

    # The update

    async def _train(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> tuple[EncodedUpdate | None, str]:
        """Make the update of a round; None: there is none, and why."""
        context, current, session = self._context, self._context.session, self._context.session.incarnation
        failure: Exception | None = None
        context.status.set("training")
        # It goes out as training starts: a later one may come late, as training may hold the interpreter.
        context.group.create_task(context.heartbeat.send_hello(), name=f"client-{context.client_id}-hello")
        update: EncodedUpdate | None = None
        try:
            update = await self._making.make(welcome, command, base)
        except Exception as error:
            failure = error
            self._models.check_frozen_again()
        finally:
            context.status.set("idle")
        # Training that was called off may have ended half way: its result is not used, also where the same command has
        # been repeated meanwhile, as by a restarted controller.
        is_called_off = session != current.incarnation or current.is_superseded(command) or self._making.is_called_off()
        if is_called_off or failure is not None:
            await self._outbox.packets.stop()
        if is_called_off:
            newer = current.command.round_id if current.command else None
            log.info("training given up", round=command.round_id, newer=newer)
            return None, PAUSED if context.status.has_called_off(command) else CALLED_OFF
        if failure is not None:
            return None, await self._report_failure(welcome, command, failure)
        return update, ""

    async def _deliver(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, update: EncodedUpdate
    ) -> tuple[EncodedUpdate | None, str]:
        """Send an update. Returns it as it was sent, and why it does not count; None: no answer has come for it."""
        current = self._context.session
        try:
            delivered = await self._send(welcome, command, base, update)
        except TooLarge as error:
            return None, await self._report_failure(welcome, command, error)
        if delivered is None:
            return None, CALLED_OFF
        update, receipt = delivered
        if receipt.accepted:
            self.counted += 1
            # Before the model of this round comes.
            self._observer.keep_personal(part_of(update.state, PERSONAL) if update.state else {})
            current.count(command.round_id, self._outbox.answered_by)
        else:
            self.refused += 1
            current.mark_handled(command)
            log.warning("update refused", **self._context.facts(), round=command.round_id, reason=receipt.reason)
        await self._context.compute.run(self._training.on_receipt, update, receipt)
        return update, "" if receipt.accepted else f"refused: {plain_line(receipt.reason)}"

    async def _send(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, update: EncodedUpdate
    ) -> tuple[EncodedUpdate, Receipt] | None:
        """Send an update, masked where the controller asks for that, until there is a receipt for what was sent; None:
        there will be none.

        Raises:
            TooLarge: it has no room in the sum of all members.
        """
        if welcome.masked:
            return await self._send_masked(command, base, update)
        in_packets = isinstance(update.request, PacketRequest)
        deliver = self._outbox.packets.deliver if in_packets else self._outbox.updates.deliver
        # Another start of the controller is asked, too. It knows whether the update counts, as the residual must.
        receipt = await deliver(
            update,
            check=lambda: self._context.is_same_run(welcome.run_id),
            is_held=self._context.session.is_held(command),
        )
        return None if receipt is None else (update, receipt)

    async def _send_masked(
        self, command: TrainCmd, base: Tensor, update: EncodedUpdate
    ) -> tuple[EncodedUpdate, Receipt] | None:
        """Send an update masked, and anew in each attempt at its round. Raises TooLarge."""
        context, masking, session = self._context, self._outbox.masking, self._context.session.incarnation

        def is_wanted() -> bool:
            part = context.session.may_take_part(context.client_id, command)
            return part and context.is_same_session(session) and not context.session.is_superseded(command)

        while (masks := await masking.take(command.round_id, is_wanted)) is not None:
            transfer = next(self._outbox.transfers)
            sent = await context.compute.run(self._training.mask, update, base, masks, transfer)
            attempt = masks.roster.attempt
            if not masking.is_open(attempt):  # it has failed meanwhile, or goes on without this client
                if sent.sealed is not None:
                    sent.sealed.hide()
                continue
            receipt = await self._outbox.updates.deliver(
                sent,
                check=lambda: context.awaits_answers_of(session) and not self._is_failed(attempt),  # noqa: B023 - awaited here
            )
            if receipt is not None:
                return sent, receipt
        return None

    def _is_failed(self, attempt: Attempt) -> bool:
        """Whether there is a later attempt at the same round, so that this one has come to nothing."""
        newest = self._outbox.masking.attempt
        return newest is None or (newest.round_id == attempt.round_id and newest != attempt)

    async def _report_failure(self, welcome: Welcome, command: TrainCmd, error: Exception) -> str:
        """Report to the controller why there is no update. Returns it, in one line."""
        current, facts = self._context.session, self._context.facts()
        current.mark_handled(command)
        if isinstance(error, NothingToTrain):
            log.info("nothing to train", **facts, round=command.round_id)
            summary, sent = SAT_OUT, TrainingFailure(welcome.run_id, command.round_id, SAT_OUT, SAT_OUT)
        else:
            sent = self._failures.note_training(
                error, welcome.run_id, command.round_id, facts, is_masked=welcome.masked
            )
            summary = self._failures.in_training
        if current.command is command:
            current.report(sent)
            await self._context.heartbeat.send_hello()
        return summary
