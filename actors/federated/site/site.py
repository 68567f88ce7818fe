"""A site of a tree: the Controller of its own clients, and one participant of the level above.

    async for report in gradbus.Site(above, bus, task, FederatedConfig(), UpstreamConfig(site=0)).rounds(): ...

To the level above it is a client (:class:`.site_member.SiteMember`) whose training is a round of its own clients, and
whose update is their exact sum. Where that level cannot be reached, the clients go on with a run of their own, which
has its own id and its own checkpoints, until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from torch import Tensor

from gradbus.actors.federated.client.session import NO_START, ControllerStart
from gradbus.actors.federated.controller.combinations import CheckedChoices, check_choices
from gradbus.actors.federated.controller.controller import Controller
from gradbus.actors.federated.controller.model_evaluation import check_controller_task
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.model.sharing import Sharing, layout_of, specs_of
from gradbus.actors.federated.site.site_controller import (
    CONTRIBUTED_FILE,
    LevelAbove,
    RelayingController,
    RoundsAlone,
    SiteController,
    UpstreamChanged,
)
from gradbus.actors.federated.site.site_member import Followed, SiteMember
from gradbus.actors.federated.site.site_rules import check_site, site_config
from gradbus.actors.federated.task import FederatedTask
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.config.federated import FederatedConfig, UpstreamConfig
from gradbus.runtime.errors import BarrierTimeout, CheckpointError, GradbusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import check_instance
from gradbus.runtime.saved_state import BUFFER, own_copies
from gradbus.runtime.tasks import TaskGroup, items_of, single_error
from gradbus.runtime.transport.channels import ToClients
from gradbus.runtime.wire.control import Status, Welcome
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control

log = get_logger("site")


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
        config: FederatedConfig | CheckedChoices,
        upstream: UpstreamConfig,
        *,
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        """A site that has not started.

        Args:
            above: joined to the job of the level above. bus: joined to the job of this site's clients.
            config: the rules of this site, or what check_choices has returned for them. How clients train, with which
                codec, and for how many rounds, comes from above; see docs/trees.md.
            on_open: as of a Controller.

        Raises:
            ConfigError: the rules do not fit a site; a bus or the task is another kind of thing, or a bus is closed.
        """
        call = "Site(above, bus, task, config, upstream)"
        rules = config.config if isinstance(config, CheckedChoices) else config
        check_instance(call, "config", rules, FederatedConfig, "Write gradbus.FederatedConfig(...)")
        check_instance(call, "upstream", upstream, UpstreamConfig, "Write UpstreamConfig(...)")
        if rules is config:
            check_choices(rules)
        check_site(rules, upstream)
        check_bus(call, "above", above)
        check_bus(call, "bus", bus)
        check_controller_task(call, task, rules, evaluates=upstream.alone)  # in rounds alone, else the top level does
        self._above = above
        self._bus = bus
        self._task = task
        self._config = rules
        self._upstream = upstream
        self._on_open = on_open
        self._contribution: RoundsAlone | None = None
        self._followed: Followed | None = None
        self._newest = NO_START  # of the level above
        self._has_begun = False  # what is in the state directory then is of this very start
        self.progress = Progress(minimum=rules.clients.min)

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


def _give_up(contribution: RoundsAlone, reason: str) -> None:
    log.warning("rounds alone not contributed", kept=str(contribution.kept), reason=reason)


async def _until_heard(bus: Bus, newest: ControllerStart) -> None:
    """Wait for a Controller on this bus, but for none that ``newest`` has replaced."""
    is_named = False
    # Control: one of PROTOCOL 3 or older, which refuses the site with a sentence when that joins.
    with bus.subscribe(ToClients, Control) as inbox:
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
