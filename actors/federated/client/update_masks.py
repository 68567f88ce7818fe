"""The client's side of secure aggregation: its keys, its shares and its masks in one attempt after another.

What may be answered is decided by ``MaskingClient``, one for each attempt; here are the messages.
They are answered while the client trains, on a thread of their own. As soon as the keys are agreed on, the masks are
made, so that they are there when training ends. A newer attempt ends the one before: its keys are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence

from gradbus.actors.aggregation.common_grid import CommonGrid
from gradbus.actors.aggregation.grid_steps import shape_of
from gradbus.actors.federated.chosen_codecs import codec_of
from gradbus.actors.federated.protocol import REPEAT_AFTER_S
from gradbus.actors.secure_aggregation.answered_sets import AnsweredSets
from gradbus.actors.secure_aggregation.keys import MIN_MEMBERS, SEALED_BYTES, Attempt, NotInProtocol, NotMember, Roster
from gradbus.actors.secure_aggregation.masked_values import UpdateMasks, zeros
from gradbus.actors.secure_aggregation.masking_client import MaskingClient
from gradbus.actors.secure_aggregation.masks import Stopped
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import MaskAnswer, MaskRoster, MaskShares, MaskSurvivors, Welcome
from gradbus.runtime.wire.messages import Identity

_MAX_ROUNDS = 64

MaskRequest = MaskRoster | MaskShares | MaskSurvivors

log = get_logger("client")


class MaskingAttempt:
    """What this client has done in one attempt to sum masked updates.

    Attributes:
        client: its keys. working: a message is being answered. masks: once they are made; they are used once.
        refused: why the newest request has no answer. has_complained: about shares of others, in the log.
    """

    def __init__(self, client: MaskingClient) -> None:
        self.client = client
        self.working = False
        self.masks: UpdateMasks | None = None
        self.refused = ""
        self.has_complained = False


class ClientMasking:
    """Takes part in attempts for one client. All methods are called on the loop."""

    def __init__(self, bus: Bus, identity: Identity, *, least_members: int) -> None:
        """``least_members``: with fewer this client takes no part."""
        self._bus = bus
        self._identity = identity
        self._least = max(MIN_MEMBERS, least_members)
        self._answered = AnsweredSets(self._least)  # also over starts of the controller
        self._spent: OrderedDict[tuple[int, int], Hashable] = OrderedDict()  # by run and round
        self._compute = ComputeThread(f"client-{identity.sender}-masks")
        self._own: MaskingAttempt | None = None
        self._changed = asyncio.Event()

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt."""
        return None if self._own is None else self._own.client.attempt

    def is_open(self, attempt: Attempt) -> bool:
        """Whether this is the newest attempt, and its sum has not been made."""
        return self._own is not None and self.attempt == attempt and not self._own.client.has_answered

    def begin(self, run_id: int, session: int, round_id: int, number: int, group: asyncio.TaskGroup) -> None:
        """Take part in an attempt; tasks belong to ``group``. What is known already only repeats the keys, as long as
        there is no roster."""
        attempt = Attempt(self._bus.job, run_id, session, round_id, number)
        if self.attempt != attempt:
            self.forget()
            self._own = MaskingAttempt(MaskingClient(attempt, self._identity.sender, least_members=self._least))
        own = self._own
        if own is not None and own.client.roster is None:
            self._answer(own, 0, own.client.advertise(), group)

    def forget(self) -> None:
        """Forget all keys: the controller that they were for is gone, or they are of an earlier attempt."""
        self._own = None
        self._compute.stop_current()
        self._changed.set()

    def begin_round(self, run_id: int, round_id: int) -> Mapping[int, Hashable]:
        """A round begins: for no earlier one does this client answer any more. Returns the rounds of the run in which
        it has helped to unmask a sum with its own update, whether there was a receipt or not, with the terms of the
        roster: what it had kept until then has gone out."""
        if (attempt := self.attempt) is not None and (attempt.run_id != run_id or attempt.round_id < round_id):
            self.forget()
        return {number: terms for (run, number), terms in self._spent.items() if run == run_id}

    def interrupt(self) -> None:
        """Check at once whether masks are still wanted."""
        self._changed.set()

    def on_request(self, request: MaskRequest, welcome: Welcome, dim: int, group: asyncio.TaskGroup) -> None:
        """A request of the controller, answered by a task of ``group``. ``welcome``: says which codec the
        updates have. ``dim``: values of the model."""
        own, attempt = self._own, self.attempt
        if own is None or attempt is None:
            return
        if (request.run_id, request.round_id, request.attempt) != (attempt.run_id, attempt.round_id, attempt.number):
            return
        if not own.working:  # else it is repeated
            own.working = True
            name = f"client-{self._identity.sender}-masks"
            group.create_task(self._handle(own, request, welcome, dim, group), name=name)

    async def _handle(
        self, own: MaskingAttempt, request: MaskRequest, welcome: Welcome, dim: int, group: asyncio.TaskGroup
    ) -> None:
        client = own.client
        try:
            match request:
                case MaskRoster():
                    sealed = await self._compute.run(self._share, client, request, welcome, dim)
                    self._answer(own, 1, b"".join(sealed), group)
                case MaskShares():
                    pieces = [
                        request.sealed[at : at + SEALED_BYTES] for at in range(0, len(request.sealed), SEALED_BYTES)
                    ]
                    first = not client.senders
                    lacking = await self._compute.run(client.receive, request.senders, pieces)
                    self._complain(own, lacking)
                    self._answer(own, 2, b"".join(one.to_bytes(4, "little") for one in lacking), group)
                    if first and client.senders:
                        group.create_task(self._make_masks(own, dim), name=f"client-{self._identity.sender}-make-masks")
                case MaskSurvivors():
                    self._answer(own, 3, self._unmask(own, request.clients), group)
        except NotInProtocol as error:
            if str(error) != own.refused:  # the request is repeated
                own.refused = str(error)
                (log.info if isinstance(error, NotMember) else log.warning)(
                    "no part in this attempt",
                    client=self._identity.sender,
                    round=request.round_id,
                    attempt=request.attempt,
                    reason=own.refused,
                )
            if isinstance(request, MaskRoster):
                self._answer(own, 1, b"", group)  # so that it is not waited for
        finally:
            own.working = False

    def _complain(self, own: MaskingAttempt, about: Sequence[int]) -> None:
        """Log, once, whose shares this client cannot use."""
        if about and not own.has_complained:
            own.has_complained = True
            log.warning(
                "shares of other clients cannot be used",
                client=self._identity.sender,
                round=own.client.attempt.round_id,
                attempt=own.client.attempt.number,
                senders=about[:20],
            )

    @staticmethod
    def _share(client: MaskingClient, request: MaskRoster, welcome: Welcome, dim: int) -> list[bytes]:
        try:
            grid = CommonGrid(request.sent, request.block_elems, request.steps)
            grid.check(dim)  # before anything of its size is made
            codec = codec_of(welcome)
        except ValueError as error:
            raise NotInProtocol(str(error)) from None
        sent, block_elems = shape_of(codec, dim)
        if grid.sent != sent or grid.block_elems not in (0, block_elems):
            raise NotInProtocol(
                f"a grid with {grid.sent} values and blocks of {grid.block_elems}: the codec {codec.name} of this run "
                f"has {sent} and {block_elems}, 0 for all and for none"
            )
        return client.share(Roster.parse(client.attempt, request.threshold, request.members, request.cap, grid))

    def _unmask(self, own: MaskingAttempt, survivors: Sequence[int]) -> bytes:
        """Shares that take the masks off the sum of these clients. From now on nothing is masked in this attempt."""
        client = own.client
        name = client.attempt.run_id, client.attempt.round_id
        if client.roster is None or (not client.senders and self._identity.sender not in survivors):
            raise NotMember("an attempt that goes on without this client")
        terms = client.roster.terms
        self._answered.check(name, terms, survivors)
        shares = client.unmask(survivors)
        self._answered.note(name, terms, survivors)
        if self._identity.sender in survivors:
            self._spent[name] = terms
        while len(self._spent) > _MAX_ROUNDS:
            self._spent.popitem(last=False)
        own.masks = None
        return b"".join(shares)

    async def _make_masks(self, own: MaskingAttempt, dim: int) -> None:
        """Make the masks of an attempt, unless a newer one begins."""
        client = own.client
        roster = client.roster
        assert roster is not None, "there are shares"

        def should_stop() -> bool:
            return self._own is not own or self._compute.should_stop()

        def masks() -> UpdateMasks:
            if should_stop():  # it has waited for the thread
                raise Stopped
            total = zeros(roster.grid, dim)
            client.mask(total, should_stop)
            return UpdateMasks(roster, self._identity.sender, len(client.senders), total, roster.positions(dim))

        with contextlib.suppress(Stopped, NotInProtocol):  # the latter: the sum was made without this client meanwhile
            made = await self._compute.run(masks)
            if not client.has_answered:
                own.masks = made
                self._changed.set()

    def _answer(self, own: MaskingAttempt, phase: int, data: bytes, group: asyncio.TaskGroup) -> None:
        """Send an answer, unless a newer attempt has begun."""
        if own is self._own:
            attempt = own.client.attempt
            answer = MaskAnswer(attempt.run_id, attempt.round_id, attempt.number, phase, data)
            group.create_task(self._send(answer), name=f"client-{self._identity.sender}-mask-answer")

    async def _send(self, answer: MaskAnswer) -> None:
        with contextlib.suppress(BusError):  # it is asked for again
            await self._bus.publish(self._identity, answer)

    async def take(self, round_id: int, check: Callable[[], bool]) -> UpdateMasks | None:
        """The masks of the newest attempt at this round, waited for; each is given once. None: ``check`` says that the
        update is no longer wanted; it may raise."""
        while True:
            own, attempt = self._own, self.attempt
            if own is not None and attempt is not None and attempt.round_id == round_id and own.masks is not None:
                masks, own.masks = own.masks, None
                return masks
            if not check():
                return None
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_AFTER_S):
                    await self._changed.wait()

    def close(self) -> None:
        """End. What is being made is given up."""
        self.forget()
        self._compute.close()
