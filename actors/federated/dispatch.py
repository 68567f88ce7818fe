"""Every message that reaches the controller, answered or passed on.

Nothing that comes from the wire ends the controller: what cannot be used is counted and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable

from gradbus.actors.federated.clients import Answer, Member, Members
from gradbus.actors.federated.liveness import Rivals
from gradbus.actors.federated.participation import FOR_GOOD, Conduct, Participation
from gradbus.actors.federated.publish import Downlink
from gradbus.actors.federated.rounds import TRAINING_FAILED
from gradbus.actors.federated.updates_in import Intake
from gradbus.runtime.bus.bus import Bus, Subscription
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import BusClosed, GradbusError, JobTaken
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_text
from gradbus.runtime.wire.control import Failed, Hello, Leave, NeedModel, Offer, Refused, Welcome
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message, PeerGone

MAX_DISTINCT = 32  # that are shown in a run; what a client says of its errors is its own invention
MAX_LINE = 1200  # characters of its last line, which says it all
MAX_TEXT = 8000  # characters of a traceback: its end, where the error stands

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

log = get_logger("controller")


class Failures:
    """What went wrong in the training of clients in this start of the controller."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._newest: dict[int, str] = {}
        self._last: dict[int, str] = {}  # by client, without what differs from one time to the next

    def note(self, client_id: int, round_id: int, text: str, reason: str = TRAINING_FAILED) -> None:
        """A client says that nothing came of its training; ``text`` is the traceback. Writes a line into the log."""
        text = plain_text(text[-MAX_TEXT:]).strip()
        key = _ADDRESS.sub("0x", text)
        if key not in self._seen and len(self._seen) >= MAX_DISTINCT:
            key = ""
        self._seen[key] += 1
        error = text.rpartition("\n")[2][:MAX_LINE]
        repeated = bool(key) and self._last.get(client_id) == key  # in the next attempt, or in the next round
        self._last[client_id] = key
        self._newest[client_id] = error
        facts = {
            "client": client_id, "round": round_id, "reason": reason, "error": error, "times": self._seen[key]
        }  # fmt: skip
        if key and self._seen[key] == 1:
            log.error("training failed on a client", **facts, traceback=text)
        elif repeated:
            log.info("training failed again on a client", **facts)
        else:
            log.error("training failed on a client", **facts)

    def newest(self, client_id: int) -> str:
        """The last line of what this client said last."""
        return self._newest.get(client_id, "for a reason that it did not tell")


