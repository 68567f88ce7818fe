"""Whole runs with secure aggregation over real DDS, with all actors on one loop: the model has the bits of a plain run,
whoever drops out when, and on the bus there is nothing from which a single update could be had."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from dds_domains import new_domain
from torch import Tensor, nn
from trees import DIM as TREE_DIM
from trees import UnequalTask, rules, site_of, tree

import gradbus
from gradbus.actors.federated import updates_out
from gradbus.actors.federated.client import Client
from gradbus.actors.federated.update_masks import ClientMasking
from gradbus.actors.federated.updates_in import UpdateReceiver
from gradbus.actors.secure_aggregation.keys import Attempt, Roster, commitment
from gradbus.actors.secure_aggregation.shamir import SHARE_BYTES, Interpolation
from gradbus.models import NoopTask
from gradbus.models.task import TrainResult
from gradbus.runtime.errors import ConfigError, JoinRefused, RoundTimeout
from gradbus.runtime.wire.control import Hello, MaskAnswer, MaskRoster, MaskShares, MaskSurvivors
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity

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
    """Calls ``quit`` instead of doing its part in a phase: 0 keys, 1 shares, 2 the masked update, 3 unmasking."""

    phase = -1
    quit: Callable[[], object]

    def _answer(self, own: Any, phase: int, data: bytes, group: Any) -> None:
        if phase == self.phase and phase != 2:
            self.quit()
        else:
            super()._answer(own, phase, data, group)

    async def take(self, *arguments: Any) -> Any:
        masks = await super().take(*arguments)
        if self.phase == 2:
            self.quit()
            await asyncio.sleep(60)  # until it is cancelled
        return masks


class Run:
    """A controller and clients that have not started. ``quits``: phase by client."""

    def __init__(
        self, ids: Iterable[int], *, quits: dict[int, int] | None = None, secure: bool = True,
        client: dict[str, Any] | None = None, shared_memory: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        self.ids, self.quits, self.client = list(ids), quits or {}, client or {}
        clients = {"num": len(self.ids), "min": 2, "dead_after_s": 30.0, **settings.pop("clients", {})}
        masked = {"enabled": secure, **settings.pop("secure_aggregation", {})}
        self.config = gradbus.FederatedConfig(
            **{"clients": clients, "eval_every": 0, "rounds": 1, "secure_aggregation": masked, **settings}
        )
        self.job, self.domain = f"secure-{os.getpid()}-{next(_jobs)}", new_domain()
        self.connect = functools.partial(
            gradbus.connect, job=self.job, domain=self.domain, shared_memory=shared_memory
        )  # fmt: skip
        self.task = Moving()
        self.make_controller: Callable[..., gradbus.Controller] = gradbus.Controller
        self.make_client: Callable[..., Client] = Client

    async def one_client(self, client_id: int) -> None:
        async with self.connect() as bus:
            client = self.make_client(
                bus, self.task, client_id=client_id, config=gradbus.ClientConfig(**self.client)
            )  # fmt: skip
            running = asyncio.create_task(client.run())
            if client_id in self.quits:
                masking = QuittingMasks(bus, client._identity, least_members=0)
                masking.phase, masking.quit = self.quits[client_id], running.cancel
                client._masking = masking
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


@pytest.mark.parametrize("shared_memory", [True, False], ids=["in memory", "over DDS"])
def test_the_model_has_the_bits_of_a_run_without_secure_aggregation(shared_memory: bool) -> None:
    controller = Run(range(10), rounds=2, strategy="fedadam", shared_memory=shared_memory)()
    assert torch.equal(controller.weights, plain_weights(10, 2, "fedadam"))
    for report in controller.progress.reports:
        assert report.bytes_up == 10 * (7 * DIM + 32)
        assert report.clients == tuple(range(10))
        assert (report.attempt, report.loss, report.num_samples) == (1, 1.25, sum(20 + one for one in range(10)))
        assert bool(report.bytes_up_shared) is shared_memory


def test_messages_that_are_lost_are_sent_again() -> None:
    run = Run(range(3), clients={"num": 3, "heartbeat_s": 0.2})
    run.connect = functools.partial(
        run.connect,
        faults="drop round_terms nth=1; drop mask_roster nth=1; drop mask_shares nth=1; drop mask_survivors nth=1;"
        "drop mask_answer p=0.3 times=6; duplicate mask_answer p=0.3; seed=1",
    )  # fmt: skip
    controller = run()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2), 1)
    assert torch.equal(controller.weights, plain_weights(3))


def test_no_update_is_refused_however_often_it_is_offered_before_the_sum_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates_out, "REPEAT_AFTER_S", 0.001)
    add = UpdateReceiver._add_unmasked

    def slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        add(*arguments)

    monkeypatch.setattr(UpdateReceiver, "_add_unmasked", slowly)
    controller = Run(range(4), rounds=2)()
    for report in controller.progress.reports:
        assert (report.clients, report.dropped) == ((0, 1, 2, 3), {})
    assert torch.equal(controller.weights, plain_weights(4, 2))


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
def test_where_three_of_ten_drop_out_the_model_is_that_of_the_plain_sum_of_those_whose_updates_came(phase: int) -> None:
    controller = Run(range(10), quits=dict.fromkeys((7, 8, 9), phase))()
    (report,) = controller.progress.reports
    count = 10 if phase == 3 else 7  # those who drop out in the last one are in the sum already
    assert (report.clients, report.attempt) == (tuple(range(count)), 1)
    assert torch.equal(controller.weights, plain_weights(count))


@pytest.mark.parametrize("phase", [2, 3])
def test_after_an_attempt_with_too_few_nothing_of_it_counts_and_the_next_one_masks_the_same_updates_anew(
    phase: int,
) -> None:
    run = Run(range(4), quits={3: phase}, secure_aggregation={"threshold": 1.0})
    controller = run()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2), 2)
    assert torch.equal(controller.weights, plain_weights(3))
    assert sorted(run.task.trained) == [(0, 1), (1, 1), (2, 1), (3, 1)], "nobody trains twice for a round"


class Observer:
    """Everything on the bus of a run. ``on_message``: called with each control message."""

    def __init__(self, run: Run, on_message: Callable[[Any, Control], object] = lambda *_: None) -> None:
        self.controls: list[Control] = []
        self.frames: list[bytes] = []
        self._on_message = on_message
        main = run.main

        async def observed() -> gradbus.Controller:
            async with run.connect() as bus:
                with bus.subscribe(Control, ClientUpdate) as inbox:
                    reading = asyncio.create_task(self._read(bus, inbox))
                    try:
                        return await main()
                    finally:
                        await asyncio.sleep(0.2)  # what was sent last
                        reading.cancel()

        run.main = observed  # type: ignore[method-assign]

    async def _read(self, bus: Any, inbox: Any) -> None:
        async for message in inbox:
            if isinstance(message, ClientUpdate):
                self.frames.append(bytes(message.frame.data))
            elif isinstance(message, Control):
                self.controls.append(message)
                self._on_message(bus, message)

    def all(self, kind: type[Any], phase: int | None = None) -> list[tuple[Control, Any]]:
        """Control messages of a kind, with their bodies."""
        found = [(one, one.body) for one in self.controls if isinstance(one.body, kind)]
        return [each for each in found if phase is None or each[1].phase == phase]


def test_fewer_than_the_threshold_end_the_run_with_a_clear_error_and_nobody_is_asked_for_shares() -> None:
    run = Run(range(4), quits={2: 2, 3: 2}, round={"max_attempts": 1})
    observer = Observer(run)
    with pytest.raises(
        RoundTimeout, match=r"2 updates where 3 .* 2 masked updates have come, the threshold is 3. Nothing was revealed"
    ):
        run()
    assert observer.all(MaskAnswer, 1)
    assert not observer.all(MaskSurvivors)
    assert not observer.all(MaskAnswer, 3)


def test_fewer_than_two_clients_with_keys_end_the_run_with_the_reason() -> None:
    with pytest.raises(RoundTimeout, match=r"2 clients have shared their secrets, the threshold is 3. Nothing was rev"):
        Run(range(4), quits={2: 1, 3: 1}, round={"max_attempts": 1})()


def plain_bytes(client_id: int, round_id: int) -> list[bytes]:
    """Pieces of an update as no Controller may see them: float32, and integers of each width, from its middle."""
    delta, at = delta_of(client_id, round_id), slice(DIM // 2, DIM // 2 + 8)
    integers = np.rint(delta.double().numpy() * (20 + client_id) * 2.0**30).astype("<i8")
    planes = integers.view("<u4")[::2][at], integers.view("<u2")[2::4][at]
    return [delta.numpy()[at].tobytes(), integers[at].tobytes(), planes[0].tobytes()]


@pytest.mark.parametrize("seed", range(3))
def test_on_the_bus_is_no_update_and_never_both_shares_of_a_client_whoever_drops_out(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    quits = {int(one): int(drawn.integers(4)) for one in drawn.choice(7, 2, replace=False)}
    run = Run(range(7), quits=quits, shared_memory=False, rounds=2, clients={"num": 7, "start_grace_s": 0.0})

    def ask_again(bus: Any, message: Control) -> None:
        """A Controller that asks for other survivors as well, in its own name."""
        body = message.body
        if isinstance(body, MaskSurvivors) and len(body.clients) not in asked:
            asked.add(len(body.clients) - 1)
            other = MaskSurvivors(body.run_id, body.round_id, body.attempt, body.clients[:-1])
            tasks.append(asyncio.ensure_future(bus.publish(Identity(CONTROLLER, message.incarnation), other)))

    asked: set[int] = set()
    tasks: list[Any] = []
    observer = Observer(run, ask_again)
    run()
    assert asked, "the Controller has not asked twice"
    assert len(observer.frames) >= 5
    seen = b"".join([*observer.frames, *(one.body.data for one, _ in observer.all(MaskAnswer))])
    for client_id, round_id in itertools.product(range(7), (1, 2)):
        for piece in plain_bytes(client_id, round_id):
            assert piece not in seen
    check_shares(run.job, observer)


def test_without_secure_aggregation_the_same_pieces_of_updates_would_be_found_on_the_bus() -> None:
    observer = Observer(run := Run(range(2), secure=False, shared_memory=False))
    run()
    seen = b"".join(observer.frames)
    assert all(plain_bytes(client_id, 1)[0] in seen for client_id in range(2))


def check_shares(job: str, observer: Observer) -> None:
    """Of no client both kinds of shares were revealed, by anybody, in an attempt; and what was revealed is what it
    should be: with the threshold of them, the seeds of survivors, and the keys of those that dropped out."""
    rosters = {
        (body.round_id, body.attempt): Roster.parse(
            Attempt(job, body.run_id, one.incarnation, body.round_id, body.attempt), body.threshold, body.members,
            body.cap,
        )
        for one, body in observer.all(MaskRoster)
    }  # fmt: skip
    senders = {(body.round_id, body.attempt): body.senders for _, body in observer.all(MaskShares)}
    answers: dict[tuple[int, int], dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))
    for one, body in observer.all(MaskAnswer, 3):
        answers[body.round_id, body.attempt][one.sender].add(body.data)
    assert answers
    for name, by_client in answers.items():
        assert all(len(different) == 1 for different in by_client.values()), "a client has answered two questions"
        roster = rosters[name]
        for place, sender in enumerate(senders[name]):
            revealed = {
                client_id: next(iter(data))[SHARE_BYTES * place :][:SHARE_BYTES]
                for client_id, data in by_client.items()
            }
            chosen = sorted(revealed)[: roster.threshold]
            secret = Interpolation([roster.points[one] for one in chosen]).secret(
                {roster.points[one]: revealed[one] for one in chosen}
            )
            member = roster.member(sender)
            is_seed = commitment(secret) == member.commitment
            is_key = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == member.masking
            assert is_seed != is_key


def test_a_controller_that_is_started_again_in_mid_round_makes_new_keys_and_comes_to_the_same_model(
    tmp_path: Path,
) -> None:
    class Dying(gradbus.Controller):
        """Ends when it knows the sum, before anything is committed."""

        async def _unmask(self, *arguments: Any) -> bool:
            await super()._unmask(*arguments)
            raise RuntimeError("killed")

    run = Run(range(4), checkpoint={"dir": tmp_path})
    observer = Observer(run)

    async def twice(bus: Any) -> gradbus.Controller:
        with pytest.raises(RuntimeError, match="killed"):
            await Dying(bus, run.task, run.config).run()
        controller = gradbus.Controller(bus, run.task, run.config)
        await controller.run()
        return controller

    run.control = twice  # type: ignore[method-assign]
    controller = run()
    assert torch.equal(controller.weights, plain_weights(4))
    keys = {(one.sender, body.data) for one, body in observer.all(MaskAnswer, 0)}
    assert len(keys) == 8, "each client has advertised keys of its own to each start of the Controller"
    by_session = {one.incarnation for one, _ in observer.all(MaskRoster)}
    assert len(by_session) == 2


def test_a_client_that_masks_nothing_is_refused_with_the_reason() -> None:
    class Old(Client):
        def _describe(self, matched: bool) -> Hello:
            hello = super()._describe(matched)
            return Hello(**{name: getattr(hello, name) for name in hello.__dataclass_fields__} | {"masks": False})

    run = Run([0], clients={"num": None, "min": 2, "start_timeout_s": 5.0})
    run.make_client = Old
    with pytest.raises(JoinRefused, match="masked before they leave their client"):
        run()


def test_a_client_that_insists_on_being_one_of_many_sends_nothing_otherwise() -> None:
    with pytest.raises(JoinRefused, match=r"not masked, and client.least_members is 3: nothing is sent"):
        Run([0, 1], secure=False, client={"least_members": 3})()
    run = Run([0, 1], client={"least_members": 3}, secure_aggregation={"shares_timeout_s": 60.0})  # it says so at once
    observer = Observer(run)
    with pytest.raises(RoundTimeout, match="secure aggregation: 0 "):
        run()
    assert observer.all(MaskRoster)
    assert {body.data for _, body in observer.all(MaskAnswer, 1)} == {b""}


def test_an_update_that_has_no_room_in_the_sum_is_reported_and_the_others_count() -> None:
    class Huge(Moving):
        def train(self, model: Any, **arguments: Any) -> TrainResult:
            done = super().train(model, **arguments)
            if arguments["client_id"] == 3:
                with torch.no_grad():
                    model.vector[7] = 1e6
            return done

    run = Run(range(4))
    run.task = Huge()
    controller = run()
    (report,) = controller.progress.reports
    assert report.clients == (0, 1, 2)
    assert torch.equal(controller.weights, plain_weights(3))


def test_central_privacy_adds_its_noise_to_the_unmasked_sum() -> None:
    pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")
    privacy = {"name": "central", "noise_multiplier": 0.01, "clip_norm": 0.1, "target_quantile": 0.5}
    controller = Run(range(4), privacy=privacy)()
    (report,) = controller.progress.reports
    assert report.epsilon is not None
    assert report.clients == (0, 1, 2, 3)
    clipped = [delta_of(one, 1) * (0.1 / float(delta_of(one, 1).norm())) for one in range(4)]
    # Noise of 0.01 x 0.1 / 4 on each value of the mean, over all of them.
    assert float((controller.weights - torch.stack(clipped).mean(0)).norm()) < 4 * 0.00025 * DIM**0.5


def test_a_site_masks_for_its_own_clients_and_the_tree_has_the_bits_of_a_plain_run() -> None:
    async def run(secure: bool) -> tuple[Tensor, set[str]]:
        async with tree() as place:
            centre = gradbus.Controller(
                await place.bus("centre"), NoopTask(TREE_DIM), rules(2, sites=True, rounds=2)
            )  # fmt: skip
            watching = (await place.bus("site-0")).subscribe(Control)
            async with asyncio.TaskGroup() as group:
                for number, ids in enumerate(((0, 1, 2), (3, 4))):
                    own = rules(len(ids), secure_aggregation={"enabled": secure and number == 0})
                    level = f"site-{number}"
                    site = site_of(await place.bus("centre"), await place.bus(level), number, own)
                    group.create_task(site.run())
                    for client_id in ids:
                        client = Client(await place.bus(level), UnequalTask(), client_id=client_id)
                        group.create_task(client.run())
                await centre.run()
            seen = [await watching.get() for _ in range(len(watching))]
            kinds = {type(one.body).__name__ for one in seen if isinstance(one, Control)}
            return centre.weights.clone(), kinds

    plain, secure = asyncio.run(run(False)), asyncio.run(run(True))
    assert torch.equal(plain[0], secure[0])
    assert "MaskSurvivors" in secure[1] - plain[1]


def test_more_clients_than_can_mask_for_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="300 clients in a round: at most 255"):
        Run(range(2), clients={"num": 300})()
