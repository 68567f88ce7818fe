"""Data-parallel runs whose result is known: equal on all ranks, and equal to that of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.experiments.bench_ddp_process import Data, Training, hashes_of_steps, run_ranks
from gradbus.experiments.bench_rows import Row, at_most, one_thread
from gradbus.models import mnist_mlp

_SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


def equal_rows(
    worlds: Sequence[int] = (2, 3, 4), *, steps: int = 100, data: Data = "mnist"
) -> tuple[list[Row], dict[str, Any]]:
    """Parameters of all ranks after every step. The workers compare them, and so does this."""
    equal, asked, taken = 0, 0, {}
    for exchange in ("dense", "dgc"):
        for world in worlds:
            config = {"exchange": exchange, "warmup": [0.01], "hash_every": 1, "epochs": 2, "eval_every_epochs": 0}
            samples = uneven(world, 32, steps // 2)
            found = run_ranks(
                Training(
                    world=world, model=mnist_mlp, batch_size=32, samples=samples, data=data, config=config,
                    record=True,
                )
            )  # fmt: skip
            hashes = [rank["hashes"] for rank in found]
            equal += sum(len(set(of_step)) == 1 for of_step in zip_longest(*hashes))
            asked += steps
            taken[f"equal_{exchange}_{world}"] = hashes[0][-1]
    note = f"dense and DGC, worlds {_list(worlds)}, {steps} steps each, two epochs that end unevenly"
    return [
        Row("steps after which all ranks' parameters are equal", f"{asked}", equal, "", equal == asked, note)
    ], taken


def bit_equal_rows(
    worlds: Sequence[int] = (2, 3, 4),
    *,
    steps: int = 20,
    model: Callable[..., nn.Module] = mnist_mlp,
    data: Data = "mnist",
) -> tuple[list[Row], dict[str, Any]]:
    """Dense runs, all ranks of them, against one process that has all shards: a hash after every step."""
    equal, asked, taken, model_name = 0, 0, {}, model.__name__.removeprefix("mnist_").upper()
    algorithms = ("direct", "ring", "shards") if model is mnist_mlp else ("auto",)
    for world in worlds:
        expected: list[int] = []
        for algorithm in algorithms:
            config = {**_SGD, "epochs": 2, "algorithm": algorithm, "eval_every_epochs": 0}
            run = Training(
                world=world, model=model, batch_size=16, samples=uneven(world, 16, steps // 2), data=data,
                config=config, record=True,
            )  # fmt: skip
            hashes = [rank["hashes"] for rank in run_ranks(run)]
            expected = expected or one_process(run)[0]
            equal += sum(len(set(of_step)) == 1 for of_step in zip_longest(expected, *hashes))
            asked += len(expected)
            taken[f"bits_{model_name}_{world}_{algorithm}"] = hashes[0][-1]
    note = f"worlds {_list(worlds)}; {', '.join(algorithms)}; {steps} steps each, epochs that end unevenly"
    return [Row(f"steps bit-equal to one process, {model_name}", f"{asked}", equal, "", equal == asked, note)], taken


def smooth_mlp(seed: int = 0) -> nn.Module:
    """The perceptron with tanh. With ReLU a difference of 1e-8 makes some unit of some sample fire here and not there,
    once in a few runs, and from then on the parameters are 1e-4 apart, whatever the optimizers do."""
    model = mnist_mlp(seed)
    model.relu = nn.Tanh()
    return model


def dense_dgc_rows(
    worlds: Sequence[int] = (1, 2, 4), *, steps: int = 50, data: Data = "mnist"
) -> tuple[list[Row], dict[str, Any]]:
    """DGC that sends everything against ``torch.optim.SGD`` on the mean gradient."""
    worst, taken = 0.0, {}
    for world in worlds:
        for nesterov in (False, True):
            config = {**_SGD, "nesterov": nesterov, "max_steps": steps, "eval_every_epochs": 0}
            config |= {"exchange": "dgc", "density": 1.0, "warmup": "none"}
            run = Training(
                world=world, model=smooth_mlp, batch_size=64, samples=world * 64 * steps, data=data, config=config,
                give_model=True,
            )  # fmt: skip
            found = run_ranks(run)[0]["params"]
            expected = [p.detach() for p in one_process(run)[1].parameters()]
            apart = max(float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(found, expected, strict=True))
            taken[f"dense_dgc_{world}{'_nesterov' if nesterov else ''}"] = apart
            worst = max(worst, apart)
    note = f"largest difference of a parameter after {steps} steps; worlds {_list(worlds)}, with and without Nesterov"
    return [at_most("DGC at density 1 against torch.optim.SGD", worst, 1e-6, "", note)], taken


def one_process(run: Training) -> tuple[list[int], nn.Module]:
    """What a plain loop makes of it: the shards' gradients one by one, added in rank order, times 1 / shards with data.

    Returns:
        A hash of all parameters after every step, and the model.
    """
    config, task = run.config, run.task()
    ranks = range(run.world)
    with one_thread(), hashes_of_steps() as hashes:
        model: nn.Module = task.build_model()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, **{key: config[key] for key in _SGD})
        for epoch in range(config.get("epochs", 1)):
            shards = [
                task.batches(rank=rank, world=run.world, epoch=epoch, seed=config.get("seed", 0)) for rank in ranks
            ]
            for batches in zip_longest(*shards):
                gradients = [_gradients(task, model, batch) for batch in batches if batch is not None]
                for position, parameter in enumerate(parameters):
                    total = gradients[0][position]
                    for of_rank in gradients[1:]:
                        total += of_rank[position]
                    parameter.grad = total * (1 / len(gradients))
                optimizer.step()
    return hashes, model


def _gradients(task: Any, model: nn.Module, batch: Any) -> list[Tensor]:
    return list(torch.autograd.grad(task.loss(model, batch), list(model.parameters())))


def uneven(world: int, batch_size: int, steps: int) -> int:
    """Samples of an epoch of so many steps, in the last of which all ranks but the last one have one sample left."""
    return world * batch_size * (steps - 1) + world - 1


def _list(worlds: Sequence[int]) -> str:
    return ", ".join(map(str, worlds))
