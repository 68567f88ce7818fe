"""One case for every driver of rank programs: each algorithm for some steps, and each kind of request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import ALGORITHMS, Place, Step, bucket_of, make_algorithm
from gradbus.runtime.algorithms.requests import (
    AllGather,
    AllReduce,
    Broadcast,
    Program,
    ReduceScatter,
    Swap,
    Together,
    side_by_side,
)
from gradbus.runtime.algorithms.routes import ROUTES

SHAPES = {"conv": (6, 3, 3, 3), "bias": (6,), "matrix": (60, 33)}
STEPS = 3
LOSSES = (1.0, 5.0, 1.0)
# Algorithms with options in which all they do is done within these steps.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ALGORITHMS.table},
    "dense fp16": ("dense", {"wire": "fp16"}),
    **{f"dense {route}": ("dense", {"route": route}) for route in ("direct", "shards", *ROUTES)},
    "bytegrad hierarchical": ("bytegrad", {"hierarchical": True, "chunk_elems": 64}),
    "dense bf16": ("dense", {"wire": "bf16"}),
    "ef21-sgdm": ("ef21", {"eta": 0.1}),
    "hybrid with topk": ("hybrid", {"small_numel": 20, "patterns": {"conv": "topk"}}),
    "adaptive-powersgd": ("adaptive-powersgd", {"window_steps": 3, "rank": 2}),
    "powersgd cut": ("powersgd", {"max_aspect": 1.5, "rank": 2}),
    "powersgd twice": ("powersgd", {"power_iterations": 2, "rank": 2, "min_rate": 1}),
    "dgc fp16": ("dgc", {"warmup": "none", "density": 0.1, "value_dtype": "fp16", "dense_dtype": "fp16"}),
    "async-averaging": ("async-averaging", {"every_steps": 2}),
    "local-sgd": ("local-sgd", {"steps": 2}),
    "post-local-sgd": ("post-local-sgd", {"steps": 3, "dense_steps": 1}),
    "sparseloco": ("sparseloco", {"steps": 1}),
    "noloco": ("noloco", {"steps": 1}),
    **{f"diloco {codec}": ("diloco", {"steps": 1, "codec": codec}) for codec in ("fp32", "bf16", "q8", "q4", "q2")},
    "diloco in fragments": ("diloco", {"steps": 3, "fragments": 3}),
    "qadam": ("qadam", {"warmup_steps": 1}),
    "onebit-adam": ("onebit-adam", {"warmup_steps": 1}),
    **{f"decentralized {peers}": ("decentralized", {"peers": peers}) for peers in ("all", "ring", "choco")},
}


def every_algorithm(rank: int, world: int) -> Program[dict[str, Tensor]]:
    """What this rank has after the last step, by algorithm."""
    found = {}
    hosts = tuple(f"host {rank // 2}" for rank in range(world))
    for case, (name, options) in CASES.items():
        algorithm = make_algorithm(name, Place(rank, world, hosts), options)
        algorithm.begin(bucket_of({key: torch.ones(shape) for key, shape in SHAPES.items()}))
        for number in range(STEPS):
            random = torch.Generator().manual_seed(1000 * number + rank)  # ranks may be threads of one process
            bucket = bucket_of({key: torch.randn(shape, generator=random) for key, shape in SHAPES.items()})
            yield from algorithm.exchange(bucket, Step(number, active=world, loss=LOSSES[number]))
            algorithm.commit()
        found[case] = bucket.flat
    return found


def every_request(rank: int, world: int) -> Program[dict[str, Any]]:
    """The results of all kinds of requests, alone, together, and side by side with programs of other lengths."""
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(rank))
    right, left = (rank + 1) % world, (rank - 1) % world
    to_the_right = {right: x} if world > 1 else {}
    from_the_left = {left: torch.empty(7, 3)} if world > 1 else {}
    found: dict[str, Any] = {}
    for op in ("sum", "mean", "min", "max"):
        found[op] = yield AllReduce("reduce", x, op)  # type: ignore[arg-type]
    found["half"] = yield AllReduce("half", x.to(torch.bfloat16), "mean")
    found["divided"] = yield AllReduce("divided", x, "mean", divisor=7)
    found["in place"] = yield AllReduce("in place", x.clone(), out=x.clone())
    found["scattered"] = yield ReduceScatter("scatter", x)
    ragged = yield AllGather("ragged", x[: 1 + rank % 3])
    found["ragged"] = torch.cat(ragged)
    found["broadcast"] = yield Broadcast("broadcast", x.clone(), root=world - 1)
    came = yield Swap("right", to_the_right, from_the_left)
    found["swapped"] = torch.stack([came[left]]) if came else torch.zeros(0)
    if rank < 2 <= world:  # the others sit this one out
        came = yield Swap("first two", {1 - rank: x}, {1 - rank: torch.empty(7, 3)})
        found["of two"] = came[1 - rank]
    first, (second, third) = yield Together(
        (AllReduce("a", x), Together((AllGather("b", x), Swap("c", to_the_right, from_the_left))))
    )
    found["together"] = torch.cat([first, *second, *third.values()])

    def phases(name: str, count: int) -> Program[Tensor]:
        y = x.clone()
        for _ in range(count):
            y = yield AllReduce(name, y, "mean")
        return y

    found["side by side"] = torch.cat((yield from side_by_side(phases("d", 1), phases("e", 0), phases("f", 3))))
    return found
