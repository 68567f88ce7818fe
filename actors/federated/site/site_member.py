"""A site as a participant of the level above: it trains by a round of its own clients, and sends their exact sum."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from gradbus.actors.aggregation.merged_buffers import BufferLayout
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.client_observer import ClientObserver
from gradbus.actors.federated.client.client_rounds import Outbox
from gradbus.actors.federated.client.client_run import ClientRun, Prepared
from gradbus.actors.federated.client.last_model import LastModelDeadline
from gradbus.actors.federated.client.session import ClientContext, ControllerSession, ControllerStart
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing, layout_of
from gradbus.actors.federated.protocol import REPEAT_AFTER_S
from gradbus.actors.federated.site.site_controller import SiteController, SiteUpdate, UpstreamChanged
from gradbus.actors.federated.task import FederatedTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig, UpstreamConfig
from gradbus.runtime.errors import BarrierTimeout, GradbusError, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import EvaluationRequest, Hello, LocalModelRequest, Status, UploadRequest, Welcome
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Message, TrainCmd

log = get_logger("site")

MakeController = Callable[[Welcome, Tensor | None], Awaitable[SiteController]]


class _Superseded(GradbusError):
    """The level above does not want this round any more."""


class _UpstreamSession(ControllerSession):
    """A session with the level above, which may be lost: ``lost`` is then set."""

    lost = False

    def check_controller(self, misconfiguration: Callable[[], str] = str, advice: Callable[[], str] = str) -> None:
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


class _SiteClients(NamedTuple):
    """Holds the Controller of a site's clients, its run, and the frozen parameters that it was given."""

    controller: SiteController
    serving: asyncio.Task[None]
    frozen: Tensor | None


class LowerLevel(NamedTuple):
    """Holds what a site's part in the run of the level above needs of the site itself.

    Attributes:
        make_controller: called when it is welcomed, with its frozen parameters. on_report: called with the reports of
            that Controller.
        followed: what it has followed before; None: nothing.
    """

    upstream: UpstreamConfig
    make_controller: MakeController
    on_report: Callable[[RoundReport], object]
    followed: Followed | None


class SiteMember(Client):
    """The upward side of a site, for as long as the level above is there."""

    _codecs_setting = "upstream.codecs"
    _task_methods = ("build_model",)  # its clients train
    _session: _UpstreamSession
    _running: SiteRun | None

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
        self._upstream = upstream
        self._make_controller = make_controller
        self._on_report = on_report
        self._before = followed, newest
        timeout_s = upstream.alone_after_s if followed and upstream.alone else upstream.timeout_s
        config = ClientConfig(controller_timeout_s=timeout_s, codecs=upstream.codecs)
        super().__init__(bus, task, client_id=upstream.site or 0, name=upstream.name, config=config)

    def _make_session(self) -> _UpstreamSession:
        return _UpstreamSession(self._config.controller_timeout_s, self._before[1])

    def _make_run(self, context: ClientContext, prepared: Prepared) -> SiteRun:
        lower = LowerLevel(self._upstream, self._make_controller, self._on_report, self._before[0])
        return SiteRun(context, prepared, self._outbox, self._observer, lower)

    @property
    def followed(self) -> Followed | None:
        """Return what it has of the level above; None before the first command."""
        return self._before[0] if self._running is None else self._running.followed

    @property
    def controller(self) -> SiteController | None:
        """Return the Controller of the site's clients; None before this site is welcomed."""
        return None if self._running is None else self._running.controller

    @property
    def is_cut_off(self) -> bool:
        """Whether the level above has been silent for too long."""
        return self._session.lost

    @property
    def newest(self) -> ControllerStart:
        """The newest start of the level above that this site has heard: no earlier one of that run is followed."""
        return self._session.newest

    def _introduction(self, model: FlatModel) -> Hello:
        return replace(super()._introduction(model), site=True, masks=False, grids=False)

    async def _report_unwelcomed(self, error: Exception) -> None:
        pass  # it may start again at once; else the reason of its Leave says why


