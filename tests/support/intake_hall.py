"""An intake with a bus that only keeps what is said, and clients that do what a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import partial_sum
from gradbus.actors.aggregation.bounded_strategy import BoundedStrategy
from gradbus.actors.aggregation.bounds import Bounds
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller import uploads
from gradbus.actors.federated.controller.rounds import Round, RoundRules
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.update_admission import Quarantine, Strike, UpdateAdmission
from gradbus.actors.federated.controller.update_sum import UpdateForm, UpdateSum
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import AsynchronousSettings, FederatedConfig
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.testing.journal import History
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.control import Grant, Receipt, UploadRequest
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Identity

RUN, DIM, CHUNK_BYTES = 0xABC, 100, 64
MAX_SAMPLES = 1 << 30
T = TypeVar("T")


class FakeBus:
    """Keeps what was published; somebody may wait for it."""

    def __init__(self) -> None:
        self.memory = PayloadMemory(switched_on=True)
        self.said: list[Any] = []
        self.rejected: Counter[str] = Counter()
        self.error: Exception | None = None
        self.is_closed = False
        self.open = asyncio.Event()  # while it is not set, publishing waits, as on a full queue
        self.open.set()
        self.news = asyncio.Event()

    async def publish(self, sender: Identity, body: Any) -> None:
        if self.error is not None:
            raise self.error
        self.said.append(body)
        self.news.set()
        await self.open.wait()

    def all(self, kind: type[T]) -> list[T]:
        return [body for body in self.said if isinstance(body, kind)]

    @property
    def granted(self) -> list[int]:
        """Ids of the clients that were granted, in order."""
        return [grant.to for grant in self.all(Grant)]

    @property
    def receipts(self) -> list[tuple[int, bool]]:
        return [(receipt.to, receipt.accepted) for receipt in self.all(Receipt)]


class HeldFedAvg(FedAvg):
    """Adding takes as long as the test wants."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.go_on = threading.Event()
        self.added: list[int] = []

    def add(self, update: Update, facts: Facts) -> None:
        self.loop.call_soon_threadsafe(self.entered.set)
        assert self.go_on.wait(10.0)
        super().add(update, facts)
        self.added.append(facts.client_id)


@dataclass
class Hall:
    """An intake with all that it needs."""

    bus: FakeBus
    strategy: HeldFedAvg
    intake: UpdateReceiver
    update_sum: UpdateSum
    round: Round
    base: Tensor
    admission: UpdateAdmission
    bounds: Bounds | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    changes: list[None] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.bus.news.clear()
                await self.bus.news.wait()

    def mean(self) -> Tensor:
        weights = self.base.clone()
        self.strategy.finish(weights)
        return weights - self.base

    def open_round(self, round_id: int, clients: int = 3) -> None:
        rules = RoundRules(minimum=1, quorum=1.0, deadline_s=1e9, grace_s=0.0)
        self.round = Round(round_id, range(clients), rules, now_s=0.0)
        if self.bounds is not None:
            self.bounds.open_round(round_id)
        self.intake.open_round(self.round, self.base)


class Lies(NamedTuple):
    """What is bounded where clients may lie: norms of these sections, and weights, within a round or a buffer."""

    sections: Sequence[str] = ()
    by_rounds: bool = True


