"""Which runs there are, and which tables they fill. Figures share runs: equal runs are done once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

CODECS = ("fp32", "q8", "s4", "sq8")
EXCHANGES = ("dense", "int8", "dgc")

Data = Literal["mnist", "glyphs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedRun:
    """A controller and its clients, each a process of its own, as ``gradbus demo`` starts them.

    Attributes:
        codec: of the clients' updates. downlink: of the global model. version: of the updates' bytes.
        partition: iid, or dirichlet:ALPHA.
        samples: of a client and round. eval_every: 0: never.
    """

    kind: ClassVar[str] = "federated"
    codec: str
    downlink: str
    version: int = 2
    partition: str = "iid"
    seed: int = 0
    rounds: int = 10
    samples: int = 6000
    clients: int = 2
    eval_every: int = 1
    data: Data = "mnist"

    @property
    def label(self) -> str:
        """A short name for people, good as a part of a file name."""
        partition = self.partition.replace(":", "").replace(".", "")
        return f"federated-{self.codec}-{self.downlink}-v{self.version}-{partition}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRun:
    """Two ranks with one torch thread each, which train the perceptron.

    Attributes:
        exchange: dense (float32), dgc, or int8: see :mod:`gradbus.experiments.figures.int8_exchange`.
        overlap: dense: send while the backward pass goes on, so that a part of the communication is hidden.
        warmup: dgc: epochs in which the density falls to its end.
        samples: of the training set; None: all.
    """

    kind: ClassVar[str] = "parallel"
    exchange: str
    overlap: bool = False
    seed: int = 0
    epochs: int = 10
    warmup: int = 3
    samples: int | None = None
    world: int = 2
    batch_size: int = 128
    lr: float = 0.05
    density: float = 0.001
    data: Data = "mnist"

    @property
    def label(self) -> str:
        """A short name for people, good as a part of a file name."""
        return f"parallel-{self.exchange}{'-overlap' if self.overlap else ''}-seed{self.seed}"


Run = FederatedRun | ParallelRun


def settings_of(run: Run) -> dict[str, Any]:
    """All that decides what a run does, as plain data."""
    return {"kind": run.kind, **asdict(run)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is run.

    Attributes:
        seeds: of runs with equal shares. skewed_seeds: of those with unequal ones, which are evaluated only in every
            second round. samples: of a client and round. train_samples: of data-parallel training, None for all.
        timed_rounds: of runs that only measure time; 0: take it from those that are evaluated.
    """

    name: str
    rounds: int
    samples: int
    seeds: int
    skewed_seeds: int
    timed_rounds: int
    epochs: int
    warmup: int
    train_samples: int | None
    data: Data = "mnist"


FULL = Scale(
    name="full", rounds=10, samples=6000, seeds=3, skewed_seeds=2, timed_rounds=6,
    epochs=10, warmup=3, train_samples=None,
)  # fmt: skip
QUICK = Scale(
    name="quick", rounds=2, samples=500, seeds=1, skewed_seeds=1, timed_rounds=0,
    epochs=3, warmup=1, train_samples=None,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of one scale.

    Attributes:
        codecs: IID, the codec in both directions: bytes and accuracy. skewed: the same on Dirichlet 0.5.
        timing: the codec in both directions, without evaluation: what a round takes, and what for.
        old_bytes: one short round in version 1, with the model in plain float32, as the original had it: bytes only.
        parallel: every exchange, sending after the backward pass. overlapped: dense, as it is by default.
    """

    scale: Scale
    codecs: tuple[FederatedRun, ...]
    skewed: tuple[FederatedRun, ...]
    timing: tuple[FederatedRun, ...]
    old_bytes: tuple[FederatedRun, ...]
    parallel: tuple[ParallelRun, ...]
    overlapped: tuple[ParallelRun, ...]

    def groups(self) -> Mapping[str, tuple[Run, ...]]:
        """By name, in the order in which they are run: what is quick, and needed by most figures, comes first."""
        return {
            "old_bytes": self.old_bytes, "overlapped": self.overlapped, "parallel": self.parallel,
            "timing": self.timing, "codecs": self.codecs, "skewed": self.skewed,
        }  # fmt: skip

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Each run with the name of its group; first one seed of all, so that a plan cut short is still of use.

        A run that two groups share comes twice.
        """
        listed = [(name, run) for name, runs in self.groups().items() for run in runs]
        return iter(sorted(listed, key=lambda item: item[1].seed))


def make_plan(scale: Scale) -> Plan:
    """All runs of this scale."""
    common: dict[str, Any] = {"samples": scale.samples, "data": scale.data}
    parallel: dict[str, Any] = {
        "epochs": scale.epochs, "warmup": scale.warmup, "samples": scale.train_samples, "data": scale.data
    }  # fmt: skip
    every = 1 if scale.rounds < 10 else 2

    def federated(codec: str, seed: int, **more: Any) -> FederatedRun:
        return FederatedRun(codec=codec, downlink=codec, seed=seed, rounds=scale.rounds, **common, **more)

    codecs = tuple(federated(codec, seed) for seed in range(scale.seeds) for codec in CODECS)
    timing = tuple(
        FederatedRun(codec=codec, downlink=codec, rounds=scale.timed_rounds, eval_every=0, **common) for codec in CODECS
    )
    return Plan(
        scale=scale,
        codecs=codecs,
        skewed=tuple(
            federated(codec, seed, partition="dirichlet:0.5", eval_every=every)
            for seed in range(scale.skewed_seeds)
            for codec in CODECS
        ),
        timing=timing if scale.timed_rounds else codecs[: len(CODECS)],
        old_bytes=tuple(
            FederatedRun(codec=codec, downlink="fp32", version=1, rounds=1, samples=128, eval_every=0, data=scale.data)
            for codec in CODECS
        ),
        parallel=tuple(
            ParallelRun(exchange=exchange, seed=seed, **parallel)
            for seed in range(scale.seeds)
            for exchange in EXCHANGES
        ),
        overlapped=(ParallelRun(exchange="dense", overlap=True, **parallel),),
    )
