"""Buffers of integers and booleans in real rounds, over real DDS: merged by rules, saved, resumed, exported."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from patience import eventually
from safetensors.torch import load_file
from structlog.testing import capture_logs
from torch import Tensor, nn
from trees import rules as tree_rules
from trees import tree

import gradbus
from gradbus.actors import Site
from gradbus.actors.federated.controller.saved_run import restore_weights
from gradbus.actors.federated.controller.saved_state import saved_state
from gradbus.actors.federated.model.sharing import check_buffers_sent, specs_of
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history
from gradbus.commands.rundir.export import export
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.config.federated import ClientConfig, UpstreamConfig
from gradbus.runtime.errors import CheckpointError, ConfigError, JoinRefused
from gradbus.runtime.wire.control import Welcome

RULES = {"*.usage": "sum", "seen": "all", "lowest": "min"}
WARNING = "training has changed tensors that are not exchanged"
_jobs = itertools.count()
pytestmark = pytest.mark.usefixtures("one_thread")
State = Mapping[str, Tensor]


class ActNorm(nn.Module):
    """Sets itself up by its first batch, as ActNorm and vector quantisers do, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("initialized", torch.tensor(False))
        self.register_buffer("usage", torch.full((2,), 10))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not self.initialized:
                with torch.no_grad():
                    self.scale.copy_(x.std(0).reciprocal())
                self.initialized.fill_(True)
            self.usage[0] += len(x)
        return x * self.scale


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bn, self.last = ActNorm(), nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("seen", torch.tensor([False, False]))
        self.register_buffer("lowest", torch.tensor(100, dtype=torch.int32))
        with torch.no_grad():
            self.last.weight.fill_(0.1)
            self.last.bias.zero_()


class FlowTask:
    """Client k makes k + 1 steps a round; what each training begins with is noted."""

    model: type[nn.Module] = Flow

    def __init__(self) -> None:
        self.before: list[State] = []
        self.evaluated: list[State] = []

    def build_model(self) -> nn.Module:
        return self.model()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
        self.before.append({name: one.clone() for name, one in model.state_dict().items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()
        for step in range(client_id + 1):
            x = torch.linspace(-1 - client_id, 1 + round_id + step, 12).view(4, 3)
            optimizer.zero_grad()
            model.last(model.bn(model.norm(x))).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            model.seen[0] = True
            model.seen[1] = client_id == 1
            model.lowest.fill_(min(int(model.lowest), 50 - client_id))
        return TrainResult(4 * (client_id + 1), 0.5)

    def evaluate(self, model: Any) -> EvalResult | None:
        self.evaluated.append({name: one.clone() for name, one in model.state_dict().items()})
        return EvalResult(None, 0.5, 4)

    def evaluate_local(self, model: Any, *, client_id: int) -> EvalResult:
        self.evaluated.append({name: one.clone() for name, one in model.state_dict().items()})
        return EvalResult(None, 0.5, 4)


def federated(
    tasks: Sequence[FlowTask], *, server: FlowTask | None = None, client: Mapping[str, Any] | None = None, **rules: Any
) -> tuple[State, list[gradbus.RoundReport]]:
    """A run. Returns the state of the global model, and the reports."""
    job, domain = f"buffers-{os.getpid()}-{next(_jobs)}", new_domain()
    many = {"num": len(tasks), "min": len(tasks), "dead_after_s": 30.0, **rules.pop("clients", {})}
    config = gradbus.FederatedConfig(**{"rounds": 2, "eval_every": 0, "clients": many, "buffers": RULES, **rules})

    async def one(client_id: int, task: FlowTask) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id, config=ClientConfig(**(client or {}))).run()

    async def main() -> tuple[State, list[gradbus.RoundReport]]:
        async with asyncio.timeout(60.0), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, server or type(tasks[0])(), config)
            for number, task in enumerate(tasks):
                group.create_task(one(number, task))
            reports = await controller.run()
            return await controller.state_dict(), reports

    return asyncio.run(main())


