"""Training with the communication hooks of gradbus.torch.hooks, on any backend."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hooked_training import HOOKS, LR, SMALL_BUCKETS, STEPS, Net, Run, digest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

from gradbus.torch import hooks

VARIANTS = ("dgc fp16", "top k int8")  # of other hooks: some ways are enough
WITH_MEMORY = ("dgc", "dgc fp16", "top k", "top k int8")


def every_way(place: RankLocation) -> dict[str, dict[str, list[str]]]:
    """Digests of the parameters after each step, by hook and way."""
    place.start()
    given = dist.new_group(list(range(place.world)))
    ways: dict[str, dict[str, Any]] = {
        "one bucket": {},
        "several buckets": SMALL_BUCKETS,
        "gradients as views": {"gradient_as_bucket_view": True, **SMALL_BUCKETS},
        "static graph": {"static_graph": True, **SMALL_BUCKETS},
        "a given group": {"process_group": given, **SMALL_BUCKETS},
        "unused parameters": {"find_unused_parameters": True, **SMALL_BUCKETS},
        "accumulation": SMALL_BUCKETS,
    }
    results: dict[str, dict[str, list[str]]] = {}
    for hook in HOOKS:
        results[hook] = {}
        for way, options in ways.items():
            if hook in VARIANTS and way not in ("one bucket", "several buckets", "unused parameters"):
                continue
            run = Run(hook, **options)
            for step in range(STEPS):
                # Nobody uses the layer in step 2, only some ranks do in the odd ones.
                skip = way == "unused parameters" and (step == 2 or (step % 2 == 1 and place.rank == 0))
                run.step(place, step, skip=skip, parts=2 if way == "accumulation" else 1)
            results[hook][way] = run.digests
    return results


def collectives(place: RankLocation) -> dict[str, list[int]]:
    """Collectives and messages of two steps, and the bytes of a message against dense ones, by hook."""
    found = {}
    for hook in HOOKS:
        run = Run(hook, **SMALL_BUCKETS)
        for step in range(3):
            run.step(place, step)
        state, group = run.state, dist.group.WORLD
        assert group is not None
        before = group._get_sequence_number_for_group(), state.messages, state.bytes_out, state.dense_bytes
        for step in range(3, 5):
            run.step(place, step)
        after = group._get_sequence_number_for_group(), state.messages, state.bytes_out, state.dense_bytes
        found[hook] = [new - old for new, old in zip(after, before, strict=True)]
    return found


def warm_up(place: RankLocation) -> dict[str, list[int]]:
    """Bytes of a step in each of three epochs; then of the last two, where a state was loaded after the second."""

    def sizes_of(*epochs: int | None) -> list[int]:
        sizes = []
        for step, epoch in enumerate(epochs):
            if epoch is not None:
                state.start_epoch(epoch)
            before = state.bytes_out
            run.step(place, step)
            sizes.append(state.bytes_out - before)
        return sizes

    run, state = with_warm_up()
    found = {"started": sizes_of(0, 1, 2)}
    run, state = with_warm_up()
    state.start_epoch(1)
    saved = state.state_dict()
    run, state = with_warm_up()
    state.load_state_dict(saved)
    return {**found, "loaded": sizes_of(None, 2)}


def with_warm_up() -> tuple[Run, hooks.DgcHookState]:
    run = Run("")
    state = hooks.DgcHookState(run.model.named_parameters(), density=0.01, warmup=(0.25, 0.05))
    run.ddp.register_comm_hook(state, hooks.dgc)
    return run, state


# Learning


def final_losses(place: RankLocation) -> dict[str, float]:
    """Of a small network on generated data after 60 steps, without a hook and with each."""
    data = torch.Generator().manual_seed(11)
    centers = torch.randn(5, 20, generator=data)
    y = torch.randint(0, 5, (2000,), generator=data)
    x = centers[y] + 2.0 * torch.randn(2000, 20, generator=data)
    found = {}
    for name in ("dense", "dgc", "top k", "byte grad", "bf16"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))
        ddp = DistributedDataParallel(model)
        if name != "dense":
            make, function = HOOKS[name]
            ddp.register_comm_hook(make(model.named_parameters()), function)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if name == "dgc" else 0.9)
        batches = torch.Generator().manual_seed(place.rank)
        for _ in range(60):
            chosen = torch.randint(0, 2000, (32,), generator=batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x[chosen]), y[chosen]).backward()
            optimizer.step()
        found[name] = nn.functional.cross_entropy(model(x), y).item()
    return found


def everything_sent(place: RankLocation) -> float:
    """The largest difference between DGC at density 1 and torch's SGD with momentum, after some steps."""
    ours, theirs = Run("everything", **SMALL_BUCKETS), Run("", **SMALL_BUCKETS)
    theirs.optimizer = torch.optim.SGD(theirs.model.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        ours.step(place, step)
        theirs.step(place, step)
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


# Saved and loaded


def saved_halfway(place: RankLocation) -> dict[str, list[str]]:
    """Digests of steps 6 to 11 of a training that was saved before them."""
    found = {}
    for hook in HOOKS:
        run = Run(hook, **SMALL_BUCKETS)
        for step in range(6):
            run.step(place, step)
        torch.save({"model": run.model.state_dict(), "hook": run.state.state_dict()}, file_of(place, hook))
        for step in range(6, 12):
            run.step(place, step)
        found[hook] = run.digests[6:]
    return found


def loaded(place: RankLocation) -> dict[str, list[str]]:
    """The same steps, from the files, with other buckets."""
    place.start()
    found = {}
    for hook in HOOKS:
        run = Run(hook, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
        saved = torch.load(file_of(place, hook), weights_only=True)
        run.model.load_state_dict(saved["model"])
        run.state.load_state_dict(saved["hook"])
        for step in range(6, 12):
            run.step(place, step)
        found[hook] = run.digests
    return found


def file_of(place: RankLocation, hook: str) -> Path:
    return Path(place.options["folder"]) / f"{hook}-{place.rank}.pt"


class Product(nn.Module):
    """Its gradient is what it is multiplied with."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4, 3, 3).to(memory_format=memory_format))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


def memory_formats(place: RankLocation) -> dict[str, bool]:
    """Whether each entry is saved in its place, and found there by a model with another order in memory."""
    found = {}
    for hook in WITH_MEMORY:
        make, function = HOOKS[hook]
        model, usual = Product(torch.channels_last), Product(torch.contiguous_format)
        state, other = make(model.named_parameters()), make(usual.named_parameters())
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, function)
        gradient = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(place.rank))
        ddp(gradient).backward()
        other.load_state_dict(state.state_dict())
        waiting = {"dgc": "V", "top": "residual"}[hook.split()[0]]
        first, second = (one.state_dict()["parameters"]["weight"][waiting] for one in (state, other))
        kept = first.abs() > 0.2  # less may be what rounding has left of an entry that was sent
        found[hook] = torch.equal(first, second) and bool(kept.any()) and torch.equal(first[kept], gradient[kept])
    return found


# Gradients that are missing, or no numbers


def not_finite(place: RankLocation) -> dict[str, dict[str, Any]]:
    """One rank has an infinite gradient in one entry of one parameter, under a loss scaler."""
    found = {}
    for hook in HOOKS:
        run = Run(hook, lr=LR / 4, **SMALL_BUCKETS)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        bad: list[str] = []
        for step in range(4):
            run.optimizer.zero_grad()
            loss = run.loss(place, step)
            if step == 2 and place.rank == 1:
                loss = loss + run.model.last.weight[0, 0] * math.inf
            scaler.scale(loss).backward()
            named = run.model.named_parameters()
            bad += [name for name, parameter in named if not grad_of(parameter).isfinite().all()]
            scaler.step(run.optimizer)
            scaler.update()
            run.digests.append(digest(run.model))
        finite = all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
        found[hook] = {"bad": bad, "digests": run.digests, "scale": scaler.get_scale(), "finite": finite}
    return found


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def memory_of(run: Run) -> dict[str, dict[str, Any]]:
    """What the hook remembers, by parameter; a copy."""
    parameters: dict[str, dict[str, Any]] = copy.deepcopy(run.state.state_dict()["parameters"])
    return parameters


def taken_back(place: RankLocation) -> dict[str, float]:
    """How far what is owed after a step that was taken back is from all that was there, by hook and parameter."""
    found = {}
    for hook in WITH_MEMORY:
        run = Run(hook, **SMALL_BUCKETS)
        for step in range(2):
            run.step(place, step)
        before = memory_of(run)
        names = [name for name, _ in run.model.named_parameters()]
        gradients = torch.autograd.grad(run.loss(place, 2, wrapped=False), list(run.model.parameters()))
        run.optimizer.zero_grad()
        run.loss(place, 2).backward()
        run.state.take_back()
        after = memory_of(run)
        for name, gradient in zip(names, gradients, strict=True):
            old, new = before[name], after[name]
            if "residual" in old:
                found[f"{hook} {name}"] = float((new["residual"] - (old["residual"] + gradient)).abs().max())
            elif "V" in old:
                expected = old["V"] + 0.9 * old["U"] + gradient
                found[f"{hook} {name}"] = float((new["V"] - expected).abs().max())
            elif "M" in old:
                found[f"{hook} {name}"] = float((new["M"] - old["M"]).abs().max())
    return found


def unused_by_all(place: RankLocation) -> dict[str, bool]:
    """Whether a step that leaves a layer out on all ranks leaves alone what is remembered for it."""
    found = {}
    for hook in WITH_MEMORY:
        run = Run(hook, find_unused_parameters=True, **SMALL_BUCKETS)
        for step in range(2):
            run.step(place, step)
        before = memory_of(run)
        run.step(place, 2, skip=True)
        after = memory_of(run)
        for name in ("sometimes.weight", "sometimes.bias"):
            tensors = [key for key, value in before[name].items() if isinstance(value, Tensor)]
            found[f"{hook} {name}"] = all(torch.equal(before[name][key], after[name][key]) for key in tensors)
        assert not torch.equal(next(iter(before["last.weight"].values())), next(iter(after["last.weight"].values())))
    return found


# Mistakes


def mistakes(place: RankLocation) -> dict[str, str]:
    """What each is told."""
    return dict(_mistakes(place))


def _mistakes(place: RankLocation) -> Iterator[tuple[str, str]]:
    model = Net()
    named = list(model.named_parameters())
    yield "float64", told(lambda: hooks.TopKHookState(nn.Linear(2, 2).double().named_parameters()))
    yield "device", told(lambda: hooks.Bf16HookState(nn.Linear(2, 2, device="meta").named_parameters()))
    yield "twice", told(lambda: hooks.Bf16HookState([*named, named[0]]))
    yield "nothing", told(lambda: hooks.Bf16HookState([]))
    yield "density", told(lambda: hooks.DgcHookState(named, density=100))
    only_first = dist.new_group([0])
    if place.rank == 1:
        yield "group", told(lambda: hooks.DgcHookState(named, process_group=only_first))

    yield "state", told(lambda: backward(model, hooks.TopKHookState(named), hooks.dgc))
    yield "unknown", told(lambda: backward(model, hooks.Bf16HookState(named[2:]), hooks.bf16))
    yield "sparse", told(sparse_gradients)
    yield "epoch", told(lambda: backward(model, hooks.DgcHookState(named, warmup=(0.25,)), hooks.dgc))
    yield "options", told(lambda: backward(model, hooks.DgcHookState(named, nesterov=place.rank == 1), hooks.dgc))
    ahead = hooks.Bf16HookState(named)
    ahead.load_state_dict({**ahead.state_dict(), "steps": 5 * place.rank})
    yield "steps", told(lambda: backward(model, ahead, hooks.bf16))

    state = hooks.DgcHookState(named)
    saved = copy.deepcopy(state.state_dict())
    saved["parameters"]["conv.weight"]["U"].fill_(1.0)
    yield "world", told(lambda: state.load_state_dict({**saved, "world": 3}))
    yield "other hook", told(lambda: state.load_state_dict(hooks.TopKHookState(named).state_dict()))
    yield "names", told(lambda: hooks.DgcHookState(named[1:]).load_state_dict(saved))
    yield "min_numel", told(lambda: hooks.DgcHookState(named, min_numel=10**6).load_state_dict(saved))
    damaged = copy.deepcopy(saved)
    damaged["parameters"]["last.weight"]["V"] = torch.ones(3)
    yield "damaged", told(lambda: state.load_state_dict(damaged))
    assert not state.state_dict()["parameters"]["conv.weight"]["U"].any(), "changed by a state that was refused"
    state.load_state_dict(saved)
    assert state.state_dict()["parameters"]["conv.weight"]["U"].all()
    bf16 = hooks.Bf16HookState(named)
    bf16.load_state_dict({**bf16.state_dict(), "world": 3})  # nothing in it belongs to a rank


def told(action: Callable[[], Any]) -> str:
    """The error that ``action`` ends in."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def backward(model: nn.Module, state: Any, hook: Any) -> None:
    """One backward pass with a hook."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)
    ddp(torch.zeros(2, 1, 8, 8)).sum().backward()


def sparse_gradients() -> None:
    """A backward pass with an embedding whose gradient is sparse."""
    model = nn.Embedding(10, 4, sparse=True)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(hooks.TopKHookState(model.named_parameters()), hooks.top_k)
    ddp(torch.tensor([1, 2])).sum().backward()


def dds_all(place: RankLocation) -> dict[str, Any]:
    """All scenes that need no second backend, in one set of processes."""
    results: dict[str, Any] = {"every_way": every_way(place)}
    for scene in (
        collectives, warm_up, final_losses, everything_sent, saved_halfway, memory_formats, not_finite, taken_back,
        unused_by_all, mistakes,
    ):  # fmt: skip
        results[scene.__name__] = scene(place)
    return results
