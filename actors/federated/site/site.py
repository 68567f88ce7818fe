"""A site of a tree: the Controller of its own clients, and one participant of the level above.

    async for report in gradbus.Site(above, bus, task, FederatedConfig(), UpstreamConfig(site=0)).rounds(): ...

To the level above it is a client (:class:`SiteMember`) whose training is a round of its own clients, and whose update
is their exact sum. Where that level cannot be reached, the clients go on with a run of their own, which has its own id
and its own checkpoints, until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gradbus.actors.aggregation.merged_buffers import BufferLayout
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.last_model import LastModelDeadline
from gradbus.actors.federated.client.session import NO_START, ControllerSession, ControllerStart
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.controller.combinations import check_choices
from gradbus.actors.federated.controller.controller import Controller
from gradbus.actors.federated.controller.model_evaluation import check_controller_task
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.state import SavedRun
from gradbus.actors.federated.model.sharing import REST, Sharing, layout_of, specs_of
from gradbus.actors.federated.protocol import REPEAT_AFTER_S
from gradbus.actors.federated.site.site_controller import (
    CONTRIBUTED_FILE,
    LevelAbove,
    RelayingController,
    RoundsAlone,
    SiteController,
    SiteUpdate,
    UpstreamChanged,
)
from gradbus.actors.federated.task import FederatedTask
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.choices import SELECTORS
from gradbus.runtime.config.federated import ClientConfig, FederatedConfig, UpstreamConfig
from gradbus.runtime.errors import BarrierTimeout, CheckpointError, ConfigError, GradbusError, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import check_instance
from gradbus.runtime.saved_state import BUFFER, own_copies
from gradbus.runtime.tasks import TaskGroup, items_of, single_error
from gradbus.runtime.transport.channels import ToClients
from gradbus.runtime.wire.control import EvaluationRequest, Hello, LocalModelRequest, Status, UploadRequest, Welcome
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import Control, Message, TrainCmd

FROM_ABOVE = {"rounds", "seed", "training", "codec", "exchange", "share", "buffers", "early_stop", "callbacks"}
"""The settings that at a site are those of the level above."""
ENDLESS = 1_000_000  # rounds: the level above ends the run

log = get_logger("site")

MakeController = Callable[[Welcome, Tensor | None], Awaitable[SiteController]]


class _Superseded(GradbusError):
    """The level above does not want this round any more."""


class _UpstreamSession(ControllerSession):
    """A session with the level above, which may be lost: ``lost`` is then set."""

    lost = False

    def check_controller(self, misconfiguration: str, advice: Callable[[], str] = str) -> None:
        try:
            super().check_controller(misconfiguration, advice)
        except BarrierTimeout:
            self.lost = True
            raise


class Followed(NamedTuple):
    """Holds what a site has of the level above: enough to go on alone.

    Attributes:
        round_id, base: the newest model, float32, shape (D,). command: the newest command. terms: how to train.
        frozen: the frozen parameters; None: there are none. buffers: the merged buffers of the model.
    """

    round_id: int
    base: Tensor
    command: TrainCmd
    terms: Welcome
    frozen: Tensor | None
    buffers: Mapping[str, Tensor] = {}


class SiteMember(Client):
    """The upward side of a site, for as long as the level above is there.

    Attributes:
        controller: of the site's clients, once this site is welcomed.
        followed: what it has of the level above; None before the first command.
    """

    _codecs_setting = "upstream.codecs"
    _task_methods = ("build_model",)  # its clients train

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        upstream: UpstreamConfig,
        make_controller: MakeController,
        on_report: Callable[[RoundReport], object],
        *,
        followed: Followed | None,
        newest: ControllerStart,
    ) -> None:
        """A member that has not started.

        Args:
            make_controller: called when it is welcomed, with its frozen parameters.
            followed, newest: as of the member before.
        """
        timeout_s = upstream.alone_after_s if followed and upstream.alone else upstream.timeout_s
        config = ClientConfig(controller_timeout_s=timeout_s, codecs=upstream.codecs)
        super().__init__(bus, task, client_id=upstream.site or 0, name=upstream.name, config=config)
        self._upstream = upstream
        self._make_controller = make_controller
        self._on_report = on_report
        self._session: _UpstreamSession = _UpstreamSession(timeout_s, newest)
        self.controller: SiteController | None = None
        self.followed = followed
        self._frozen_values: Tensor | None = None
        self._terms: Welcome | None = None  # the newest Welcome, also while another one is awaited

    @property
    def is_cut_off(self) -> bool:
        """Whether the level above has been silent for too long."""
        return self._session.lost

    @property
    def newest(self) -> ControllerStart:
        """The newest start of the level above that this site has heard: no earlier one of that run is followed."""
        return self._session.newest

    def _describe(self, matched: bool) -> Hello:
        return replace(super()._describe(matched), site=True, masks=False, grids=False)

    def _on_controller(self, session: int, body: Any, group: TaskGroup) -> None:
        if isinstance(body, Status) and self.controller is not None:
            self.controller.progress.rounds = body.rounds
        super()._on_controller(session, body, group)
        self._tell_end()

    def _tell_end(self) -> None:
        """Have the Controller of this site wait for no clients where the run has ended."""
        if self._session.ended is not None and self.controller is not None and not self.controller.started.is_set():
            self.controller.stop_waiting()

    def _accept_welcome(self, session: int, welcome: Welcome) -> None:
        super()._accept_welcome(session, welcome)
        self._terms = welcome

    def _take_request(self, request: EvaluationRequest | LocalModelRequest) -> None:
        pass  # a site has no data; a Controller of sites asks none

    def _handle(self, message: Message, group: TaskGroup) -> None:
        try:
            super()._handle(message, group)
        except TrainingFailed as error:
            if self.controller is None or not self.controller.started.is_set():
                raise
            self.controller.end(error)  # which ends the clients of this site, then this member

    async def _prepare(self, welcome: Welcome, group: TaskGroup) -> None:
        """Start the Controller of this site, and wait for its clients."""
        if welcome.frozen:
            if await self._models.lacks_frozen(welcome):
                await self._models.fetch_frozen(welcome)
                if await self._models.lacks_frozen(welcome):  # that level has ended its run, or started again
                    if self._session.ended is not None:
                        return
                    raise UpstreamChanged("the level above has started again before its frozen parameters were here")
            self._frozen_values = self._model.read_frozen()
        self.controller = await self._make_controller(welcome, self._frozen_values)
        self._tell_end()
        self._serving = group.create_task(self.controller.serve(self._on_report), name="site-controller")
        await self.controller.started.wait()
        self._session.begin()

    async def _report_unprepared(self, error: Exception, run_id: int) -> None:
        pass  # it may start again at once; else the reason of its Leave says why

    async def _work(self, group: TaskGroup) -> None:
        await super()._work(group)
        if self.controller is None and self._terms is not None:
            await self._prepare(self._terms, group)  # its clients have yet to learn that the run has ended
        if (controller := self.controller) is None:
            return
        await self._fetch_last_model(controller)
        await self._take_newest(controller)
        controller.end()
        await self._serving

    async def _fetch_last_model(self, controller: SiteController) -> None:
        """Wait, as a client does, for the model after the newest round that the clients of this site were asked for,
        whether or not their sum counts in it; where they were asked for none, for the newest model."""
        is_over = LastModelDeadline(self._bus).is_over
        with contextlib.suppress(BarrierTimeout):
            # The end, or the Status, of the next start of the level above may arrive before its Welcome.
            while (welcome := self._session.welcome) is None:
                if is_over():
                    return
                self._changed.clear()
                await self._wait(REPEAT_AFTER_S)
            newest = welcome.next_round - 1 if controller.command is None else controller.command.round_id
            await self._models.fetch(
                welcome, self._models.replica, max(newest, controller.counted_round), is_over, first_after_s=0.1
            )

    async def _take_newest(self, controller: SiteController) -> None:
        """Pass the newest model on to the site's clients, if it is new."""
        vector, round_id = self._models.replica.vector, self._models.replica.round_id
        if vector is None or self._session.welcome is None:
            return
        if self._session.run_id != controller.run_id:
            raise UpstreamChanged(f"the level above has begun run {self._session.run_id:016x}")
        if _rules_of(self._session.welcome) != _rules_of(controller.terms) and self._session.ended is None:
            raise UpstreamChanged("the level above has started again with other settings")
        buffers = self._buffers()
        await controller.adopt(round_id, vector, buffers)
        if self.followed is not None:
            self.followed = self.followed._replace(round_id=round_id, base=vector, buffers=buffers)

    async def _take_last_model(self) -> None:
        """Do nothing: the site's clients have got it already, before they ended."""

    def _layout(self) -> BufferLayout:
        """The merged buffers of the level above: this site's clients may keep some of them."""
        assert self._session.welcome is not None, "a site that is not welcomed has nothing of the level above"
        return layout_of(self._model.specs, Sharing.of_welcome(self._session.welcome))

    def _buffers(self) -> dict[str, Tensor]:
        """All merged buffers of the newest model."""
        layout = self._layout()
        if not layout:
            return {}
        built = self._model.module.state_dict()  # nothing here trains it
        as_built = {name: built[name].detach().cpu() for name in layout.names}
        return {**as_built, **layout.unpack(self._models.replica.buffers)}

    async def _wait(self, timeout_s: float) -> None:
        if self.controller is not None and self.controller.started.is_set():
            await self._take_newest(self.controller)  # before its command: the site's clients get it earlier
        await super()._wait(min(timeout_s, self._session.controller_timeout_s / 4))  # to notice in time that it is lost

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor, group: TaskGroup) -> None:
        controller = self.controller
        assert controller is not None, "it is started before this site is ready"
        await self._take_newest(controller)
        self.followed = Followed(command.round_id - 1, base, command, welcome, self._frozen_values, self._buffers())
        if self._upstream.alone:  # before its first command it has nothing to go on with
            self._session.controller_timeout_s = self._upstream.alone_after_s
        await super()._train_and_send(welcome, command, base, group)
        if self._session.counted_round == command.round_id:
            controller.note_counted(command.round_id)

    async def _make_update(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> EncodedUpdate:
        """A round of the site's clients, and its sum."""
        controller = self.controller
        assert controller is not None
        began_s = time.perf_counter()
        due_s = time.monotonic() + controller.round_s - (began_s - self._session.commanded_s)
        gathering = asyncio.create_task(controller.gather(command, due_s), name="site-round")
        try:
            while not gathering.done():
                self._changed.clear()
                if self._session.is_superseded(command):
                    raise _Superseded(f"round {command.round_id} is not wanted any more")
                changed = asyncio.create_task(self._changed.wait(), name="site-round-superseded")
                try:
                    await asyncio.wait({gathering, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
            update = gathering.result()
        finally:
            if not gathering.done():
                gathering.cancel()
                await asyncio.wait({gathering})
        return await self._compute.run(self._wrap, welcome, command, update, began_s)

    def _is_called_off(self) -> bool:
        return False  # a round that is no longer wanted has raised

    def _wrap(self, welcome: Welcome, command: TrainCmd, update: SiteUpdate, began_s: float) -> EncodedUpdate:
        """The sum as an update, in shared memory where the level above reads that."""
        here, payload = self._bus.memory.here, update.payload + self._layout().pack(update.buffers)
        sealed = self._bus.memory.put(payload) if here and here == welcome.memory else None
        loss, transfer = update.totals.loss(), next(self._outbox.transfers)
        request = UploadRequest(
            run_id=welcome.run_id,
            round_id=command.round_id,
            transfer=transfer,
            total_bytes=len(payload),
            num_samples=update.num_samples,
            loss=math.nan if loss is None else loss,
            train_s=max(0.0, time.perf_counter() - began_s),
            encode_s=0.0,
            memory="" if sealed is None else sealed.place,
            wait_s=max(0.0, began_s - self._session.commanded_s),
        )
        key = FrameKey(
            Kind.UPDATE, welcome.run_id, command.round_id, self.client_id, self._identity.incarnation, transfer
        )
        return EncodedUpdate(key, request, payload if sealed is None else sealed.payload, sealed=sealed)


class Site:
    """A Controller with a level above it.

    Attributes:
        progress: where it stands, for display, as of a Controller; phase ``alone`` while it is cut off.
    """

    def __init__(
        self,
        above: Bus,
        bus: Bus,
        task: FederatedTask,
        config: FederatedConfig,
        upstream: UpstreamConfig,
        *,
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        """A site that has not started.

        Args:
            above: joined to the job of the level above. bus: joined to the job of this site's clients.
            config: the rules of this site. How clients train, with which codec, and for how many rounds, comes from
                above; see docs/trees.md.
            on_open: as of a Controller.

        Raises:
            ConfigError: the rules do not fit a site; a bus or the task is another kind of thing, or a bus is closed.
        """
        call = "Site(above, bus, task, config, upstream)"
        check_instance(call, "config", config, FederatedConfig, "Write gradbus.FederatedConfig(...)")
        check_instance(call, "upstream", upstream, UpstreamConfig, "Write UpstreamConfig(...)")
        check_choices(config)
        check_site(config, upstream)
        check_bus(call, "above", above)
        check_bus(call, "bus", bus)
        check_controller_task(call, task, config, evaluates=upstream.alone)  # in rounds alone, else the top level does
        self._above = above
        self._bus = bus
        self._task = task
        self._config = config
        self._upstream = upstream
        self._on_open = on_open
        self._contribution: RoundsAlone | None = None
        self._followed: Followed | None = None
        self._newest = NO_START  # of the level above
        self._has_begun = False  # what is in the state directory then is of this very start
        self.progress = Progress(minimum=config.clients.min)

    async def run(self) -> list[RoundReport]:
        """All rounds that are left, as of :meth:`.Controller.run`."""
        async with contextlib.aclosing(self.rounds()) as rounds:
            async for _ in rounds:
                pass
        return list(self.progress.reports)

    def rounds(self) -> AsyncGenerator[RoundReport, None]:
        """The rounds in which the clients of this site counted, as of :meth:`.Controller.rounds`.

        Raises:
            JoinRefused: the level above has refused this site.
            BarrierTimeout: that level is silent, or too few clients came.
            TrainingFailed, CheckpointError: as of a Controller.
        """
        return items_of(self._serve, name="site")

    async def _serve(self, on_report: Callable[[RoundReport], object]) -> None:
        while True:
            member = SiteMember(
                self._above,
                self._task,
                self._upstream,
                self._make_controller,
                on_report,
                followed=self._followed,
                newest=self._newest,
            )
            try:
                try:
                    await member.run()
                finally:
                    self._newest = member.newest
                self.progress.phase = "done"
                return
            except UpstreamChanged as change:
                log.warning("site begins anew", reason=str(change))
                self._take_back(member.controller)
                self._followed = None  # of the last time that it was cut off, which may be many rounds ago
            except BarrierTimeout as error:
                self._followed = member.followed
                if not member.is_cut_off or not self._upstream.alone or self._followed is None:
                    raise
                log.error("cut off", site=self._upstream.site, after=self._followed.round_id, reason=str(error))
                self._take_back(member.controller)
                await self._go_on_alone(self._followed)

    def _take_back(self, controller: SiteController | None) -> None:
        """Keep what a Controller has not contributed for the next one."""
        if controller is not None:
            self._contribution = controller.contribution

    async def _make_controller(self, welcome: Welcome, frozen: Tensor | None) -> SiteController:
        config = site_config(self._config, self._upstream, welcome)
        if self._has_begun:
            config = config.replaced("checkpoint.resume", True)
        directory = config.checkpoint.dir
        if directory is not None:
            config = config.replaced(
                "checkpoint.dir", await asyncio.to_thread(_directory_of, directory, welcome.run_id)
            )
        contribution, self._contribution = self._contribution, None
        if contribution is not None and contribution.run_id != welcome.run_id:
            _give_up(contribution, "the level above has begun another run")
            contribution = None
        return SiteController(
            self._bus,
            self._task,
            config,
            above=LevelAbove(welcome, frozen),
            progress=self.progress,
            on_open=self._opened,
            contribution=contribution,
        )

    def _opened(self) -> None:
        self._has_begun = True
        self._on_open()

    async def _go_on_alone(self, followed: Followed) -> None:
        """Rounds of the site's own, from its newest model, until the level above is back."""
        round_id, base, command, terms, frozen, buffers = followed
        assert self._config.checkpoint.dir is not None, "checked at the start"
        directory = await asyncio.to_thread(_directory_of, self._config.checkpoint.dir, terms.run_id)
        kept = await asyncio.to_thread(_directory_alone, directory, round_id)
        config = site_config(self._config, self._upstream, terms)
        config = config.replaced("checkpoint.dir", kept)
        config = config.replaced("checkpoint.init_path", directory / f"round-{round_id:06d}.safetensors")
        config = config.replaced("checkpoint.resume", True)  # rounds alone after this round are of one run
        controller = RelayingController(self._bus, self._task, config, above=LevelAbove(terms, frozen), command=command)
        async with TaskGroup() as group:
            rounds = group.create_task(self._alone(controller), name="site-alone")
            await _until_heard(self._above, self._newest)
            rounds.cancel()
            await asyncio.wait({rounds})
        newest = await asyncio.to_thread(_newest_alone, kept)
        history = [] if newest is None else SavedRun.of(newest).history
        samples = history[-1].num_samples if history else 0
        log.warning(
            "level above is back",
            rounds_alone=0 if newest is None else newest.round_id,
            samples=samples,
            kept=str(kept),
            rejoin=self._upstream.rejoin,
        )
        if newest is not None and samples and self._upstream.rejoin == "contribute":
            if self._contribution is not None and self._contribution.kept != kept:
                _give_up(self._contribution, f"the site was cut off again, after round {round_id}")
            specs = specs_of(await asyncio.to_thread(self._task.build_model))
            changed = layout_of(specs, Sharing.of(config)).changes(buffers, own_copies(newest.tensors, BUFFER))
            self._contribution = RoundsAlone(terms.run_id, kept, newest.tensors["weights"] - base, samples, changed)

    async def _alone(self, controller: Controller) -> None:
        self.progress.phase = "alone"
        try:
            async with contextlib.aclosing(controller.rounds()) as rounds:
                async for report in rounds:
                    log.info("round alone", number=report.round_id, clients=list(report.clients), loss=report.loss)
        except (GradbusError, BaseExceptionGroup) as error:
            reason = single_error(error) if isinstance(error, BaseExceptionGroup) else error
            log.error("rounds alone end", reason=str(reason), effect="the site waits for the level above")


def site_config(config: FederatedConfig, upstream: UpstreamConfig, welcome: Welcome) -> FederatedConfig:
    """The rules of a site, with what the level above decides.

    Raises:
        ConfigError: a round of the site could end too late for that level.
    """
    own, share = config.round.timeout_s, upstream.deadline_share
    due_s = welcome.round_s * share
    if welcome.round_s and "timeout_s" in config.round.model_fields_set:
        if own > due_s:
            raise ConfigError(
                f"federated.round.timeout_s is {own:g} s, and a round of the level above ends after "
                f"{welcome.round_s:g} s, of which this site may take {share:g} (upstream.deadline_share): set at "
                f"most {due_s:g} s, or leave it out"
            )
        due_s = own
    due_s = due_s or own
    log.info("round deadlines", above_s=welcome.round_s, here_s=due_s)
    config = config.replaced("round.timeout_s", due_s).replaced("rounds", ENDLESS)
    sharing = Sharing.of_welcome(welcome)
    config = config.replaced("exchange", sharing.exchange).replaced("share", sharing.settings())
    # Where this site masks, only buffers for which the level above has named a rule are shown to it.
    masks = config.secure_aggregation.enabled
    return config.replaced(
        "buffers", {pattern: rule for pattern, rule in sharing.buffers if pattern != REST or not masks}
    )


def _rules_of(welcome: Welcome) -> tuple[object, ...]:
    """Return what of a Welcome a site passes on to its clients, and its own deadline. The same in all of one start of
    the level above: what could change its options there is refused above sites."""
    return (
        welcome.codec,
        welcome.codec_options,
        welcome.section_codec,
        welcome.section_options,
        welcome.rule,
        welcome.options,
        welcome.round_s,
        welcome.frozen,
        welcome.include,
        welcome.exclude,
        welcome.buffers,
        welcome.buffer_layout,
    )


def _give_up(contribution: RoundsAlone, reason: str) -> None:
    log.warning("rounds alone not contributed", kept=str(contribution.kept), reason=reason)


async def _until_heard(bus: Bus, newest: ControllerStart) -> None:
    """Wait for a Controller on this bus, but for none that ``newest`` has replaced."""
    is_named = False
    with bus.subscribe(ToClients) as inbox:
        while True:
            message = await inbox.get()
            if not (isinstance(message, Control) and message.sender == CONTROLLER and isinstance(message.body, Status)):
                continue
            if not newest.is_after(message.incarnation, message.body):
                return
            if not is_named:
                log.warning(
                    "earlier start of the level above ignored",
                    host=message.body.host,
                    hint="the site has followed a later one: start that again, or restart this site to follow any",
                )
            is_named = True


def not_its_own(config: FederatedConfig) -> dict[str, Any]:
    """What of a site's settings the level above decides, as ``exclude`` of a pydantic model: the rest, written down, is
    a configuration that a site starts with."""
    of_round = {"timeout_s"} - config.round.model_fields_set
    return {**dict.fromkeys(FROM_ABOVE, True), "round": of_round}


def check_site(config: FederatedConfig, upstream: UpstreamConfig) -> None:
    """Raises ConfigError: these rules are not for a site."""
    if upstream.site is None:
        raise ConfigError("upstream.site is missing: each site of a level has a number of its own")
    if given := sorted(config.model_fields_set & FROM_ABOVE):
        raise ConfigError(
            f"federated.{', federated.'.join(given)}: at a site, the level above decides this. Set it at the top "
            f"level, and leave it out here"
        )
    if config.mode != "synchronous":
        raise ConfigError(
            f"federated.mode is {config.mode}: the sum of a site is of one round of the level above, and updates from "
            f"older models cannot be in it. Leave it out here"
        )
    if config.strategy.name != "fedavg" or config.strategy.options:
        raise ConfigError(
            f"federated.strategy is {config.strategy.name}: a site adds up exact sums, and the strategy is that of the "
            f"top level. One that needs single updates, such as a median, cannot be had of sums. Leave it out here"
        )
    if config.privacy.name != "none":
        raise ConfigError(
            f"federated.privacy is {config.privacy.name}: a site sends sums, and in those of several sites single "
            f"clients cannot be bounded. Leave it out here, and at the top level let the clients take part themselves"
        )
    if config.downlink_codec.name != "fp32":
        raise ConfigError(
            f"federated.downlink_codec is {config.downlink_codec.name}: a site passes models on unchanged. Set it at "
            f"the level above, or leave it out here"
        )
    if config.selection != SELECTORS.default:
        raise ConfigError(
            f"federated.selection ({config.selection.name}): the rounds of a site are those of the level above, and "
            f"all of its clients take part. Leave it out here"
        )
    if config.evaluation.is_on:
        raise ConfigError(
            "federated.evaluation: the rounds of a site are those of the level above, whose deadline leaves no time to "
            "evaluate. Leave it out in trees; the Controller of the top level evaluates on its own data (eval_every)"
        )
    if config.checkpoint.keep_best is not None:
        raise ConfigError(
            "federated.checkpoint.keep_best: the models of a site are those of the level above. Set it at the top level"
        )
    if config.history.payloads:
        raise ConfigError("federated.history.payloads: the rounds of a site cannot be computed again from its updates")
    if upstream.alone and config.checkpoint.dir is None:
        raise ConfigError("upstream.alone needs federated.checkpoint.dir, where the rounds alone are kept")


def _directory_alone(directory: Path, round_id: int) -> Path:
    """Return where rounds alone after this one are kept: with those before, unless these have been contributed."""
    kept, number = directory / f"alone-after-{round_id:06d}", 1
    while (kept / CONTRIBUTED_FILE).exists():
        number += 1
        kept = directory / f"alone-after-{round_id:06d}-{number}"
    return kept


def _newest_alone(kept: Path) -> Checkpoint | None:
    """The newest checkpoint of rounds alone; None: they did not begin, or it cannot be read."""
    try:
        return CheckpointStore.to_read(kept).load_newest(SavedRun.of) if kept.is_dir() else None
    except (CheckpointError, OSError) as error:
        log.warning("rounds alone cannot be read", kept=str(kept), reason=str(error))
        return None


def _directory_of(directory: Path, run_id: int) -> Path:
    """The checkpoints of this run: the directory itself, unless it has those of another one."""
    if directory.is_dir():
        newest = CheckpointStore.to_read(directory).load_newest(SavedRun.of)
        if newest is not None and int(SavedRun.of(newest).run_id, 16) != run_id:
            return directory / f"run-{run_id:016x}"
    return directory
