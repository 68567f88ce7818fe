"""Personal layers over real DDS, with all actors on one loop: what stays at home, restarts, and with what it works."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from safetensors.torch import load_file
from torch import Tensor, nn
from trees import rules as tree_rules
from trees import tree

import gradbus
from gradbus import codecs
from gradbus.actors import Site
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.config.federated import ClientConfig, UpstreamConfig
from gradbus.runtime.errors import ConfigError, JoinRefused

FED_BN, FED_PER = {"exclude": ["*bn*"]}, {"exclude": ["head.*"]}
_jobs = itertools.count()
pytestmark = pytest.mark.usefixtures("one_thread")
_building = threading.Lock()  # actors of one process build their models side by side, and draw from one generator


class Net(nn.Module):
    """A trained layer, batch normalisation with its counter, and a head."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mix = nn.Linear(3, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)


class Images:
    """Each client has other samples; what it trains is noted: the state before and after, by round."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []
        self.evaluated = 0
        self.evaluated_here: list[dict[str, Tensor]] = []

    def build_model(self) -> nn.Module:
        with _building:
            return Net(self.classes)

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, client_id: int, lr: float, make_optimizer: Any = None, **_: Any) -> TrainResult:
        self.before.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        generator = torch.Generator().manual_seed(client_id)
        x = torch.randn(8, 3, generator=generator) * (1 + client_id) + client_id
        y = torch.arange(8) % self.classes
        optimizer = (make_optimizer or partial(torch.optim.SGD, lr=lr))(model.parameters())
        for part in (slice(0, 4), slice(4, 8)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model.head(model.bn(model.mix(x[part])).relu()), y[part])
            loss.backward()
            optimizer.step()
        self.after.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return TrainResult(8, float(loss.detach()))

    def evaluate(self, model: Any) -> EvalResult:
        self.evaluated += 1
        return EvalResult(0.5, 1.0, 8)


class Judged(Images):
    """A client finds the loss of the model on its own data; what it is asked to evaluate is noted."""

    def evaluate_local(self, model: Any, *, client_id: int) -> EvalResult:
        self.evaluated_here.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return EvalResult(None, float(model.head.weight.square().sum()), 8)


def personal(states: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in states.items() if name.startswith(prefix)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(
    tasks: Sequence[Images],
    *,
    state: Path | None = None,
    server: Images | None = None,
    client: dict[str, Any] | None = None,
    **rules: Any,
) -> tuple[Tensor, list[gradbus.RoundReport]]:
    """A whole run. ``state``: of the controller and of the clients."""
    job, domain = f"personal-{os.getpid()}-{next(_jobs)}", new_domain()
    given = {"rounds": 2, "training": {"lr": 0.1}, **rules}
    if state is not None:
        given["checkpoint"] = {"dir": state / "controller"}
    least = 1 if {"mode", "selection"} & rules.keys() else len(tasks)
    many = {"num": len(tasks), "min": least, "dead_after_s": 30.0, "start_timeout_s": 5.0}
    config = gradbus.FederatedConfig(**{**given, "clients": many})

    async def one(client_id: int, task: Any) -> None:
        own = ClientConfig(state_dir=None if state is None else state / "clients", **(client or {}))
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id, config=own).run()

    async def main() -> tuple[Tensor, list[gradbus.RoundReport]]:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, server or Images(), config)
            for client_id, task in enumerate(tasks):
                group.create_task(one(client_id, task))
            reports = await controller.run()
        return controller.weights.clone(), reports

    return asyncio.run(main())


def only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.parametrize(("share", "prefix"), [(FED_BN, "bn"), (FED_PER, "head")], ids=["FedBN", "FedPer"])
def test_what_is_personal_stays_at_its_client_and_the_rest_is_averaged(share: Any, prefix: str) -> None:
    tasks, server = [Images(), Images()], Images()
    weights, reports = run(tasks, server=server, share=share, rounds=3)
    shared = [name for name in Net().state_dict() if not name.startswith((prefix, "bn.num"))]
    size = len(codecs.get("fp32").encode(torch.zeros(weights.numel())))
    size += 0 if prefix == "bn" else 4 + 8 + 8  # the block with the number of batches
    assert weights.numel() == sum(Net().state_dict()[name].numel() for name in shared)
    assert [report.bytes_up for report in reports] == [2 * size] * 3, "nothing else is sent"
    for task in tasks:
        for before, after in zip(task.before[1:], task.after, strict=False):
            assert same(personal(before, prefix), personal(after, prefix))
    first, second = (personal(task.after[-1], prefix) for task in tasks)
    assert not same(first, second)
    mean = torch.cat([torch.stack([task.after[-1][name] for task in tasks]).mean(0).flatten() for name in shared])
    torch.testing.assert_close(weights, mean)
    assert server.evaluated == 0, "there is no whole model"
    assert {report.accuracy for report in reports} == {None}


def test_clients_evaluate_the_shared_part_with_their_own_tensors_and_that_may_end_the_run() -> None:
    tasks, server = [Judged(), Judged()], Judged()
    stop = {"metric": "client.loss", "patience": 1, "min_delta": 1e9}
    weights, reports = run(tasks, server=server, share=FED_PER, rounds=5, evaluation={"every": 1}, early_stop=stop)
    assert len(reports) == 2, "the first evaluation is the best one, the second no better"
    losses = [float(task.after[-1]["head.weight"].square().sum()) for task in tasks]
    assert reports[-1].by_clients.metrics["loss"].mean == pytest.approx(sum(losses) / 2)
    for task in tasks:
        evaluated, trained = task.evaluated_here[-1], task.after[-1]
        assert same(personal(evaluated, "head"), personal(trained, "head"))
        assert torch.equal(evaluated["mix.weight"].flatten(), weights[:12])


def test_a_personal_model_that_diverges_keeps_no_client_out_of_the_global_one(tmp_path: Path) -> None:
    tasks, plain = [Images(), Images()], [Images(), Images()]
    rule = {"lr": 0.1, "rule": {"name": "ditto", "own_lr": 1e6, "lam": 1e6}}
    weights, reports = run(tasks, state=tmp_path, training=rule, rounds=3)
    expected, _ = run(plain, training={"lr": 0.1}, rounds=3)
    assert [report.clients for report in reports] == [(0, 1)] * 3
    assert torch.equal(weights, expected)


def test_without_patterns_a_client_keeps_nothing_of_batch_normalisation_as_all_of_it_is_shared(tmp_path: Path) -> None:
    tasks = [Images()]
    run(tasks, state=tmp_path, rounds=2)
    assert list((tmp_path / "clients" / "client-0").glob("round-*")) == []
    assert [int(before["bn.num_batches_tracked"]) for before in tasks[0].before] == [0, 2]


def test_each_virtual_client_is_evaluated_with_its_own_head(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"share": FED_PER, "rounds": 2, "training": {"lr": 0.1}, "evaluation": {"every": 1}}
    tasks = [Judged() for _ in range(3)]
    _, deployed = run(tasks, **rules)
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1, state_dir=tmp_path)
    config = gradbus.FederatedConfig(**rules, clients={"dead_after_s": 30.0})
    result = gradbus.simulate(Judged(), 3, config=config, options=options)
    found = [report.by_clients.metrics for report in result.rounds]
    assert found == [report.by_clients.metrics for report in deployed]
    own = {number: float(task.after[-1]["head.weight"].square().sum()) for number, task in enumerate(tasks)}
    assert dict(found[-1]["loss"].worst) == pytest.approx(own)


def test_clients_and_a_controller_that_start_again_go_on_with_equal_bits(tmp_path: Path) -> None:
    through = [Images(), Images()]
    expected, _ = run(through, share=FED_BN, rounds=4, codec="sq8")
    for rounds in (2, 3, 4):
        tasks = [Images(), Images()]
        weights, _ = run(tasks, state=tmp_path, share=FED_BN, rounds=rounds, codec="sq8")
    assert torch.equal(weights, expected)
    assert [len(task.before) for task in tasks] == [1, 1]
    for task, whole in zip(tasks, through, strict=True):
        assert same(task.before[0], whole.before[3])
        assert same(task.after[0], whole.after[3])
    kept = load_file(tmp_path / "clients" / "client-1" / "round-000004.safetensors")
    assert same(
        {name.removeprefix("personal."): one for name, one in kept.items() if name.startswith("personal.")},
        personal(through[1].after[3], "bn"),
    )


def test_heads_may_differ_in_size_from_client_to_client() -> None:
    tasks = [Images(2), Images(5)]
    weights, reports = run(tasks, share=FED_PER)
    assert [report.clients for report in reports] == [(0, 1)] * 2
    assert tasks[1].after[-1]["head.weight"].shape == (5, 4)
    assert weights.numel() == 3 * 4 + 4 + 4 * 4


class Waiting(Images):
    """Waits in its third training until another client has its data, and so is about to join."""

    def __init__(self, ready: threading.Event) -> None:
        super().__init__()
        self._ready = ready

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        if len(self.before) == 2:
            assert self._ready.wait(20.0)
        return super().train(model, **arguments)


class Late(Images):
    def __init__(self, ready: threading.Event) -> None:
        super().__init__()
        self._ready = ready
        self.rounds: list[int] = []  # of its trainings; the update of the first one may be too late to count

    def prepare(self, client_id: int, num_clients: int) -> None:
        self._ready.set()

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self.rounds.append(arguments["round_id"])
        return super().train(model, **arguments)


def test_a_client_that_joins_late_begins_with_the_global_model_and_personal_tensors_as_built() -> None:
    ready, job, domain = threading.Event(), f"personal-late-{os.getpid()}", new_domain()
    first, late = Waiting(ready), Late(ready)

    async def one(client_id: int, task: Any) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id).run()

    async def main() -> list[gradbus.RoundReport]:
        config = gradbus.FederatedConfig(
            rounds=40, share=FED_BN, clients={"min": 1, "dead_after_s": 30.0}, training={"lr": 0.1}
        )
        reports = []
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            group.create_task(one(0, first))
            async for report in gradbus.Controller(bus, Images(), config).rounds():
                reports.append(report)
                if report.round_id == 1:
                    group.create_task(one(1, late))
        return reports

    reports = asyncio.run(main())
    assert any(report.clients == (0, 1) for report in reports)
    at_home = Net().state_dict()
    assert same(personal(late.before[0], "bn"), personal(at_home, "bn"))
    together = first.before[late.rounds[0] - 1]
    assert not torch.equal(late.before[0]["mix.weight"], at_home["mix.weight"])
    assert torch.equal(late.before[0]["mix.weight"], together["mix.weight"])
    assert not same(personal(together, "bn"), personal(at_home, "bn"))


@pytest.mark.parametrize(
    "rules",
    [
        {"codec": "q8", "downlink_codec": "sq8"},
        {"strategy": "scaffold", "training": {"lr": 0.1, "rule": "scaffold"}},
        {"strategy": "fedadam", "training": {"lr": 0.1, "rule": "ditto"}},
        {"mode": "asynchronous", "asynchronous": {"buffer": 2}},
        {"selection": {"name": "uniform", "count": 1}},
        {"training": {"optimizer": "adamw", "keep_optimizer": True, "lr": 0.01}},
        {"limits": {"clip_norm": 0.1}, "strategy": "median"},
    ],
    ids=["codecs", "scaffold", "ditto", "asynchronous", "selection", "kept-optimizer", "median"],
)
def test_it_works_with(rules: dict[str, Any]) -> None:
    tasks = [Images(), Images(), Images()]
    _, reports = run(tasks, share=FED_BN, rounds=3, **rules)
    assert len(reports) == 3
    trained = [task for task in tasks if len(task.after) > 1]
    assert trained, "of 3 rounds with 1 of 3 clients one has two, too: so the seed says"
    for task in trained:
        own = [(personal(b, "bn"), personal(a, "bn")) for b, a in zip(task.before, task.after, strict=True)]
        if "ditto" in str(rules):
            own = own[1::2]  # of each round the training of the global model
        assert same(own[1][0], own[0][1])
        assert int(own[0][1]["bn.num_batches_tracked"]) == 2


def test_sites_pass_on_what_is_shared() -> None:
    flat_tasks = [Images(), Images()]
    expected, _ = run(flat_tasks, share=FED_BN)

    async def main() -> tuple[Tensor, list[Images]]:
        tasks = [Images(), Images()]
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above = await here.bus("centre"), await here.bus("centre")
            for number, task in enumerate(tasks):
                local, theirs = await here.bus(f"site-{number}"), await here.bus(f"site-{number}")
                site = Site(above, local, Images(), tree_rules(1), UpstreamConfig(site=number, alone=False))
                group.create_task(site.run())
                group.create_task(gradbus.Client(theirs, task, client_id=number).run())
            config = tree_rules(2, sites=True, rounds=2, share=FED_BN, training={"lr": 0.1})
            controller = gradbus.Controller(centre, Images(), config)
            await controller.run()
        return controller.weights.clone(), tasks

    weights, tasks = asyncio.run(main())
    assert torch.equal(weights, expected)
    assert all(same(task.after[-1], flat.after[-1]) for task, flat in zip(tasks, flat_tasks, strict=True))


def test_virtual_clients_make_the_same_models_and_keep_the_same_tensors(tmp_path: Path) -> None:
    tasks = [Images() for _ in range(3)]
    rules = {"share": FED_BN, "rounds": 3, "training": {"lr": 0.1, "rule": "ditto"}, "seed": 1}
    _, deployed = run(tasks, **rules)
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2, state_dir=tmp_path)
    config = gradbus.FederatedConfig(**rules, clients={"dead_after_s": 30.0})
    result = gradbus.simulate(Images(), 3, config=config, options=options)
    assert [r.weights_crc32 for r in result.rounds] == [r.weights_crc32 for r in deployed]
    for client_id, task in enumerate(tasks):
        kept = load_file(tmp_path / f"client-{client_id}" / "round-000003.safetensors")
        home = {name.removeprefix("personal."): one for name, one in kept.items() if name.startswith("personal.")}
        own = {name.removeprefix("own_model."): one for name, one in kept.items() if name.startswith("own_model.")}
        assert same(home, personal(task.after[-1], "bn"))
        assert same(own, task.after[-2])


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"share": {"exclude": ["*.bn*"]}}, "near are 'bn."),
        ({"share": {"include": ["neck.*"]}}, "matches no tensor"),
        ({"share": {"exclude": ["*"]}}, "leave nothing to share"),
        ({"share": FED_PER, "early_stop": {"patience": 1}}, "which has no whole model: head.weight, head.bias"),
        ({"share": FED_PER, "checkpoint": {"keep_best": "accuracy"}}, "such as client.loss"),
    ],
)
def test_patterns_that_cannot_be_are_refused_at_the_start(rules: dict[str, Any], text: str) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run([Images()], **rules)
    error = only(caught.value)
    assert isinstance(error, ConfigError)
    assert text in str(error)


def test_a_client_that_would_share_something_else_is_refused() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run([Images(2), Images(5)], share=FED_BN)
    error = only(caught.value)
    assert isinstance(error, JoinRefused)
    assert "shares 41 values, here 26" in str(error)


@pytest.mark.parametrize("share", [FED_BN, {"include": ["head.weight", "mix.*"]}])
def test_a_client_that_keeps_a_layer_sends_nothing_to_a_controller_that_shares_it(share: dict[str, Any]) -> None:
    task = Images()
    with pytest.raises(BaseExceptionGroup) as caught:
        run([task], client={"keep_personal": ["head.*"]}, share=share)
    error = only(caught.value)
    assert isinstance(error, JoinRefused)
    names = "'head.weight'" if "include" in share else "'head.weight', 'head.bias'"
    assert f"the controller shares {names}, which client.keep_personal keeps here: nothing is sent" in str(error)
    assert 'set federated.share.exclude to ["head.*"]' in str(error)
    assert not task.before


def test_a_client_that_keeps_a_layer_takes_part_where_it_stays_at_home_and_says_where_there_is_none() -> None:
    _, reports = run([Images(), Images()], client={"keep_personal": ["head.*"]}, share=FED_PER, rounds=1)
    assert [report.clients for report in reports] == [(0, 1)]
    with pytest.raises(BaseExceptionGroup) as caught:
        run([Images()], client={"keep_personal": ["haed.*"]}, share=FED_PER)
    assert "client.keep_personal: 'haed.*' matches no tensor of the model; near are 'head." in str(only(caught.value))
    options = gradbus.SimulationOptions(processes=1, domain=new_domain(), client=ClientConfig(keep_personal=["head.*"]))
    with pytest.raises(JoinRefused, match="keep_personal keeps here"):
        gradbus.simulate(Images(), 2, config=gradbus.FederatedConfig(rounds=1, eval_every=0), options=options)


def test_another_share_is_no_way_to_go_on(tmp_path: Path) -> None:
    run([Images()], state=tmp_path, share=FED_BN, rounds=1)
    with pytest.raises(BaseExceptionGroup) as caught:
        run([Images()], state=tmp_path, share=FED_PER, rounds=2)
    assert "the same federated.share" in str(only(caught.value))