def buffers(state: State) -> dict[str, Any]:
    return {name: one.tolist() for name, one in state.items() if not one.is_floating_point()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


AFTER_TWO = {
    "norm.initialized": True,  # any
    "norm.usage": [10 + 2 * 4 * (1 + 2), 10],  # the sum of two rounds of both clients
    "bn.num_batches_tracked": 4,  # the largest: client 1 makes two steps a round
    "seen": [True, False],  # all: client 0 has not seen the second one
    "lowest": 49,
}


def test_a_flag_is_set_once_and_stays_and_counts_reach_the_global_model(tmp_path: Path) -> None:
    tasks, server = [FlowTask(), FlowTask()], FlowTask()
    found, reports = federated(
        tasks,
        server=server,
        eval_every=1,
        evaluation={"every": 1},
        checkpoint={"dir": tmp_path, "keep_best": "eval_loss"},
    )
    assert buffers(found) == AFTER_TWO
    for task in tasks:
        assert [bool(before["norm.initialized"]) for before in task.before] == [False, True]
        assert buffers(task.before[1]) == buffers(server.evaluated[0]), "clients begin with what the controller has"
        assert [buffers(one) for one in task.evaluated] == [buffers(one) for one in server.evaluated]
    assert buffers(server.evaluated[1]) == AFTER_TWO
    assert [dict(report.dropped) for report in reports] == [{}, {}]
    for store, number in ((CheckpointStore.to_read(tmp_path), 2), (CheckpointStore.to_read(tmp_path / "best"), 1)):
        checkpoint, restored = store.load(number), Flow()
        load = CheckpointStore.to_read(tmp_path).load_constant
        restore_weights(restored, checkpoint, load)
        exported = saved_state(checkpoint, load)
        assert not exported.left_out
        assert same(exported.tensors, restored.state_dict())
        assert buffers(exported.tensors) == buffers(server.evaluated[number - 1])


def test_a_resumed_run_and_one_that_begins_with_its_model_have_the_same_buffers(tmp_path: Path) -> None:
    def tasks() -> list[FlowTask]:
        return [FlowTask(), FlowTask()]

    whole, reports = federated(tasks(), rounds=4)
    kept = {"checkpoint": {"dir": tmp_path}}
    federated(tasks(), rounds=2, **kept)
    resumed, again = federated(tasks(), rounds=4, **kept)
    assert same(whole, resumed)
    assert [report.weights_crc32 for report in again] == [report.weights_crc32 for report in reports]
    assert buffers(whole)["bn.num_batches_tracked"] == 8
    begun = tasks()
    federated(begun, rounds=1, checkpoint={"init_path": tmp_path / "round-000004.safetensors"})
    assert [buffers(task.before[0]) for task in begun] == [buffers(whole)] * 2


@pytest.mark.parametrize("downlink", ["fp32", "q8"])
def test_rounds_with_buffers_are_computed_again_from_their_journal(tmp_path: Path, downlink: str) -> None:
    found, _ = federated(
        [FlowTask(), FlowTask()], codec="q8", downlink_codec=downlink, history={"dir": tmp_path, "payloads": True}
    )
    assert buffers(found) == AFTER_TWO
    findings = {finding.name: finding for finding in check(read_history(tmp_path))}
    assert not any(finding.violations for finding in findings.values()), findings
    assert findings["I3"].checked > 0


def test_a_tree_merges_as_one_controller_would() -> None:
    flat, _ = federated([FlowTask() for _ in range(3)])

    async def main() -> State:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, number = await here.bus("centre"), await here.bus("centre"), 0
            for site, clients in enumerate((1, 2)):
                local, theirs = await here.bus(f"site-{site}"), await here.bus(f"site-{site}")
                upstream = UpstreamConfig(site=site, alone=False)
                group.create_task(Site(above, local, FlowTask(), tree_rules(clients), upstream).run())
                for client_id in range(number, number + clients):
                    group.create_task(gradbus.Client(theirs, FlowTask(), client_id=client_id).run())
                number += clients
            config = tree_rules(2, sites=True, rounds=2, buffers=RULES)
            controller = gradbus.Controller(centre, FlowTask(), config)
            await controller.run()
            return await controller.state_dict()

    assert same(asyncio.run(main()), flat)


def test_below_a_site_that_masks_clients_keep_what_no_rule_of_the_top_level_names() -> None:
    tasks = [FlowTask(), FlowTask()]

    async def main() -> State:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            config = tree_rules(2, secure_aggregation={"enabled": True})
            group.create_task(Site(above, local, FlowTask(), config, UpstreamConfig(site=0, alone=False)).run())
            for client_id, task in enumerate(tasks):
                group.create_task(gradbus.Client(theirs, task, client_id=client_id).run())
            top = tree_rules(1, sites=True, rounds=2, buffers={"norm.initialized": "any"})
            controller = gradbus.Controller(centre, FlowTask(), top)
            await controller.run()
            return await controller.state_dict()

    found = asyncio.run(main())
    assert bool(found["norm.initialized"])
    assert int(found["bn.num_batches_tracked"]) == 0
    assert [int(task.before[1]["bn.num_batches_tracked"]) for task in tasks] == [1, 2]


class HeldTask(FlowTask):
    """Holds its second training until that is let go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop, self.reached, self.go_on = loop, asyncio.Event(), threading.Event()

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        if len(self.before) == 1:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self.go_on.wait(30.0)
        return super().train(model, **arguments)


def test_what_a_site_has_counted_alone_is_contributed_with_its_rounds(tmp_path: Path) -> None:
    async def main() -> tuple[State, int]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above = [await here.bus("centre") for _ in range(2)]
            local, theirs = [await here.bus("site") for _ in range(2)]
            task = HeldTask(asyncio.get_running_loop())
            group.create_task(gradbus.Client(theirs, task, client_id=0).run())
            config = tree_rules(1, checkpoint={"dir": tmp_path / "site", "resume": True})
            upstream = UpstreamConfig(site=0, alone=True, alone_after_s=1.0, rejoin="contribute")
            group.create_task(Site(above, local, FlowTask(), config, upstream).run())
            top = tree_rules(1, sites=True, rounds=2, buffers=RULES, checkpoint={"dir": tmp_path / "centre"})
            with capture_logs() as logs:
                first = group.create_task(gradbus.Controller(centre, FlowTask(), top).run())
                await task.reached.wait()  # the site has the model of round 1, and trains for round 2
                first.cancel()
                await asyncio.wait({first})
                task.go_on.set()
                await eventually(lambda: any(line["event"] == "round alone" for line in logs))
                controller = gradbus.Controller(centre, FlowTask(), top)
                await controller.run()
            (back,) = [line for line in logs if line["event"] == "level above is back"]
            return await controller.state_dict(), back["rounds_alone"]

    found, alone = asyncio.run(main())
    assert alone >= 1
    assert bool(found["norm.initialized"])
    assert found["norm.usage"].tolist() == [10 + 4 + 4 + 4 * alone, 10], "round 1, round 2 again, and those alone"
    assert int(found["bn.num_batches_tracked"]) == 1 + alone, "the largest: of round 2 it is 2"


def test_virtual_clients_merge_as_deployed_ones_do() -> None:
    deployed, reports = federated([FlowTask() for _ in range(3)], evaluation={"every": 1})
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1)
    config = gradbus.FederatedConfig(
        rounds=2, eval_every=0, buffers=RULES, evaluation={"every": 1}, clients={"dead_after_s": 30.0}
    )
    result = gradbus.simulate(FlowTask(), 3, config=config, options=options)
    assert [one.weights_crc32 for one in result.rounds] == [one.weights_crc32 for one in reports]
    assert buffers(deployed)["bn.num_batches_tracked"] == 6


def test_asynchronous_rounds_never_take_a_count_back() -> None:
    task = FlowTask()
    found, _ = federated(
        [task], rounds=5, mode="asynchronous", asynchronous={"buffer": 1, "repeats": True}, clients={"min": 1}
    )
    counts = [int(before["bn.num_batches_tracked"]) for before in task.before]
    assert counts == sorted(counts)
    flags = [bool(before["norm.initialized"]) for before in task.before]
    assert flags == sorted(flags)
    assert flags[-1]
    assert bool(found["norm.initialized"])


class Liar(FlowTask):
    """Sets a flag that no other client sets, and a count to the largest value that there is."""

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        result = super().train(model, **arguments)
        model.seen[1] = True
        model.bn.num_batches_tracked.fill_(torch.iinfo(torch.int64).max)
        return result


def test_under_a_robust_strategy_one_client_decides_over_no_buffer() -> None:
    tasks = [FlowTask(), Liar(), FlowTask()]
    found, _ = federated(tasks, strategy="median", buffers={})
    assert buffers(found)["seen"] == [True, False]
    assert bool(found["norm.initialized"])
    assert int(found["bn.num_batches_tracked"]) == 6, "of 1 and 3 steps, and the largest value"


def test_what_is_kept_by_name_stays_at_its_client(tmp_path: Path) -> None:
    tasks, keep = [FlowTask(), FlowTask()], {"bn.*": "keep", "*": "max"}
    with capture_logs() as lines:
        found, _ = federated(tasks, buffers=keep, client={"state_dir": tmp_path})
    assert [int(task.before[1]["bn.num_batches_tracked"]) for task in tasks] == [1, 2]
    assert int(found["bn.num_batches_tracked"]) == 0
    assert not [line for line in lines if line["event"] == WARNING]
    kept = CheckpointStore.to_read(tmp_path / "client-1").load(2).tensors
    assert {name: int(one) for name, one in kept.items()} == {"personal.bn.num_batches_tracked": 4}


def test_what_is_shared_by_no_pattern_is_not_merged() -> None:
    tasks = [FlowTask(), FlowTask()]
    found, _ = federated(tasks, buffers={}, share={"exclude": ["bn.*"]})
    assert [int(task.before[1]["bn.num_batches_tracked"]) for task in tasks] == [1, 2]
    assert int(found["bn.num_batches_tracked"]) == 0
    assert bool(found["norm.initialized"])


def warnings_of(lines: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(line) for line in lines if line["event"] == WARNING]


@pytest.mark.parametrize("rules", [{}, {"norm.initialized": "any"}], ids=["default", "by name"])
def test_masked_updates_come_with_the_buffers_that_are_named_alone(rules: dict[str, str]) -> None:
    tasks = [FlowTask() for _ in range(3)]
    masked = {"secure_aggregation": {"enabled": True}, "clients": {"min": 3}}
    with capture_logs() as lines:
        found, _ = federated(tasks, buffers=rules, **masked)
    warned = warnings_of(lines)
    assert sorted(line["client"] for line in warned) == [0, 1, 2], "once each, in two rounds"
    assert bool(found["norm.initialized"]) is bool(rules)
    assert ("norm.initialized" in warned[0]["first"]) is not bool(rules)
    assert int(found["bn.num_batches_tracked"]) == 0
    assert [int(task.before[1]["bn.num_batches_tracked"]) for task in tasks] == [1, 2, 3], "each goes on with its own"
    assert "sends it in the clear" in warned[0]["remedy"]


class Counting(nn.Module):
    """Has no batch statistics, which privacy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))


