"""DiLoCo in a script of one's own."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_node import RankLocation

import gradbus.torch
from gradbus.experiments.examples import local_updates
from gradbus.runtime.algorithms.base import Step, TensorBucket
from gradbus.runtime.algorithms.diloco import StreamingDiLoCo
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.errors import CollectiveError, ConfigError
from gradbus.torch.cpu_copies import local_of
from gradbus.torch.weight_exchange import WeightExchange


def example(place: RankLocation) -> dict[str, Any]:
    """What the example prints."""
    place.start()
    return local_updates.train(steps=60)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3))


class Training:
    """A rank with data of its own."""

    def __init__(
        self,
        rank: int,
        *,
        model_state: Any = None,
        model_type: torch.dtype = torch.float32,
        algorithm: str = "",
        **options: Any,
    ) -> None:
        """``model_state``: loaded before the ranks meet. ``algorithm``: in place of ``diloco``."""
        self.random = torch.Generator().manual_seed(rank)
        torch.manual_seed(5)  # of the model
        self.model = net().to(model_type)
        if model_state is not None:
            self.model.load_state_dict(model_state)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if algorithm:
            self.diloco = gradbus.torch.with_algorithm(self.model, [self.optimizer], algorithm, **options)
        else:
            self.diloco = gradbus.torch.DiLoCo(self.model, self.optimizer, **options)

    def step(self) -> None:
        x = torch.randn(16, 12, generator=self.random)
        found = self.model(x.to(next(self.model.parameters()).dtype))
        loss = nn.functional.cross_entropy(found, x[:, :3].argmax(1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.step()
        return self

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and buffers."""
        return [tensor.clone() for tensor in self.model.state_dict().values()]


def resumed(place: RankLocation) -> dict[str, Any]:
    """Weights and buffers of a run, and of one that goes on from what was saved between two exchanges, by how it
    exchanges: with the model loaded before, and after, and not at all; and after, from a state of an older version."""
    place.start()
    found: dict[str, Any] = {}
    for name, options in {
        "diloco": {"codec": "q4"},
        "streaming": {"codec": "q8", "fragments": 2, "delay": 1, "alpha": 0.3},
    }.items():
        whole = Training(place.rank, steps=4, **options).steps(11)
        first = Training(place.rank, steps=4, **options).steps(5)
        saved = copy.deepcopy(
            [
                first.model.state_dict(),
                first.optimizer.state_dict(),
                first.diloco.state_dict(),
                first.random.get_state(),
            ]
        )
        found[name] = {"whole": whole.tensors}
        for way in ("before", "after", "not at all", "older version"):
            model, optimizer, diloco, random = copy.deepcopy(saved)
            again = Training(place.rank, steps=4, model_state=model if way == "before" else None, **options)
            if way in ("after", "older version"):
                again.model.load_state_dict(model)
            if way == "older version":
                diloco = {key: value for key, value in diloco.items() if key not in ("weights", "buffers")}
            again.optimizer.load_state_dict(optimizer)
            again.diloco.load_state_dict(diloco)
            again.random.set_state(random)
            found[name][way] = again.steps(6).tensors
    return found


