"""Training with every algorithm through a communication hook."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.dense import Dense
from gradbus.runtime.algorithms.powersgd import PowerSGD
from gradbus.runtime.choices import ALGORITHMS
from gradbus.runtime.errors import ConfigError, ReplicasDiverged
from gradbus.torch import AlgorithmHook, with_algorithm

STEPS = 6
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}
OPTIONS: dict[str, dict[str, Any]] = {
    "qadam": {"warmup_steps": 3, "eps": 1e-3},
    "onebit-adam": {"warmup_steps": 3, "eps": 1e-3},
    "local-sgd": {"steps": 3},
    "post-local-sgd": {"steps": 3, "dense_steps": 1},
    "diloco": {"steps": 3},
    "sparseloco": {"steps": 3},
    "noloco": {"steps": 3},
    "dgc": {"warmup": "none", "density": 0.05, "momentum": 0.5},
}
WITHOUT_MOMENTUM = {"qadam", "onebit-adam", "dgc"}  # the optimizer


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(16, 24, generator=random), torch.randint(4, (16,), generator=random)


class Training:
    """A model of one rank, its optimizer, and the hook if there is an algorithm."""

    def __init__(self, rank: int, algorithm: str = "", **options: Any) -> None:
        self.rank = rank
        self.step_number = 0
        self.losses: list[float] = []
        self.model = DistributedDataParallel(net(), **SMALL_BUCKETS)
        momentum = 0.0 if algorithm in WITHOUT_MOMENTUM else 0.9
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=momentum)
        self.hook: AlgorithmHook | None = None
        if algorithm:
            self.hook = with_algorithm(self.model, [self.optimizer], algorithm, **options)

    def backward(self) -> None:
        x, wanted = batch(self.rank, self.step_number)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), wanted).backward()
        self.step_number += 1

    def apply(self, gradients: list[Tensor | None] | None) -> None:
        """Step with these gradients, or pass over all parameters."""
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = None if gradients is None else gradients[number]
        self.optimizer.step()

    def step(self, *, spoilt: bool = False, counts: bool = True) -> None:
        x, wanted = batch(self.rank, self.step_number)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), wanted)
        (loss * torch.nan if spoilt else loss).backward()
        if self.hook is not None:
            self.hook.report_loss(loss)
            self.losses.append(loss.item())
        self.optimizer.step()
        self.step_number += counts

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.step()
        return self

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def every_algorithm(place: RankLocation) -> dict[str, Any]:
    """The weights after some steps, by algorithm; ``""``: without one."""
    place.start()
    return {
        name: Training(place.rank, name, **OPTIONS.get(name, {})).steps(STEPS).weights
        for name in ("", *ALGORITHMS.table)
    }


def powersgd_and_torchs_hook(place: RankLocation) -> dict[str, Any]:
    """Weights with our algorithm, and with the hook of torch, from the same first Q."""
    place.start()
    found = {}
    for ours in (True, False):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        names = [name for name, parameter in model.module.named_parameters() if parameter.dim() > 1]
        shapes = {name: parameter.shape for name, parameter in model.module.named_parameters()}
        qs = {n: torch.randn(shapes[n][1], 2, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(names)}
        if ours:
            hook = with_algorithm(model, [optimizer], "powersgd", rank=2, min_rate=1.0, start_step=2)
            assert isinstance(hook.algorithm, PowerSGD)
            hook.algorithm.memory.load({f"q/{name}": q for name, q in qs.items()}, frozenset({"q"}))
        else:
            state = power_sgd.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
            )
            model.register_comm_hook(state, power_sgd.powerSGD_hook)
            order = names[::-1]  # that of DDP's buckets from the second step on
            flat = torch.cat([qs[name].reshape(-1) for name in order])
            state.q_memory_dict[0] = flat
            state.p_memory_dict[0] = torch.empty(sum(shapes[name][0] * 2 for name in order))
        for number in range(6):
            x, wanted = batch(place.rank, number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), wanted).backward()
            optimizer.step()
        found["ours" if ours else "torch"] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def spoilt_steps(place: RankLocation) -> dict[str, Any]:
    """Weights of a run in which the loss of the last rank is not finite twice, and of one without these steps. Those
    that have local steps exchange in each: in a step without an exchange the other ranks would go on."""
    place.start()
    found: dict[str, Any] = {}
    for name in ALGORITHMS.table:
        options = {key: 1 if key == "steps" else value for key, value in OPTIONS.get(name, {}).items()}
        undisturbed = Training(place.rank, name, **options).steps(4).weights
        training = Training(place.rank, name, **options).steps(2)
        for _ in range(2):
            training.step(spoilt=place.rank == place.world - 1, counts=False)
        assert training.hook is not None
        found[name] = {"skipped": training.hook.skipped_steps, "weights": training.steps(2).weights, "as": undisturbed}
    return found


def resumed(place: RankLocation) -> dict[str, Any]:
    """Weights of a run, and of one that goes on from the saved state of its middle."""
    place.start()
    found: dict[str, Any] = {}
    for name in ALGORITHMS.table:
        options = OPTIONS.get(name, {})
        first = Training(place.rank, name, **options).steps(3)
        assert first.hook is not None
        saved = (first.model.state_dict(), first.optimizer.state_dict(), first.hook.state_dict())
        second = Training(place.rank, name, **options)
        assert second.hook is not None
        for part, state in zip((second.model, second.optimizer, second.hook), saved, strict=True):
            part.load_state_dict({**state})  # type: ignore[arg-type]
        second.step_number = 3
        expected = Training(place.rank, name, **options).steps(6).weights
        found[name] = {"weights": second.steps(3).weights, "as": expected}
    return found


def in_the_midst_of_other_calls(place: RankLocation) -> dict[str, Any]:
    """Weights where DDP has calls of its own in a backward pass, and where two models share one."""
    place.start()

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = net(), nn.Linear(4, 4)

        def forward(self, x: Tensor, uses: bool) -> Tensor:
            found: Tensor = self.always(x)
            return self.sometimes(found) if uses else found

    model = DistributedDataParallel(Sometimes(), find_unused_parameters=True, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with_algorithm(model, optimizer, "powersgd", rank=2)
    for number in range(4):
        x, wanted = batch(place.rank, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, number % 2 == 0), wanted).backward()
        optimizer.step()
    found = {"unused": [parameter.detach().clone() for parameter in model.parameters()]}
    both = [DistributedDataParallel(net(), **SMALL_BUCKETS) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.02) for one in both]
    for one, its in zip(both, optimizers, strict=True):
        with_algorithm(one, [its], "topk")
    for number in range(3):
        x, wanted = batch(place.rank, number)
        for its in optimizers:
            its.zero_grad()
        nn.functional.cross_entropy(both[0](x) + both[1](x), wanted).backward()
        for its in optimizers:
            its.step()
    found["two"] = [parameter.detach().clone() for one in both for parameter in one.parameters()]
    return found


def several_optimizers(place: RankLocation) -> dict[str, Any]:
    """Weights where means are taken after the steps of one optimizer, of two, and of two in the order that was not
    given; and where the second one steps in no pass but the last."""
    place.start()
    found: dict[str, Any] = {}
    for way in ("one", "two", "other order", "second at the end"):
        model = net()
        halves = [list(model.parameters())[:2], list(model.parameters())[2:]]
        groups = [list(model.parameters())] if way == "one" else halves
        optimizers = [torch.optim.SGD(group, lr=0.02, momentum=0.9) for group in groups]
        with_algorithm(model, optimizers, "async-averaging", delay_steps=0, every_steps=1)
        for number in range(4):
            x, wanted = batch(place.rank, number)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), wanted).backward()
            steps = optimizers[:1] if way == "second at the end" and number < 3 else optimizers
            for optimizer in reversed(steps) if way == "other order" else steps:
                optimizer.step()
        found[way] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def a_failing_program(place: RankLocation) -> dict[str, Any]:
    """What backward() raises where an algorithm fails, and what its memory is after that."""
    place.start()
    training = Training(place.rank, f"{__name__}:Fails")
    with pytest.raises(RuntimeError) as caught:
        training.step()
    return {"error": str(caught.value)}


def a_rank_that_stands_still(place: RankLocation) -> dict[str, Any]:
    """How long the first rank waits in its step for the second one, in a group with a deadline of its own."""
    place.start()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    dist.distributed_c10d.set_timeout(timedelta(seconds=3), group)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with_algorithm(model, [optimizer], "local-sgd", steps=1, process_group=group)
    store = place.store
    started_s = time.monotonic()
    if place.rank == 0:
        with pytest.raises(RuntimeError):
            optimizer.step()
        store.set("told", "")
    else:
        store.wait(["told"], timedelta(seconds=50))
    return {"waited_s": time.monotonic() - started_s}


def ranks_in_another_order(place: RankLocation) -> dict[str, Any]:
    """Weights where the group of DDP has the ranks in their order, and in another one."""
    place.start()
    found = {}
    for order in ([0, 1], [1, 0]):
        group = dist.new_group(order, sort_ranks=False)
        model = DistributedDataParallel(net(), process_group=group, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with_algorithm(model, [optimizer], "bytegrad")
        for number in range(3):
            x, wanted = batch(place.rank, number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), wanted).backward()
            optimizer.step()
        found[str(order)] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def late_gradients(place: RankLocation) -> dict[str, Any]:
    """Weights where a step takes the gradients of one before: with a hook, by hand, and going on from a saved state."""
    place.start()
    found: dict[str, Any] = {}
    for delay in (1, 2):
        training = Training(place.rank, "dense", delay_steps=delay)
        found[f"hook {delay}"] = training.steps(4).weights
        assert training.hook is not None
        saved = copy.deepcopy(
            (training.model.state_dict(), training.optimizer.state_dict(), training.hook.state_dict())
        )
        found[f"drained {delay}"] = drained(training.steps(2))
        for smaller in range(delay):
            other = Training(place.rank, "dense", delay_steps=smaller).hook
            found[f"{delay} loaded into {smaller}"] = told(other, saved[2])
        by_hand = Training(place.rank)
        waiting: list[list[Tensor | None]] = []
        for number in range(6):
            by_hand.backward()
            gradients = [parameter.grad for parameter in by_hand.model.parameters()]
            waiting.append([None if one is None else one.clone() for one in gradients])
            by_hand.apply(waiting.pop(0) if len(waiting) > delay else None)
            if number == 3:
                found[f"by hand {delay}"] = by_hand.weights
        for means in waiting:
            by_hand.apply(means)
        found[f"drained by hand {delay}"] = by_hand.weights
        again = Training(place.rank, "dense", delay_steps=delay)
        assert again.hook is not None
        for part, state in zip((again.model, again.optimizer, again.hook), saved, strict=True):
            part.load_state_dict(state)  # type: ignore[arg-type]
        renamed = [{**one, "tensors": {"another": torch.zeros(3)}} for one in saved[2]["waiting"]]
        found[f"of another model {delay}"] = told(again.hook, {**saved[2], "waiting": renamed})
        again.step_number = 4
        found[f"resumed {delay}"] = drained(again.steps(2))
    spoilt = Training(place.rank, "topk", delay_steps=1).steps(2)
    spoilt.step(spoilt=place.rank == 1)
    found["spoilt"] = drained(spoilt.steps(2))
    assert spoilt.hook is not None
    found["skipped"] = spoilt.hook.skipped_steps
    return found


def late_gradients_at_predicted_weights(place: RankLocation) -> dict[str, Any]:
    """Weights of a rank that is alone, by its delay; of two together, going on from a saved state, and after a step
    that is not finite; and those that a model has before its optimizer's step, and in an evaluation."""
    place.start()
    found: dict[str, Any] = {}
    alone = [dist.new_group([rank]) for rank in range(place.world)][place.rank]
    for delay in (0, 1, 2):
        training = Training(place.rank)
        training.model = DistributedDataParallel(net(), process_group=alone, **SMALL_BUCKETS)
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        training.hook = with_algorithm(
            training.model, [training.optimizer], "dense", delay_steps=delay, predicts_weights=delay > 0
        )
        found[f"alone {delay}"] = drained(training.steps(6))
    late = {"delay_steps": 1, "predicts_weights": True}
    together = Training(place.rank, "powersgd", **late).steps(3)
    assert together.hook is not None
    saved = copy.deepcopy((together.model.state_dict(), together.optimizer.state_dict(), together.hook.state_dict()))
    found["before"] = together.weights
    together.backward()
    found["ahead"] = together.weights
    with torch.no_grad():
        together.model(batch(0, 0)[0])
    found["in an evaluation"] = together.weights
    together.optimizer.step()
    found["together"] = drained(together.steps(2))
    again = Training(place.rank, "powersgd", **late)
    assert again.hook is not None
    for part, state in zip((again.model, again.optimizer, again.hook), saved, strict=True):
        part.load_state_dict(state)  # type: ignore[arg-type]
    again.step_number = 3
    found["resumed"] = drained(again.steps(3))
    spoilt = Training(place.rank, "dense", **late).steps(2)
    spoilt.step(spoilt=place.rank == 1)
    found["spoilt"] = drained(spoilt.steps(2))
    assert spoilt.hook is not None
    found["skipped"] = spoilt.hook.skipped_steps
    return found


