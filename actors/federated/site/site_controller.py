"""The Controller of a site's clients: its rounds are those of the level above, from which each model comes.

It is the Controller of every run, but for three things: how to train, and when, is what the level above says; the
updates of a round become a sum that is sent there, not a model; and the next model is what is received from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.strategies import FedAvg, Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.chosen_codecs import codec_of, names_of, own_codecs
from gradbus.actors.federated.controller.controller import ActiveRun, Controller
from gradbus.actors.federated.controller.deadline import RoundDeadline
from gradbus.actors.federated.controller.early_stop import RunCallbacks
from gradbus.actors.federated.controller.liveness import tolerate_write_timeout
from gradbus.actors.federated.controller.order_book import OrderBook
from gradbus.actors.federated.controller.ordered_run import RoundRequests
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.round_collection import CollectedRound
from gradbus.actors.federated.controller.round_commit import RoundCommitter
from gradbus.actors.federated.controller.rounds import Outcome, RoundTotals
from gradbus.actors.federated.controller.run_parts import PreparedRun, RunParts
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.federated.task_results import NothingToTrain
from gradbus.codecs import Codec
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.optimization.schedules import RoundRates
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import TrainCmd

CONTRIBUTED = "contributed rounds alone"  # in the marks of a round's report
CONTRIBUTED_FILE = "contributed"  # in the directory of rounds alone: they have gone into a sum

log = get_logger("site")


class UpstreamChanged(Exception):
    """The level above has gone back to an earlier model, or on to another run or other rules: the site's clients have
    to begin anew."""


class LevelAbove(NamedTuple):
    """Tells how the level above has its clients train.

    Attributes:
        terms: its Welcome, with codec and rule. frozen: its frozen parameters; None: there are none.
    """

    terms: Welcome
    frozen: Tensor | None


class RoundsAlone(NamedTuple):
    """Holds what a site has learnt in rounds of its own.

    Attributes:
        run_id: of the level above. kept: the directory of those rounds.
        difference: to the model that they began with, float32, shape (D,). num_samples: its weight.
        buffers: what has changed of the merged buffers, as of a client.
    """

    run_id: int
    kept: Path
    difference: Tensor
    num_samples: int
    buffers: Mapping[str, Tensor] = {}


class SiteUpdate(NamedTuple):
    """The sum of a site's round for the level above.

    Attributes:
        payload: its bytes. num_samples: in it. totals: what else is known of the updates.
        buffers: what its clients have changed of the merged buffers, merged.
    """

    payload: bytes
    num_samples: int
    totals: RoundTotals
    buffers: Mapping[str, Tensor]


class SiteSum(FedAvg):
    """The exact sum of a round. Its model is the one that the level above has made of the sums of all sites.

    Attributes:
        next_model: float32, shape (D,), from the level above, before :meth:`finish`. next_buffers: its merged buffers.
    """

    next_model: Tensor
    next_buffers: Mapping[str, Tensor]

    def finish(self, weights: Tensor) -> None:
        weights.copy_(self.next_model)

    def contribute(self, difference: Tensor, num_samples: int) -> None:
        """Add one more vector to the sum of the round, with this weight. Raises ValueError: it does not fit."""
        update = codecs.parse(codecs.get("fp32").encode(difference), expected_dim=difference.numel())
        self.add(Update(update), Facts(client_id=-1, num_samples=num_samples))

    def encode(self, totals: RoundTotals) -> tuple[bytes, int]:
        """The message for the level above, and the number of samples in it."""
        assert self._mean is not None, "begin() comes first"
        parts, samples = totals.loss_parts()
        return self._mean.encode(totals.clients(), parts, samples), self._mean.num_samples


class RelayedOrders(OrderBook):
    """Orders the rounds as another level does, which differ in nothing but their number."""

    def __init__(
        self,
        config: FederatedConfig,
        strategy: Strategy,
        state: RunState,
        rates: RoundRates,
        *,
        has_caller: bool,
        terms: Welcome,
        newest: Callable[[], TrainCmd | None],
    ) -> None:
        """``terms``: the Welcome of that level. ``newest``: returns its newest command."""
        super().__init__(config, strategy, state, rates, has_caller=has_caller)
        self._terms = terms
        self._newest = newest

    def command(self, round_id: int) -> TrainCmd:
        return replace(self._newest_command(), round_id=round_id)

    def list_work(self, first: int, last: int) -> list[tuple[int, int]]:
        steps = self._terms.options.get("training.steps")
        return [(self._newest_command().epochs, steps if type(steps) is int and steps > 0 else 0)]

    def _newest_command(self) -> TrainCmd:
        command = self._newest()
        assert command is not None, "no round begins before the level above has commanded one"
        return command


class RelayingController(Controller):
    """A Controller whose clients train as another level says.

    Attributes:
        terms: the Welcome of that level, which says how to train.
        command: the newest one of that level. The rounds differ in nothing but their number.
    """

    _call = "Site(above, bus, task, config, upstream)"

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        config: FederatedConfig,
        *,
        above: LevelAbove,
        command: TrainCmd | None = None,
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        """A controller that has not started. ``command``: the newest one of that level; None: it has given none yet."""
        super().__init__(bus, task, config, on_open=on_open)
        self.terms, self._frozen = above
        self.command = command

    def _prepare(self, *, has_caller: bool = False) -> PreparedRun:
        if self._config.secure_aggregation.enabled and self.terms.codec != "fp32":
            raise ConfigError(
                f"federated.secure_aggregation: the level above has updates encoded with {self.terms.codec}, and only "
                f"those of fp32 can be masked. Set federated.codec at the top level, or leave secure_aggregation out "
                f"here"
            )
        prepared = super()._prepare(has_caller=has_caller)
        if self._frozen is not None:
            prepared.model.write_frozen(self._frozen)
        return prepared

    def _make_book(self, strategy: Strategy, state: RunState, rates: RoundRates, *, has_caller: bool) -> OrderBook:
        return RelayedOrders(
            self._config, strategy, state, rates, has_caller=has_caller, terms=self.terms, newest=lambda: self.command
        )

    def _level_above(self) -> Welcome:
        return self.terms

    def _ids_known_before(self) -> range:
        """Ids of clients are those of the whole tree: which of them are here is not known."""
        return super()._ids_known_before() if self._config.clients.kind == "sites" else range(0)

    def _max_update_bytes(self, model: FlatModel, strategy: Strategy) -> int:
        if self._config.clients.kind == "sites" or self._config.secure_aggregation.enabled:
            return super()._max_update_bytes(model, strategy)
        return int(codec_of(self.terms, allowed=names_of(self.terms)).max_bytes(model.dim))

    def _own_codecs(self) -> tuple[type[Codec], ...]:
        """Those of the level above, which this site has allowed before it began."""
        return own_codecs(names_of(self.terms))


class AdoptingCommitter(RoundCommitter):
    """Commits the model that the level above has made of the sums of all sites."""

    def __init__(
        self, parts: RunParts, callbacks: RunCallbacks, deadline: RoundDeadline | None, own_sum: SiteSum
    ) -> None:
        """``own_sum``: the innermost strategy of the site, which has the next model."""
        super().__init__(parts, callbacks, deadline)
        self._sum = own_sum

    async def _aggregate(self, collected: CollectedRound) -> None:
        """Take the model of the level above, also where no client of this site had anything to train."""
        await self._context.compute.run(self.finish_round)

    def finish_round(self) -> None:
        self._parts.strategy.finish(self._state.weights)
        self._state.replace_buffers({name: self._sum.next_buffers[name] for name in self._state.buffers})

    def adopt(self, round_id: int) -> None:
        """Take a model to which this site has not contributed, on the compute thread."""
        self.finish_round()
        self._state.adopt(round_id)
        if (history := self._context.history).on:
            crc32 = self.weights_crc32()
            history.note("adopted", round=round_id, crc32=crc32, held_crc32=crc32)


class SiteController(RelayingController):
    """A site's Controller while the level above is there. A ``SiteMember`` calls it, one call at a time.

    Attributes:
        started: set when enough clients are there.
        counted_round: the newest round in which the sum of this site counts.
        contribution: what is added to the next sum.
        is_over: the run had ended before this site was ready: no clients are waited for, and those that come learn it.
    """

    _evaluates = False  # the top level does

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        config: FederatedConfig,
        *,
        above: LevelAbove,
        progress: Progress,
        on_open: Callable[[], object],
        contribution: RoundsAlone | None = None,
    ) -> None:
        """A controller that has not started; else as of :class:`RelayingController`.

        Args:
            progress: of the site, over all such controllers.
            contribution: is added to the first sum.
        """
        super().__init__(bus, task, config, above=above, on_open=on_open)
        self.progress = progress
        self.started = asyncio.Event()
        self.counted_round = 0
        self.is_over = False
        self._waiting: asyncio.Timeout | None = None  # for clients
        self.contribution = contribution
        self._contributed: RoundsAlone | None = None  # it is in the present sum
        self._accepted: set[int] = set()
        self._gathered: CollectedRound | None = None
        self._published = -1  # the model of this round was published last
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _make_base_strategy(self, dim: int) -> Strategy:
        return SiteSum(dim)

    @property
    def _sum(self) -> SiteSum:
        own_sum = self._started.base_strategy
        assert isinstance(own_sum, SiteSum), "made so"
        return own_sum

    def _make_committer(
        self, parts: RunParts, callbacks: RunCallbacks, deadline: RoundDeadline | None
    ) -> AdoptingCommitter:
        return AdoptingCommitter(parts, callbacks, deadline, self._sum)

    @property
    def _committer(self) -> AdoptingCommitter:
        committer = self._run.committer
        assert isinstance(committer, AdoptingCommitter), "made so"
        return committer

    def _prepare(self, *, has_caller: bool = False) -> PreparedRun:
        prepared = super()._prepare(has_caller=has_caller)
        prepared.state.follow_run(self.terms.run_id)
        return prepared

    async def _start(
        self,
        stack: AsyncExitStack,
        prepared: PreparedRun,
        on_report: Callable[[RoundReport], object],
        requests: RoundRequests | None,
    ) -> ActiveRun:
        self.progress.reports = []  # those of the checkpoint follow
        self.progress.dropped.clear()
        return await super()._start(stack, prepared, on_report, requests)

    async def _all_rounds(self) -> None:
        if not self.is_over:
            try:
                async with asyncio.timeout(None) as self._waiting:
                    await self._wait_for_clients()
            except TimeoutError:
                if not self.is_over:
                    raise
            finally:
                self._waiting = None
        self.started.set()
        await self._ended
        await self._publish_saved()

    async def _publish_saved(self) -> None:
        """Publish the model of the checkpoint where none has come from above since this start: clients wait for it."""
        round_id = self._started.state.round_id
        if self._published < 0 < round_id:
            log.warning("last model of the level above not received", held=round_id)
            with tolerate_write_timeout("model", round_id):
                await self._run.parts.publisher.publish_full(round_id)

    def expect_rounds(self, rounds: int) -> None:
        """Note of how many rounds the run of the level above is."""
        self.progress.rounds = rounds

    def note_counted(self, round_id: int) -> None:
        """Note that the sum of this site counts in a round."""
        self.counted_round = round_id

    def mark_run_ended(self) -> None:
        """Wait for no clients, or no longer: the run has ended."""
        if self._waiting is not None and not self.is_over:
            self._waiting.reschedule(asyncio.get_running_loop().time())
        self.is_over = True

    def _lingers(self, began_after: int) -> bool:
        return self.is_over or super()._lingers(began_after)

    @property
    def round_s(self) -> float:
        """Seconds that a round of this site may take."""
        return self._config.round.timeout_s

    def end(self, error: Exception | None = None) -> None:
        """End the run for the clients of this site: all rounds are done, or with this error."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def gather(self, command: TrainCmd, due_s: float) -> SiteUpdate:
        """Have the clients do this round until ``due_s``, by ``time.monotonic``. A round whose sum is complete is not
        done again: its sum is still there.

        Raises:
            BarrierTimeout, RoundTimeout, TrainingFailed: there are too few updates. Those that there are count in the
            next attempt at this round. NothingToTrain: no client of this site had anything to train.
        """
        self.command = command
        if self._gathered is None:
            self._gathered = await self._run.collector.collect(command.round_id, self._accepted, due_s=due_s)
            if (contribution := self.contribution) is not None:
                try:
                    await self._compute.run(self._contribute, contribution)
                except (ValueError, OSError) as error:  # it is kept on the disk all the same
                    log.warning(
                        "rounds alone not contributed",
                        round=command.round_id,
                        kept=str(contribution.kept),
                        reason=str(error),
                    )
                    self.contribution = self._contributed = None
        if self._gathered.outcome in (Outcome.NOTHING, Outcome.GIVEN_UP) and self._contributed is None:
            raise NothingToTrain
        self.progress.phase = "delivering"
        return await self._compute.run(self._encode)

    def _encode(self) -> SiteUpdate:
        totals, merge = self._run.parts.receiver.totals, self._run.parts.update_sum.buffers
        return SiteUpdate(*self._sum.encode(totals), totals, {} if merge is None else merge.changes())

    def _contribute(self, contribution: RoundsAlone) -> None:
        # First the file: whether the sum counts, a site that is killed or cut off meanwhile never learns, and rounds
        # that go on in this directory would bring these along a second time.
        (contribution.kept / CONTRIBUTED_FILE).touch()
        # Here, as whoever waits for this may be cancelled: if the sum that has them does not count, adopt() says so.
        self.contribution, self._contributed = None, contribution
        self._sum.contribute(contribution.difference, contribution.num_samples)
        if (merge := self._run.parts.update_sum.buffers) is not None:
            merge.add({name: one for name, one in contribution.buffers.items() if name in merge.layout.names})

    async def adopt(self, round_id: int, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Take the model after this round, and its merged buffers, which the level above has committed: as the state of
        this site, and for its clients, unchanged.

        Raises:
            UpstreamChanged: the clients hold a later one.
            CheckpointError: it cannot be written.
        """
        if round_id == self._published:
            return
        if round_id < self._published:
            raise UpstreamChanged(f"the level above has gone back from round {self._published} to {round_id}")
        self._sum.next_model, self._sum.next_buffers = vector, buffers
        gathered, self._gathered = self._gathered, None
        self._accepted = set()
        if gathered is not None and gathered.round.round_id == round_id == self.counted_round:
            marks: dict[str, tuple[int, ...]] = {} if self._contributed is None else {CONTRIBUTED: ()}
            self._contributed = None
            self._run.on_report(await self._committer.commit(gathered, marks=marks))
        else:
            if self._published >= 0:
                log.warning("round without this site", round=round_id, held=self._published)
            if (lost := self._contributed) is not None:
                log.warning(
                    "rounds alone not contributed",
                    round=round_id,
                    kept=str(lost.kept),
                    reason="the round with them was committed without this site, as far as it knows",
                )
                self._contributed = None
            await self._take_over(round_id)
        self._published = self.progress.round_id = round_id
        self.progress.phase = "waiting"

    async def _take_over(self, round_id: int) -> None:
        """Go on from a model to which this site has not contributed."""
        parts = self._run.parts
        await parts.publisher.quiesce()
        await self._compute.run(self._committer.adopt, round_id)
        await parts.terms.let_into_round(round_id + 1)  # they came when this site held a later model
        with tolerate_write_timeout("model", round_id):
            await parts.publisher.publish_full(round_id)
