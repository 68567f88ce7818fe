"""The controller of a federated run: a straight script of rounds.

    async for report in gradbus.Controller(bus, task, FederatedConfig(rounds=10)).rounds(): ...

It may die at any point. Started again with the same state directory it goes on with the same run: a round either was
committed, or is done again from the same model, with the same result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from gradbus import codecs
from gradbus.actors.aggregation.clipping import CAPPED, sample_cap, within_limits
from gradbus.actors.aggregation.strategies import Strategy, make_strategy
from gradbus.actors.federated.clients import Members
from gradbus.actors.federated.dispatch import Failures, Reception
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.liveness import MAX_NAMED, Presence, Rivals, claim_job, unless_taken
from gradbus.actors.federated.local_training import codec_options
from gradbus.actors.federated.participation import FOR_GOOD, NO_UPDATE, Conduct, Strike
from gradbus.actors.federated.publish import Downlink
from gradbus.actors.federated.report import Progress, RoundReport, report_of
from gradbus.actors.federated.rounds import (
    CLIENT_LOST,
    CLIENT_SILENT,
    FAILURES,
    TRAINING_FAILED,
    Gathering,
    Outcome,
    Round,
)
from gradbus.actors.federated.state import RunState
from gradbus.actors.federated.task import EvalOutcome, FederatedTask
from gradbus.actors.federated.updates_in import Intake
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.checkpoint import copy_state
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.dds.missing_peers import WaitLog
from gradbus.runtime.errors import BusError, GradbusError, RoundTimeout, TrainingFailed, WriteTimeout
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited
from gradbus.runtime.tasks import single_error
from gradbus.runtime.testing.instrumentation import Probe
from gradbus.runtime.wire.control import Failed, Refused
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, TrainCmd, new_incarnation

_SHOWN = 20  # clients that a line names

log = get_logger("controller")


class Attendance:
    """Waits for clients, and keeps those out whose conduct asks for it."""

    def __init__(
        self, bus: Bus, identity: Identity, members: Members, conduct: Conduct, config: FederatedConfig,
        progress: Progress, *, sleep_until: Callable[[float], Awaitable[None]], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """``sleep_until``: waits until something happened, or until that time by ``time.monotonic``. ``changed``: the
        table of members did."""
        self._bus = bus
        self._identity = identity
        self._members = members
        self._conduct = conduct
        self._config = config
        self._progress = progress
        self._sleep_until = sleep_until
        self._changed = changed

    async def gather(self, round_id: int, accepted: Collection[int] = ()) -> None:
        """The subscription barrier: enough clients are matched both ways and have been welcomed.

        ``accepted``: clients that need not be there, for their updates count already.

        Raises:
            BarrierTimeout: they were not, for too long.
        """
        config, out = self._config, self._conduct.out(round_id)
        self._progress.phase = "waiting"
        kept_out = f" (kept out: {', '.join(map(str, list(out)[:20]))})" if out else ""
        gathering = Gathering(
            minimum=config.min_clients, expected=config.num_clients, now_s=time.monotonic(),
            timeout_s=config.start_timeout_s, grace_s=config.start_grace_s,
            what=f"round {round_id} cannot start{kept_out}: clients", excused=out,
            doubt=lambda: self._bus.doubt, hint=self._bus.reach.advice,
        )  # fmt: skip
        waiting = WaitLog(log, self._bus.reach, job=self._bus.job, round=round_id)
        while not gathering.may_start(ready := sorted({*accepted, *self.ready(round_id)}), time.monotonic()):
            waiting.look(self._absent(gathering.missing(ready)), doubt=self._bus.doubt)
            # Nothing tells when our own side has matched, which may be after the client's last word.
            await self._sleep_until(min(gathering.next_check_s(), time.monotonic() + config.heartbeat_s))
        if len(ready) < (config.num_clients or 0) - len(out):
            log.warning("starting without all clients", ready=ready, expected=config.num_clients)

    def _absent(self, missing: Collection[int]) -> list[str]:
        """Clients that are waited for, for a line; one that has come and loads its data is no stranger."""
        here = {member.client_id for member in self._members}
        named = [f"client {number}{' (is here, not ready yet)' * (number in here)}" for number in missing]
        return named[:_SHOWN] or ["some client"]

    def ready(self, round_id: int) -> list[int]:
        """Clients that said they are ready, as far as our own side is matched as well."""
        ready = self._members.ready(round_id)
        # Several clients may share a process and so a reader: this holds back only while DDS sees nobody at all.
        return ready if self._bus.matched_readers(TrainCmd) and self._bus.matched_writers(ClientUpdate) else []

    async def on_strike(self, strike: Strike) -> None:
        """A client has sent a bad update."""
        facts = {"client": strike.client_id, "round": strike.round_id, "reason": strike.reason, "strikes": strike.count}
        if not strike.out_until:
            log.warning("strike", **facts)
            return
        until = "for good" if strike.out_until == FOR_GOOD else f"until round {strike.out_until}"
        log.error("client in quarantine", **facts, out=until, detail=strike.detail)
        self._members.keep_out(strike.client_id, strike.out_until)
        incarnation = self._members.incarnation_of(strike.client_id)
        if strike.out_until == FOR_GOOD and incarnation is not None:
            self._members.remove(strike.client_id, incarnation)
            with contextlib.suppress(BusError):  # its next Hello is refused as well
                await self._bus.publish(self._identity, Refused(strike.client_id, incarnation, strike.sentence))
        self._changed()


class Evaluation:
    """Evaluates after every so many rounds, and after the last."""

    def __init__(
        self, task: FederatedTask, model: FlatModel, weights: Tensor, compute: ComputeThread, config: FederatedConfig
    ) -> None:
        self._task = task
        self._model = model
        self._weights = weights
        self._compute = compute
        self._config = config

    async def after(self, round_id: int, progress: Progress) -> EvalOutcome | None:
        """Quality of the weights as they are now, after this round; None if it is not due, or if the task has no way to
        tell."""
        every = self._config.eval_every
        if not every or (round_id % every and round_id != self._config.rounds):
            return None
        progress.phase = "evaluating"
        return await self._compute.run(self._evaluate)

    def _evaluate(self) -> EvalOutcome | None:
        self._model.hold(self._weights)
        return self._task.evaluate(self._model.module)


class Controller:
    """Runs the rounds of one job on one bus.

    Attributes:
        progress: where it stands, for display; see :class:`Progress`.
    """

    def __init__(
        self, bus: Bus, task: FederatedTask, config: FederatedConfig, *, strategy: Strategy | None = None,
        on_open: Callable[[], object] = lambda: None, fail_at: str | None = None,
    ) -> None:  # fmt: skip
        """A controller that has not started.

        Args:
            bus: joined to the job.
            task: gives the model, and evaluates it where it can.
            config: the rules.
            strategy: in place of the one that ``config.strategy`` names.
            on_open: called once the job is this controller's and the state is restored: from then on it is this run.
            fail_at: a fail point for tests, ``name:round``; by default from the environment.
        """
        self._bus = bus
        self._on_open = on_open
        self._task = task
        self._config = config
        self._given_strategy = strategy
        self._identity = Identity(CONTROLLER, new_incarnation())
        self._probe = Probe("controller", config.history_dir, payloads=config.history_payloads, fail_at=fail_at)
        self._history = self._probe.history
        self._compute = ComputeThread("controller")
        self._round: Round | None = None
        self._wakeup = asyncio.Event()
        self._failures = Failures()
        self._has_commanded = False
        self._missed: dict[int, str] = {}  # clients that are lost to the open round, and why
        self.progress = Progress(rounds=config.rounds, minimum=config.min_clients)
        # Made by _open, off the loop: building a model and reading a checkpoint take their time.
        self._model: FlatModel
        self._strategy: Strategy
        self._state: RunState
        self._members: Members

    def _open(self) -> None:
        config = self._config
        self._model = FlatModel(self._task.build_model(), config.exchange)
        self._strategy = within_limits(self._given_strategy or make_strategy(config, self._model.dim), config)
        self._strategy.check(config)
        self._cap = sample_cap(self._strategy, config)
        self._state = RunState(config, self._model, self._strategy)
        # Later than every start before, whatever the clock says.
        again = self._state.incarnation + 1 + int.from_bytes(os.urandom(2), "little")  # also after two quick crashes
        self._identity = Identity(CONTROLLER, max(self._identity.incarnation, again))
        self._state.incarnation = self._identity.incarnation
        self._members = Members(
            dim=self._model.dim, layout=self._model.layout, session=self._identity.incarnation,
            dead_after_s=config.dead_after_s, rival_after_s=2.4 * config.heartbeat_s, memory=self._bus.memory.here,
            trained_only=config.exchange == "trained",
        )  # fmt: skip

    def _connect(self) -> None:
        """What belongs to the loop."""
        self._bus.open_writer(TrainCmd)  # clients are ready when they are matched with it
        config, state, dim = self._config, self._state, self._model.dim
        down = codecs.get(config.downlink_codec, **codec_options(config.downlink_codec, config))
        self._downlink = Downlink(
            self._bus, self._identity, self._compute, down, self._members, run_id=state.run_id, weights=state.weights,
            held=state.held, history=self._history, frozen=self._model,
        )  # fmt: skip
        self._attendance = Attendance(
            self._bus, self._identity, self._members, state.conduct, config, self.progress,
            sleep_until=self._sleep_until, changed=self._membership_changed,
        )  # fmt: skip
        up = codecs.get(config.codec, **codec_options(config.codec, config))
        self._intake = Intake(
            self._bus, self._identity, self._strategy, self._compute, dim=dim, run_id=state.run_id,
            max_bytes=up.max_bytes(dim), budget_bytes=config.receive_budget_bytes, max_samples=config.max_samples,
            conduct=state.conduct, on_strike=self._attendance.on_strike, on_change=self._changed, history=self._history,
            cap=self._cap,
        )  # fmt: skip
        self._evaluation = Evaluation(self._task, self._model, state.weights, self._compute, config)
        self._presence = Presence(
            self._bus, self._identity, self._members, self._intake, self.progress, run_id=state.run_id,
            heartbeat_s=config.heartbeat_s, changed=self._membership_changed, open_round=lambda: self._round,
        )  # fmt: skip
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

        They are copies on the CPU, made off the event loop, and never in the midst of a step of the server.
        """
        _ = self.model
        return await self._compute.run_or_follow(self._copy_state)

    def _copy_state(self) -> dict[str, Any]:
        self._model.hold(self._state.weights)
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
        """
        async for _ in self.rounds():
            pass
        return list(self.progress.reports)

    async def rounds(self) -> AsyncGenerator[RoundReport, None]:
        """Run, and give each report as its round is committed. Closing the iterator ends the run in order.

        Raises:
            As :meth:`run`.
        """
        reports: asyncio.Queue[RoundReport | None] = asyncio.Queue()  # bounded by the number of rounds
        running = asyncio.create_task(self._run(reports.put_nowait), name="controller")
        running.add_done_callback(lambda _: reports.put_nowait(None))
        try:
            while (report := await reports.get()) is not None:
                yield report
            try:
                await running
            except BaseExceptionGroup as group:
                raise single_error(group) from None
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])  # and not "await running": a cancel of ours must not get lost in it
                if not running.cancelled():
                    running.exception()  # it was told to stop: nobody is left to hear

    async def _run(self, on_report: Callable[[RoundReport], None]) -> None:
        config = self._config
        finished, final, reason = False, False, "the controller was stopped"
        try:
            await self._compute.run(self._open)
            await claim_job(self._bus, self._identity, config.heartbeat_s, hangs_after_s=config.dead_after_s)
            self._connect()
            self._on_open()
            state = self._state
            await self._compute.run(state.note_start, self._history)
            resumed_at_end = state.round_id >= config.rounds
            with self._bus.subscribe(ClientUpdate, Control) as inbox:
                async with asyncio.TaskGroup() as group:
                    reception = self._reception = Reception(
                        self._bus, self._identity, self._members, self._intake, self._downlink, state.conduct, config,
                        run_id=state.run_id, next_round=self._next_round, rivals=Rivals(self._bus.job, self._identity),
                        changed=self._membership_changed, failed=self._client_failed, in_doubt=self._presence.in_doubt,
                        participation=state.participation,
                    )  # fmt: skip
                    helpers = [
                        group.create_task(reception.run(inbox, group), name="reception"),
                        group.create_task(self._intake.run(), name="intake"),
                        group.create_task(self._presence.beat(), name="heartbeat"),
                    ]
                    try:
                        if state.round_id < config.rounds:
                            await self._attendance.gather(state.round_id + 1)
                            reception.has_begun = True
                            await self._compute.run(state.save_initial)
                            with unless_taken("model", state.round_id):
                                await self._downlink.publish_full(state.round_id)
                        await self._evaluate_resumed()
                        while state.round_id < config.rounds:
                            on_report(await self._one_round(state.round_id + 1))
                        finished, reason = True, "all rounds are done"
                        await self._presence.bye(ok=True, reason=reason, linger=resumed_at_end)
                    except Exception as error:
                        reason, final = str(error), isinstance(error, TrainingFailed)
                        raise
                    finally:
                        if not finished:
                            await self._presence.bye(ok=False, reason=reason, final=final)
                        for helper in helpers:
                            helper.cancel()
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
            self._compute.close()
            if hasattr(self, "_downlink"):
                self._downlink.close()
            if self._has_commanded:
                self._name_who_never_counted()
            if hasattr(self, "_state"):
                self._state.close()
            self._probe.end(phase=self.progress.phase, reason=reason, rejected=dict(self._bus.rejected))

    # Who is there

    def _next_round(self) -> int:
        """The first round that a client which comes now takes part in."""
        return self._round.round_id + 1 if self._round is not None else self._state.round_id + 1

    def _membership_changed(self) -> None:
        if self._round is not None:
            # A client that died and is back already takes part from the next round on: in this one it is lost.
            round_id = self._round.round_id
            unheard = self._members.unheard(round_id)
            lost, found = self._round.follow(self._members.taking_part(round_id), unheard)
            for client_id in lost:
                reason = CLIENT_SILENT if client_id in unheard else CLIENT_LOST
                self._intake.dropped[reason] += 1
                self._missed[client_id] = reason
                log.warning(reason, client=client_id, round=round_id)
            for client_id in found:
                if self._missed.pop(client_id, None) == CLIENT_SILENT:  # else it was silent before the round began
                    self._intake.dropped -= Counter({CLIENT_SILENT: 1})  # it is not lost to this round any more
                log.info("client waited for again", client=client_id, round=round_id)
        self.progress.clients = tuple(sorted(member.client_id for member in self._members if not member.silent))
        self.progress.out = self._state.conduct.out(self._state.round_id + 1)
        self._presence.on_left()
        self._changed()

    def _client_failed(self, client_id: int, said: Failed) -> None:
        round_id = said.round_id
        if self._round is None or self._round.round_id != round_id or client_id not in self._round.open:
            return  # said before: it is repeated until the next command
        reason = said.reason if said.reason in FAILURES else TRAINING_FAILED
        self._failures.note(client_id, round_id, said.text, reason)
        self._round.fail(client_id, reason)
        self._intake.dropped[reason] += 1
        self._changed()

    def _changed(self) -> None:
        """Something happened that may end a wait."""
        round_ = self._round
        if round_ is not None:
            ready, expected = len(round_.accepted), round_.needed
            if (ready, expected) != (self.progress.ready, self.progress.expected):
                self.progress.ready, self.progress.expected = ready, expected
                log.info("final-ready=%d/%d (min=%d)", ready, expected, round_.minimum, round=round_.round_id)
        self._wakeup.set()

    async def _sleep_until(self, at_s: float) -> None:
        """Until something happened, or that time."""
        self._wakeup.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_s - time.monotonic())):
                await self._wakeup.wait()

    # A round

    async def _one_round(self, round_id: int) -> RoundReport:
        """Attempts at a round, until there are enough updates. What has counted in one goes on counting in the next."""
        started_s = time.perf_counter()
        await self._compute.run(self._strategy.begin, round_id, self._downlink.held)
        accepted: set[int] = set()
        self._missed = {}
        self._cap.begin(round_id, self._state.participation.samples())
        for attempt in range(1, self._config.max_attempts + 1):
            if len(accepted.union(self._attendance.ready(round_id))) < self._config.min_clients:
                await self._attendance.gather(round_id, accepted)
            round_, outcome = await self._collect(round_id, accepted)
            accepted = round_.accepted
            if outcome is not Outcome.TOO_FEW:
                return await self._commit(round_, outcome, attempt, started_s)
            self._missed.update(self._why_missed(round_))
            log.warning("round goes on", round=round_id, updates=len(accepted), needed=round_.minimum, attempt=attempt)
            for member in self._members.admit(round_id):
                with contextlib.suppress(WriteTimeout):  # its Hello says what it knows, and brings another
                    await self._reception.welcome(member)
        raise self._too_few(round_)

    def _too_few(self, round_: Round) -> GradbusError:
        """Why a round came to nothing: the clients' own code, if every update that is missing is missing for that."""
        failed = sorted(client_id for client_id, why in round_.failed.items() if why in FAILURES)
        would_do = len(round_.accepted) + len(failed) >= round_.minimum  # else others are missing as well
        if failed and would_do and round_.expected == round_.accepted.union(failed):
            who = f"client{'s' * (len(failed) > 1)} {', '.join(map(str, failed[:20]))}{' ...' * (len(failed) > 20)}"
            return TrainingFailed(
                f"training failed on {who}: {self._failures.newest(failed[0])}. Mend it there, start the clients and "
                f"then the controller again: the run goes on from the last committed model", failed,
            )  # fmt: skip
        accepted = len(round_.accepted)
        return RoundTimeout(round_.round_id, accepted, self._config.min_clients, self._config.max_attempts)

    async def _collect(self, round_id: int, accepted: set[int]) -> tuple[Round, Outcome]:
        """Command the round and take in updates until it is over."""
        config = self._config
        round_ = Round(
            round_id, self._attendance.ready(round_id), minimum=config.min_clients, quorum=config.quorum,
            now_s=time.monotonic(), deadline_s=config.round_timeout_s, grace_s=config.grace_s, accepted=accepted,
            silent=self._members.unheard(round_id),
        )  # fmt: skip
        self._probe.reached("before_command", round_id)
        self._round, self._has_commanded = round_, True
        self._intake.open(round_)
        self.progress.phase, self.progress.round_id = "training", round_id
        self.progress.out = self._state.conduct.out(round_id)
        self._changed()
        if self._history.on:
            await self._compute.run(self._note_command, round_)
        command = TrainCmd(round_id, config.subset_size, config.epochs, config.lr, config.seed)
        self._intake.timing.commanded()
        with unless_taken("command", round_id):
            await self._bus.publish(self._identity, command)
        self._probe.reached("after_command", round_id)
        try:
            reached = len(accepted)
            while (outcome := round_.verdict(time.monotonic())) is None:
                if len(round_.accepted) > reached:
                    reached = len(round_.accepted)
                    self._probe.reached("mid_collect", round_id)
                await self._sleep_until(round_.next_check_s())
        finally:
            await self._intake.close()
            self._round = None
        # What was being added when the round ended has been counted by now; that can only have made it better.
        return round_, round_.verdict(time.monotonic()) or outcome

    async def _commit(self, round_: Round, outcome: Outcome, attempt: int, started_s: float) -> RoundReport:
        """From the sum of the updates to the published, durable model."""
        round_id, state = round_.round_id, self._state
        collected_s = time.perf_counter()
        self.progress.phase = "aggregating"
        await self._downlink.quiesce()
        self._probe.reached("after_collect_before_aggregate", round_id)
        crc32 = await self._compute.run(self._finish)
        aggregated_s = time.perf_counter()
        self._probe.reached("after_aggregate_before_commit", round_id)
        report = report_of(
            round_, outcome, attempt, self._intake, crc32=crc32, started_s=started_s, collected_s=collected_s,
            aggregated_s=aggregated_s, strikes=state.conduct.take_new(), marks=self._marks(),
        )  # fmt: skip
        state.participation.commit(round_id, self._intake.tally.samples, self._why_missed(round_))
        self._missed = {}
        # The message is made before the commit: what the clients will hold is part of the state.
        size = await self._downlink.prepare(round_id)
        await self._compute.run(self._make_durable, report)
        committed_s = time.perf_counter()
        self._probe.reached("after_commit_before_publish", round_id)
        with unless_taken("model", round_id):
            await self._downlink.publish()
        published_s = time.perf_counter()
        self._probe.reached("after_publish", round_id)
        evaluation = await self._evaluation.after(round_id, self.progress)
        report = state.amend(
            report, bytes_down=size * max(1, len(self._members)),
            bytes_down_shared=size * min(self._downlink.told, self._members.sharing),
            downlink_residual_norm=self._downlink.residual_norm,
            checkpoint_s=committed_s - aggregated_s, publish_s=published_s - committed_s,
            eval_s=time.perf_counter() - published_s, seconds=published_s - started_s,
            accuracy=None if evaluation is None else evaluation.accuracy,
            eval_loss=None if evaluation is None else evaluation.loss,
        )  # fmt: skip
        self.progress.add(report)
        log.info(
            "round done", round=round_id, accuracy=report.accuracy, loss=report.loss, clients=list(report.clients),
            outcome=report.outcome, seconds=round(report.seconds, 3), bytes_shared=report.bytes_shared,
        )  # fmt: skip
        return report

    def _marks(self) -> dict[str, tuple[int, ...]]:
        capped = tuple(sorted(self._intake.capped))
        return {**({CAPPED: capped} if capped else {}), **self._strategy.marks()}

    def _why_missed(self, round_: Round) -> dict[int, str]:
        """Of clients that were expected in this round and do not count, the reason that was seen."""
        missed = {
            **dict.fromkeys(round_.silent, CLIENT_SILENT), **dict.fromkeys(round_.open, NO_UPDATE), **self._missed,
        }  # fmt: skip
        for client_id, reason in round_.failed.items():
            is_own = reason in FAILURES
            missed[client_id] = f"{reason}: {self._failures.newest(client_id)}" if is_own else reason
        return {client_id: why for client_id, why in missed.items() if client_id not in round_.accepted}

    def _name_who_never_counted(self) -> None:
        """The end of the run, whatever it is: nobody should have to look for a client that came to nothing."""
        participation = self._state.participation
        if self._missed:  # in a round that was not committed
            participation.commit(self._state.round_id + 1, self._intake.tally.samples, self._missed)
        never = participation.never_counted(range(self._config.num_clients or 0))
        self.progress.never_counted = never
        for client_id, why in list(never.items())[:MAX_NAMED]:
            log.warning("client never counted", client=client_id, reason=why)

    def _finish(self) -> int:
        self._strategy.finish(self._state.weights)
        return zlib.crc32(self._state.weights.numpy().data)

    def _note_command(self, round_: Round) -> None:
        expected, counted = sorted(round_.expected), sorted(round_.accepted)
        self._history.note("commanded", round=round_.round_id, expected=expected, counted=counted)

    def _make_durable(self, report: RoundReport) -> None:
        self._state.commit(report, self._downlink.held_apart)
        self._downlink.note_commit(report)

    async def _evaluate_resumed(self) -> None:
        """The round before a crash was committed, but may not have been evaluated."""
        last = self.progress.reports[-1] if self.progress.reports else None
        if last and last.accuracy is None and (found := await self._evaluation.after(last.round_id, self.progress)):
            self.progress.amend(self._state.amend(last, accuracy=found.accuracy, eval_loss=found.loss))
