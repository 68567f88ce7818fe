"""Whatever comes in from the wire: no exception leaves an actor, and nothing of it counts."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
import torch
from bus_helpers import writer_of
from dds_domains import new_domain
from other_payloads import send_instead

import gradbus
from gradbus import codecs
from gradbus.actors.federated.client import session
from gradbus.actors.federated.client import updates_out as update_sender
from gradbus.models import NoopTask
from gradbus.runtime.shm.segment import machine
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import (
    Hello,
    Leave,
    ModelAvailable,
    ModelRequest,
    Receipt,
    Status,
    TrainingFailure,
    UploadRequest,
)
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Identity, ModelBlob, TrainCmd

pytestmark = pytest.mark.faults

DIM = 20_000


class Attacker:
    """A participant that knows the job and says whatever it likes."""

    def __init__(self, bus: gradbus.Bus, seed: int) -> None:
        self._bus = bus
        self._random = random.Random(seed)
        for kind in (TrainCmd, ModelBlob, ClientUpdate):
            bus.open_writer(kind)

    async def raw(self, kind: type[Any], fields: tuple[Any, ...], data: bytes) -> None:
        """Any bytes in a sample of this topic."""
        writer_of(self._bus, kind).write(fields, (data,))

    async def spray(self, run_id: int, victim: int) -> None:
        """Garbage, damaged frames, frames of every identity, and control messages that lie."""
        rng = self._random
        for _ in range(30):
            noise = rng.randbytes(rng.randrange(0, 300))
            await self.raw(ClientUpdate, (victim, 1, 5), noise)
            await self.raw(ModelBlob, (1,), noise)
            payload = rng.randbytes(rng.randrange(0, 4 * DIM))
            key = FrameKey(Kind.UPDATE, run_id, rng.randrange(3), rng.choice([victim, 9]), rng.getrandbits(64), 1)
            await self._bus.send_update(key, rng.randrange(-5, 100), payload)
            damaged = bytearray(b"".join(map(bytes, next(iter(frames.split(key, payload))))))
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            await self.raw(ClientUpdate, (key.sender, key.round_id, 5), bytes(damaged))
            model = FrameKey(Kind.MODEL, run_id, rng.randrange(4), CONTROLLER, rng.getrandbits(64), rng.randrange(9))
            await self._bus.send_model(model, rng.randbytes(100), flags=rng.randrange(16))
            liar = Identity(rng.choice([victim, 7, CONTROLLER]), rng.getrandbits(20))
            for body in self._lies(run_id):
                await self._bus.publish(liar, body)

    def _place(self) -> str:
        """Of memory that is not there, is somebody else's, or is no memory."""
        rng = self._random
        process = rng.choice([1, os.getpid(), os.getppid(), 4_194_304])
        return rng.choice(["", "x", f"{machine()} {process} {rng.randrange(60)} {rng.getrandbits(128):032x}"])

    def _lies(self, run_id: int) -> list[control.Body]:
        rng = self._random
        return [
            Hello(3, rng.getrandbits(40), rng.getrandbits(64), True, 0, "x" * 50, 5, 5, "nobody:0", -1),
            UploadRequest(
                run_id, 1, rng.getrandbits(32), rng.getrandbits(60), rng.getrandbits(40), float("nan"), 1.0, 1.0
            ),
            UploadRequest(
                run_id, rng.randrange(1, 4), rng.getrandbits(32), 8 * DIM // 10, 5, 0.5, 1.0, 1.0, self._place()
            ),
            ModelAvailable(run_id, rng.randrange(4), rng.getrandbits(8), rng.random() < 0.5, 4 * DIM, self._place()),
            ModelRequest(run_id, rng.randrange(4), rng.getrandbits(32), [rng.randrange(1 << 20) for _ in range(256)]),
            TrainingFailure(run_id, 1, "not true"),
            Leave("nor this"),
            Receipt(0, rng.getrandbits(64), run_id, 1, 1, True, ""),
            Status(rng.getrandbits(64), 1, "done", 4_000_000_000, 0),
        ]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_under_a_spray_of_garbage_ends_with_the_weights_of_a_quiet_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OLD_SESSION_S", 60.0)  # who is not heard while all stand still is not replaced

    def weights(attacked: bool) -> list[int]:
        return asyncio.run(_run(seed if attacked else None))

    assert weights(attacked=True) == weights(attacked=False)


async def _run(attack_seed: int | None) -> list[int]:
    job, domain = f"hostile-{os.getpid()}", new_domain()
    config = gradbus.FederatedConfig(rounds=3, clients={"num": 2, "dead_after_s": 30.0}, codec="s4", eval_every=0)

    async def client(client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, NoopTask(DIM, delta="seeded"), client_id=client_id).run()

    async with (
        asyncio.timeout(60),
        gradbus.connect(job=job, domain=domain) as bus,
        gradbus.connect(job=job, domain=domain) as evil,
    ):
        controller = gradbus.Controller(bus, NoopTask(DIM), config)
        attacker: Attacker | None = None
        async with asyncio.TaskGroup() as group:
            for client_id in (0, 1):
                group.create_task(client(client_id))
            async for report in controller.rounds():
                assert report.clients == (0, 1)
                if attack_seed is not None and report.round_id < 3:
                    # Not earlier: a controller waits for one that may be there already and says nothing.
                    attacker = attacker or Attacker(evil, attack_seed)
                    await attacker.spray(controller.run_id, victim=report.round_id - 1)
        if attack_seed is not None:
            assert bus.rejected["crc"] > 0
            assert bus.rejected["short"] > 0
        return [report.weights_crc32 for report in controller.progress.reports]


def test_an_update_of_another_size_or_with_damaged_content_is_refused_and_the_round_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that speaks the protocol rightly, but whose payload is of no use."""
    payloads = iter([codecs.get("fp32").encode(torch.zeros(DIM - 1)), b"\x51\x38\x00\x01" + b"\xff" * 400])
    send_instead(monkeypatch, lambda key, honest: next(payloads) if key.sender == 1 else honest)
    # A request that is repeated when its update was refused just now is counted as well.
    monkeypatch.setattr(update_sender, "REPEAT_AFTER_S", 60.0)

    async def client(job: str, domain: int, client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, NoopTask(DIM, delta="seeded"), client_id=client_id).run()

    async def main() -> list[gradbus.RoundReport]:
        job, domain = f"bad-{os.getpid()}", new_domain()
        config = gradbus.FederatedConfig(rounds=2, clients={"num": 2, "dead_after_s": 30.0}, eval_every=0)
        async with asyncio.timeout(30), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            for client_id in (0, 1):
                group.create_task(client(job, domain, client_id))
            return await gradbus.Controller(bus, NoopTask(DIM), config).run()

    reports = asyncio.run(main())
    assert [report.clients for report in reports] == [(0,), (0,)]
    assert [report.dropped for report in reports] == [{"malformed": 1}, {"malformed": 1}]