def told(hook: AlgorithmHook | None, state: dict[str, Any]) -> str:
    """Why a hook refuses a state."""
    assert hook is not None
    with pytest.raises(ValueError, match="saved state of with_algorithm") as caught:
        hook.load_state_dict(state)
    return str(caught.value)


def drained(training: Training) -> list[Tensor]:
    """The weights after all that waits."""
    assert training.hook is not None
    while training.hook.drain():
        training.optimizer.step()
    return training.weights


def late_weights(place: RankLocation) -> dict[str, Any]:
    """Weights where their means of every third step are applied some steps later: with a hook, and by hand."""
    place.start()
    found: dict[str, Any] = {"1 loaded into 0": late_weights_without_a_delay(place)}
    for delay in (0, 1, 3):
        for with_hook in (True, False):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            hook = None
            if with_hook:
                hook = with_algorithm(model, [optimizer], "async-averaging", delay_steps=delay, every_steps=3)
            waiting: list[tuple[int, list[Tensor]]] = []
            for number in range(7):
                if hook is not None and number == 4:
                    hook.load_state_dict(copy.deepcopy(hook.state_dict()))
                x, wanted = batch(place.rank, number)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), wanted).backward()
                optimizer.step()
                if with_hook:
                    continue
                if delay:
                    add_changes(model, waiting, number - delay)
                if number % 3 == 2:
                    copies = [parameter.detach().clone() for parameter in model.parameters()]
                    means = [parameter.detach().clone() for parameter in model.parameters()]
                    for mean in means:
                        dist.all_reduce(mean)
                        mean.mul_(0.5)
                    changes = [mean - own for mean, own in zip(means, copies, strict=True)]
                    waiting.append((number, changes if delay else means))
                    if not delay:
                        replace(model, waiting.pop()[1])
            if hook is not None:
                hook.drain()
            else:
                add_changes(model, waiting, 7)
            key = f"{'hook' if with_hook else 'by hand'} {delay}"
            found[key] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def late_weights_without_a_delay(place: RankLocation) -> str:
    """Why a hook without a delay refuses a state in which a mean of weights waits."""
    late = Training(place.rank, "async-averaging", delay_steps=1, every_steps=2).steps(2)
    assert late.hook is not None
    in_time = Training(place.rank, "async-averaging", delay_steps=0, every_steps=2)
    return told(in_time.hook, late.hook.state_dict())


