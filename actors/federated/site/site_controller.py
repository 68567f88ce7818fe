"""The Controller of a site's clients: its rounds are those of the level above, from which each model comes.

It is the Controller of every run, but for three things: how to train, and when, is what the level above says; the
updates of a round become a sum that is sent there, not a model; and the next model is what is received from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.strategies import FedAvg, Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.chosen_codecs import codec_of, names_of, own_codecs
from gradbus.actors.federated.client.local_training import NothingToTrain
from gradbus.actors.federated.controller.combinations import make_strategy
from gradbus.actors.federated.controller.controller import Controller
from gradbus.actors.federated.controller.liveness import tolerate_write_timeout
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundTotals
from gradbus.actors.federated.task import FederatedTask
from gradbus.codecs import Codec
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import TrainCmd

CONTRIBUTED = "contributed rounds alone"  # in the marks of a round's report
CONTRIBUTED_FILE = "contributed"  # in the directory of rounds alone: they have gone into a sum

log = get_logger("site")


class UpstreamChanged(Exception):
    """The level above has gone back to an earlier model, or on to another run or other rules: the site's clients have
    to begin anew."""


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
        terms: Welcome,
        frozen: Tensor | None = None,
        command: TrainCmd | None = None,
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        """A controller that has not started.

        Args:
            terms: the Welcome of that level, with codec and rule. frozen: its frozen parameters; None: there are none.
        """
        super().__init__(bus, task, config, on_open=on_open)
        self.terms = terms
        self._frozen = frozen
        self.command = command

    def _open(self) -> None:
        super()._open()
        if self._config.secure_aggregation.enabled and self.terms.codec != "fp32":
            raise ConfigError(
                f"federated.secure_aggregation: the level above has updates encoded with {self.terms.codec}, and only "
                f"those of fp32 can be masked. Set federated.codec at the top level, or leave secure_aggregation out "
                f"here"
            )
        if self._frozen is not None:
            self._model.write_frozen(self._frozen)

    def _wire(self) -> None:
        super()._wire()
        self._dispatcher.terms = self.terms

    def _ids_known_before(self) -> range:
        """Ids of clients are those of the whole tree: which of them are here is not known."""
        return super()._ids_known_before() if self._config.clients.kind == "sites" else range(0)

    def _max_update_bytes(self) -> int:
        if self._config.clients.kind == "sites" or self._config.secure_aggregation.enabled:
            return super()._max_update_bytes()
        return int(codec_of(self.terms, allowed=names_of(self.terms)).max_bytes(self._model.dim))

    def _own_codecs(self) -> tuple[type[Codec], ...]:
        """Those of the level above, which this site has allowed before it began."""
        return own_codecs(names_of(self.terms))

    async def _command(self, round_id: int) -> TrainCmd:
        assert self.command is not None, "no round begins before the level above has commanded one"
        return replace(self.command, round_id=round_id)

    def _work(self, command: TrainCmd) -> list[tuple[int, int]]:
        steps = self.terms.options.get("training.steps")
        return [(command.epochs, steps if type(steps) is int and steps > 0 else 0)]


class SiteController(RelayingController):
    """A site's Controller while the level above is there. A ``SiteMember`` calls it, one call at a time.

    Attributes:
        started: set when enough clients are there.
        counted_round: the newest round in which the sum of this site counts.
        contribution: is added to the next sum.
        is_over: the run had ended before this site was ready: no clients are waited for, and those that come learn it.
    """

    _evaluates = False  # the top level does

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        config: FederatedConfig,
        *,
        terms: Welcome,
        frozen: Tensor | None,
        progress: Progress,
        on_open: Callable[[], object],
    ) -> None:
        """``progress``: of the site, over all such controllers; else as of :class:`RelayingController`."""
        super().__init__(bus, task, config, terms=terms, frozen=frozen, on_open=on_open)
        self.progress = progress
        self.started = asyncio.Event()
        self.counted_round = 0
        self.is_over = False
        self._waiting: asyncio.Timeout | None = None  # for clients
        self.contribution: RoundsAlone | None = None
        self._contributed: RoundsAlone | None = None  # it is in the present sum
        self._due_s = 0.0
        self._accepted: set[int] = set()
        self._gathered: tuple[Round, Outcome, int, float] | None = None
        self._published = -1  # the model of this round was published last
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_report: Callable[[RoundReport], object]

    def _make_strategy(self) -> Strategy:
        self._sum = SiteSum(self._model.dim)
        return make_strategy(self._config, self._model.dim, self._sum)

    def _open(self) -> None:
        super()._open()
        self._state.run_id, self._state.adopts = self.terms.run_id, True

    def _wire(self) -> None:
        self.progress.reports = []  # those of the checkpoint follow
        self.progress.dropped.clear()
        super()._wire()

    async def _all_rounds(self, on_report: Callable[[RoundReport], object]) -> None:
        self._on_report = on_report
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

    def stop_waiting(self) -> None:
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

    def _time_left(self) -> tuple[float, float]:
        left_s = max(0.0, self._due_s - time.monotonic())
        return max(0.01, min(self._config.clients.start_timeout_s, left_s)), left_s

    async def gather(self, command: TrainCmd, due_s: float) -> SiteUpdate:
        """Have the clients do this round until ``due_s``, by ``time.monotonic``. A round whose sum is complete is not
        done again: its sum is still there.

        Raises:
            BarrierTimeout, RoundTimeout, TrainingFailed: there are too few updates. Those that there are count in the
            next attempt at this round. NothingToTrain: no client of this site had anything to train.
        """
        self.command, self._due_s = command, due_s
        started_s = time.perf_counter()
        if self._gathered is None:
            self._gathered = (*await self._gather(command.round_id, self._accepted), started_s)
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
        if self._gathered[1] in (Outcome.NOTHING, Outcome.GIVEN_UP) and self._contributed is None:
            raise NothingToTrain
        self.progress.phase = "delivering"
        return await self._compute.run(self._encode)

    def _encode(self) -> SiteUpdate:
        totals, merge = self._receiver.totals, self._receiver.buffers
        return SiteUpdate(*self._sum.encode(totals), totals, merge.changes() if merge.layout else {})

    def _contribute(self, contribution: RoundsAlone) -> None:
        # First the file: whether the sum counts, a site that is killed or cut off meanwhile never learns, and rounds
        # that go on in this directory would bring these along a second time.
        (contribution.kept / CONTRIBUTED_FILE).touch()
        # Here, as whoever waits for this may be cancelled: if the sum that has them does not count, adopt() says so.
        self.contribution, self._contributed = None, contribution
        self._sum.contribute(contribution.difference, contribution.num_samples)
        if (merge := self._receiver.buffers).layout:
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
        if gathered is not None and gathered[0].round_id == round_id == self.counted_round:
            self._on_report(await self._commit(*gathered))
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
        await self._publisher.quiesce()
        await self._compute.run(self._adopt, round_id)
        for member in self._registry.admit(round_id + 1):  # they came when this site held a later model
            with contextlib.suppress(BusError):  # its next Hello brings another
                await self._dispatcher.welcome(member)
        with tolerate_write_timeout("model", round_id):
            await self._publisher.publish_full(round_id)

    def _finish_round(self) -> None:
        self._strategy.finish(self._state.weights)
        self._state.buffers = {name: self._sum.next_buffers[name] for name in self._state.buffers}

    def _adopt(self, round_id: int) -> None:
        self._finish_round()
        self._state.adopt(round_id)
        if (history := self._probe.history).on:
            crc32 = zlib.crc32(self._state.weights.numpy().data)
            history.note("adopted", round=round_id, crc32=crc32, held_crc32=crc32)

    async def _aggregate(self, round_: Round, outcome: Outcome) -> None:
        """Take the model of the level above, also where no client of this site had anything to train."""
        await self._compute.run(self._finish_round)

    def _marks(self) -> dict[str, tuple[int, ...]]:
        alone: dict[str, tuple[int, ...]] = {} if self._contributed is None else {CONTRIBUTED: ()}
        self._contributed = None
        return {**super()._marks(), **alone}
