"""The controller of a federated run: a script of rounds.

    async for report in gradbus.Controller(bus, task, FederatedConfig(rounds=10)).rounds(): ...

It may die at any point, and goes on when it is started again with the same state directory: a round either was
committed, or is repeated from the same model, with the same result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from gradbus.actors.aggregation import partial_sum, updates
from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.federated.chosen_codecs import check_downlink
from gradbus.actors.federated.controller.asynchronous import Bases
from gradbus.actors.federated.controller.best_model import BestModel
from gradbus.actors.federated.controller.combinations import (
    CheckedChoices,
    check_choices,
    check_strategy,
    make_strategy,
)
from gradbus.actors.federated.controller.deadline import RoundDeadline
from gradbus.actors.federated.controller.early_stop import EarlyStop, RunCallbacks
from gradbus.actors.federated.controller.liveness import MAX_NAMED, claim_job, tolerate_write_timeout
from gradbus.actors.federated.controller.model_evaluation import (
    check_controller_task,
    check_evaluation,
    personal_of,
)
from gradbus.actors.federated.controller.order_book import OrderBook, check_order
from gradbus.actors.federated.controller.ordered_run import OrderedRun, RoundRequests, serving
from gradbus.actors.federated.controller.participation import HAS_PAUSED
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.round_collection import RoundCollector
from gradbus.actors.federated.controller.round_commit import RoundCommitter
from gradbus.actors.federated.controller.run_parts import PreparedRun, RunParts, make_parts
from gradbus.actors.federated.controller.state import RunContext, RunState
from gradbus.actors.federated.controller.update_sum import UpdateForm
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing, check_buffers, check_noise, check_sharing
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.secure_aggregation.masked_values import size_of
from gradbus.codecs import Codec
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.callbacks import Callbacks
from gradbus.runtime.checkpoint import copy_state
from gradbus.runtime.choices import CLIENT_SCHEDULES, STRATEGIES
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.timeouts import federated_timeouts, log_timeouts
from gradbus.runtime.errors import ConfigError, RunOver, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited, check_instance
from gradbus.runtime.optimization.schedules import RoundRates
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.testing.journal import Probe
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, new_incarnation

ALL_DONE = "all rounds are done"

log = get_logger("controller")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveRun:
    """Holds what a run has once the job is this controller's.

    Attributes:
        on_report: called with the report of each round that is done.
        requests: orders of rounds; None: nothing orders them, as at a site.
    """

    prepared: PreparedRun
    parts: RunParts
    callbacks: RunCallbacks
    best: BestModel | None
    collector: RoundCollector
    committer: RoundCommitter
    on_report: Callable[[RoundReport], object]
    requests: RoundRequests | None


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
        config: FederatedConfig | CheckedChoices,
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
            config: the rules; or what :func:`.combinations.check_combination` has returned for them, which are then
                not checked again.
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
        rules = config.config if isinstance(config, CheckedChoices) else config
        check_instance(call, "config", rules, FederatedConfig, advice)
        # With patterns only the model tells whether some of it is personal: see _prepare.
        may_evaluate = self._evaluates and not Sharing.of(rules).has_patterns
        check_controller_task(call, task, rules, evaluates=may_evaluate)
        if strategy is not None:
            check_instance(call, "strategy", strategy, Strategy, "Write its name in the settings, or give an object")
        choices = config if isinstance(config, CheckedChoices) else check_choices(rules)
        self._choices = choices if strategy is None else replace(choices, fits_strategy=False)
        self._bus = bus
        self._on_open = on_open
        self._task = task
        self._config = rules
        self._callbacks = Callbacks("federated", callbacks, rules.callbacks)
        self._given_strategy = strategy
        self._probe = Probe("controller", rules.history.dir, payloads=rules.history.payloads, fail_at=fail_at)
        self._compute = ComputeThread("controller")
        self._prepared: PreparedRun | None = None
        self._running: ActiveRun | None = None
        self.progress = Progress(rounds=rules.rounds, minimum=rules.clients.min)

    def _prepare(self, *, has_caller: bool = False) -> PreparedRun:
        """Build the model and restore the state, off the loop. ``has_caller``: it orders each round, in its own way."""
        config, choices, codecs = self._config, self._choices, self._choices.codecs
        training, given = config.training, self._given_strategy
        rates = RoundRates(CLIENT_SCHEDULES, training.schedule, training.first_lr, config.rounds)
        sharing = Sharing.of(config, STRATEGIES.find(config.strategy.name) if given is None else type(given))
        model = FlatModel(build_model(self._task), sharing, rebuild=partial(build_model, self._task))
        check_sharing(model.specs, sharing)
        check_buffers(model.specs, config, sharing)
        if config.privacy.name != "none":
            check_noise(model.specs, sharing)
        check_evaluation(config, model)
        is_whole = not personal_of(model)
        check_controller_task(self._call, self._task, config, evaluates=self._evaluates and is_whole)
        base_strategy = self._make_base_strategy(model.dim)
        strategy = make_strategy(config, model.dim, base_strategy)
        strategy.lay_out(model.shapes)
        check_strategy(choices, strategy)
        bases = Bases(config.asynchronous, codecs.update, model.dim) if config.mode == "asynchronous" else None
        check_downlink(codecs, model.dim)
        max_update_bytes, own = self._max_update_bytes(model, strategy), self._own_codecs()
        with contextlib.ExitStack() as undo:
            state = RunState(config, model, strategy)
            undo.callback(state.close)
            # Later than every start before, also where the clock was set back.
            last_start = state.incarnation
            again = last_start + 1 + int.from_bytes(os.urandom(2), "little")  # also after two quick crashes
            incarnation = max(new_incarnation(), again)
            state.hold_as(incarnation)
            self._prepared = PreparedRun(
                choices=choices,
                identity=Identity(CONTROLLER, incarnation),
                last_start=last_start,
                model=model,
                state=state,
                base_strategy=base_strategy,
                strategy=strategy,
                book=self._make_book(strategy, state, rates, has_caller=has_caller),
                form=UpdateForm(model.dim, model.buffers, own, bases),
                max_update_bytes=max_update_bytes,
            )
            undo.pop_all()
        self.progress.epsilon, self.progress.epsilon_budget = strategy.epsilon, strategy.epsilon_budget
        return self._prepared

    def _make_base_strategy(self, dim: int) -> Strategy:
        """The strategy without its limits and its privacy."""
        return self._given_strategy or self._choices.take_strategy(dim)

    def _make_book(self, strategy: Strategy, state: RunState, rates: RoundRates, *, has_caller: bool) -> OrderBook:
        return OrderBook(self._config, strategy, state, rates, has_caller=has_caller)

    def _make_committer(
        self, parts: RunParts, callbacks: RunCallbacks, deadline: RoundDeadline | None
    ) -> RoundCommitter:
        return RoundCommitter(parts, callbacks, deadline)

    def _max_update_bytes(self, model: FlatModel, strategy: Strategy) -> int:
        """Length of the longest update that a participant can send."""
        if self._config.clients.kind == "sites":
            return partial_sum.max_bytes(model.dim)
        if self._config.secure_aggregation.enabled:
            return size_of(strategy.masked_grid.count(model.dim))  # of a first round: later ones are shorter
        codecs = self._choices.codecs
        longest, others = int(codecs.longest.max_bytes(model.dim)), strategy.sections
        return longest + updates.overhead_bytes(others, codecs.section) if others else longest

    def _own_codecs(self) -> tuple[type[Codec], ...]:
        """Codecs that are not built in, which updates may be in: those that this configuration names."""
        return self._choices.codecs.own

    def _level_above(self) -> Welcome | None:
        """The Welcome of the level above; None: there is none."""
        return None

    async def _start(
        self,
        stack: AsyncExitStack,
        prepared: PreparedRun,
        on_report: Callable[[RoundReport], object],
        requests: RoundRequests | None,
    ) -> ActiveRun:
        """Make all parts, once the job is this controller's."""
        config, state, progress = self._config, prepared.state, self.progress
        context = RunContext(
            self._bus,
            prepared.identity,
            self._compute,
            config,
            state,
            self._probe.history,
            probe=self._probe,
        )
        parts = make_parts(
            context,
            self._task,
            prepared,
            progress,
            above=self._level_above(),
            keeps_counted=self._callbacks.have("on_update"),
        )
        stack.callback(parts.publisher.close)
        progress.names = state.names
        for report in state.history:
            progress.add(report)
        progress.round_id = state.round_id
        self._on_open()
        await self._compute.run(state.note_start, context.history)
        stop, best, least = config.early_stop, config.checkpoint, config.evaluation.least_answered
        stop = stop.replaced("mode", config.mode_of(stop.metric, stop.mode))
        early_stop = EarlyStop(stop, self._callbacks, state.history, least_answered=least)
        best_model = None
        if best.keep_best is not None:
            best = best.replaced("best_mode", config.mode_of(best.keep_best, best.best_mode))
            best_model = await self._compute.run(BestModel, best, state, least_answered=least)
            stack.callback(best_model.close)
        callbacks = RunCallbacks(self._compute, self._callbacks, early_stop)
        times_median, deadline = config.round.timeout_times_median, None
        if times_median is not None:
            deadline = RoundDeadline(times_median, config.round.timeout_s)
        return ActiveRun(
            prepared=prepared,
            parts=parts,
            callbacks=callbacks,
            best=best_model,
            collector=RoundCollector(parts, callbacks, deadline),
            committer=self._make_committer(parts, callbacks, deadline),
            on_report=on_report,
            requests=requests,
        )

    @property
    def _started(self) -> PreparedRun:
        if self._prepared is None:
            raise RuntimeError("the controller has not started: there is no model yet")
        return self._prepared

    @property
    def _run(self) -> ActiveRun:
        assert self._running is not None, "rounds begin once all parts are made"
        return self._running

    @property
    def weights(self) -> torch.Tensor:
        """The global model, float32, shape (D,). It is changed in place while rounds run."""
        return self._started.state.weights

    @property
    def model(self) -> nn.Module:
        """The live global model, once the run has started. Rounds change it; :meth:`state_dict` gives copies."""
        return self._started.model.module

    async def state_dict(self) -> dict[str, Any]:
        """The global model as it is after the newest round: tensors by name, for ``model.load_state_dict``.

        They are copies on the CPU, made off the event loop, and never in the middle of an aggregation.
        """
        return await self._compute.run_or_follow(partial(_copy_state, self._started))

    @property
    def run_id(self) -> int:
        """Id of the run: new at a fresh start, kept over a resume."""
        return self._started.state.run_id

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
        requests = RoundRequests(has_caller=has_caller)
        async with serving(partial(self._serve, requests=requests), requests, name="controller"):
            yield OrderedRun(requests, self.progress, partial(check_order, self._config))

    async def serve(self, on_report: Callable[[RoundReport], object] = lambda report: None) -> None:
        """The run, with a call for each round that is done; rounds are as configured. Raises as :meth:`run`, errors
        possibly in a group."""
        await self._serve(on_report)

    async def _serve(
        self,
        on_report: Callable[[RoundReport], object] = lambda report: None,
        *,
        requests: RoundRequests | None = None,
    ) -> None:
        reason = ["the controller was stopped"]
        async with AsyncExitStack() as stack:
            stack.callback(
                lambda: self._probe.end(phase=self.progress.phase, reason=reason[0], rejected=dict(self._bus.rejected))
            )
            try:
                await self._run_rounds(stack, on_report, reason, requests)
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
        if self._prepared is None:  # else also where _prepare was cancelled after it had made it
            return
        if self._running is not None and self._running.parts.current_round.has_been:
            self._name_clients_that_never_counted(self._running)
        self._prepared.state.close()

    async def _run_rounds(
        self,
        stack: AsyncExitStack,
        on_report: Callable[[RoundReport], object],
        reason: list[str],
        requests: RoundRequests | None,
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
        prepared = await self._compute.run(self._prepare, has_caller=requests is not None and requests.has_caller)
        state = prepared.state
        await claim_job(
            self._bus,
            prepared.identity,
            config.clients.heartbeat_s,
            hangs_after_s=config.clients.dead_after_s,
            run_id=state.run_id,
            last_start=prepared.last_start,
        )
        await self._compute.run(state.record_start)
        self._running = await self._start(stack, prepared, on_report, requests)
        parts, began_after = self._running.parts, state.round_id
        # ToClients: of another controller. Control: of peers of PROTOCOL 3 and older, which are refused there.
        inbox = stack.enter_context(self._bus.subscribe(ClientUpdate, ToController, ToClients, Control))
        self._bus.open_writer(Control)
        async with TaskGroup() as group:
            helpers = [
                group.create_task(parts.dispatcher.run(inbox, group), name="dispatcher"),
                group.create_task(parts.receiver.run(), name="update-receiver"),
                group.create_task(parts.monitor.run(), name="heartbeat"),
            ]
            try:
                await self._all_rounds()
                finished, reason[0] = True, self._over()
                parts.joining.run_is_over()
                parts.publisher.note_last()
                await parts.monitor.announce_end(ok=True, reason=reason[0], linger=self._lingers(began_after))
            except Exception as error:
                # After these, waiting for this controller is of no use. Clients that are about to join hear it, too.
                reason[0], final = str(error), isinstance(error, TrainingFailed | ConfigError)
                linger = isinstance(error, ConfigError)
                raise
            finally:
                if not finished:
                    parts.joining.run_is_over()
                    await parts.monitor.announce_end(ok=False, reason=reason[0], final=final, linger=linger)
                for helper in helpers:
                    helper.cancel()

    async def _all_rounds(self) -> None:
        """The rounds that are left, when all parts run."""
        run, progress, rounds = self._run, self.progress, self._config.rounds
        parts, state = run.parts, run.prepared.state
        began_after = state.round_id
        await self._compute.run(self._note_end)
        # It may show that the run had ended: then no clients are waited for.
        amended = await self._amended(await parts.evaluation.complete_newest(progress.reports))
        if state.round_id < rounds and not run.callbacks.stop.reason:
            await parts.evaluation.try_own_metrics(progress.reports)
            await self._wait_for_clients()
            await self._compute.run(state.save_initial)
            with tolerate_write_timeout("model", state.round_id):
                await parts.publisher.publish_full(state.round_id)
            later = await self._amended(await parts.evaluation.complete_newest_by_clients(progress.reports))
            amended = later or amended
            await parts.evaluation.try_client_metrics(progress.reports)
        elif state.round_id > 0:  # the last start may have ended before all clients had it
            with tolerate_write_timeout("model", state.round_id):
                await parts.publisher.publish_full(state.round_id)
        if amended is not None:
            await run.callbacks.call(run.callbacks.stop.call_on_evaluation, amended)
        await self._ordered_rounds()
        if (stop := run.callbacks.stop).reason:
            progress.ended_early = stop.reason
            log.info("stopped early", round=state.round_id, reason=stop.reason, best=stop.best_round)
        if parts.cross_site is not None and state.round_id > began_after:
            progress.phase = "evaluating"
            progress.cross_site = await parts.cross_site.run()
        run.callbacks.run_has_ended()
        await run.callbacks.call(run.callbacks.stop.call_on_end, list(progress.reports))

    async def _ordered_rounds(self) -> None:
        run = self._run
        parts, state, requests = run.parts, run.prepared.state, run.requests
        if requests is not None and not self._over():
            requests.begin(await self._compute.run(parts.book.recorded, state.round_id + 1))
        while not self._over():
            if requests is not None and requests.has_caller:
                self.progress.phase = "waiting"
            given = RoundOrder() if requests is None else await requests.next()
            round_id = state.round_id + 1
            if given is None:
                run.callbacks.stop.end(f"the caller has ended it after round {state.round_id}")
            elif await run.callbacks.call(run.callbacks.stop.call_on_round, round_id):
                await self._compute.run(parts.book.decide_order, round_id, given, parts.selection.ready(round_id))
                report = await run.committer.commit(await run.collector.collect(round_id, set()))
                run.on_report(report)
                await self._after_round(report)
        if requests is not None:
            requests.end(self._over())

    async def _after_round(self, report: RoundReport) -> None:
        """Decide whether the run goes on after a round, and give the caller its report, also where that fails."""
        run = self._run
        if run.requests is not None:
            run.requests.note(report)
        try:
            if run.best is not None:
                await self._compute.run(run.best.note, report)
            await run.callbacks.call(run.callbacks.stop.note_round, report)
            await self._compute.run(self._note_end)
        finally:
            if run.requests is not None:
                run.requests.answer(self._over())

    def _lingers(self, began_after: int) -> bool:
        """Return whether clients may come yet that have to learn of the end: no round was done in this start."""
        return self._started.state.round_id == began_after

    def _over(self) -> str:
        """Why there is no round left; empty: there is one."""
        are_left = self._started.state.round_id < self._config.rounds
        return self._run.callbacks.stop.reason or ("" if are_left else ALL_DONE)

    def _note_end(self) -> None:
        """The strategy may end the run before its last round."""
        if not self._over():
            self._run.callbacks.stop.end(self._run.parts.strategy.end_reason())

    async def _wait_for_clients(self) -> None:
        """Wait until the first round can start. From then on the clients follow this controller."""
        parts, state = self._run.parts, self._started.state
        await parts.selection.wait_for_start(state.round_id + 1, timeout_s=self._config.clients.start_timeout_s)
        parts.dispatcher.run_has_begun()

    def _ids_known_before(self) -> range:
        """Ids of participants that are known before any has come."""
        return range(0 if self._run.parts.selection.is_partial else self._config.clients.num or 0)

    def _name_clients_that_never_counted(self, run: ActiveRun) -> None:
        """Log the clients whose updates never counted, at any end of the run."""
        state = run.prepared.state
        if missed := run.parts.losses.missed:  # in a round that was not committed
            state.participation.commit(state.round_id + 1, run.parts.receiver.totals.samples, missed)
        never = state.participation.never_counted(self._ids_known_before())
        self.progress.never_counted = never
        for client_id, why in list(never.items())[:MAX_NAMED]:
            (log.info if why == HAS_PAUSED else log.warning)(
                "client never counted", **state.names.facts(client_id), reason=why
            )

    async def _amended(self, report: RoundReport | None) -> RoundReport | None:
        """The newest round has been evaluated after a resume; None: it had been before. Returns the report."""
        if report is not None:
            await self._compute.run(self._note_evaluation, report)
        return report

    def _note_evaluation(self, report: RoundReport) -> None:
        """The evaluation of the newest model decides whether the run goes on, and whether the model is the best one."""
        if self._run.best is not None:
            self._run.best.note(report)
        self._run.callbacks.stop.note(report)


def _copy_state(prepared: PreparedRun) -> dict[str, Any]:
    prepared.model.hold(prepared.state.weights, prepared.state.buffers)
    return copy_state(prepared.model.module)
