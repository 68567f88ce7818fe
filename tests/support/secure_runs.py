"""Whole runs with secure aggregation over real DDS, all actors on one loop: their parts, and who reads along."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from dds_domains import new_domain
from torch import Tensor, nn

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.update_masks import ClientMasking
from gradbus.actors.federated.controller.controller import ActiveRun
from gradbus.models.task import TrainResult
from gradbus.runtime.transport.channels import Inbox, ToClients, ToController
from gradbus.runtime.wire.control import Hello, MaskAnswer
from gradbus.runtime.wire.messages import ClientUpdate, Control

DIM = 5000
_jobs = itertools.count()


def delta_of(client_id: int, round_id: int) -> Tensor:
    """What training changes: normal, other for each client and round."""
    generator = torch.Generator().manual_seed(1000 * client_id + round_id)
    return torch.randn(DIM, generator=generator) * 0.01


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(DIM))


class Moving:
    """Training that adds :func:`delta_of`, with some more samples for each client. ``trained``: (client, round)."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, int]] = []

    def build_model(self) -> nn.Module:
        return Vector()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
        self.trained.append((client_id, round_id))
        with torch.no_grad():
            model.vector.add_(delta_of(client_id, round_id))
        return TrainResult(20 + client_id, 1.25)

    def evaluate(self, model: Any) -> None:
        return None


class QuittingMasks(ClientMasking):
    """Calls ``quit`` instead of doing its part in a phase of a round: 0 keys, 1 shares, 2 the masked update, 3
    unmasking."""

    phase = -1
    in_round = 1
    quit: Callable[[], object]

    def _answer(self, own: Any, phase: int, data: bytes, group: Any) -> None:
        if phase == self.phase and phase != 2 and own.client.attempt.round_id == self.in_round:
            self.quit()
        else:
            super()._answer(own, phase, data, group)

    async def take(self, round_id: int, *arguments: Any) -> Any:
        masks = await super().take(round_id, *arguments)
        if self.phase == 2 and round_id == self.in_round:
            self.quit()
            await asyncio.sleep(60)  # until it is cancelled
        return masks


Masking = TypeVar("Masking", bound=ClientMasking)


def replace_masking(client: Client, kind: type[Masking]) -> Masking:
    """Have a client that has not started take its part in attempts as this class does."""
    masking = kind(client._bus, client._identity, least_members=0)  # noqa: SLF001 - as the client makes its own
    client._outbox.masking = masking  # noqa: SLF001 - no argument gives it another one: none of a user's may mask
    return masking


class Run:
    """A controller and clients that have not started. ``quits``: phase by client, in the round ``quits_in``."""

    quits_in = 1

    def __init__(
        self,
        ids: Iterable[int],
        *,
        quits: dict[int, int] | None = None,
        secure: bool = True,
        client: dict[str, Any] | None = None,
        shared_memory: bool = True,
        **settings: Any,
    ) -> None:
        self.ids, self.quits, self.client = list(ids), quits or {}, client or {}
        clients = {"num": len(self.ids), "min": 2, "dead_after_s": 30.0, **settings.pop("clients", {})}
        masked = {"enabled": secure, **settings.pop("secure_aggregation", {})}
        self.config = gradbus.FederatedConfig(
            **{"clients": clients, "eval_every": 0, "rounds": 1, "secure_aggregation": masked, **settings}
        )
        self.job, self.domain = f"secure-{os.getpid()}-{next(_jobs)}", new_domain()
        self.connect = functools.partial(gradbus.connect, job=self.job, domain=self.domain, shared_memory=shared_memory)
        self.task = Moving()
        self.make_controller: Callable[..., gradbus.Controller] = gradbus.Controller
        self.make_client: Callable[..., Client] = Client

    async def one_client(self, client_id: int) -> None:
        async with self.connect() as bus:
            client = self.make_client(bus, self.task, client_id=client_id, config=gradbus.ClientConfig(**self.client))
            running = asyncio.create_task(client.run())
            if client_id in self.quits:
                masking = replace_masking(client, QuittingMasks)
                masking.phase, masking.in_round, masking.quit = self.quits[client_id], self.quits_in, running.cancel
            try:
                await running
            except asyncio.CancelledError:
                if client_id not in self.quits or not running.cancelled():
                    raise
            finally:
                running.cancel()

    async def main(self) -> gradbus.Controller:
        async with asyncio.timeout(60), self.connect() as bus, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.one_client(client_id)) for client_id in self.ids]
            try:
                controller = await self.control(bus)
                await asyncio.wait(tasks, timeout=10.0)
            finally:
                for task in tasks:
                    task.cancel()
        return controller

    async def control(self, bus: Any) -> gradbus.Controller:
        controller = self.make_controller(bus, self.task, self.config)
        await controller.run()
        return controller

    def __call__(self) -> gradbus.Controller:
        try:
            return asyncio.run(self.main())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