class Reception:
    """Turns messages into events of the controller."""

    def __init__(
        self, bus: Bus, identity: Identity, members: Members, intake: Intake, downlink: Downlink, conduct: Conduct,
        config: FederatedConfig, *, run_id: int, next_round: Callable[[], int], changed: Callable[[], None],
        failed: Callable[[int, Failed], None], rivals: Rivals, in_doubt: Callable[[], bool],
        participation: Participation | None = None,
    ) -> None:  # fmt: skip
        """``next_round``: the first round that a client which comes now takes part in. ``changed``: the table of
        members did. ``failed``: nothing came of a client's training, with the reason. ``rivals``: other controllers.
        ``in_doubt``: whether what DDS says of who is gone, and who was heard when, is to be doubted now, see
        Presence."""
        self._rivals = rivals
        self._participation = participation or Participation()
        self._in_doubt = in_doubt
        self.has_begun = False  # the clients are ours: who comes now stays away
        self._bus = bus
        self._identity = identity
        self._members = members
        self._intake = intake
        self._downlink = downlink
        self._conduct = conduct
        self._config = config
        self._run_id = run_id
        self._next_round = next_round
        self._changed = changed
        self._failed = failed

    async def run(self, inbox: Subscription, group: asyncio.TaskGroup) -> None:
        """Handle messages until the bus is closed."""
        while True:
            try:
                message = await inbox.get()
            except BusClosed:
                if inbox.fault:
                    raise
                raise BusClosed("the bus was closed under a running controller: stop the controller first") from None
            try:
                await self._handle(message, group)
            except JobTaken:
                raise
            except GradbusError as error:
                log.warning("message not handled", kind=type(message).__name__, reason=str(error))
            except Exception:  # a mistake of ours: one message must not end a run of days
                self._intake.dropped["handler failed"] += 1
                with contextlib.suppress(Exception):  # the log itself may be what failed: its stream is the host's
                    log.exception("message not handled", kind=type(message).__name__)

    async def _handle(self, message: Message, group: asyncio.TaskGroup) -> None:
        match message:
            case ClientUpdate():
                self._heard(message.client_id, message.frame.key.incarnation)
                await self._intake.on_frame(message)
            case Control(sender=sender, incarnation=incarnation, body=body) if sender != CONTROLLER:
                if isinstance(body, Hello):
                    await self._hello(sender, incarnation, body, message.number)
                elif not self._heard(sender, incarnation):
                    pass  # not a member: its Hello will come
                elif isinstance(body, Offer):
                    if body.run_id == self._run_id:
                        self._members.holds(sender, incarnation, body.round_id - 1)  # what it was trained from
                    await self._intake.on_offer(sender, incarnation, body)
                elif isinstance(body, NeedModel):
                    self._downlink.on_need(sender, body, group)
                elif isinstance(body, Failed) and body.run_id == self._run_id:
                    self._failed(sender, body)
                elif isinstance(body, Leave):
                    log.info("client left", client=sender, reason=body.reason)
                    self._gone(sender, incarnation)
            case PeerGone(sender=sender, incarnation=incarnation, why="") if self._in_doubt():
                self._members.wait_for(sender, incarnation, time.monotonic())
            case PeerGone(sender=sender, incarnation=incarnation):
                self._gone(sender, incarnation)
            case _ if not self.has_begun and (taken := self._rivals.hear_early(message)) is not None:
                raise taken
            case _:
                pass  # our own words, or those of a controller that will stay away

    def _heard(self, client_id: int, incarnation: int) -> bool:
        """A member lives. One that was silent is waited for again, before what it says is looked at: an update that it
        offers counts, if its round is still open. False: it is none."""
        member = self._members.get(client_id, incarnation)
        if member is None:
            return False
        was_unheard, quiet_s = member.silent or member.quiet, member.quiet_s(time.monotonic())
        member.hear(time.monotonic())
        if was_unheard:
            log.info("client heard again", client=client_id, seconds=round(quiet_s, 1))
            self._changed()
        return True

    async def _hello(self, client_id: int, incarnation: int, hello: Hello, number: int) -> None:
        self._heard(client_id, incarnation)
        before = self._members.get(client_id, incarnation)
        earlier = self._members.incarnation_of(client_id)
        was_ready = before is not None and self._is_ready(before)
        next_round, out_until = self._next_round(), self._conduct.out_until(client_id)
        if out_until == FOR_GOOD:
            answer, why = Answer.REFUSE, self._conduct.why_out(client_id, next_round) or ""
        else:
            answer, why = self._members.hello(
                client_id, incarnation, hello, now_s=time.monotonic(), next_round=next_round, number=number,
                out_until=out_until, in_doubt=self._in_doubt(),
            )  # fmt: skip
        if earlier is not None and self._members.get(client_id, earlier) is None:
            self._intake.forget(client_id, earlier)  # an older start of it, which is gone
            self._changed()
        if answer is Answer.REFUSE:
            log.warning("client refused", client=client_id, host=hello.host, reason=why)
            self._participation.turned_away(client_id, why)
            await self._bus.publish(self._identity, Refused(client_id, incarnation, why))
            return
        member = self._members.get(client_id, incarnation)
        if answer is Answer.WELCOME and member is not None:
            await self.welcome(member)
        if member is not None and (before is None or was_ready != self._is_ready(member)):
            if before is None:
                log.info("client joined", client=client_id, host=hello.host, from_round=member.from_round)
            self._changed()

    def _is_ready(self, member: Member) -> bool:
        return member.hello.ready and member.hello.session == self._identity.incarnation

    async def welcome(self, member: Member) -> None:
        """Tell a client from which round on it takes part, and by which rules."""
        config = self._config
        welcome = Welcome(
            to=member.client_id, incarnation=member.incarnation, run_id=self._run_id, next_round=member.from_round,
            codec=config.codec, density=config.density, chunk_elems=config.chunk_elems,
            codec_version=config.codec_version, num_clients=config.num_clients or 0, heartbeat_s=config.heartbeat_s,
            memory=self._bus.memory.here, frozen=self._downlink.frozen_hash,
        )  # fmt: skip
        await self._bus.publish(self._identity, welcome)
        await self._downlink.welcome(member.client_id)

    def _gone(self, client_id: int, incarnation: int) -> None:
        self._intake.forget(client_id, incarnation)
        if self._members.remove(client_id, incarnation):
            self._changed()