@torch.no_grad()
def replace(model: nn.Module, weights: list[Tensor]) -> None:
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)


@torch.no_grad()
def add_changes(model: nn.Module, waiting: list[tuple[int, list[Tensor]]], until: int) -> None:
    while waiting and waiting[0][0] <= until:
        for parameter, change in zip(model.parameters(), waiting.pop(0)[1], strict=True):
            parameter.add_(change)


def losses_and_hashes(place: RankLocation) -> dict[str, Any]:
    """The losses that an algorithm is told, those of this rank, and what is told of weights that differ."""
    place.start()
    training = Training(place.rank, f"{__name__}:Records", hash_every=2)
    assert training.hook is not None
    assert isinstance(training.hook.algorithm, Records)
    training.steps(3)
    training.step(spoilt=True, counts=False)
    training.steps(1)
    own = [training.losses[number] for number in (0, 1, 2, 4)]
    if place.rank == 1:
        with torch.no_grad():
            next(iter(training.model.parameters())).view(-1)[0] += 1
    with pytest.raises(ReplicasDiverged) as caught:
        training.steps(2)
    algorithm = training.hook.algorithm
    told = [algorithm.told[number] for number in range(5)]
    late = Training(place.rank, f"{__name__}:RecordsWeights", delay_steps=1).steps(4)
    assert late.hook is not None
    late.hook.drain()
    assert isinstance(late.hook.algorithm, RecordsWeights)
    of_weights = {"due": late.hook.algorithm.due, "late": late.hook.algorithm.late, "own_late": late.losses}
    overlapping = Training(place.rank, f"{__name__}:RecordsOverlapping").steps(4)
    assert overlapping.hook is not None
    assert isinstance(overlapping.hook.algorithm, RecordsOverlapping)
    of_weights |= {"overlapping": [*overlapping.hook.algorithm.told.values()], "own_overlapping": overlapping.losses}
    return {
        **of_weights,
        "told": told,
        "own": own,
        "ranks": list(caught.value.ranks),
        "hosts": list(algorithm.place.hosts),
    }


