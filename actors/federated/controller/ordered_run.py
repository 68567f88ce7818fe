"""A run whose rounds the caller orders, one by one: the rendezvous of the caller's task and the controller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.runtime.errors import ConfigError, RunOver
from gradbus.runtime.misuse import awaited
from gradbus.runtime.tasks import end, single_error
from gradbus.runtime.wire.client_orders import ClientOrder


class _Asked(NamedTuple):
    """An order, and the future of its report."""

    order: RoundOrder
    answer: asyncio.Future[RoundReport]


class RoundRequests:
    """Holds one order at a time, and then the report of its round.

    Attributes:
        over: why there is no round left; empty: there is.
        interrupted: the order of a round that a crash has cut off; None: no round was, or its caller did not order it.
    """

    def __init__(self, *, has_caller: bool) -> None:
        """``has_caller``: a caller orders each round, in its own way; else each is asked for as it is configured."""
        self.has_caller = has_caller
        self.over = ""
        self._error: BaseException | None = None  # that has ended the controller
        self.interrupted: RoundOrder | None = None
        self._asked: _Asked | None = None  # not begun yet
        self._under_way: _Asked | None = None
        self._report: RoundReport | None = None
        self._is_finished = False  # the caller orders nothing more
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()

    # The controller's side

    def begin(self, interrupted: RoundOrder | None) -> None:
        """Let the caller order rounds."""
        self.interrupted = interrupted
        self._opened.set()

    async def next(self) -> RoundOrder | None:
        """Wait for the next order; None: the caller ends the run."""
        while self._asked is None:
            if self._is_finished:
                return None
            self._changed.clear()
            await self._changed.wait()
        self._under_way, self._asked = self._asked, None
        return self._under_way.order

    def note(self, report: RoundReport) -> None:
        """Note the report of the round that was ordered."""
        self._report = report

    def answer(self, over: str = "") -> None:
        """Give the caller the report that was noted. ``over``: why there is no further round."""
        self.over, self.interrupted = over, None
        if self._under_way is not None and self._report is not None and not self._under_way.answer.done():
            self._under_way.answer.set_result(self._report)
        self._under_way = self._report = None

    def end(self, over: str) -> None:
        """Tell the caller that there is no round left, also one that it has just ordered."""
        self.over = over
        self.begin(None)
        self._fail(RunOver(over))

    def ended(self, running: asyncio.Task[None]) -> None:
        """Tell the caller what has ended the controller."""
        error = RunOver("the controller was stopped") if running.cancelled() else running.exception()
        if isinstance(error, BaseExceptionGroup):
            error = single_error(error)
        self._error = error
        if error is not None:
            self.over = self.over or str(error) or type(error).__name__
        self._opened.set()
        self._fail(error or RunOver(self.over))

    def forget(self) -> None:
        """Let go of the error that has ended the controller: its traceback holds the frames of the run."""
        self._error = None

    def _fail(self, error: BaseException) -> None:
        for asked in (self._asked, self._under_way):
            if asked is not None and not asked.answer.done():
                asked.answer.set_exception(error)
        self._asked = self._under_way = None

    # The caller's side

    async def opened(self) -> None:
        """Wait until rounds can be ordered. Raises what has ended the controller before."""
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    async def order(self, order: RoundOrder) -> RoundReport:
        """Have a round done, and return its report."""
        if any(asked is not None and not asked.answer.done() for asked in (self._asked, self._under_way)):
            raise RuntimeError("a round is under way: await its report before you order the next one")
        if self.over:
            raise self._error or RunOver(self.over)
        asked = self._asked = _Asked(order, asyncio.get_running_loop().create_future())
        self._changed.set()
        try:
            return await asked.answer
        finally:
            if self._asked is asked:  # called off before it has begun
                self._asked = None

    def finish(self) -> None:
        """End the run, after the round that is under way."""
        self._is_finished = True
        self._changed.set()


class OrderedRun:
    """The rounds of a run that has begun, ordered by its caller.

    Attributes:
        reports: of the rounds that are done, those before a resume included, oldest first.
    """

    def __init__(self, requests: RoundRequests, progress: Progress, check: Callable[[RoundOrder], None]) -> None:
        """``check`` raises ConfigError for an order that this run cannot have."""
        self._requests = requests
        self._progress = progress
        self._check = check

    @property
    def reports(self) -> Sequence[RoundReport]:
        return tuple(self._progress.reports)

    @property
    def is_over(self) -> bool:
        """Whether there is no round left: all are done, or the run has ended early."""
        return bool(self._requests.over)

    @property
    def reason(self) -> str:
        """Why it is over; empty: it goes on."""
        return self._requests.over

    @property
    def interrupted(self) -> RoundOrder | None:
        """The order of the next round, where a crash has cut that round off: it holds, whatever is ordered. None: no
        round was cut off, or its caller did not order it."""
        return self._requests.interrupted

    @awaited("run.round(...)")
    async def round(
        self,
        *,
        lr: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        subset_size: int | None = None,
        seed: int | None = None,
        clients: Iterable[int | str] | None = None,
        each: Mapping[int | str, ClientOrder | Mapping[str, Any]] | None = None,
    ) -> RoundReport:
        """Have the clients train a round, and return its report: the new model is committed and published.

        What is left out is as the strategy orders it, or else as ``federated.training`` has it. If this is cancelled,
        the round goes on; its report is in :attr:`reports`, and the next order waits for it.

        Args:
            lr: learning rate of the clients.
            epochs: passes over their samples. steps: optimizer steps, instead of epochs.
            subset_size: samples that each of them trains on; 0: all of its own.
            seed: of their random numbers.
            clients: ids or names of those that train in this round; the others sit it out.
            each: what single clients are to do differently, by id or name, such as ``{2: {"epochs": 1}}``.

        Raises:
            ConfigError: such an order is not possible; nothing was sent, and another one may be given.
            RunOver: there is no round left.
            And what :meth:`.Controller.run` raises.
        """
        if clients is not None and not isinstance(clients, str | bytes):
            clients = [self._id_of("clients", one) for one in clients]
        order = RoundOrder.of(
            lr=lr,
            epochs=epochs,
            steps=steps,
            subset_size=subset_size,
            seed=seed,
            clients=clients,
            **({} if each is None else {"each": self._by_id(each)}),
        )
        self._check(order)
        return await self._requests.order(order)

    def _id_of(self, where: str, client: int | str) -> int:
        """Return the id of a client that is named in an order; what is no name is checked with the order."""
        if not isinstance(client, str):
            return client
        try:
            return self._progress.names.find(client)
        except ValueError as error:
            raise ConfigError(f"order of a round, {where}: {error}") from None

    def _by_id(self, each: Mapping[int | str, Any]) -> Mapping[int, Any]:
        found: dict[int, Any] = {}
        for client, order in each.items():
            if (client_id := self._id_of("each", client)) in found:
                label = self._progress.names.label(client_id)
                raise ConfigError(f"order of a round, each: client {label} has two orders: give it by name or by id")
            found[client_id] = order
        return found


@contextlib.asynccontextmanager
async def serving(
    serve: Callable[[], Coroutine[Any, Any, None]], requests: RoundRequests, *, name: str
) -> AsyncGenerator[None, None]:
    """Run the coroutine that does the rounds as a task of this name. It is asked to end when the block does, and is
    cancelled where the block raises.

    Raises:
        What ``serve`` raises, without groups around a single error.
    """
    running = asyncio.create_task(serve(), name=name)
    running.add_done_callback(requests.ended)
    try:
        await requests.opened()
        yield
        requests.finish()
        try:
            await asyncio.shield(running)
        except BaseExceptionGroup as group:
            raise single_error(group) from None
    finally:
        await end(running)
        requests.forget()
