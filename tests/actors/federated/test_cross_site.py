"""Local models on their way to the controller, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from intake_hall import FakeBus

from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller.cross_site import NOT_WANTED, LocalModelReceiver
from gradbus.actors.federated.controller.evaluation import LOST
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.protocol import PAUSED
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.testing.journal import History
from gradbus.runtime.wire.control import CANDIDATE_ROUNDS, Receipt, UploadRequest
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Identity

DIM, RUN, ROUND = 1 << 15, 7, CANDIDATE_ROUNDS[0]


@contextlib.contextmanager
def busy(compute: ComputeThread) -> Iterator[None]:
    """The thread has something else to do meanwhile."""
    done = threading.Event()
    running = asyncio.create_task(compute.run(done.wait, 20.0))
    running.add_done_callback(lambda task: task.result())
    try:
        yield
    finally:
        done.set()


def test_messages_go_on_while_a_local_model_waits_to_be_read_in_its_clients_memory() -> None:
    payload = torch.arange(DIM, dtype=torch.float32).numpy().tobytes()

    async def main() -> None:
        bus, changed = FakeBus(), asyncio.Event()

        async def sleep_until(_: float) -> None:
            changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await changed.wait()

        with ComputeThread("cross-site-test") as compute:
            context = RunContext(
                bus,
                Identity(CONTROLLER, 1),
                compute,
                FederatedConfig(),  # type: ignore[arg-type]
                SimpleNamespace(run_id=RUN, round_id=3, names=ClientNames()),
                History(None, "controller"),  # type: ignore[arg-type]
            )
            registry = SimpleNamespace(
                incarnation_of=lambda _: 100,
                taking_part=lambda _: {0},
                get=lambda *_: SimpleNamespace(),
                paused_ids=set,
            )
            receiver = LocalModelReceiver(
                context,
                registry,
                SimpleNamespace(sleep_until=sleep_until, notify=changed.set),  # type: ignore[arg-type]
                dim=DIM,
            )
            sealed = PayloadMemory(switched_on=True).put(payload)
            assert sealed is not None
            request = UploadRequest(RUN, ROUND, 1, len(payload), 1, 0.0, 0.0, 0.0, sealed.place)
            async with asyncio.timeout(10.0):
                fetching = asyncio.create_task(receiver.fetch(0, ROUND))
                await bus.news.wait()  # it is requested
                with busy(compute):
                    await receiver.on_request(0, 100, request)
                    await receiver.on_request(1, 100, request)  # of another client, which is answered at once
                    assert [receipt.reason for receipt in bus.all(Receipt)] == [NOT_WANTED]
                    assert not fetching.done()
                found = await fetching
            assert isinstance(found, memoryview)
            assert bytes(found) == payload
            sealed.hide()

    asyncio.run(main())


def test_a_paused_client_is_called_paused_and_one_that_is_gone_lost() -> None:
    async def fetched(*, paused: bool, at_once: bool) -> memoryview | str:
        """What is found of a client that is not here, or goes once its model has been requested."""
        bus, is_away = FakeBus(), at_once

        async def sleep_until(_: float) -> None:
            nonlocal is_away
            is_away = True

        with ComputeThread("cross-site-test") as compute:
            context = RunContext(
                bus,
                Identity(CONTROLLER, 1),
                compute,
                FederatedConfig(),  # type: ignore[arg-type]
                SimpleNamespace(run_id=RUN, round_id=3, names=ClientNames()),
                History(None, "controller"),  # type: ignore[arg-type]
            )
            registry = SimpleNamespace(
                incarnation_of=lambda _: None if at_once and not paused else 100,
                taking_part=lambda _: set() if is_away else {0},
                get=lambda *_: SimpleNamespace(),
                paused_ids=lambda: {0} if is_away and paused else set(),
            )
            receiver = LocalModelReceiver(
                context,
                registry,
                SimpleNamespace(sleep_until=sleep_until, notify=lambda: None),  # type: ignore[arg-type]
                dim=DIM,
            )
            return await receiver.fetch(0, ROUND)

    for at_once in (True, False):
        assert asyncio.run(fetched(paused=True, at_once=at_once)) == PAUSED
        assert asyncio.run(fetched(paused=False, at_once=at_once)) == LOST