class SiteRun(ClientRun):
    """The part of a site in the run of the level above.

    Attributes:
        followed: what it has of that level; None before the first command.
    """

    def __init__(
        self, context: ClientContext, prepared: Prepared, outbox: Outbox, observer: ClientObserver, lower: LowerLevel
    ) -> None:
        super().__init__(context, prepared, outbox, observer)
        self._lower = lower
        self._clients: _SiteClients | None = None
        self.followed = lower.followed
        self._terms: Welcome | None = None  # the newest Welcome, also while another one is awaited

    @property
    def controller(self) -> SiteController | None:
        """Return the Controller of the site's clients; None before this site is welcomed."""
        return None if self._clients is None else self._clients.controller

    def _on_controller(self, session: int, body: Any) -> None:
        if isinstance(body, Status) and self.controller is not None:
            self.controller.expect_rounds(body.rounds)
        super()._on_controller(session, body)
        self._tell_end()

    def _tell_end(self) -> None:
        """Have the Controller of this site wait for no clients where the run has ended."""
        if self._session.ended is not None and self.controller is not None and not self.controller.started.is_set():
            self.controller.mark_run_ended()

    def _accept_welcome(self, session: int, welcome: Welcome) -> None:
        super()._accept_welcome(session, welcome)
        self._terms = welcome

    def _take_request(self, request: EvaluationRequest | LocalModelRequest) -> None:
        pass  # a site has no data; a Controller of sites asks none

    def handle(self, message: Message) -> None:
        try:
            super().handle(message)
        except TrainingFailed as error:
            if self.controller is None or not self.controller.started.is_set():
                raise
            self.controller.end(error)  # which ends the clients of this site, then this member

    async def _prepare(self, welcome: Welcome) -> None:
        """Start the Controller of this site, and wait for its clients."""
        frozen: Tensor | None = None
        if welcome.frozen:
            if await self.models.lacks_frozen(welcome):
                await self.models.fetch_frozen(welcome)
                if await self.models.lacks_frozen(welcome):  # that level has ended its run, or started again
                    if self._session.ended is not None:
                        return
                    raise UpstreamChanged("the level above has started again before its frozen parameters were here")
            frozen = self.model.read_frozen()
        controller = await self._lower.make_controller(welcome, frozen)
        serving = self._group.create_task(controller.serve(self._lower.on_report), name="site-controller")
        self._clients = _SiteClients(controller, serving, frozen)
        self._tell_end()
        await controller.started.wait()
        self._session.begin()

    async def _report_unprepared(self, error: Exception, run_id: int) -> None:
        pass  # it may start again at once; else the reason of its Leave says why

    async def _work(self) -> None:
        await super()._work()
        if self._clients is None and self._terms is not None:
            await self._prepare(self._terms)  # its clients have yet to learn that the run has ended
        if (clients := self._clients) is None:
            return
        controller = clients.controller
        await self._fetch_last_model(controller)
        await self._take_newest(controller)
        controller.end()
        await clients.serving

    async def _fetch_last_model(self, controller: SiteController) -> None:
        """Wait, as a client does, for the model after the newest round that the clients of this site were asked for,
        whether or not their sum counts in it; where they were asked for none, for the newest model."""
        is_over = LastModelDeadline(self._context.bus, lambda: self.models.replica.progress_s).is_over
        with contextlib.suppress(BarrierTimeout):
            # The end, or the Status, of the next start of the level above may arrive before its Welcome.
            while (welcome := self._session.welcome) is None:
                if is_over():
                    return
                self._changed.clear()
                await self._wait(REPEAT_AFTER_S)
            newest = welcome.next_round - 1 if controller.command is None else controller.command.round_id
            await self.models.fetch(
                welcome, self.models.replica, max(newest, controller.counted_round), is_over, first_after_s=0.1
            )

    async def _take_newest(self, controller: SiteController) -> None:
        """Pass the newest model on to the site's clients, if it is new."""
        vector, round_id = self.models.replica.vector, self.models.replica.round_id
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
        return layout_of(self.model.specs, Sharing.of_welcome(self._session.welcome))

    def _buffers(self) -> dict[str, Tensor]:
        """All merged buffers of the newest model."""
        layout = self._layout()
        if not layout:
            return {}
        built = self.model.module.state_dict()  # nothing here trains it
        as_built = {name: built[name].detach().cpu() for name in layout.names}
        return {**as_built, **layout.unpack(self.models.replica.buffers)}

    async def _wait(self, timeout_s: float) -> None:
        if self.controller is not None and self.controller.started.is_set():
            await self._take_newest(self.controller)  # before its command: the site's clients get it earlier
        await super()._wait(min(timeout_s, self._session.controller_timeout_s / 4))  # to notice in time that it is lost

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> None:
        assert self._clients is not None, "they are started before this site is ready"
        controller, _, frozen = self._clients
        await self._take_newest(controller)
        self.followed = Followed(command.round_id - 1, base, command, welcome, frozen, self._buffers())
        if self._lower.upstream.alone:  # before its first command it has nothing to go on with
            self._session.limit_silence(self._lower.upstream.alone_after_s)
        await super()._train_and_send(welcome, command, base)
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
        here, payload = self._context.bus.memory.here, update.payload + self._layout().pack(update.buffers)
        sealed = self._context.bus.memory.put(payload) if here and here == welcome.memory else None
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
            Kind.UPDATE,
            welcome.run_id,
            command.round_id,
            self._context.client_id,
            self._context.identity.incarnation,
            transfer,
        )
        return EncodedUpdate(key, request, payload if sealed is None else sealed.payload, sealed=sealed)


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