class Records(Dense):
    """Keeps the losses that it is told, by the number of the step."""

    choice = "records"
    needs_loss = True

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self.told: dict[int, float] = {}

    def exchange(self, bucket: TensorBucket, step: Step) -> Any:
        self.told[step.number] = step.loss
        yield from super().exchange(bucket, step)


class RecordsWeights(Records):
    """The same of weights, with the losses that it is told where it says what is due, and where a result is late."""

    choice = "records-weights"
    scope = "weights"
    equal_replicas = False

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self.due: list[float] = []
        self.late: list[float] = []

    def is_due(self, step: Step) -> bool:
        self.due.append(step.loss)
        return True

    def applied_late(self, step: Step, live: Tensor, before: Tensor, result: Tensor) -> Tensor:
        self.late.append(step.loss)
        return super().applied_late(step, live, before, result)


class RecordsOverlapping(RecordsWeights):
    """The same, exchanged before the optimizer's step."""

    choice = "records-overlapping"
    overlaps = True


class Fails(Algorithm):
    """Fails in the first bucket."""

    def exchange(self, bucket: TensorBucket, step: Step) -> Any:
        raise ZeroDivisionError("nothing to divide by")
        yield


def refusals(place: RankLocation) -> dict[str, str]:
    """What is refused at the start, and why."""
    place.start()
    told = {}

    def refused(case: str, model: nn.Module, optimizer: torch.optim.Optimizer, name: str, **options: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            with_algorithm(model, [optimizer], name, **options)
        told[case] = str(caught.value)

    model = DistributedDataParallel(net())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("unknown", model, sgd, "powersdg")
    refused("option", model, sgd, "powersgd", rnak=2)
    refused("optimizer", model, torch.optim.Adam(model.parameters()), "qadam")
    refused("momentum", model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "onebit-adam")
    plain = net()
    refused("plain", plain, torch.optim.SGD(plain.parameters(), lr=0.1), "topk")
    of_gpus = dist.new_group(backend="cuda:gloo")
    refused("backend", net(), sgd, "decentralized", process_group=of_gpus)
    refused("device", net().to("meta"), sgd, "topk")
    refused("device of weights", net().to("meta"), sgd, "decentralized")
    unused = DistributedDataParallel(net(), find_unused_parameters=True)
    refused("unused", unused, torch.optim.SGD(unused.parameters(), lr=0.1), "dense", delay_steps=1)
    embedding = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)))
    refused("sparse", embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), "topk")
    given = nn.Embedding.from_pretrained(torch.ones(4, 2), sparse=True)  # has no gradient
    frozen = DistributedDataParallel(nn.Sequential(given, nn.Linear(2, 1)))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in frozen.module]  # one for when it is trained
    with_algorithm(frozen, optimizers, "topk").close()
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, power_sgd.powerSGD_hook)
    refused("hooked", hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), "topk")
    refused("another model", model, torch.optim.SGD(net().parameters(), lr=0.1), "topk")
    refused("hash", model, sgd, "topk", hash_every=-1)
    refused("delay", model, sgd, "dense", delay_steps=-1)
    refused("prediction without a delay", model, sgd, "dense", predicts_weights=True)
    refused(
        "prediction of adam", model, torch.optim.Adam(model.parameters()), "dense", delay_steps=1, predicts_weights=True
    )
    refused("aggregator", model, sgd, "fixed-point", route="ina")
    refused("dtype", DistributedDataParallel(net().double()), sgd, "dense")
    refused("differs", model, sgd, "topk", density=0.1 * (1 + place.rank))
    refused("one rank", model, sgd, "topk" if place.rank else "tokp")
    patterns = {"^0": "dense", "weight": "topk"}
    order = dict(reversed(patterns.items())) if place.rank else patterns
    refused("order", model, sgd, "hybrid", patterns=order)
    dist.barrier()
    return told
