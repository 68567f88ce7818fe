"""Updates in packets over real DDS, with all actors on one loop: the model has the bits of the packets' sum."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dds_domains import new_domain
from torch import Tensor, nn

import gradbus
from gradbus import codecs
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.federated.controller.packets_in import PacketCollector
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ClientFile
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history
from gradbus.models import ClassificationTask, Dataset, DataSplit, NoopTask, TrainResult
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.wire.control import PacketRequest, UploadRequest
from gradbus.runtime.wire.messages import Control, Message

DIM = 5000
SAMPLES = 16  # of each client, which no cap changes
MIXED = (("fp32", 2), ("q8", 2), ("s4", 1), ("sq8", 2))

_jobs = itertools.count()


def packets_of(client_id: int, round_id: int, mixed: Sequence[tuple[str, int]] = MIXED) -> Iterator[bytes]:
    for number, (name, version) in enumerate(mixed):
        generator = torch.Generator().manual_seed(10_000 * round_id + 100 * client_id + number)
        vector = torch.randn(DIM, generator=generator) * 1e-2
        yield codecs.get(name, version=version).encode(vector)


def sum_of(packets: Iterator[bytes]) -> Tensor:
    total, *others = (codecs.decode(packet, expected_dim=DIM).vector for packet in packets)
    for one in others:
        total = total + one
    return total


class Sending(NoopTask):
    """Sends its packets while it trains; ``how``: all, but for those that come as the result."""

    def __init__(self, how: str = "send", mixed: Sequence[tuple[str, int]] = MIXED) -> None:
        super().__init__(DIM)
        self.how, self.mixed = how, mixed

    def train(self, model: Any, *, client_id: int, round_id: int, round: Any, **_: Any) -> TrainResult:  # type: ignore[override]
        assert torch.equal(round.vector(), round.base)
        assert round.layers == {"vector": slice(0, DIM)}
        packets = packets_of(client_id, round_id, self.mixed)
        if self.how == "result":
            return TrainResult.packets(((packet, SAMPLES) for packet in packets), loss=0.5)
        if self.how == "both":
            round.send(next(packets))
            return TrainResult.packets(packets, num_samples=SAMPLES, loss=0.5)
        for packet in packets:
            round.send(packet)
        return TrainResult(SAMPLES, 0.5)


class Plain(NoopTask):
    """Has moved the model by what the packets of :class:`Sending` come to."""

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:  # type: ignore[override]
        with torch.no_grad():
            model.vector += sum_of(packets_of(client_id, round_id))
        return TrainResult(SAMPLES, 0.5)


def run(
    tasks: Sequence[Any], *, faults: str = "", client: gradbus.ClientConfig | None = None, **settings: Any
) -> tuple[gradbus.Controller, list[UploadRequest]]:
    """A whole run; each client has its task. Returns the requests that have come as well."""
    job, domain = f"packets-{os.getpid()}-{next(_jobs)}", new_domain()
    config = gradbus.FederatedConfig(
        **{"rounds": 2, "clients": {"num": len(tasks), "dead_after_s": 30.0}, "eval_every": 0, **settings}
    )
    requests: list[UploadRequest] = []

    async def one(client_id: int, task: Any) -> None:
        async with gradbus.connect(job=job, domain=domain, faults=faults) as bus:
            await gradbus.Client(bus, task, client_id=client_id, config=client).run()

    async def main() -> gradbus.Controller:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain, faults=faults) as bus:
            with bus.subscribe(ToController) as inbox:
                controller = gradbus.Controller(bus, NoopTask(DIM), config)
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(note(inbox))
                    for client_id, task in enumerate(tasks):
                        group.create_task(one(client_id, task))
                    await controller.run()
                    listening.cancel()
                return controller

    async def note(inbox: Any) -> None:
        async for message in inbox:
            note_request(message)

    def note_request(message: Message) -> None:
        if isinstance(message, Control) and isinstance(message.body, UploadRequest):
            requests.append(message.body)

    return asyncio.run(main()), requests


def expected(clients: int, rounds: int, mixed: Sequence[tuple[str, int]] = MIXED) -> Tensor:
    """The model after these rounds, by the exact mean of the sums, which rounds to a grid of its own."""
    weights = torch.zeros(DIM)
    for round_id in range(1, rounds + 1):
        mean = ExactMean(DIM)
        for client_id in range(clients):
            message = codecs.get("fp32").encode(
                sum_of(packets_of(client_id, round_id, mixed)), is_delta=("fp32", 1) not in mixed
            )
            mean.add(codecs.parse(message, expected_dim=DIM), base=weights, num_samples=SAMPLES)
        for place, delta in mean.blocks():
            weights[place] = delta.add_(weights[place]).to(torch.float32)
    return weights


@pytest.mark.parametrize("how", ["send", "result", "both"])
def test_four_packets_of_mixed_codecs_count_as_their_sum_bit_for_bit(how: str) -> None:
    controller, requests = run([Sending(how), Sending(how)])
    assert torch.equal(controller.weights, expected(2, 2))
    assert {type(request) for request in requests} == {PacketRequest}
    assert {request.packet for request in requests if isinstance(request, PacketRequest)} == {1, 2, 3, 4}
    for report in controller.progress.reports:
        assert (report.clients, report.num_samples, report.loss, report.dropped) == ((0, 1), 2 * SAMPLES, 0.5, {})
        assert report.bytes_up == sum(
            len(packet) for client_id in (0, 1) for packet in packets_of(client_id, report.round_id)
        )


class OneVector(nn.Module):
    """The model of :class:`NoopTask`."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(DIM))


