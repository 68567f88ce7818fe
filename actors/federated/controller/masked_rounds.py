"""The attempts at rounds with secure aggregation: whom they are made without, and what a sum that fails leads to.

The sum of an attempt is of the clients on its roster, all or nothing. So another attempt at a round has other keys and
begins at zero, and it is made without the clients that broke the protocol of the one before, and those that have sat it
out. Where clients have been asked to unmask a sum with a client that is to be left out, there is no other attempt: both
sums together would show its update. Then the round is given up, and the next one begins without that client.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from gradbus.actors.aggregation.exact_sum import OutOfRange
from gradbus.actors.aggregation.strategies import NoRoom
from gradbus.actors.federated.controller.clients import ClientRegistry
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.masked_attempt import BROKEN, AttemptTerms, MaskedAttempt
from gradbus.actors.federated.controller.report import Progress
from gradbus.actors.federated.controller.rounds import Outcome, Round
from gradbus.actors.federated.controller.run_membership import RunMembership
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.actors.federated.protocol import SAT_OUT
from gradbus.actors.secure_aggregation.keys import NotInProtocol, TooFewMembers
from gradbus.actors.secure_aggregation.masking_server import WrongSecrets
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import MaskAnswer

log = get_logger("controller")


class MaskedRounds:
    """Makes the attempts.

    Attributes:
        left_out: clients that later attempts are made without.
    """

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        receiver: UpdateReceiver,
        membership: RunMembership,
        progress: Progress,
        current_round: CurrentRound,
    ) -> None:
        """``membership``: punishes clients that break the protocol. ``current_round``: has the newest attempt."""
        self._context = context
        self._registry = registry
        self._receiver = receiver
        self._membership = membership
        self._progress = progress
        self._current_round = current_round
        self._numbers = itertools.count(1)  # none is used twice by this start of the controller
        self.left_out: set[int] = set()

    @property
    def failure(self) -> str:
        """Return why the newest attempt has failed; empty: it has not."""
        attempt = self._current_round.masked
        return "" if attempt is None else attempt.failure

    def make_attempt(self, round_: Round, terms: AttemptTerms) -> MaskedAttempt:
        """Return a new attempt at a round."""
        return MaskedAttempt(
            self._context,
            round_,
            next(self._numbers),
            terms,
            is_here=lambda *client: self._registry.get(*client) is not None,
            changed=self._current_round.notify,
        )

    def on_answer(self, client_id: int, incarnation: int, answer: MaskAnswer) -> None:
        """Take a client's answer to the newest attempt."""
        attempt = self._current_round.masked
        if attempt is None:
            return
        try:
            attempt.on_answer(client_id, incarnation, answer)
        except NotInProtocol as error:  # too late, as a rule
            self._context.dropped["mask answer"] += 1
            facts = self._context.client_facts(client_id)
            log.info("mask answer not used", **facts, phase=answer.phase, reason=str(error))

    async def end(self, round_: Round, attempt: MaskedAttempt, outcome: Outcome) -> Outcome:
        """End an attempt, of which no further update comes: with its sum its updates count. Returns why the round is
        over, after that."""
        outcome = await self._unmask(attempt, outcome)
        await self._leave_out(round_, attempt)
        return outcome

    async def _unmask(self, attempt: MaskedAttempt, outcome: Outcome) -> Outcome:
        if outcome is Outcome.TOO_FEW:
            attempt.note_too_few()
        elif outcome is not Outcome.NOTHING:
            self._progress.phase = "unmasking"
            try:
                await self._receiver.settle_masked(await attempt.unmask())
                return outcome
            except (TooFewMembers, WrongSecrets, OutOfRange, NoRoom) as error:  # the clients, or their sum
                attempt.fail(str(error))
                outcome = Outcome.GIVEN_UP if attempt.is_last else Outcome.TOO_FEW
        is_over = outcome is Outcome.GIVEN_UP
        await self._receiver.settle_masked(None, f"the round was {outcome.value}" if is_over else "")
        return outcome

    async def _leave_out(self, round_: Round, attempt: MaskedAttempt) -> None:
        """Make later attempts without those that broke the protocol of this one, and those that have sat it out: the
        roster of an attempt says how many updates it takes."""
        sat_out = {client_id for client_id, reason in round_.failed.items() if reason == SAT_OUT}
        self.left_out |= attempt.left_out | sat_out
        for client_id, reason in attempt.liars.items():
            self._context.dropped[BROKEN] += 1
            strike = self._context.state.quarantine.strike(client_id, round_.round_id, BROKEN, reason)
            if strike is not None:
                await self._membership.punish(strike)

    def note_outcome(self, outcome: Outcome) -> None:
        """Begin the next round with all clients again, but for those that this one was given up for."""
        given_up = self._current_round.masked if outcome is Outcome.GIVEN_UP else None
        self.left_out = set() if given_up is None else given_up.left_out

    def begin_round(self, ready: Collection[int]) -> None:
        """Begin a round with these clients. Those that the round before was given up for take part again if there are
        too few others."""
        if self.has_too_few_left(ready):
            self.left_out = set()

    def has_too_few_left(self, ready: Collection[int]) -> bool:
        """Whether those that are left out are missing for another attempt, which nobody else can help."""
        return bool(self.left_out) and len(set(ready) - self.left_out) < self._context.config.clients.min