@functools.cache
def plain_weights(count: int, rounds: int = 1, strategy: str = "fedavg") -> Tensor:
    """Of a run without secure aggregation, of the first clients."""
    return Run(range(count), secure=False, rounds=rounds, strategy=strategy)().weights.clone()


class Observer:
    """Everything on the bus of a run. ``on_message``: called with each control message."""

    def __init__(self, run: Run, on_message: Callable[[Any, Control], object] = lambda *_: None) -> None:
        self.controls: list[Control] = []
        self._inboxes: set[int] = set()
        self._reading: list[asyncio.Task[None]] = []
        self.frames: list[bytes] = []
        self._on_message = on_message
        main = run.main

        async def observed() -> gradbus.Controller:
            async with run.connect() as bus:
                with bus.subscribe(ToController, ToClients, ClientUpdate) as inbox:
                    self._reading = [asyncio.create_task(self._read(bus, inbox))]
                    try:
                        return await main()
                    finally:
                        await asyncio.sleep(0.2)  # what was sent last
                        for reading in self._reading:
                            reading.cancel()

        run.main = observed  # type: ignore[method-assign]

    async def _read(self, bus: Any, inbox: Any) -> None:
        async for message in inbox:
            if isinstance(message, ClientUpdate):
                self.frames.append(bytes(message.frame.data))
            elif isinstance(message, Control):
                if isinstance(message.body, Hello) and message.incarnation not in self._inboxes:
                    self._inboxes.add(message.incarnation)  # what is in it is retained, so nothing is missed
                    theirs = bus.subscribe(Inbox(message.incarnation))
                    self._reading.append(asyncio.create_task(self._read(bus, theirs)))
                self.controls.append(message)
                self._on_message(bus, message)

    def all(self, kind: type[Any], phase: int | None = None) -> list[tuple[Control, Any]]:
        """Control messages of a kind, with their bodies."""
        found = [(one, one.body) for one in self.controls if isinstance(one.body, kind)]
        return [each for each in found if phase is None or each[1].phase == phase]


class Dying(gradbus.Controller):
    """Ends when it knows the sum of a round, before it is committed; or, with ``phase``, at a first answer of that
    phase."""

    phase = -1
    in_round = 1

    async def _start(self, *arguments: Any) -> ActiveRun:
        run = await super()._start(*arguments)
        masked, collector = run.parts.masked, run.collector
        assert masked is not None
        on_answer, end, until_over = masked.on_answer, masked.end, collector._until_over  # noqa: SLF001 - it waits there

        def answered(client_id: int, incarnation: int, answer: MaskAnswer) -> None:
            on_answer(client_id, incarnation, answer)
            if answer.phase == self.phase and answer.round_id == self.in_round:
                self.has_died.set()

        async def until_over_or_dead(*arguments: Any) -> Any:
            return await self._or_die(until_over(*arguments))

        async def end_or_die(*arguments: Any) -> Any:
            done = await self._or_die(end(*arguments))
            if self.phase == -1 and self.progress.round_id == self.in_round:
                raise RuntimeError("killed")
            return done

        masked.on_answer, masked.end = answered, end_or_die  # type: ignore[method-assign]
        collector._until_over = until_over_or_dead  # type: ignore[method-assign]  # noqa: SLF001 - as above
        return run

    async def _or_die(self, work: Any) -> Any:
        self.has_died = asyncio.Event()
        death, done = asyncio.ensure_future(self.has_died.wait()), asyncio.ensure_future(work)
        await asyncio.wait([death, done], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            await asyncio.wait([done])
            raise RuntimeError("killed")
        death.cancel()
        return done.result()


def restarted(
    run: Run,
    phase: int = -1,
    *,
    round_id: int = 1,
    meanwhile: Callable[[], object] = lambda: None,
    grace_s: float = 10.0,
) -> None:
    """Have the Controller of a run end in mid-round, and be started again. ``grace_s``: it then waits so long for more
    clients than the least number."""

    async def twice(bus: Any) -> gradbus.Controller:
        first = Dying(bus, run.task, run.config)
        first.phase, first.in_round = phase, round_id
        with pytest.raises(RuntimeError, match="killed"):
            await first.run()
        meanwhile()
        clients = run.config.clients.model_copy(update={"start_grace_s": grace_s})
        controller = gradbus.Controller(bus, run.task, run.config.model_copy(update={"clients": clients}))
        await controller.run()
        return controller

    run.control = twice  # type: ignore[method-assign]