def send_packets(model: nn.Module, dataset: Dataset, *, round: Any, **_: Any) -> TrainResult:
    for packet in packets_of(0, 1):
        round.send(packet)
    return TrainResult(SAMPLES, 0.5)


def of_train_fn() -> ClassificationTask:
    data = DataSplit(Dataset("noise", torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64)))
    return ClassificationTask(OneVector, data, train_fn=send_packets)


@pytest.mark.parametrize("configured", [False, True])
def test_a_train_fn_and_a_task_of_a_configuration_get_the_packets_of_their_round_if_they_ask(configured: bool) -> None:
    task: Any = of_train_fn()
    if configured:
        task = ConfiguredTask(ClientFile(task={"task": f"{__name__}:of_train_fn"}).task)  # type: ignore[arg-type]
    controller, requests = run([task], rounds=1)
    assert torch.equal(controller.weights, expected(1, 1))
    assert {type(request) for request in requests} == {PacketRequest}


def test_messages_that_are_lost_or_come_twice_change_nothing() -> None:
    faults = (
        "drop packet_request p=0.3 times=20; duplicate packet_request p=0.3; drop grant p=0.2 times=8; "
        "drop receipt p=0.3 times=12; duplicate receipt p=0.3; drop packets_missing p=0.5 times=4; "
        "duplicate update p=0.3; drop update p=0.2 times=6; seed=3"
    )
    controller, _ = run([Sending("send"), Sending("result")], faults=faults)
    assert torch.equal(controller.weights, expected(2, 2))
    assert [report.clients for report in controller.progress.reports] == [(0, 1), (0, 1)]


def test_weights_among_the_packets_make_weights_of_the_sum() -> None:
    mixed = (("fp32", 1), ("s4", 1))
    controller, _ = run([Sending(mixed=mixed)])
    assert torch.equal(controller.weights, expected(1, 2, mixed))
    assert torch.allclose(controller.weights, sum_of(packets_of(0, 2, mixed)), atol=1e-8)


def test_packets_leave_while_the_client_trains() -> None:
    here = threading.Event()

    class Waiting(Sending):
        def train(self, model: Any, *, round: Any, **command: Any) -> TrainResult:  # type: ignore[override]
            for number, packet in enumerate(packets_of(0, 1), start=1):
                round.send(packet)
                if number == 2:
                    assert here.wait(20.0), "the first packet was not requested while its client trained"
            return TrainResult(SAMPLES, 0.5)

    job, domain = f"packets-{os.getpid()}-{next(_jobs)}", new_domain()

    async def main() -> gradbus.Controller:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus:
            rules = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "dead_after_s": 30.0}, eval_every=0)
            controller = gradbus.Controller(bus, NoopTask(DIM), rules)
            with bus.subscribe(ToController) as inbox:

                async def watch() -> None:
                    async for message in inbox:
                        if isinstance(message, Control) and isinstance(message.body, PacketRequest):
                            here.set()

                async def client() -> None:
                    async with gradbus.connect(job=job, domain=domain) as own:
                        await gradbus.Client(own, Waiting(), client_id=0).run()

                async with asyncio.TaskGroup() as group:
                    watching, _ = group.create_task(watch()), group.create_task(client())
                    await controller.run()
                    watching.cancel()
            return controller

    assert torch.equal(asyncio.run(main()).weights, expected(1, 1))


def test_the_norm_of_the_sum_is_limited_not_that_of_a_packet() -> None:
    total = sum_of(packets_of(0, 1))
    controller, _ = run([Sending()], rounds=1, limits={"clip_norm": float(total.norm()) / 2})
    assert torch.allclose(controller.weights, total / 2, rtol=1e-5)
    largest = max(float(codecs.decode(one, expected_dim=DIM).vector.norm()) for one in packets_of(0, 1))
    assert largest < float(total.norm())
    controller, _ = run([Sending()], rounds=1, limits={"clip_norm": 1.01 * float(total.norm())})
    assert torch.equal(controller.weights, expected(1, 1))


@pytest.mark.parametrize("codec", ["fp32", "q8"])
def test_with_secure_aggregation_a_client_adds_its_packets_before_it_masks_them(codec: str) -> None:
    tasks = [Sending(), Sending("result"), Sending("both")]
    clients = {"num": 3, "min": 2, "dead_after_s": 30.0}
    secure = {"secure_aggregation": {"enabled": True}, "codec": {"name": codec}, "rounds": 1, "clients": clients}
    controller, requests = run(tasks, **secure)
    assert {type(request) for request in requests} == {UploadRequest}
    plain, _ = run([Plain(DIM) for _ in tasks], **secure)
    assert torch.equal(controller.weights, plain.weights)