class CountingTask(FlowTask):
    model = Counting

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
        self.before.append({name: one.clone() for name, one in model.state_dict().items()})
        with torch.no_grad():
            model.weight += 1.0
            model.count += client_id + 1
            if isinstance(model, Table):
                model.table[1] = round_id
            if isinstance(model, Odd):
                model.cache += 1
                model.register_buffer("late", torch.tensor(round_id))
        return TrainResult(4, 0.5)


class Table(Counting):
    """Has an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)


class Odd(Table):
    """Registers a buffer in training, too; and has one that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class TableTask(CountingTask):
    model = Table


class OddTask(CountingTask):
    model = Odd


def test_what_training_changes_and_is_not_exchanged_is_named_once() -> None:
    with capture_logs() as lines:
        found, _ = federated([OddTask()], rounds=3, buffers={})
    (warned,) = warnings_of(lines)
    assert (warned["client"], warned["tensors"], warned["first"]) == (0, 2, ["table", "late"])
    assert "make it a buffer" in warned["remedy"]
    assert "in build_model" in warned["remedy"]
    assert buffers(found) == {"count": 3, "table": [0, 0, 0, 0]}


def test_what_a_pattern_leaves_out_is_not_named() -> None:
    with capture_logs() as lines:
        federated([TableTask()], buffers={"count": "keep"}, share={"exclude": ["table"]})
    assert not warnings_of(lines)