def low_precision(place: RankLocation) -> dict[str, Any]:
    """A model in bfloat16: weights of a run, and of one that goes on from what was saved; and what exchanges change
    where nothing is trained."""
    place.start()

    def made() -> Training:
        training = Training(place.rank, steps=4, model_type=torch.bfloat16, codec="fp32", outer_momentum=0.0)
        training.optimizer.param_groups[0]["lr"] = 0.5
        return training

    whole, first = made().steps(11), made().steps(5)
    saved = [copy.deepcopy(one.state_dict()) for one in (first.optimizer, first.diloco)]
    random = first.random.get_state()
    again = made()
    again.optimizer.load_state_dict(saved[0])
    again.diloco.load_state_dict(saved[1])
    again.random.set_state(random)
    again.steps(6)
    exact = copy.deepcopy(first.diloco.state_dict())
    for group in first.optimizer.param_groups:
        group["lr"] = group["momentum"] = 0.0
    first.steps(3)  # to the second exchange
    second = copy.deepcopy(first.diloco.state_dict())
    first.steps(8)  # two more, in which nothing is trained
    third = first.diloco.state_dict()
    return {
        "whole": whole.weights,
        "again": again.weights,
        "types": {str(one.dtype) for one in whole.weights},
        "lacked": max(float(one.abs().max()) for one in exact["residuals"].values()),
        "second": [*second["weights"].values(), *second["residuals"].values()],
        "third": [*third["weights"].values(), *third["residuals"].values()],
        "shared": third["shared"],
    }


def shards(place: RankLocation) -> dict[str, Any]:
    """Two hosts of two ranks: FSDP2 within each, DiLoCo between them. And the same without shards, of two ranks."""
    place.start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    host, within = mesh.get_coordinate() or (0, 0)

    def trained(model: nn.Module, group: Any) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = gradbus.torch.DiLoCo(model, optimizer, steps=3, codec="fp32", group=group)
        random = torch.Generator().manual_seed(host)  # one batch for the ranks of a host
        for number in range(8):
            x = torch.randn(16, 12, generator=random)
            loss = model(x).square().mean() * (torch.nan if (number, host) == (4, 0) else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        diloco.drain()
        diloco.average()
        found = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
        return [one.detach().clone() for one in found]

    def made() -> nn.Sequential:
        torch.manual_seed(5 + place.rank // 2)  # that of the first host counts
        return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3))

    between = mesh.get_group("between")
    sharded = fully_shard(made(), mesh=mesh["within"])
    with pytest.raises(ConfigError, match="hold others of the same model"):
        gradbus.torch.DiLoCo(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    found = {"sharded": trained(sharded, between), "whole": trained(made(), between), "place": [host, within]}
    with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        trained(fully_shard(made(), mesh=mesh["within"]), between)
    return {**found, "groups of a second run": new_group.call_count}


def spoilt_shard(place: RankLocation) -> dict[str, Any]:
    """Two hosts of two ranks, with an exchange after every second step. In the second one the last rank has a shard
    that is not finite. Each host's model after each exchange, what is exchanged then, and how many were skipped."""
    place.start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    torch.manual_seed(5)
    model = fully_shard(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)), mesh=mesh["within"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    between = mesh.get_group("between")
    diloco = gradbus.torch.DiLoCo(model, optimizer, steps=2, codec="fp32", group=between)
    random = torch.Generator().manual_seed(place.rank // 2)
    weights, shared = [], []
    for number in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 12, generator=random)).square().mean().backward()
        if (place.rank, number) == (3, 3):
            local_of(model[0].weight)[0] = torch.inf
        optimizer.step()
        if number % 2:
            diloco.drain()
            weights.append([one.full_tensor().detach().clone() for one in model.parameters()])  # type: ignore[attr-defined]
            shared.append(copy.deepcopy(list(diloco.algorithm.shared_state().values())))
    return {"weights": weights, "shared": shared, "skipped": diloco.skipped_steps}


def weights_of(diloco: gradbus.torch.DiLoCo) -> WeightExchange:
    """What exchanges the weights, between whose steps others fail."""
    steps = diloco._weights  # noqa: SLF001 - a user has the optimizer's steps, and nothing between them
    assert steps is not None
    return steps.exchange