@pytest.mark.parametrize("mode", [{"asynchronous": {"buffer": 2, "repeats": False}}, {"asynchronous": {"buffer": 1}}])
def test_in_asynchronous_rounds_an_update_in_packets_is_one_of_its_base(mode: dict[str, Any]) -> None:
    controller, requests = run([Sending(), Sending("result")], mode="asynchronous", rounds=3, **mode)
    assert len(controller.progress.reports) == 3
    assert {type(request) for request in requests} == {PacketRequest}
    assert all(not report.dropped.get("packets") for report in controller.progress.reports)


def test_with_local_privacy_the_noise_is_added_to_the_sum() -> None:
    privacy = {"name": "local", "clip_norm": 1.0, "noise_multiplier": 0.1}
    controller, requests = run([Sending(), Sending()], rounds=1, privacy=privacy)
    assert {type(request) for request in requests} == {UploadRequest}
    assert len(controller.progress.reports) == 1


def test_the_journal_of_the_controller_says_that_it_has_counted_what_the_client_offered(tmp_path: Path) -> None:
    history = {"history": {"dir": str(tmp_path), "payloads": True}}
    run([Sending(), Sending("result")], client=gradbus.ClientConfig(**{"history": {"dir": str(tmp_path)}}), **history)
    findings = check(read_history(tmp_path))
    assert {finding.name: finding.violations for finding in findings if finding.violations} == {}


def test_a_rule_with_sections_of_its_own_has_the_packets_added_at_the_client() -> None:
    class Stepping(Sending):
        def train(self, model: Any, *, round: Any, **command: Any) -> TrainResult:  # type: ignore[override]
            result = super().train(model, round=round, **command)
            optimizer = torch.optim.SGD(model.parameters(), lr=command["lr"])
            model.vector.square().sum().backward()
            optimizer.step()  # without a step the rule would have no effect
            return result

    training = {"lr": 0.1, "rule": "scaffold"}
    controller, requests = run([Stepping(), Stepping("result")], rounds=1, strategy="scaffold", training=training)
    assert {type(request) for request in requests} == {UploadRequest}
    assert torch.equal(controller.weights, expected(2, 1))


def test_virtual_clients_add_their_packets_where_they_train() -> None:
    rules = gradbus.FederatedConfig(rounds=1, eval_every=0, clients={"dead_after_s": 30.0})
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2)
    result = gradbus.simulate(Sending("result"), 3, config=rules, options=options)
    (weights,) = result.model.parameters()
    plain = gradbus.simulate(Plain(DIM), 3, config=rules, options=options)
    assert torch.equal(weights, next(plain.model.parameters()))


def test_a_controller_that_has_lost_packets_asks_for_them_and_the_update_counts_once() -> None:
    lost = threading.Event()
    add = PacketCollector.add

    def add_and_lose(self: PacketCollector, update: Any, payload: memoryview, now_s: float) -> Any:
        whole = add(self, update, payload, now_s)
        if update.request.packet == 2 and not lost.is_set():
            lost.set()
            assert self.forget(update.client_id, update.incarnation)  # as of a client that is taken for dead
        return whole

    with mock.patch.object(PacketCollector, "add", add_and_lose):
        controller, _ = run([Sending()], rounds=1)
    assert lost.is_set()
    assert torch.equal(controller.weights, expected(1, 1))
    assert controller.progress.reports[0].num_samples == SAMPLES


def test_where_the_controller_measures_the_updates_of_a_first_round_these_are_the_sums() -> None:
    tasks = [Sending(), Sending("result"), Sending("both")]
    controller, requests = run(tasks, limits={"trust": "adversarial"})
    assert {type(request) for request in requests} == {PacketRequest}
    assert [report.clients for report in controller.progress.reports] == [(0, 1, 2)] * 2
    plain, _ = run([Plain(DIM) for _ in tasks], limits={"trust": "adversarial"}, rounds=1)
    first, _ = run(tasks, limits={"trust": "adversarial"}, rounds=1)
    assert torch.equal(first.weights, plain.weights)


def test_with_merged_buffers_the_packets_are_added_at_the_client() -> None:
    class Counting(NoopTask):
        def build_model(self) -> Any:
            model = super().build_model()
            model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            return model

        def train(self, model: Any, **command: Any) -> TrainResult:
            model.seen += 3
            return TrainResult.packets(packets_of(command["client_id"], 1), num_samples=SAMPLES)

    job, domain = f"packets-{os.getpid()}-{next(_jobs)}", new_domain()

    async def main() -> gradbus.Controller:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus:
            rules = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "dead_after_s": 30.0}, eval_every=0)
            controller = gradbus.Controller(bus, Counting(DIM), rules)

            async def client() -> None:
                async with gradbus.connect(job=job, domain=domain) as own:
                    await gradbus.Client(own, Counting(DIM), client_id=0).run()

            async with asyncio.TaskGroup() as group:
                group.create_task(client())
                await controller.run()
            return controller

    assert torch.equal(asyncio.run(main()).weights, expected(1, 1))