def test_with_privacy_no_exact_value_leaves_a_client() -> None:
    pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")
    privacy = {"name": "local", "noise_multiplier": 1.0, "clip_norm": 1.0}
    tasks: list[FlowTask] = [CountingTask(), CountingTask()]
    with capture_logs() as lines:
        found, _ = federated(tasks, buffers={}, privacy=privacy)
    assert {line["client"] for line in warnings_of(lines)} == {0, 1}
    assert "without noise" in warnings_of(lines)[0]["remedy"]
    assert (int(found["count"]), [int(task.before[1]["count"]) for task in tasks]) == (0, [1, 2])
    with pytest.raises(BaseExceptionGroup) as caught:
        federated([CountingTask()], buffers={"count": "max"}, privacy=privacy)
    assert "exact values, without noise, would leave the clients" in str(only(caught.value))


@pytest.mark.parametrize(
    ("client", "rules", "words"),
    [
        ({"keep_personal": ["count"]}, {}, "the controller shares 'count', which client.keep_personal keeps here"),
        (
            {"least_members": 2},
            {"secure_aggregation": {"enabled": True}, "buffers": {"count": "max"}},
            "asks for the exact values of 'count', and client.least_members asks for masks: nothing is sent",
        ),
    ],
)
def test_a_client_that_insists_sends_no_buffer(client: Any, rules: Any, words: str) -> None:
    tasks = [CountingTask(), CountingTask()]
    with pytest.raises(BaseExceptionGroup) as caught:
        federated(tasks, client=client, **{"buffers": {}, **rules})
    error = only(caught.value)
    assert isinstance(error, JoinRefused)
    assert words in str(error)
    assert not any(task.before for task in tasks), "nothing was trained"


