"""How to train with each algorithm of the table: options and learning rates that a user would take, with the reason.

An algorithm that is not named here is in the benchmark with its default options, at the learning rate of dense. Those
with local steps, some tens between two exchanges, have a benchmark of their own, of longer runs: :mod:`.local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradbus.runtime.algorithms.base import ALGORITHMS


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A way to train.

    Attributes:
        title: of the algorithm with these options. algorithm: its name; "" is PyTorch's own PowerSGD hook on gloo.
        options: of the algorithm. lr, momentum: of SGD.
        delay_steps: after so many steps a result is applied; None: as it has. predicts_weights: the setting.
        why: these options and not others.
        steady: options under which the first steps already are as the later ones, for figures of short runs.
        most_points: percentage points of accuracy that it may be below dense. most_bytes: share of the bytes of dense
            that it may send, on the CNN. most_models: bytes of the model that a rank may send in a step.
        most_coding: share of a step that the algorithm may compute, on the CNN.
    """

    title: str
    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.05
    momentum: float = 0.9
    delay_steps: int | None = None
    predicts_weights: bool = False
    why: str = ""
    steady: Mapping[str, Any] = field(default_factory=dict)
    most_points: float | None = None
    most_bytes: float | None = None
    most_models: float | None = None
    most_coding: float | None = None

    def settings(self) -> dict[str, Any]:
        """Return what a Worker is to be configured with."""
        return {
            "algorithm": {"name": self.algorithm, **self.options},
            "delay_steps": self.delay_steps,
            "predicts_weights": self.predicts_weights,
            "optimizer": {"lr": self.lr, "momentum": self.momentum},
        }

    @property
    def runs_beside(self) -> bool:
        """Whether the exchange goes on while gradients are computed, so that its time is no part of the step."""
        kind = ALGORITHMS.find(self.algorithm)
        delay = kind.delay_steps if self.delay_steps is None else self.delay_steps
        return bool(delay or kind.scope == "weights")


