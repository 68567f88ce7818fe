"""The controller of a federated run: a script of rounds.

    async for report in gradbus.Controller(bus, task, FederatedConfig(rounds=10)).rounds(): ...

It may die at any point, and goes on when it is started again with the same state directory: a round either was
committed, or is repeated from the same model, with the same result.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import nn

from gradbus.actors.aggregation import partial_sum, updates
from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.aggregation.typical import most_samples
from gradbus.actors.federated.chosen_codecs import check_downlink, names_in, own_codecs
from gradbus.actors.federated.controller.asynchronous import Bases, BufferRound
from gradbus.actors.federated.controller.best_model import BestModel
from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.clients import FIRST_HOST, ClientRegistry, duplicate_after_s
from gradbus.actors.federated.controller.combinations import check_choices, check_strategy, make_strategy, most_clients
from gradbus.actors.federated.controller.cross_site import CrossSiteEvaluation, LocalModelReceiver
from gradbus.actors.federated.controller.deadline import RoundDeadline
from gradbus.actors.federated.controller.dispatch import Dispatcher
from gradbus.actors.federated.controller.early_stop import EarlyStop
from gradbus.actors.federated.controller.liveness import (
    MAX_NAMED,
    LivenessMonitor,
    claim_job,
    tolerate_write_timeout,
)
from gradbus.actors.federated.controller.masked_attempt import AttemptTerms
from gradbus.actors.federated.controller.masked_rounds import MaskedRounds
from gradbus.actors.federated.controller.model_evaluation import (
    ModelEvaluation,
    check_controller_task,
    check_evaluation,
    personal_of,
)
from gradbus.actors.federated.controller.order_book import OrderBook, check_order
from gradbus.actors.federated.controller.ordered_run import OrderedRun, RoundRequests, serving
from gradbus.actors.federated.controller.participation import HAS_PAUSED
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.report import Progress, RoundReport, round_report
from gradbus.actors.federated.controller.round_losses import RoundLosses
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.federated.controller.selection import ParticipantSelection
from gradbus.actors.federated.controller.selectors.base import make_selector
from gradbus.actors.federated.controller.state import RunContext, RunState
from gradbus.actors.federated.controller.update_admission import UpdateAdmission
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing, check_buffers, check_noise, check_sharing
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.secure_aggregation.masked_values import size_of
from gradbus.codecs import Codec
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.callbacks import Callbacks, CallbackWait
from gradbus.runtime.checkpoint import copy_state
from gradbus.runtime.choices import CLIENT_SCHEDULES, CODECS, STRATEGIES
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.timeouts import federated_timeouts, log_timeouts
from gradbus.runtime.errors import ConfigError, RunOver, TrainingFailed, WriteTimeout
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited, check_instance
from gradbus.runtime.optimization.schedules import RoundRates
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.testing.instrumentation import Probe
from gradbus.runtime.wire.control import BEFORE_FIRST_ROUND, MaskAnswer, RepeatedCommand, RoundTerms, TrainingFailure
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, TrainCmd, new_incarnation

# Steps that a client may announce for each sample and epoch: a batch has at least one sample, and a task of one's own
# may have several optimizers, or several steps for a batch.
STEPS_PER_SAMPLE = 16

P = ParamSpec("P")
T = TypeVar("T")

ALL_DONE = "all rounds are done"
_PAUSED_ATTEMPTS = 10  # times max_attempts: clients that pause and resume for ever do not keep a round open for ever
LINES_OF_A_ROUND = 20  # about how updates come in, however many clients there are

log = get_logger("controller")


def _repeated(command: TrainCmd, run_id: int, attempt: int) -> RepeatedCommand:
    """Return what repeats the command of this attempt at a round."""
    return RepeatedCommand(
        run_id, command.round_id, command.subset_size, command.epochs, command.lr, command.seed, attempt
    )


class Controller:
    """Runs the rounds of one job on one bus.

    Attributes:
        progress: where it stands, for display; see :class:`Progress`.
    """

    _call: ClassVar[str] = "Controller(bus, task, config)"  # how a program makes it
    _evaluates: ClassVar[bool] = True  # models, after its rounds

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        config: FederatedConfig,
        *,
        strategy: Strategy | None = None,
        on_open: Callable[[], object] = lambda: None,
        fail_at: str | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        """A controller that has not started.

        Args:
            bus: joined to the job.
            task: gives the model, and evaluates it where it can.
            config: the rules.
            strategy: in place of the one that ``config.strategy`` names.
            on_open: called once the job is this controller's and the state is restored: from then on it is this run.
            fail_at: a fail point for tests, ``name:round``; by default from the environment.
            callbacks: objects as :mod:`.early_stop` describes them, which may end the run, beside those that
                ``config.callbacks`` names.

        Raises:
            ConfigError: bus, task, config or strategy is another kind of thing, the bus is closed, a choice of the
                settings does not exist, or a callback is none.
        """
        call = self._call
        check_bus(call, "bus", bus)
        advice = "Write gradbus.FederatedConfig(rounds=10, ...), and keep the order of the arguments"
        check_instance(call, "config", config, FederatedConfig, advice)
        # With patterns only the model tells whether some of it is personal: see _open.
        may_evaluate = self._evaluates and not Sharing.of(config).has_patterns
        check_controller_task(call, task, config, evaluates=may_evaluate)
        if strategy is not None:
            check_instance(call, "strategy", strategy, Strategy, "Write its name in the settings, or give an object")
        check_choices(config)
        self._bus = bus
        self._on_open = on_open
        self._task = task
        self._config = config
        self._callbacks = Callbacks("federated", callbacks, config.callbacks)
        self._callback_wait = CallbackWait(self._callbacks)
        self._given_strategy = strategy
        self._identity = Identity(CONTROLLER, new_incarnation())
        self._probe = Probe("controller", config.history.dir, payloads=config.history.payloads, fail_at=fail_at)
        self._compute = ComputeThread("controller")
        self._round: Round | None = None
        self._attempt = 0  # at the open round, or at the last one; a site may gather one round several times
        self._attempted_round = 0  # of which self._attempt is the newest attempt
        self._wakeup = asyncio.Event()
        self._has_commanded = False
        self._has_caller = False  # it orders each round, in its own way
        self._has_orders = False  # there are some on the disk: rounds may be repeated by them
        self._last_start = 0  # incarnation of the start before this one, which may still run; 0: there was none
        self._requests: RoundRequests | None = None
        self._bases: Bases | None = None  # of asynchronous rounds
        self._selector = make_selector(config.selection)
        self._deadline = RoundDeadline(config.round.timeout_times_median, config.round.timeout_s)
        self.progress = Progress(rounds=config.rounds, minimum=config.clients.min)
        # Made by _open; the other parts by _wire.
        self._model: FlatModel
        self._strategy: Strategy
        self._state: RunState
        self._rates: RoundRates
        self._context: RunContext

    def _open(self) -> None:
        """Build the model and restore the state, off the loop."""
        config = self._config
        self._rates = RoundRates(CLIENT_SCHEDULES, config.training.schedule, config.training.first_lr, config.rounds)
        given = self._given_strategy
        sharing = Sharing.of(config, STRATEGIES.find(config.strategy.name) if given is None else type(given))
        self._model = FlatModel(build_model(self._task), sharing, rebuild=partial(build_model, self._task))
        check_sharing(self._model.specs, sharing)
        check_buffers(self._model.specs, config, sharing)
        if config.privacy.name != "none":
            check_noise(self._model.specs, sharing)
        check_evaluation(config, self._model)
        is_whole = not personal_of(self._model)
        check_controller_task(self._call, self._task, config, evaluates=self._evaluates and is_whole)
        self._strategy = self._make_strategy()
        self._strategy.lay_out(self._model.shapes)
        check_strategy(config, self._strategy)
        if config.mode == "asynchronous":
            self._bases = Bases(config.asynchronous, CODECS.make(config.codec), self._model.dim)
        check_downlink(config, self._model.dim)
        self._state = RunState(config, self._model, self._strategy)
        self._has_orders = self._state.has_orders
        self.progress.epsilon, self.progress.epsilon_budget = self._strategy.epsilon, self._strategy.epsilon_budget
        # Later than every start before, also where the clock was set back.
        self._last_start = self._state.incarnation
        again = self._state.incarnation + 1 + int.from_bytes(os.urandom(2), "little")  # also after two quick crashes
        self._identity = Identity(CONTROLLER, max(self._identity.incarnation, again))
        self._state.incarnation = self._identity.incarnation

    def _make_strategy(self) -> Strategy:
        """The strategy behind its limits. Called off the loop, when there is a model."""
        return make_strategy(self._config, self._model.dim, self._given_strategy)

    def _max_update_bytes(self) -> int:
        """Length of the longest update that a participant can send."""
        if self._config.clients.kind == "sites":
            return partial_sum.max_bytes(self._model.dim)
        if self._config.secure_aggregation.enabled:
            return size_of(
                self._strategy.masked_grid.count(self._model.dim)
            )  # of a first round: later ones are shorter
        longest = int(CODECS.make(self._config.longest_codec).max_bytes(self._model.dim))
        return longest + updates.overhead_bytes(self._strategy.sections, CODECS.make(self._config.section_codec))

    def _own_codecs(self) -> tuple[type[Codec], ...]:
        """Codecs that are not built in, which updates may be in: those that this configuration names."""
        return own_codecs(names_in(self._config))

    def _wire(self) -> None:
        """Make all parts. Called on the loop, once the job is this controller's."""
        config, state, dim = self._config, self._state, self._model.dim
        self._bus.open_writer(TrainCmd)  # clients are ready when they are matched with it
        context = self._context = RunContext(
            self._bus, self._identity, self._compute, config, state, self._probe.history
        )
        self._registry = ClientRegistry(
            dim=dim,
            layout=self._model.layout,
            session=self._identity.incarnation,
            dead_after_s=config.clients.dead_after_s,
            duplicate_after_s=duplicate_after_s(config.clients.heartbeat_s),
            memory=self._bus.memory.here,
            compares="shared" if self._model.sharing.has_patterns else config.exchange,
        )
        self._registry.max_members = most_clients(config)
        self._book = OrderBook(config, self._strategy, state, has_caller=self._has_caller)
        self._publisher = ModelPublisher(context, CODECS.make(config.downlink_codec), self._registry)
        self._selection = ParticipantSelection(
            context,
            self._registry,
            self.progress,
            self._selector,
            sleep_until=self._sleep_until,
            changed=self.membership_changed,
        )
        admission = UpdateAdmission(
            state.quarantine,
            run_id=state.run_id,
            budget_bytes=config.limits.receive_budget_bytes,
            max_bytes=self._max_update_bytes() + self._model.buffers.max_bytes,
            max_samples=config.limits.max_samples,
        )
        self._admission = admission
        self._receiver = UpdateReceiver(
            context,
            self._strategy,
            admission,
            dim=dim,
            on_strike=self._selection.on_strike,
            on_change=self._changed,
            buffers=self._model.buffers,
        )
        self._receiver.own_codecs = self._own_codecs()
        self._masked = MaskedRounds(
            context, self._registry, self._receiver, self._selection, self.progress, changed=self._changed
        )
        self._losses = RoundLosses(self._receiver, state.names)
        if self._callbacks.have("on_update"):
            self._receiver.counted = []
        if self._bases is not None:
            self._receiver.bases, admission.max_staleness = self._bases, config.asynchronous.max_staleness
        self._monitor = LivenessMonitor(
            context,
            self._registry,
            self._receiver,
            self.progress,
            changed=self.membership_changed,
            open_round=lambda: self._round,
        )
        self._dispatcher = Dispatcher(context, self._registry, self._receiver, self._publisher, self._monitor, self)
        self._dispatcher.fetch_models = self._selector.partial
        self._dispatcher.has_terms = (
            config.training.has_terms or self._has_caller or self._strategy.gives_orders or self._has_orders
        )
        self._dispatcher.names_commands = self._last_start > 0 or state.adopts  # a site has the run of its level above
        self._evaluator = self._dispatcher.evaluator = ClientEvaluator(
            context, self._registry, sleep_until=self._sleep_until, changed=self._changed
        )
        models = self._dispatcher.local_models = LocalModelReceiver(
            context, self._registry, dim=dim, sleep_until=self._sleep_until, changed=self._changed
        )
        self._evaluation = ModelEvaluation(context, self._task, self._model, self._evaluator, self.progress)
        self._cross_site = CrossSiteEvaluation(context, self._publisher, self._evaluator, models)
        self.progress.names = state.names
        for report in state.history:
            self.progress.add(report)
        self.progress.round_id = state.round_id

    @property
    def weights(self) -> torch.Tensor:
        """The global model, float32, shape (D,). It is changed in place while rounds run."""
        return self._state.weights

    @property
    def model(self) -> nn.Module:
        """The live global model, once the run has started. Rounds change it; :meth:`state_dict` gives copies."""
        if not hasattr(self, "_state"):
            raise RuntimeError("the controller has not started: there is no model yet")
        return self._model.module

    async def state_dict(self) -> dict[str, Any]:
        """The global model as it is after the newest round: tensors by name, for ``model.load_state_dict``.

        They are copies on the CPU, made off the event loop, and never in the middle of an aggregation.
        """
        _ = self.model
        return await self._compute.run_or_follow(self._copy_state)

    def _copy_state(self) -> dict[str, Any]:
        self._model.hold(self._state.weights, self._state.buffers)
        return copy_state(self._model.module)

    @property
    def run_id(self) -> int:
        """Id of the run: new at a fresh start, kept over a resume."""
        return self._state.run_id

    @awaited("controller.run()")
    async def run(self) -> list[RoundReport]:
        """All rounds that are left. Returns the reports of the whole run, those before a resume as far as the
        checkpoint has them: see :class:`RoundReport`.

        Raises:
            BarrierTimeout: not enough clients came.
            RoundTimeout: a round had too few updates, too often.
            TrainingFailed: the same, because the training of the clients raised.
            CheckpointError: the state cannot be written.
            JobInUse: the job has a controller. ControllerReplaced: it has another one since this one was paused or cut
                off.
            CallbackFailed: a callback has raised. CallbackTimeout: on_end does not return.
        """
        async for _ in self.rounds():
            pass
        return list(self.progress.reports)

    async def rounds(self) -> AsyncGenerator[RoundReport, None]:
        """Run, and yield each report as its round is committed. Closing the iterator ends the run gracefully.

        Raises:
            As :meth:`run`.
        """
        async with self._opened(has_caller=False) as run:
            with contextlib.suppress(RunOver):
                while not run.is_over:
                    yield await run.round()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[OrderedRun, None]:
        """Run, and let the caller order each round::

            async with controller.open() as run:
                while not run.is_over:
                    report = await run.round(lr=0.05, epochs=2, subset_size=500, seed=7, clients=[0, 2])

        The block begins when enough clients are there. Where it ends the run ends, for the clients, too, after
        whatever number of rounds; where it raises, the controller stops, and can be started again to go on.

        Raises:
            As :meth:`run`.
        """
        async with self._opened(has_caller=True) as run:
            yield run

    @contextlib.asynccontextmanager
    async def _opened(self, *, has_caller: bool) -> AsyncGenerator[OrderedRun, None]:
        self._has_caller = has_caller
        requests = self._requests = RoundRequests()
        async with serving(self.serve, requests, name="controller"):
            yield OrderedRun(requests, self.progress, partial(check_order, self._config))

    async def serve(self, on_report: Callable[[RoundReport], object] = lambda report: None) -> None:
        """The run, with a call for each round that is done; rounds are as configured, unless a caller orders them.
        Raises as :meth:`run`, errors possibly in a group."""
        reason = ["the controller was stopped"]
        async with AsyncExitStack() as stack:
            stack.callback(
                lambda: self._probe.end(phase=self.progress.phase, reason=reason[0], rejected=dict(self._bus.rejected))
            )
            try:
                await self._run_rounds(stack, on_report, reason)
            except asyncio.CancelledError:
                self.progress.phase = "stopped"
                raise
            except BaseException:
                self.progress.phase = "failed"
                raise
            else:
                self.progress.phase = "done"
            finally:
                self.progress.clients = ()

    def _close_state(self) -> None:
        if hasattr(self, "_state"):  # also where _open was cancelled after it had made it
            if self._has_commanded:
                self._name_clients_that_never_counted()
            self._state.close()

    async def _run_rounds(
        self, stack: AsyncExitStack, on_report: Callable[[RoundReport], object], reason: list[str]
    ) -> None:
        config, finished, final, linger = self._config, False, False, False
        stack.callback(self._close_state)
        stack.callback(self._compute.close)
        log.info(
            "run starts",
            job=self._bus.job,
            rounds=config.rounds,
            strategy=config.strategy.name,
            trust=config.limits.trust,
        )
        log_timeouts(log, federated_timeouts(config, lease_s=self._bus.remote_lease_s))
        await self._compute.run(self._open)
        state = self._state
        await claim_job(
            self._bus,
            self._identity,
            config.clients.heartbeat_s,
            hangs_after_s=config.clients.dead_after_s,
            run_id=state.run_id,
            last_start=self._last_start,
        )
        await self._compute.run(state.record_start)
        self._wire()
        stack.callback(self._publisher.close)
        self._on_open()
        await self._compute.run(state.note_start, self._probe.history)
        stop, best, least = config.early_stop, config.checkpoint, config.evaluation.least_answered
        stop = stop.replaced("mode", config.mode_of(stop.metric, stop.mode))
        best = best.replaced("best_mode", config.mode_of(best.keep_best or "", best.best_mode))
        self._stop = EarlyStop(stop, self._callbacks, state.history, least_answered=least)
        self._best = await self._compute.run(BestModel, best, state, least_answered=least)
        stack.callback(self._best.close)
        began_after = state.round_id
        inbox = stack.enter_context(self._bus.subscribe(ClientUpdate, Control))
        async with TaskGroup() as group:
            helpers = [
                group.create_task(self._dispatcher.run(inbox, group), name="dispatcher"),
                group.create_task(self._receiver.run(), name="update-receiver"),
                group.create_task(self._monitor.run(), name="heartbeat"),
            ]
            try:
                await self._all_rounds(on_report)
                finished, reason[0] = True, self._over()
                self._dispatcher.is_ending = True
                await self._monitor.announce_end(ok=True, reason=reason[0], linger=self._lingers(began_after))
            except Exception as error:
                # After these, waiting for this controller is of no use. Clients that are about to join hear it, too.
                reason[0], final = str(error), isinstance(error, TrainingFailed | ConfigError)
                linger = isinstance(error, ConfigError)
                raise
            finally:
                if not finished:
                    self._dispatcher.is_ending = True
                    await self._monitor.announce_end(ok=False, reason=reason[0], final=final, linger=linger)
                for helper in helpers:
                    helper.cancel()

    async def _all_rounds(self, on_report: Callable[[RoundReport], object]) -> None:
        """The rounds that are left, when all parts run."""
        state, config, rounds = self._state, self._config, self._config.rounds
        began_after = state.round_id
        await self._compute.run(self._note_end)
        # It may show that the run had ended: then no clients are waited for.
        amended = await self._amended(await self._evaluation.resumed(self.progress.reports))
        if state.round_id < rounds and not self._stop.reason:
            await self._evaluation.check_metrics(self.progress.reports)
            await self._wait_for_clients()
            await self._compute.run(state.save_initial)
            with tolerate_write_timeout("model", state.round_id):
                await self._publisher.publish_full(state.round_id)
            later = await self._amended(await self._evaluation.resumed_by_clients(self.progress.reports))
            amended = later or amended
            await self._evaluation.check_client_metrics(self.progress.reports)
        elif state.round_id > 0:  # the last start may have ended before all clients had it
            with tolerate_write_timeout("model", state.round_id):
                await self._publisher.publish_full(state.round_id)
        if amended is not None:
            await self._call_back(self._stop.evaluated, amended)
        await self._ordered_rounds(on_report)
        if self._stop.reason:
            self.progress.ended_early = self._stop.reason
            log.info("stopped early", round=state.round_id, reason=self._stop.reason, best=self._stop.best_round)
        if config.evaluation.cross_site and state.round_id > began_after:
            self.progress.phase = "evaluating"
            self.progress.cross_site = await self._cross_site.run()
        self._callback_wait.run_has_ended()
        await self._call_back(self._stop.run_ended, list(self.progress.reports))

    async def _call_back(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what calls callbacks, on the compute thread. Raises CallbackFailed; CallbackTimeout: the run has ended,
        and one does not return."""
        return await self._callback_wait.wait(self._compute.run(function, *args, **kwargs))

    async def _ordered_rounds(self, on_report: Callable[[RoundReport], object]) -> None:
        state, requests = self._state, self._requests
        if requests is not None and not self._over():
            requests.begin(await self._compute.run(self._book.recorded, state.round_id + 1))
        while not self._over():
            if self._has_caller:
                self.progress.phase = "waiting"
            given = RoundOrder() if requests is None else await requests.next()
            round_id = state.round_id + 1
            if given is None:
                self._stop.reason = f"the caller has ended it after round {state.round_id}"
            elif await self._call_back(self._stop.may_begin, round_id):
                await self._compute.run(self._book.open, round_id, given, self._selection.ready(round_id))
                report = await self._one_round(round_id)
                on_report(report)
                await self._after_round(report)
        if requests is not None:
            requests.end(self._over())

    async def _after_round(self, report: RoundReport) -> None:
        """Decide whether the run goes on after a round, and give the caller its report, also where that fails."""
        if self._requests is not None:
            self._requests.note(report)
        try:
            await self._compute.run(self._best.note, report)
            await self._call_back(self._stop.round_done, report)
            await self._compute.run(self._note_end)
        finally:
            if self._requests is not None:
                self._requests.answer(self._over())

    def _lingers(self, began_after: int) -> bool:
        """Return whether clients may come yet that have to learn of the end: no round was done in this start."""
        return self._state.round_id == began_after

    def _over(self) -> str:
        """Why there is no round left; empty: there is one."""
        return self._stop.reason or ("" if self._state.round_id < self._config.rounds else ALL_DONE)

    def _note_end(self) -> None:
        """The strategy may end the run before its last round."""
        if not self._stop.reason and self._state.round_id < self._config.rounds:
            self._stop.reason = self._strategy.end_reason()

    async def _wait_for_clients(self) -> None:
        """Wait until the first round can start. From then on the clients follow this controller."""
        await self._selection.wait_for_start(self._state.round_id + 1, timeout_s=self._config.clients.start_timeout_s)
        self._dispatcher.has_begun = True

    # Clients

    def next_round(self) -> int:
        """The first round that a client which comes now takes part in."""
        is_late = self._round is not None and self._bases is None
        return self._state.round_id + 1 + is_late

    def membership_changed(self) -> None:
        if self._round is not None:
            self._losses.follow(self._round, self._registry)
            self._masked.membership_changed()
        self.progress.clients = tuple(sorted(member.client_id for member in self._registry if not member.silent))
        self.progress.out = self._state.quarantine.excluded(self._state.round_id + 1)
        self._monitor.client_left()
        self._evaluator.membership_changed()
        self._changed()

    def client_gone(self, client_id: int, why: str) -> None:
        self._selection.note_gone(client_id, why)

    def mask_answered(self, client_id: int, incarnation: int, answer: MaskAnswer) -> None:
        self._masked.on_answer(client_id, incarnation, answer)

    def client_failed(self, client: int | str, report: TrainingFailure) -> None:
        if isinstance(client, str) or report.round_id == BEFORE_FIRST_ROUND:
            shown = client if isinstance(client, str) else client & ~FIRST_HOST  # of a host, the first of its clients
            self._selection.note_unprepared(shown, self._losses.note_unprepared(shown, report))
            return
        if self._losses.note_failure(self._round, client, report, attempt=self._attempt):
            self._changed()

    def _changed(self) -> None:
        """Wake the waits of the controller."""
        round_ = self._round
        if round_ is not None:
            ready, expected = round_.ready, round_.needed
            if (ready, expected) != (self.progress.ready, self.progress.expected):
                self.progress.ready, self.progress.expected = ready, expected
                if ready % max(1, expected // LINES_OF_A_ROUND) == 0 or ready >= expected:
                    log.info("final-ready=%d/%d (min=%d)", ready, expected, round_.minimum, round=round_.round_id)
        self._masked.wake()
        self._wakeup.set()

    async def _sleep_until(self, at_s: float) -> None:
        """Wait for :meth:`_changed`, or until that time."""
        self._wakeup.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_s - time.monotonic())):
                await self._wakeup.wait()

    # A round

    async def _one_round(self, round_id: int) -> RoundReport:
        started_s = time.perf_counter()
        return await self._commit(*await self._gather(round_id, set()), started_s)

    def _time_left(self) -> tuple[float, float]:
        """Seconds for which an attempt at a round may wait for clients, and those that it may then take."""
        return self._config.clients.start_timeout_s, self._config.round.timeout_s

    async def _gather(self, round_id: int, accepted: set[int]) -> tuple[Round, Outcome, int]:
        """Attempts at a round, until there are enough updates. Those of one attempt count in the next, and those of the
        clients in ``accepted`` count already: it grows. Returns the last attempt, its outcome and its number."""
        self._losses.begin()
        if self._strategy.bounds is not None:
            self._strategy.bounds.open_round(round_id)
        named, tries, attempt = self._book.named(round_id), 0, 0
        self._masked.begin_round(self._selection.ready(round_id, named))
        least = self._config.clients.min if named is None else len(named)
        while tries < self._config.round.max_attempts:
            attempt += 1
            if len(accepted.union(self._selection.ready(round_id, named))) < least:
                await self._selection.wait_for_start(round_id, accepted, timeout_s=self._time_left()[0], named=named)
            known = len(self._masked.left_out)
            round_, outcome = await self._collect(round_id, accepted, attempt)
            if outcome is not Outcome.TOO_FEW:
                self._masked.round_done(outcome)
                return round_, outcome, attempt
            # Without some clients it is another one, and their number is finite. One that is paused was asked too soon.
            has_paused = round_.lacks_only_paused and attempt < _PAUSED_ATTEMPTS * self._config.round.max_attempts
            tries += len(self._masked.left_out) == known and not has_paused
            self._losses.note_attempt(round_)
            (log.info if has_paused else log.warning)(
                "round goes on", round=round_id, updates=len(accepted), needed=round_.minimum, attempt=attempt
            )
            for member in self._registry.admit(round_id):
                with contextlib.suppress(WriteTimeout):  # its next Hello brings another
                    await self._dispatcher.welcome(member)
            too_few = self._masked.has_too_few_left(self._selection.ready(round_id, named))
            if self._time_left()[1] <= 0.0 or too_few:
                break
        raise self._losses.error(round_, attempt, self._masked.failure)

    async def _collect(self, round_id: int, accepted: set[int], attempt: int) -> tuple[Round, Outcome]:
        """Command the round and receive updates until it is over. ``accepted`` grows, also where this is cancelled; not
        so with secure aggregation, where a sum is of one attempt."""
        config = self._config
        least_s = 0.0
        if (secure := config.secure_aggregation).enabled:
            accepted = set()
            least_s = secure.exchange_s  # a client that hangs makes them take that long, whatever other rounds took
        rules = RoundRules(
            minimum=config.clients.min,
            quorum=config.round.quorum,
            deadline_s=min(
                self._time_left()[1],
                max(self._deadline.seconds(self._book.round_work(round_id), attempt), 1.1 * least_s),
            ),
            grace_s=config.round.grace_s,
        )
        round_ = self._new_round(round_id, rules, accepted)
        self._probe.reached("before_command", round_id)
        masked = self._masked.begin(round_, self._attempt_terms()) if self._masked.is_on else None
        try:
            self._round, self._has_commanded = round_, True
            self._number_attempt(round_id)
            self._receiver.open(round_, self._publisher.held, masked)
            self.progress.phase, self.progress.round_id = "training", round_id
            self.progress.out = self._state.quarantine.excluded(round_id)
            self._changed()
            if self._probe.history.on:
                await self._compute.run(self._note_command, round_)
            command, terms = await self._command(round_id), self._round_terms(round_id, round_.expected | round_.silent)
            self._limit_steps(command)
            if self._book.is_unwritten:
                await self._compute.run(self._book.write, round_id)
            self._receiver.timing.commanded()
            repeated = _repeated(command, self.run_id, self._attempt)
            with tolerate_write_timeout("command", round_id):
                await self._publish_terms(terms)
                await self._bus.publish(self._identity, command)
                if self._dispatcher.names_commands:
                    await self._context.publish(repeated)
            self._probe.reached("after_command", round_id)
            outcome = await self._until_over(round_, terms, repeated)
        finally:
            if masked is not None:
                await masked.stop()
            await self._receiver.close()
            accepted.update(round_.accepted)
            self._round = None
        # An update that was being added when the round ended counts, too.
        outcome = round_.verdict(time.monotonic()) or outcome
        if masked is not None:
            outcome = await self._masked.end(round_, masked, outcome)
        await self._call_on_update()
        if self._selector.partial and round_.open and outcome is not Outcome.TOO_FEW:
            with tolerate_write_timeout("terms", round_id):  # what the others make is not needed: they may stop
                await self._publish_terms(self._round_terms(round_id, accepted))
        return round_, outcome

    def _number_attempt(self, round_id: int) -> None:
        """Give the next attempt at this round its number, which no other one has in this start: clients ignore one that
        they know, and a site gathers a round again where its sum had too few updates or the level above asks again."""
        self._attempt = self._attempt + 1 if round_id == self._attempted_round else 1
        self._attempted_round = round_id

    async def _until_over(self, round_: Round, terms: RoundTerms | None, repeated: RepeatedCommand) -> Outcome:
        """Wait until a commanded round is over. Meanwhile repeat its terms, and its command while a client lacks it."""
        masked, round_id = self._masked.attempt, round_.round_id
        reached, repeat_s = round_.ready, self._config.clients.heartbeat_s
        repeat_at_s = time.monotonic() + repeat_s
        if masked is not None:
            masked.start(self._wakeup.set)
        while True:
            await self._call_on_update()  # before the verdict, which sees what has changed meanwhile
            if (outcome := round_.verdict(time.monotonic())) is not None:
                return outcome
            if masked is not None:
                masked.check()
            if round_.ready > reached:
                reached = round_.ready
                self._probe.reached("mid_collect", round_id)
            await self._sleep_until(min(round_.next_check_s(), repeat_at_s))
            if time.monotonic() >= repeat_at_s:
                repeat_at_s = time.monotonic() + repeat_s
                with tolerate_write_timeout("terms", round_id):
                    await self._publish_terms(terms)
                    if self._registry.lacks_command(round_.open, round_id, repeated.attempt):
                        await self._context.publish(repeated)

    async def _call_on_update(self) -> None:
        """Call the callbacks for the updates that count by now."""
        if counted := self._receiver.counted:
            self._receiver.counted = []
            await self._call_back(self._stop.updates_counted, counted)

    def _attempt_terms(self) -> AttemptTerms:
        """What the clients of an attempt with secure aggregation are told of its sum."""
        cap = (self._config.limits.cap_samples or 0) if self._strategy.weighs_samples else 1
        return AttemptTerms(self._model.dim, cap, self._strategy.masked_grid)

    def _new_round(self, round_id: int, rules: RoundRules, accepted: set[int]) -> Round:
        """An attempt at a round, in which the updates of the clients in ``accepted`` count already."""
        named = self._book.named(round_id)
        most = most_samples(self._config.limits, self._state.participation.samples().values())
        ready, enough = self._selection.participants(
            round_id, accepted, most, named=named, without=self._masked.left_out
        )
        rules = dataclasses.replace(rules, enough=enough)
        # Of those that were not asked nobody waits for one that sends again.
        silent = set() if self._selector.partial else self._registry.silent_ids(round_id) - self._masked.left_out
        silent = silent if named is None else silent.intersection(named)
        if self._bases is None:
            return Round(round_id, ready, rules, now_s=time.monotonic(), accepted=accepted, silent=silent)
        last = self.progress.reports[-1] if self.progress.reports else None
        buffer = BufferRound(
            round_id, ready, rules, self._config.asynchronous, now_s=time.monotonic(), accepted=accepted, silent=silent
        )
        if last is not None or accepted:
            buffer.go_on(last, updates=len(self._receiver.totals.staleness) if accepted else 0)
        return buffer

    async def _command(self, round_id: int) -> TrainCmd:
        """The command of a round."""
        return self._book.command(round_id, await self._compute.run(self._rates.at, round_id))

    def _work(self, command: TrainCmd) -> list[tuple[int, int]]:
        """Epochs and steps, 0 for as many as the epochs have, of the rounds whose updates count in this one."""
        return self._book.work(command.round_id - self._admission.max_staleness, command.round_id)

    def _limit_steps(self, command: TrainCmd) -> None:
        """Set the numbers of optimizer steps that a client may announce: as many as were asked for, or, where rounds
        are counted in epochs, so many for each of its samples."""
        work = self._work(command)
        asked = {steps for _, steps in work if steps}
        proportional = self._config.asynchronous.proportional_steps
        self._admission.steps = range(1, max(asked) + 1) if proportional else asked
        self._admission.steps_per_sample = STEPS_PER_SAMPLE * max(
            (epochs for epochs, steps in work if not steps), default=0
        )

    def _round_terms(self, round_id: int, participants: Collection[int]) -> RoundTerms | None:
        held = self._strategy.bounds is not None and not self._strategy.bounds.is_settled
        attempt = self._masked.number
        return self._dispatcher.round_terms(round_id, participants, self._book, held=held, attempt=attempt)

    async def _publish_terms(self, terms: RoundTerms | None) -> None:
        if terms is not None:
            await self._bus.publish(self._identity, terms)

    async def _aggregate(self, round_: Round, outcome: Outcome) -> None:
        """Make the next model of the sum of the updates; without any, the model stays as it is."""
        if outcome in (Outcome.NOTHING, Outcome.GIVEN_UP):
            log.info("model unchanged", round=round_.round_id, reason=outcome.value, clients=len(round_.failed))
        else:
            await self._compute.run(self._finish_round)

    def _finish_round(self) -> None:
        self._strategy.finish(self._state.weights)
        if self._model.buffers:
            self._state.buffers = self._receiver.buffers.finish()

    async def _commit(self, round_: Round, outcome: Outcome, attempt: int, started_s: float) -> RoundReport:
        """From the sum of the updates to the published, durable model."""
        round_id, state = round_.round_id, self._state
        collected_s = time.perf_counter()
        self.progress.phase = "aggregating"
        await self._publisher.quiesce()
        self._probe.reached("after_collect_before_aggregate", round_id)
        await self._aggregate(round_, outcome)
        # A report that somebody gets before the model is published has the checksum; else clients do not wait for it.
        is_told = state.is_durable or self._probe.history.on or self._callbacks.have("on_aggregate")
        crc32 = await self._compute.run(self._weights_crc32) if is_told else 0
        aggregated_s = time.perf_counter()
        self._probe.reached("after_aggregate_before_commit", round_id)
        totals = self._receiver.totals
        report = round_report(
            round_,
            totals,
            self._receiver.timing,
            (started_s, collected_s, aggregated_s),
            attempt=attempt,
            outcome=outcome.value,
            dropped=self._receiver.take_dropped(),
            weights_crc32=crc32,
            strikes=state.quarantine.take_new(),
            marks=self._marks(),
            epsilon=self._strategy.epsilon,
            order=self._book.order(round_id).to_json(),
        )
        if self._callbacks.have("on_aggregate"):
            await self._call_back(self._stop.aggregated, report)
        state.participation.commit(round_id, totals.samples, self._losses.of(round_), totals.loss_of)
        if attempt == 1:  # of another one the time says little: some updates were there when it began
            self._deadline.round_done(round_.answered_s, self._book.round_work(round_id))
        self._losses.begin()
        # The message is made before the commit: what the clients will hold is part of the state.
        size = await self._publisher.prepare(round_id)
        asked = round_.asked if self._selector.partial else None
        # Known before the commit, so that a resume does not lack it; what of it is shared only the sending tells.
        report = dataclasses.replace(report, bytes_down=self._publisher.bytes_down(size, asked)["bytes_down"])
        if state.is_durable or self._probe.history.on:
            await self._compute.run(self._make_durable, report)
        else:
            self._make_durable(report)
        committed_s = time.perf_counter()
        self._probe.reached("after_commit_before_publish", round_id)
        with tolerate_write_timeout("model", round_id):
            await self._publisher.publish()
        published_s = time.perf_counter()
        if not is_told:
            report = dataclasses.replace(report, weights_crc32=await self._compute.run(self._weights_crc32))
        checked_s = time.perf_counter()
        self._probe.reached("after_publish", round_id)
        if self._config.asynchronous.proportional_steps:
            await self._dispatcher.note_speeds(self._receiver.totals.speeds)
        evaluation = await self._evaluation.after_round(round_id)
        report = state.amend(
            report,
            **self._publisher.bytes_down(size, asked),
            downlink_residual_norm=self._publisher.residual_norm,
            checkpoint_s=committed_s - aggregated_s,
            publish_s=published_s - committed_s,
            eval_s=time.perf_counter() - checked_s,
            seconds=published_s - started_s,
            **evaluation,
        )
        self.progress.add(report)
        log.info(
            "round done",
            round=round_id,
            accuracy=report.accuracy,
            metrics=dict(report.metrics) or None,
            loss=report.loss,
            clients=list(report.clients),
            outcome=report.outcome,
            seconds=round(report.seconds, 3),
            bytes_shared=report.bytes_shared,
        )
        return report

    def _marks(self) -> dict[str, tuple[int, ...]]:
        return dict(self._strategy.marks())

    def _ids_known_before(self) -> range:
        """Ids of participants that are known before any has come."""
        return range(0 if self._selector.partial else self._config.clients.num or 0)

    def _name_clients_that_never_counted(self) -> None:
        """Log the clients whose updates never counted, at any end of the run."""
        participation = self._state.participation
        if missed := self._losses.missed:  # in a round that was not committed
            participation.commit(self._state.round_id + 1, self._receiver.totals.samples, missed)
        never = participation.never_counted(self._ids_known_before())
        self.progress.never_counted = never
        for client_id, why in list(never.items())[:MAX_NAMED]:
            (log.info if why == HAS_PAUSED else log.warning)(
                "client never counted", **self._state.names.facts(client_id), reason=why
            )

    def _weights_crc32(self) -> int:
        return zlib.crc32(self._state.weights.numpy().data)

    def _note_command(self, round_: Round) -> None:
        expected, counted = sorted(round_.expected), sorted(round_.accepted)
        named = self._state.names.named(expected[:MAX_NAMED])
        self._probe.history.note("commanded", round=round_.round_id, expected=expected, counted=counted, names=named)

    def _make_durable(self, report: RoundReport) -> None:
        self._state.commit(report, self._publisher.held_apart)
        self._probe.reached("after_commit_before_note", report.round_id)
        self._publisher.note_commit(report)

    async def _amended(self, report: RoundReport | None) -> RoundReport | None:
        """The newest round has been evaluated after a resume; None: it had been before. Returns the report."""
        if report is not None:
            await self._compute.run(self._note_evaluation, report)
        return report

    def _note_evaluation(self, report: RoundReport) -> None:
        """The evaluation of the newest model decides whether the run goes on, and whether the model is the best one."""
        self._best.note(report)
        self._stop.note(report)