def test_a_client_sends_no_exact_buffer_in_a_run_with_noise_whatever_the_controller_says() -> None:
    welcome = Welcome(0, 1, 7, 1, "fp32", "{}", 2, 0.5, buffers={"**": "max"}, buffer_layout=1)
    with pytest.raises(ConfigError, match="exact values of 'count', and its updates have noise: nothing is sent"):
        check_buffers_sent(specs_of(Counting()), welcome, is_private=True, insists_on_masks=False)
    none = replace(welcome, buffers={}, buffer_layout=0)
    check_buffers_sent(specs_of(Counting()), none, is_private=True, insists_on_masks=True)


def only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"count": "any"}, "'count' is a buffer of int64, for which there is no 'any': set max, min, sum or median"),
        ({"counter": "max"}, r"federated\.buffers: 'counter' matches no tensor of the model; near are 'count'"),
        ({"weight": "max"}, r"'weight' matches no buffer of integers or booleans; there are 'count'"),
    ],
)
def test_rules_that_do_not_fit_the_model_are_refused(rules: dict[str, str], words: str) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        federated([CountingTask()], buffers=rules)
    error = only(caught.value)
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=words):
        raise error


class Wider(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(2, dtype=torch.int64)


class WiderTask(CountingTask):
    model = Wider


def test_a_client_whose_buffers_have_other_shapes_is_refused_unless_it_keeps_them() -> None:
    async def main() -> None:
        job, domain = f"buffers-{os.getpid()}-{next(_jobs)}", new_domain()
        config = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "min": 1})
        async with (
            asyncio.timeout(30.0),
            gradbus.connect(job=job, domain=domain) as bus,
            gradbus.connect(job=job, domain=domain) as theirs,
        ):
            running = asyncio.create_task(gradbus.Controller(bus, CountingTask(), config).run())
            with pytest.raises(JoinRefused, match=r"merges other buffers .* here they are 'count'\. Use one model, or"):
                await gradbus.Client(theirs, WiderTask(), client_id=0).run()
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())
    federated([WiderTask()], server=CountingTask(), buffers={"count": "keep"}, rounds=1)


@pytest.mark.parametrize("trust", [False, True], ids=["data alone", "trusted"])
def test_an_exported_model_has_its_flags_and_counts(tmp_path: Path, trust: bool) -> None:
    found, _ = federated([FlowTask(), FlowTask()], checkpoint={"dir": tmp_path / "state"})
    settings = {"task": {"task": f"{__name__}:FlowTask"}, "federated": {}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "rounds.jsonl").touch()
    done = export(tmp_path, trust=trust)
    assert done.is_whole
    assert same(load_file(done.path), found)


def test_integer_parameters_are_saved_exported_and_resumed(tmp_path: Path) -> None:
    class Drawn(CountingTask):
        """Draws other integers in each process, as a quantised base of no fixed seed would have."""

        def build_model(self) -> nn.Module:
            model = Table()
            with torch.no_grad():
                model.table.fill_(next(_jobs))
            return model

    kept = {"buffers": {}, "checkpoint": {"dir": tmp_path / "state"}}
    found, _ = federated([Drawn()], rounds=1, **kept)
    (tmp_path / "rounds.jsonl").touch()
    done = export(tmp_path)
    assert done.is_whole
    assert same(load_file(done.path), found)
    resumed, _ = federated([Drawn()], rounds=2, **kept)
    assert torch.equal(resumed["table"], found["table"])
    restored, store = Drawn().build_model(), CheckpointStore.to_read(tmp_path / "state")
    restore_weights(restored, store.load(2), store.load_constant)
    assert same(restored.state_dict(), resumed)
    (kept_file,) = (tmp_path / "state").glob("integers-*.safetensors")
    kept_file.write_bytes(kept_file.read_bytes()[:-1] + b"\7")
    with pytest.raises(CheckpointError, match="other values than its name says"):
        saved_state(store.load(2), store.load_constant)