def failed_shard(place: RankLocation) -> dict[str, Any]:
    """Two hosts of two ranks, with an exchange after every second step. In the second one the last rank fails in
    its part, or it or both ranks of its host as soon as they have agreed, by what fails: what ranks are told in which
    step, what is shared after each exchange, and the weights at the end. ``last agreement``: that on whether it
    counts."""
    place.start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    between = mesh.get_group("between")

    def run(what: str, ranks: list[int]) -> dict[str, Any]:
        torch.manual_seed(5)
        model = fully_shard(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)), mesh=mesh["within"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = gradbus.torch.DiLoCo(model, optimizer, steps=2, codec="fp32", group=between)
        holders = weights_of(diloco).holders
        exchange, agree = diloco.algorithm.exchange, holders.agree
        random, number = torch.Generator().manual_seed(place.rank // 2), 0
        told, shared, agreements = [], [], list[int]()

        def fail(now: str) -> None:
            if (now, number) == (what, 3) and place.rank in ranks:
                raise CollectiveError("a message that cannot be read")

        def exchange_or_fail(bucket: TensorBucket, step: Step) -> Program[None]:
            yield from exchange(bucket, step)
            fail("exchange")

        def agree_or_fail(*own: bool) -> list[bool]:
            agreed = agree(*own)
            agreements.append(number)
            fail("agreement" if agreements.count(number) == 1 else "last agreement")
            return agreed

        with (
            patch.object(diloco.algorithm, "exchange", exchange_or_fail),
            patch.object(holders, "agree", agree_or_fail),
        ):
            for number in range(6):
                optimizer.zero_grad()
                model(torch.randn(16, 12, generator=random)).square().mean().backward()
                try:
                    optimizer.step()
                    if number % 2:
                        diloco.drain()
                except CollectiveError as error:
                    told.append((number, str(error)))
                if number % 2:
                    shared.append(copy.deepcopy(list(diloco.algorithm.shared_state().values())))
        weights = [one.full_tensor().detach().clone() for one in model.parameters()]  # type: ignore[attr-defined]
        return {"told": told, "shared": shared, "weights": weights, "skipped": diloco.skipped_steps}

    return {
        "exchange": run("exchange", [3]),
        "agreement of both": run("agreement", [2, 3]),
        "agreement of one": run("agreement", [3]),
        "last agreement": run("last agreement", [3]),
    }


def damaged_states(place: RankLocation) -> dict[str, Any]:
    """What is told of saved states whose tensors do not fit the model, and whether they have left it as it was."""
    place.start()
    training = Training(place.rank, steps=4).steps(3)
    before = training.tensors
    found = {}
    for case, (kind, name, tensor) in {
        "shape": ("weights", "0.weight", torch.zeros(3, 3)),
        "kind": ("weights", "0.weight", "text"),
        "buffer": ("buffers", "1.running_mean", None),
    }.items():
        state = copy.deepcopy(training.diloco.state_dict())
        state[kind][name] = tensor
        with pytest.raises(ValueError, match="saved state") as caught:
            training.diloco.load_state_dict(state)
        found[case] = str(caught.value)
    with pytest.raises(ValueError, match="saved state") as caught:
        Training(place.rank, steps=4, fragments=2).diloco.load_state_dict(training.diloco.state_dict())
    found["options"] = str(caught.value)
    return {**found, "is as before": all(map(torch.equal, before, training.tensors))}


def from_the_first_rank(place: RankLocation) -> dict[str, Any]:
    """Weights and buffers at the start, of ranks that began with others; and after an average, in the midst."""
    place.start()
    torch.manual_seed(place.rank)
    model = net()
    model[1].running_mean.fill_(place.rank)  # type: ignore[union-attr,operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = gradbus.torch.DiLoCo(model, optimizer, steps=100)
    start = copy.deepcopy(model.state_dict())
    for _ in range(3):
        x = torch.randn(16, 12) + place.rank
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    own = copy.deepcopy(model.state_dict())
    diloco.average()
    return {"start": start, "own": own, "mean": model.state_dict(), "sent": diloco.bytes_out}


class WithMethods(nn.Module):
    """A model whose loss may be asked for past ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def methods_of_the_model(place: RankLocation) -> dict[str, Any]:
    """Weights and bytes of runs that call the model, a method of it, and two optimizers of which one steps seldom."""
    place.start()
    found: dict[str, Any] = {}
    for way in ("call", "method", "seldom"):
        model, random = WithMethods(), torch.Generator().manual_seed(place.rank)
        optimizer = torch.optim.SGD([model.layer.weight] if way == "seldom" else model.parameters(), lr=0.1)
        other = torch.optim.SGD([model.layer.bias], lr=0.1)
        if way == "seldom":
            hook = gradbus.torch.with_algorithm(model, [optimizer, other], "diloco", steps=2)
        else:
            hook = gradbus.torch.DiLoCo(model, optimizer, steps=2)
        for number in range(4):
            x = torch.randn(16, 12, generator=random)
            model.zero_grad()
            (model(x).square().mean() if way == "call" else model.loss(x)).backward()
            optimizer.step()
            if way == "seldom" and number % 2:
                other.step()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        found[way] = {"weights": weights, "bytes_out": hook.bytes_out, "steps": hook.state_dict()["steps"]}
    return found


class FailsOnce(StreamingDiLoCo):
    """An exchange fails on all ranks, when its messages have been sent."""

    choice = "fails-once"

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield from super().exchange(bucket, step)
        if step.number == 3:
            raise CollectiveError("the network was away")


def failed_exchange(place: RankLocation) -> dict[str, Any]:
    """Weights of a run whose first exchange failed, and of one with one exchange after twice as many steps."""
    place.start()
    options = {"codec": "fp32"}
    longer = Training(place.rank, steps=8, **options).steps(8).weights
    failing = Training(place.rank, algorithm=f"{__name__}:FailsOnce", steps=4, **options).steps(3)
    with pytest.raises(CollectiveError, match="the network was away"):
        failing.step()
    return {"weights": failing.steps(4).weights, "longer": longer}


class FailsOnOneRank(StreamingDiLoCo):
    """An exchange fails on the second rank, when all messages have come."""

    choice = "fails-on-one-rank"

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield from super().exchange(bucket, step)
        if (step.number, self.place.rank) == (1, 1):
            raise CollectiveError("a message that cannot be read")


def spoilt_exchanges(place: RankLocation) -> dict[str, Any]:
    """What is left of four steps, with an exchange after every second one, of which one is spoilt on the second rank:
    weights overflow in the step with the exchange, or in the one before, or in a part that is not exchanged at the
    time, and late; or its exchange fails."""
    place.start()
    found: dict[str, Any] = {}
    for way, spoilt in {"with exchange": 1, "before it": 0, "late": 1, "failed": 1}.items():
        model = WithMethods()
        streams: dict[str, Any] = {"fragments": 2, "delay": 1} if way == "late" else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        name = f"{__name__}:FailsOnOneRank" if way == "failed" else "diloco"
        diloco = gradbus.torch.with_algorithm(model, [optimizer], name, steps=2, **streams)
        told = ""
        for number in range(4):
            is_spoilt = (place.rank, number) == (1, spoilt)
            overflows = is_spoilt and way in ("with exchange", "before it")
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e30 if overflows else 0.1)
            optimizer.param_groups[0]["lr"] = 1e30 if overflows else 1.0
            if is_spoilt and way == "late":
                model.layer.bias.detach().fill_(torch.inf)
            try:
                optimizer.step()
            except CollectiveError as error:
                told = str(error)
            if number == spoilt:
                own = [parameter.detach().clone() for parameter in model.parameters()]
        diloco.drain()
        found[way] = {
            "told": told, "skipped": diloco.skipped_steps, "steps": diloco.state_dict()["steps"], "own": own,
            "weights": [parameter.detach().clone() for parameter in model.parameters()],
            "shared": {name: tensor.clone() for name, tensor in diloco.algorithm.shared_state().items()},
        }  # fmt: skip
    return found


def restarts(place: RankLocation) -> dict[str, Any]:
    """Weights after each of ten steps, and how many exchanges were skipped, with an exchange after every second one and
    a delay of three. Weights of the second rank overflow before two exchanges begin of which neither has been applied.
    In runs that go on from what was saved after some steps it is what follows."""
    place.start()

    def made() -> tuple[Any, WithMethods, torch.optim.Optimizer]:
        model = WithMethods()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return gradbus.torch.DiLoCo(model, optimizer, steps=4, fragments=2, delay=3, codec="fp32"), model, optimizer

    def steps(run: tuple[Any, WithMethods, torch.optim.Optimizer], *numbers: int) -> list[Tensor]:
        found = []
        _, model, optimizer = run
        for number in numbers:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            if (place.rank, number) == (1, 1):
                model.layer.bias.detach().fill_(torch.inf)
            optimizer.step()
            found.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        return found

    whole = made()
    found: dict[str, Any] = {"start": torch.cat([one.detach().flatten() for one in whole[1].parameters()])}
    found["whole"], found["skipped"] = steps(whole, *range(10)), whole[0].skipped_steps
    for count in (4, 6):  # before the weights are replaced, and after that but before the second exchange is applied
        first = made()
        steps(first, *range(count))
        state, skipped = copy.deepcopy(first[0].state_dict()), first[0].skipped_steps
        again = made()
        again[0].load_state_dict(state)
        found[f"after {count}"] = steps(again, *range(count, 10))
        found[f"skipped after {count}"] = skipped + again[0].skipped_steps
    return found


def lost_verdict(place: RankLocation) -> dict[str, Any]:
    """Six steps with an exchange after every second one. The second rank does not learn whether the first exchange
    counts on all ranks."""
    place.start()
    model, told = WithMethods(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = gradbus.torch.DiLoCo(model, optimizer, steps=2)
    weights, is_lost = weights_of(diloco), iter([place.rank == 1])  # the first one
    all_are = weights.all_are

    def loses_first(is_finite: bool) -> bool:
        agreed = all_are(is_finite)
        if next(is_lost, False):
            raise CollectiveError("the network was away")
        return agreed

    with patch.object(weights, "all_are", loses_first):
        for number in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            try:
                optimizer.step()
            except CollectiveError as error:
                told.append((number, str(error)))
        diloco.drain()
    return {"told": told, "steps": diloco.state_dict()["steps"], "skipped": diloco.skipped_steps}


def refusals(place: RankLocation) -> dict[str, str]:
    """What is refused at the start."""
    place.start()
    found = {}
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD
    for name, (wrapped, outer, options) in {
        "adam": (model, torch.optim.Adam(model.parameters()), {}),
        "plain momentum": (model, sgd(model.parameters(), lr=0.7, momentum=0.9), {}),
        "decay": (model, sgd(model.parameters(), lr=0.7, weight_decay=0.1), {}),
        "option": (model, None, {"fragment": 3}),
        "wrapped": (nn.parallel.DistributedDataParallel(net()), None, {}),
    }.items():
        with pytest.raises(ConfigError) as caught:
            gradbus.torch.DiLoCo(wrapped, inner, outer, **options)
        found[name] = str(caught.value)
    with pytest.raises(ConfigError) as caught:
        gradbus.torch.DiLoCo(model, inner, steps=10 + dist.get_rank())
    found["ranks"] = str(caught.value)
    with (
        patch.object(WeightExchange, "__init__", side_effect=CollectiveError("a rank was lost")),
        pytest.raises(CollectiveError, match="a rank was lost"),
    ):
        gradbus.torch.DiLoCo(model, inner, steps=10)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.randn(4, 12)).sum().backward()
    inner.step()  # as if nothing had been tried
    has_stepped = not all(map(torch.equal, before, (parameter.detach() for parameter in model.parameters())))
    return {**found, "failed": "stepped" if has_stepped else "not stepped"}