_FROM_ADAM = "Adam's learning rate; a third of the steps is warm-up, so that the second moment has settled"
_WARM_UP = {"warmup_steps": 117}
_NO_WARM_UP = {"warmup_steps": 1}
_NAMED = (
    Recipe(title="dense fp32", algorithm="dense", why="the reference"),
    Recipe(title="dense fp16", algorithm="dense", options={"wire": "fp16"}, most_bytes=0.5),
    Recipe(title="dense bf16", algorithm="dense", options={"wire": "bf16"}, most_bytes=0.5),
    Recipe(
        title="dense, a step late", algorithm="dense", delay_steps=1, predicts_weights=True, most_points=0.3,
        why="the three-stage pipeline; without prediction it is 0.4 points below dense",
    ),
    Recipe(title="powersgd rank 4", algorithm="powersgd", options={"rank": 4}, most_points=0.2),
    Recipe(
        title="powersgd rank 4, cut", algorithm="powersgd", options={"rank": 4, "max_aspect": 20},
        most_points=0.2, most_bytes=1 / 50, why="the factors of a matrix that is long are smaller if it is cut",
    ),
    Recipe(
        title="powersgd rank 1, cut", algorithm="powersgd", options={"rank": 1, "max_aspect": 20}, most_bytes=1 / 170
    ),
    Recipe(title="powersgd, adaptive rank", algorithm="adaptive-powersgd", why="rank 2 to 8, as the loss asks for"),
    Recipe(title="hybrid", algorithm="hybrid", most_points=0.3, most_bytes=0.13, most_coding=0.05),
    Recipe(title="bytegrad", algorithm="bytegrad", most_points=0.2, most_bytes=0.25 * 1.003),
    Recipe(
        title="dgc 0.1 %", algorithm="dgc", options={"density": 0.001, "warmup": "none"},
        why="a warm-up goes by epochs, of which these runs have three",
    ),
    Recipe(title="topk 1 %", algorithm="topk", options={"density": 0.01}, most_points=0.4),
    Recipe(
        title="randomk 10 %", algorithm="randomk", lr=0.05, momentum=0.5,
        why="entries wait for ten steps in the mean: momentum on top of that overshoots",
    ),
    Recipe(title="ef21 1 %", algorithm="ef21", options={"density": 0.01}, momentum=0.0, lr=0.05),
    Recipe(
        title="ef21-sgdm 1 %", algorithm="ef21", options={"density": 0.01, "eta": 0.05}, momentum=0.0, lr=0.3,
        most_points=1.0, why="its average of gradients is the momentum, and shortens steps ten times less than SGD's",
    ),
    Recipe(
        title="signsgd", algorithm="signsgd", lr=0.0003, momentum=0.9,
        why="every entry moves by the learning rate, whatever its gradient",
    ),
    Recipe(
        title="qadam", algorithm="qadam", options={**_WARM_UP, "eps": 1e-4}, steady=_NO_WARM_UP, lr=0.001,
        momentum=0.0, most_points=0.3,
        why=f"{_FROM_ADAM}; eps, as an entry whose second moment is next to nothing moves by the rounding of the bytes "
        "divided by it: with 1e-8 the CNN diverges",
    ),
    Recipe(
        title="onebit-adam", algorithm="onebit-adam", options=_WARM_UP, steady=_NO_WARM_UP, lr=0.001, momentum=0.0,
        why=_FROM_ADAM,
    ),
    Recipe(
        title="async averaging", algorithm="async-averaging", why="every four steps, applied a step later: the defaults"
    ),
    Recipe(title="decentralized all", algorithm="decentralized", options={"peers": "all"}, most_points=0.5),
    Recipe(
        title="decentralized shift-one", algorithm="decentralized", options={"peers": "shift-one"}, most_points=0.5,
        most_models=1.0,
    ),
    Recipe(title="decentralized ring", algorithm="decentralized", options={"peers": "ring"}, most_points=0.5),
    Recipe(title="decentralized choco", algorithm="decentralized", options={"peers": "choco"}, most_points=0.5),
)  # fmt: skip
_LOCAL_LR = 0.02  # of all runs with local steps, and of dense beside them: dense is best there, and nothing diverges
_FEW = {"outer_momentum": 0.5}
_WHY_FEW = (
    "with the paper's 0.9 runs of 48 exchanges end 4 points lower, on samples of the training set: `--part tuning`"
)
_LOCAL = (
    Recipe(title="local SGD, H = 8", algorithm="local-sgd", options={"steps": 8}),
    Recipe(
        title="post-local SGD, H = 8", algorithm="post-local-sgd", options={"steps": 8, "dense_steps": 100},
        why="the first steps are the largest",
    ),
    Recipe(title="local SGD, H = 50", algorithm="local-sgd", options={"steps": 50}),
    Recipe(title="DiLoCo q8, H = 30", algorithm="diloco", options={"steps": 30, **_FEW}, most_points=0.2,
           most_bytes=1 / 100, why=_WHY_FEW),
    Recipe(title="DiLoCo fp16, H = 50", algorithm="diloco", options={"codec": "fp16", **_FEW}),
    Recipe(title="DiLoCo q8, H = 50", algorithm="diloco", options=_FEW),
    Recipe(title="DiLoCo q4, H = 50", algorithm="diloco", options={"codec": "q4", **_FEW}, most_points=0.3,
           most_bytes=1 / 400),
    Recipe(title="DiLoCo q2, H = 50", algorithm="diloco", options={"codec": "q2", **_FEW}),
    Recipe(title="DiLoCo q8, H = 50, momentum 0.9", algorithm="diloco", why="as in the paper"),
    Recipe(
        title="streaming q4, H = 50, 5 fragments, a step late", algorithm="diloco",
        options={"codec": "q4", "fragments": 5, "delay": 1, **_FEW}, why="an even load, and no rank waits",
    ),
    Recipe(title="NoLoCo, H = 50", algorithm="noloco"),
    Recipe(title="SparseLoCo, H = 30", algorithm="sparseloco", most_points=0.5, most_bytes=1 / 4000,
           why="with a learning rate of 0.05 the CNN diverges"),
)  # fmt: skip
TORCH_POWERSGD = Recipe(title="PyTorch's PowerSGD hook, rank 4, gloo", algorithm="", options={"rank": 4})


def all_recipes() -> Iterator[Recipe]:
    """Recipes of all algorithms of the table but those with local steps, in its order, dense first."""
    table = sorted(
        ALGORITHMS.table.keys() - {one.algorithm for one in _LOCAL}, key=lambda name: (name != "dense", name)
    )
    for name in table:
        named = [recipe for recipe in _NAMED if recipe.algorithm == name]
        yield from named or [Recipe(title=name, algorithm=name)]


def local_recipes() -> tuple[Recipe, ...]:
    """Recipes with local steps, behind dense, which they are compared with."""
    return tuple(replace(one, lr=_LOCAL_LR) for one in (_NAMED[0], *_LOCAL))
