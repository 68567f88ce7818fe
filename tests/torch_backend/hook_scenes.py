"""Training with the communication hooks of gradbus.torch.hooks, on any backend."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hooked_training import EVERY, LR, NAMED, SMALL_BUCKETS, STEPS, Net, Run, digest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

from gradbus.runtime.algorithms.dense import Dense
from gradbus.torch import hooks

WITH_MEMORY = ("dgc", "dgc fp16", "top k")


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
        "unused parameters": {"find_unused_parameters": True, "gradient_as_bucket_view": True, **SMALL_BUCKETS},
        "accumulation": SMALL_BUCKETS,
    }
    results: dict[str, dict[str, list[str]]] = {}
    for hook in EVERY:
        results[hook] = {}
        for way in ways if hook in ("dgc", "top k") else [*ways][:3] if hook in NAMED else ["unused parameters"]:
            options = ways[way]
            run = Run(hook, **options)
            for step in range(STEPS):
                # Nobody uses the layer in step 2, only some ranks do in the odd ones.
                skip = way == "unused parameters" and (step == 2 or (step % 2 == 1 and place.rank == 0))
                run.step(place, step, skip=skip, parts=2 if way == "accumulation" else 1)
            results[hook][way] = run.digests
    return results


def bytes_of_a_step(place: RankLocation) -> dict[str, list[int]]:
    """Bytes of the third step, and of its gradients, by hook."""
    found = {}
    for hook in NAMED:
        run = Run(hook, **SMALL_BUCKETS)
        run.state.leaves_out_unused = False
        for step in range(2):
            run.step(place, step)
        before = run.state.bytes_out, run.state.dense_bytes
        run.step(place, 2)
        found[hook] = [run.state.bytes_out - before[0], run.state.dense_bytes - before[1]]
    return found


def warm_up(place: RankLocation) -> dict[str, list[int]]:
    """Bytes of a step in each of three epochs; and in the last two, where a state was loaded after the first."""

    def sizes_of(run: Run, state: Any, *epochs: int) -> list[int]:
        sizes = []
        for epoch in epochs:
            state.start_epoch(epoch)
            before = state.bytes_out
            run.step(place, epoch)
            sizes.append(state.bytes_out - before)
        return sizes

    found = {}
    run, state = with_warm_up()
    found["started"] = sizes_of(run, state, 0)
    saved = copy.deepcopy((run.model.state_dict(), state.state_dict()))
    found["started"] += sizes_of(run, state, 1, 2)
    run, state = with_warm_up()
    run.model.load_state_dict(saved[0])
    state.load_state_dict(saved[1])
    return {**found, "loaded": sizes_of(run, state, 1, 2)}


def with_warm_up() -> tuple[Run, Any]:
    run = Run("bf16")
    run.ddp = DistributedDataParallel(run.model)
    run.state = hooks.DgcHookState(run.model.named_parameters(), density=0.01, warmup=(0.25, 0.05))
    run.ddp.register_comm_hook(run.state, hooks.dgc)
    return run, run.state


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
            make, function, options = NAMED[name]
            ddp.register_comm_hook(make(model.named_parameters(), **options), function)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if name == "dgc" else 0.9)
        batches = torch.Generator().manual_seed(place.rank)
        for _ in range(60):
            chosen = torch.randint(0, 2000, (32,), generator=batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x[chosen]), y[chosen]).backward()
            optimizer.step()
        found[name] = nn.functional.cross_entropy(model(x), y).item()
    return found


# Saved and loaded


def saved_halfway(place: RankLocation) -> dict[str, list[str]]:
    """Digests of steps 6 to 11 of a training that was saved before them."""
    found = {}
    for hook in NAMED:
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
    for hook in NAMED:
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
        make, function, options = NAMED[hook]
        model, usual = Product(torch.channels_last), Product(torch.contiguous_format)
        state, other = (make(one.named_parameters(), **options) for one in (model, usual))
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, function)
        gradient = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(place.rank))
        ddp(gradient).backward()
        other.load_state_dict(state.state_dict())
        waiting = f"{'residual' if hook == 'top k' else 'V'}/weight"
        first, second = (one.state_dict()["own"][waiting].reshape(gradient.shape) for one in (state, other))
        kept = first.abs() > 0.2  # less may be what rounding has left of an entry that was sent
        found[hook] = torch.equal(first, second) and bool(kept.any()) and torch.equal(first[kept], gradient[kept])
    for name in ("qadam", "onebit-adam"):
        model = Product(torch.channels_last)
        adam = hooks.HookState(model.named_parameters(), name)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(adam, hooks.exchange)
        of_ranks = [torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        ddp(of_ranks[place.rank]).backward()
        m = adam.state_dict()["shared"]["m/weight"]
        step = grad_of(model.weight)
        found[name] = torch.allclose(m, 0.05 * (of_ranks[0] + of_ranks[1])) and torch.equal(step.sign(), m.sign())
    return found


# Gradients that are missing, or no numbers


def not_finite(place: RankLocation) -> dict[str, dict[str, Any]]:
    """One rank has an infinite gradient in one entry of one parameter, under a loss scaler."""
    found = {}
    for hook in NAMED:
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
        skipped = run.state.skipped_steps
        found[hook] = {
            "bad": bad,
            "digests": run.digests,
            "scale": scaler.get_scale(),
            "finite": finite,
            "skipped": skipped,
        }
    return found


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def memory_of(run: Run) -> dict[str, Tensor]:
    """What the hook remembers, by kind and parameter; a copy."""
    saved = run.state.state_dict()
    return {name: tensor.clone() for name, tensor in {**saved["own"], **saved["shared"]}.items()}


def taken_back(place: RankLocation) -> dict[str, float]:
    """How far what is kept after a step that was taken back is from what it should be, by hook and parameter."""
    found = {}
    for hook in WITH_MEMORY:
        run = Run(hook, **SMALL_BUCKETS)
        for step in range(2):
            run.step(place, step)
        before = memory_of(run)
        named = dict(run.model.named_parameters())
        gradients = dict(
            zip(named, torch.autograd.grad(run.loss(place, 2, wrapped=False), list(named.values())), strict=True)
        )
        run.optimizer.zero_grad()
        run.loss(place, 2).backward()
        run.state.undo_step()
        after = memory_of(run)
        for key, old in before.items():
            kind, _, name = key.partition("/")
            if kind == "V":
                old = old + 0.9 * before[f"U/{name}"] + gradients[name]
            if kind not in ("U", "samples"):
                found[f"{hook} {key}"] = float((after[key] - old).abs().max())
    return found


def unused_by_all(place: RankLocation) -> dict[str, bool]:
    """Whether a step that leaves a layer out on all ranks leaves alone what is remembered for it."""
    found = {}
    for hook in WITH_MEMORY:
        run = Run(hook, find_unused_parameters=True, **SMALL_BUCKETS)
        for step in range(2):
            run.step(place, step, skip=step == 0)  # not even the first step has all parameters
        before = memory_of(run)
        run.step(place, 2, skip=True)
        after = memory_of(run)
        same = {key: torch.equal(old, after[key]) for key, old in before.items()}
        found |= {f"{hook} {key}": rests for key, rests in same.items() if "/sometimes." in key}
        assert not all(rests for key, rests in same.items() if "/last." in key)
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
    yield "weights", told(lambda: hooks.HookState(named, "decentralized"))
    yield "options", told(lambda: hooks.DgcHookState(named, nesterov=place.rank == 1))
    only_first = dist.new_group([0])
    if place.rank == 1:
        yield "group", told(lambda: hooks.DgcHookState(named, process_group=only_first))

    yield "state", told(lambda: backward(model, hooks.TopKHookState(named), hooks.dgc))
    yield "unknown", told(lambda: backward(model, hooks.Bf16HookState(named[2:]), hooks.bf16))
    yield "sparse", told(sparse_gradients)
    yield "epoch", told(lambda: backward(model, hooks.DgcHookState(named, warmup=(0.25,)), hooks.dgc))
    silent = hooks.HookState(named, f"{__name__}:NeedsLoss")
    backward(model, silent, hooks.exchange)
    yield "loss", told(lambda: backward(model, silent, hooks.exchange))

    state = hooks.DgcHookState(named)
    backward(model, state, hooks.dgc)
    saved = copy.deepcopy(state.state_dict())
    yield "world", told(lambda: state.load_state_dict({**saved, "world": 3}))
    yield "other hook", told(lambda: state.load_state_dict(hooks.TopKHookState(named).state_dict()))
    yield "names", told(lambda: hooks.DgcHookState(named[1:]).load_state_dict(saved))
    other = hooks.DgcHookState(named, min_numel=10**6)
    yield "min_numel", told(lambda: other.load_state_dict(saved))
    yield (
        "damaged",
        told(lambda: state.load_state_dict({**saved, "own": {"V/last.weight": torch.full((3,), math.nan)}})),
    )
    bf16 = hooks.Bf16HookState(named)
    bf16.load_state_dict({**bf16.state_dict(), "world": 3})  # nothing in it belongs to a rank
    yield "steps", told(lambda: bf16.load_state_dict({**bf16.state_dict(), "steps": 5 * place.rank}))
    only_one = {**bf16.state_dict(), "algorithm": "dense" if place.rank else "densest"}
    yield "one rank", told(lambda: bf16.load_state_dict(only_one))


class NeedsLoss(Dense):
    """An algorithm that asks for the loss."""

    choice = "needs-loss"
    needs_loss = True


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
    ddp(torch.ones(2, 1, 8, 8)).sum().backward()


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
        bytes_of_a_step,
        warm_up,
        final_losses,
        saved_halfway,
        memory_formats,
        not_finite,
        taken_back,
        unused_by_all,
        mistakes,
    ):
        results[scene.__name__] = scene(place)
    return results
