"""The Controller's side of secure aggregation: one attempt at a round, over the bus.

    keys -> roster -> shares -> masked updates -> survivors -> the sum

What may be asked and what answers mean is decided by ``MaskingServer``; here are the messages, the deadlines and the
repetition. Keys and shares are exchanged while the clients train. Nothing of an attempt that fails counts in the next
one, for which all keys are made anew. It reveals nothing, unless it fails in the last phase, where an answer that is
late gives the sum: see :mod:`gradbus.actors.secure_aggregation.answered_sets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradbus.actors.aggregation.common_grid import CommonGrid
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.sum_summary import SumSummary, ranges_of
from gradbus.actors.federated.controller.rounds import UNMASKED, Outcome, Round
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.protocol import PAUSED, REPEAT_AFTER_S, SAT_OUT
from gradbus.actors.secure_aggregation.keys import SEALED_BYTES, Attempt, Dishonest, NotInProtocol, TooFewMembers
from gradbus.actors.secure_aggregation.masked_values import SMALL_BYTES, VALUE_BYTES, MaskedValues, integers_of, zeros
from gradbus.actors.secure_aggregation.masking_server import MaskingServer, WrongSecrets
from gradbus.actors.secure_aggregation.shamir import SHARE_BYTES
from gradbus.codecs import CodecError
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Body, MaskAnswer, MaskRoster, MaskShares, MaskSurvivors

LATE_KEYS = "no keys in time"
LATE_SHARES = "no shares in time"
DECLINED = "does not mask with these members"
BROKEN = "broke the protocol of secure aggregation"  # no honest client does
_ID_BYTES = 4

log = get_logger("controller")


class AttemptTerms(NamedTuple):
    """Holds what all clients of an attempt round and weigh by. It has to be the same in all attempts at a round.

    Attributes:
        dim: values of the model. cap: samples that an update of more counts as; 0: there is none.
        grid: to which they round.
    """

    dim: int
    cap: int
    grid: CommonGrid


class MaskedAttempt:
    """One attempt. All methods are called on the loop, but for :meth:`add`.

    Attributes:
        number: of the attempt, among those of this start of the Controller.
        failure: why it has failed; empty: it has not.
        liars: clients that have broken the protocol, each with the reason.
        disputed: clients of which some have, and nobody knows which.
    """

    def __init__(
        self,
        context: RunContext,
        round_: Round,
        number: int,
        terms: AttemptTerms,
        *,
        is_here: Callable[[int, int], bool],
        changed: Callable[[], None],
    ) -> None:
        """An attempt that has not begun.

        Args:
            is_here: whether this start of a client is still registered.
            changed: called when clients of the round are no longer waited for.
        """
        self._context = context
        self._settings = context.config.secure_aggregation
        self._round = round_
        self._is_here = is_here
        self._changed = changed
        self.number = number
        attempt = Attempt(context.bus.job, context.run_id, context.identity.incarnation, round_.round_id, number)
        least = context.config.clients.min
        self._server = MaskingServer(
            attempt, self._settings.threshold, cap=terms.cap, grid=terms.grid, least_members=least
        )
        self._terms = terms
        self._total = zeros(terms.grid, terms.dim)
        self._positions: NDArray[np.int64] | None = None
        self._weights: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}  # of those that have advertised keys: no later start has them
        self._ready: set[int] = set()  # that have the shares of the others
        self._news = asyncio.Event()
        self._agreeing: asyncio.Task[None] | None = None
        self.failure = ""
        self.liars: dict[int, str] = {}
        self.disputed: frozenset[int] = frozenset()

    # Keys and shares, while the clients train

    def start(self, done: Callable[[], object]) -> None:
        """Begin to exchange them; ``done`` is called when that has ended. :meth:`stop` has to follow."""
        self._agreeing = asyncio.create_task(self._agree(), name="masked-attempt")
        self._agreeing.add_done_callback(lambda _: done())

    def check(self) -> None:
        """Raises what has gone wrong in this process."""
        if self._agreeing is not None and self._agreeing.done():
            self._agreeing.result()

    async def stop(self) -> None:
        """Exchange no more."""
        if self._agreeing is not None:
            self._agreeing.cancel()
            await asyncio.wait([self._agreeing])

    async def _agree(self) -> None:
        """Exchange keys and shares. Clients that do not answer in time are not in the sum; with too few others the
        round is over."""
        round_, server, settings = self._round, self._server, self._settings
        try:
            await self._wait(lambda: not round_.open - set(server.advertised), settings.keys_timeout_s)
            roster = server.close_keys(without={*self.liars, *self._that_sat_out()})
            self.keep_to_members()
            grid = roster.grid
            terms = roster.threshold, roster.cap, roster.to_bytes(), grid.sent, grid.block_elems, grid.exponents
            request = MaskRoster(*self._name, *terms)
            await self._ask([request], lambda: round_.open - set(server.shared), settings.shares_timeout_s)
            server.close_shares()
            round_.require(roster.threshold)
            self.keep_to_members()
            self._positions = await self._context.compute.run(roster.positions, self._terms.dim)
        except TooFewMembers as error:
            if self._that_sat_out() and len(round_.open) < round_.minimum:
                # Without those that sat out no attempt has enough members. If the others have nothing to train either,
                # the round has; they had the same command, and may be slower to say so.
                await self._wait(lambda: not round_.open, settings.keys_timeout_s)
            if round_.open or round_.without_enough() is not Outcome.NOTHING:
                self.fail(str(error))
            return
        complain_until_s = time.monotonic() + settings.shares_timeout_s
        while not self.failure:  # until the end of the attempt, which cancels this: silent clients may come back
            missing = round_.open - self._ready
            if not missing or time.monotonic() >= complain_until_s:
                self._judge()
            for client_id in missing | self._helpers():
                await self._send(self._shares_for(client_id))
            await self._wait(
                (lambda: not round_.open - self._ready) if missing else lambda: bool(round_.open - self._ready),
                REPEAT_AFTER_S,
            )

    def _helpers(self) -> set[int]:
        """Clients that have shared, and then had nothing to train or paused: with their shares they can help to
        unmask."""
        return self._that_sat_out().intersection(self._server.senders) - self._ready

    def _that_sat_out(self) -> set[int]:
        return {client_id for client_id, reason in self._round.failed.items() if reason in (SAT_OUT, PAUSED)}

    def _shares_for(self, client_id: int) -> MaskShares:
        sealed = b"".join(self._server.sealed_for(client_id))
        senders = list(self._server.senders)
        return MaskShares(client_id, self._incarnations[client_id], *self._name, senders, sealed)

    def keep_to_members(self) -> None:
        """Wait no longer for clients that this attempt goes on without."""
        server = self._server
        reason = LATE_SHARES if server.senders else LATE_KEYS
        members: Collection[int] = server.senders or (server.roster.ids if server.roster is not None else ())
        if members and (others := self._round.open.difference(members)):
            for client_id in others:
                self._round.fail(client_id, reason)
            log.warning("not in the sum", clients=sorted(others)[:20], round=self._round.round_id, reason=reason)
            self._changed()

    def _judge(self) -> None:
        """Draw the consequences of the complaints that have come. The attempt may have failed then."""
        server = self._server
        if self.failure or not server.has_complaints:
            return
        judgement = server.judge()
        for client_id, reason in judgement.liars.items():
            self._blame(client_id, reason)
        if judgement.disputed:
            self.disputed = judgement.disputed
            log.warning(
                "clients in dispute",
                clients=sorted(self.disputed),
                round=self._round.round_id,
                attempt=self.number,
                reason="some say that they cannot use the shares of others, which may be true or not",
            )
        if judgement.is_blocked:
            others = sorted({*self.liars, *self.disputed})
            self.fail(f"secure aggregation: too few clients can use the shares of others, which is due to {others}")

    def _blame(self, client_id: int, reason: str) -> None:
        """Note that a client has broken the protocol. It is waited for no longer."""
        if client_id in self.liars:
            return
        self.liars[client_id] = reason
        facts = {"client": client_id, "round": self._round.round_id, "attempt": self.number, "reason": reason}
        log.warning("client left out of secure aggregation", **facts)
        self._round.fail(client_id, BROKEN)
        self._changed()

    @property
    def left_out(self) -> set[int]:
        """Clients without which the next attempt is made."""
        return {*self.liars, *self.disputed}

    @property
    def is_last(self) -> bool:
        """Whether no other attempt at this round can have a sum: clients have been asked to unmask one with those that
        are left out, and do not answer for a sum without one of them, as both together would show its update."""
        return not self.left_out.isdisjoint(self._server.survivors)

    def fail(self, reason: str) -> None:
        """Nothing of this attempt counts."""
        if self.failure:
            return
        log.warning("secure aggregation failed", round=self._round.round_id, attempt=self.number, reason=reason)
        self.failure = reason
        self._round.fail_all(UNMASKED)
        self._changed()

    def note_too_few(self) -> None:
        """The round is over, with too few updates: say why, unless that is known."""
        accepted, roster = len(self._round.accepted), self._server.roster
        if not self.failure and roster is None:
            self.failure = (
                f"secure aggregation: the keys of {len(self._server.advertised)} of {len(self._round.asked)} clients "
                f"had come when the round was over. Nothing was revealed"
            )
        elif not self.failure and roster is not None and accepted < roster.threshold:
            self.failure = (
                f"secure aggregation: {accepted} masked updates have come, the threshold is {roster.threshold}. "
                f"Nothing was revealed"
            )

    def on_answer(self, client_id: int, incarnation: int, answer: MaskAnswer) -> None:
        """A client's part in a phase. Raises NotInProtocol: it does not belong to this attempt."""
        if (answer.run_id, answer.round_id, answer.attempt) != self._name:
            return  # of an earlier attempt
        try:
            self._take(client_id, incarnation, answer)
        except Dishonest as error:
            self._blame(client_id, str(error))
        self._news.set()

    def _take(self, client_id: int, incarnation: int, answer: MaskAnswer) -> None:
        """Take an answer. Raises NotInProtocol, as :meth:`on_answer`; Dishonest: no honest client sends it."""
        server, data = self._server, answer.data
        if answer.phase == 0:
            if client_id not in self._round.open:
                return  # it sits this round out, or has been lost
            if self._incarnations.setdefault(client_id, incarnation) == incarnation:
                server.add_keys(client_id, data)
        elif self._incarnations.get(client_id) != incarnation:
            raise NotInProtocol(f"client {client_id} has been started again since it advertised its keys")
        elif answer.phase == 1 and not data:
            self._round.fail(client_id, DECLINED)
            self._changed()
        elif answer.phase == 1 and client_id not in server.shared:
            server.add_shares(client_id, _pieces(data, SEALED_BYTES))
        elif answer.phase == 2:
            server.add_complaints(client_id, [int.from_bytes(one, "little") for one in _pieces(data, _ID_BYTES)])
            self._ready.add(client_id)
        elif answer.phase == 3 and client_id not in server.answered:
            server.add_unmasking(client_id, _pieces(data, SHARE_BYTES))

    def wake(self) -> None:
        """The registry of clients has changed."""
        self._news.set()

    # Masked updates

    def takes(self, client_id: int) -> bool:
        """Whether an update of this client can be in the sum."""
        return client_id in self._server.senders

    def add(self, client_id: int, payload: memoryview, num_samples: int) -> None:
        """Add a masked update, on the compute thread, in full or, with an exception, not at all. ``num_samples``: as
        its client has announced.

        Raises:
            CodecError: it is none, or not of this attempt, or of another weight.
        """
        width = SMALL_BYTES if self._terms.grid.is_small else VALUE_BYTES
        values = MaskedValues.parse(payload, expected_dim=len(self._total), value_bytes=width)
        roster = self._server.roster
        assert roster is not None, "updates are taken from members alone"
        expected = self.number, roster.weight(num_samples)
        if (values.attempt, values.weight) != expected:
            raise CodecError(
                f"masked update of attempt {values.attempt} with weight {values.weight:,}: expected attempt "
                f"{expected[0]} with weight {expected[1]:,}"
            )
        values.add_to(self._total)
        self._weights[client_id] = values.weight

    # The sum

    async def unmask(self) -> PartialSum:
        """The sum of the updates that count in the round, once no further ones are taken.

        Raises:
            TooFewMembers: too few clients have answered in time, or can use the shares of others. WrongSecrets: some
                client has shared another secret than it has advertised.
        """
        server, round_, roster = self._server, self._round, self._server.roster
        assert roster is not None, "there are updates"
        self._judge()  # not all may have complained in time: what is known now is known before anything is revealed
        if self.failure:
            raise TooFewMembers(self.failure)
        survivors = server.close_inputs(round_.accepted)
        request = MaskSurvivors(*self._name, list(survivors))
        compute = self._context.compute
        await self._ask([request], self._to_answer, self._settings.unmask_timeout_s)
        try:
            await compute.run(server.unmask, self._total, compute.should_stop)
        except WrongSecrets as error:
            for client_id in error.clients:
                self._blame(client_id, "the shares that it has sealed for others do not give what it has advertised")
            raise
        except TooFewMembers:
            self._note_lacking()
            raise
        num_samples = sum(self._weights[one] for one in survivors)
        summary = SumSummary(num_samples, len(survivors), ranges_of(survivors), (), 0)
        total, self._total = self._total, np.zeros(0, np.uint64)  # 8 bytes a value: it is not kept beside the next one
        return PartialSum(summary, integers_of(total, roster, self._positions, self._terms.dim), None)

    def _note_lacking(self) -> None:
        """Note in dispute whom complaints, and silence now, leave too few shares of: the pair, or the sender alone
        where it is silent, too."""
        server = self._server
        for client_id in server.lacking:
            if (by := server.complaints_about(client_id)) and client_id not in self.liars:
                self.disputed |= {client_id} if client_id not in server.answered else {client_id, *by}

    def _to_answer(self) -> set[int]:
        """Clients whose answers are waited for; none, once there are enough."""
        server = self._server
        missing = set() if server.can_unmask else set(server.senders).difference(server.answered, self.liars)
        return {one for one in missing if self._is_here(one, self._incarnations[one])}

    # Messages

    @property
    def _name(self) -> tuple[int, int, int]:
        attempt = self._server.attempt
        return attempt.run_id, attempt.round_id, attempt.number

    async def _ask(self, requests: Iterable[Body], missing: Callable[[], set[int]], timeout_s: float) -> None:
        """Send requests, again and again, until no answer is missing, or for so long."""
        until_s = time.monotonic() + timeout_s
        while missing() and (left_s := until_s - time.monotonic()) > 0:
            for request in requests:
                await self._send(request)
            await self._wait(lambda: not missing(), min(REPEAT_AFTER_S, left_s))

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()

    async def _send(self, body: Body) -> None:
        with contextlib.suppress(BusError):  # sent again
            await self._context.publish(body)


def _pieces(data: bytes, size: int) -> Sequence[bytes]:
    """Pieces of equal size. Raises Dishonest: it is cut short."""
    if len(data) % size:
        raise Dishonest(f"an answer of {len(data)} bytes: expected a multiple of {size}")
    return [data[at : at + size] for at in range(0, len(data), size)]