@contextlib.asynccontextmanager
async def hall_of(  # noqa: PLR0913 - each is of a test or two
    *,
    clients: int = 3,
    budget_bytes: int = 1 << 20,
    held: bool = False,
    history: History | None = None,
    repair_after_s: float = 60.0,
    stall_after_s: float = 60.0,
    sites: bool = False,
    lies: Lies | None = None,
    form: UpdateForm = UpdateForm(DIM),  # noqa: B008 - it is immutable
) -> AsyncIterator[Hall]:
    """``repair_after_s``, ``stall_after_s``: of the intake; long, as a machine may stand still between any two steps of
    a test that counts what is said. ``sites``: their exact sums are expected. ``lies``: what is bounded;
    None: nothing. ``form``: of the updates."""
    bus, strategy, base = FakeBus(), HeldFedAvg(DIM), torch.zeros(DIM)
    if not held:
        strategy.go_on.set()
    changes: list[None] = []
    strikes: list[Strike] = []

    async def note(strike: Strike) -> None:
        strikes.append(strike)

    delays = {"REPAIR_AFTER_S": repair_after_s, "STALL_AFTER_S": stall_after_s}
    with ComputeThread("intake-test") as compute, mock.patch.multiple(uploads, **delays):
        state = SimpleNamespace(run_id=RUN, names=ClientNames(), counted={})
        journal = history or History(None, "controller")
        context = RunContext(
            bus,
            Identity(CONTROLLER, 1),
            compute,  # type: ignore[arg-type]
            FederatedConfig(clients={"kind": "sites" if sites else "clients"}),
            state,
            journal,  # type: ignore[arg-type]
        )
        admission = UpdateAdmission(
            Quarantine(max_strikes=2, quarantine_rounds=3),
            run_id=RUN,
            max_bytes=(partial_sum.max_bytes(DIM) if sites else codecs.get("fp32").max_bytes(DIM))
            + (0 if form.buffers is None else form.buffers.max_bytes),
            budget_bytes=budget_bytes,
            max_samples=MAX_SAMPLES,
            max_staleness=0 if form.bases is None else AsynchronousSettings().max_staleness,
        )
        bounds = None
        if lies is not None:
            bounds = Bounds(strategy, times=4.0, sections=lies.sections, by_rounds=lies.by_rounds)
        taking = strategy if bounds is None else BoundedStrategy(strategy, bounds)
        update_sum = UpdateSum(context, taking, form)
        intake = UpdateReceiver(
            context,
            admission,
            update_sum,
            on_strike=note,
            on_change=lambda: (changes.append(None), bus.news.set())[0],
        )
        hall = Hall(bus, strategy, intake, update_sum, None, base, admission, bounds, context.dropped, changes, strikes)  # type: ignore[arg-type]
        hall.open_round(1, clients)
        running = asyncio.create_task(intake.run())
        try:
            yield hall
        finally:
            strategy.go_on.set()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def run_with(test: Callable[[Hall], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0), hall_of(**options) as hall:
            await test(hall)

    asyncio.run(main())


@dataclass(frozen=True)
class Sender:
    """A client's update, and how it gets to the intake."""

    client_id: int = 0
    incarnation: int = 100
    transfer: int = 1
    round_id: int = 1
    run_id: int = RUN
    num_samples: int = 10
    seed: int = 0
    payload: bytes = b""
    memory: str = ""

    @property
    def delta(self) -> Tensor:
        return torch.randn(DIM, generator=torch.Generator().manual_seed(self.seed))

    @property
    def data(self) -> bytes:
        return self.payload or codecs.get("fp32").encode(self.delta)

    @property
    def request(self) -> UploadRequest:
        return UploadRequest(
            self.run_id, self.round_id, self.transfer, len(self.data), self.num_samples, 0.5, 1.0, 0.1, self.memory
        )

    @property
    def frames(self) -> list[ClientUpdate]:
        key = FrameKey(Kind.UPDATE, self.run_id, self.round_id, self.client_id, self.incarnation, self.transfer)
        return [
            ClientUpdate(self.client_id, self.round_id, self.num_samples, frames.parse(head + bytes(data)))
            for head, data in frames.split(key, self.data, chunk_bytes=CHUNK_BYTES)
        ]

    async def offer_to(self, hall: Hall) -> None:
        await hall.intake.on_request(self.client_id, self.incarnation, self.request)

    async def send_to(self, hall: Hall, which: slice = slice(None)) -> None:
        for message in self.frames[which]:
            await hall.intake.on_frame(message)


async def deliver(hall: Hall, *senders: Sender) -> None:
    """All of it, until there is a receipt for each."""
    for sender in senders:
        before = len(hall.bus.receipts)
        await sender.offer_to(hall)
        await sender.send_to(hall)
        await hall.until(lambda before=before: len(hall.bus.receipts) > before)  # type: ignore[misc]
