"""Which runs there are, and which tables they fill. Figures share runs: equal runs are done once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from typing import Any, ClassVar, Literal

from gradbus.runtime.json_text import parse_json

CODECS = ("fp32", "q8", "s4", "sq8")
EXCHANGES = ("dense", "int8", "dgc")
WITHOUT_DATA = frozenset({"scaling", "memory", "jobs", "loss"})  # groups of runs that train nothing
TRACES = {"resnet50": 300_000, "vgg19": 10_000}  # simulated up to so many messages
RUNGS = ("star", "ring", "compression", "overlap")
WAYS = ("DDP", "DGC", "DiLoCo", "streaming")

Data = Literal["mnist", "glyphs"]
DATA_NAMES: dict[Data, str] = {"mnist": "MNIST", "glyphs": "Glyphs (digits drawn on the spot)"}  # in figures


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
        """A short name, good as a part of a file name."""
        partition = self.partition.replace(":", "").replace(".", "")
        return f"federated-{self.codec}-{self.downlink}-v{self.version}-{partition}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRun:
    """Two ranks with one torch thread each, which train the perceptron.

    Attributes:
        exchange: dense (float32), dgc, or int8: see :mod:`gradbus.experiments.figures.int8`.
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
        """A short name, good as a part of a file name."""
        return f"parallel-{self.exchange}{'-overlap' if self.overlap else ''}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRun:
    """One rung of the ladder on a slow link, see :mod:`gradbus.experiments.bench.rungs`.

    Attributes:
        samples: of the training set. epochs: at most, each evaluated at its end.
    """

    kind: ClassVar[str] = "ladder"
    rung: str
    samples: int = 12_800
    epochs: int = 6
    seed: int = 0
    data: Data = "mnist"

    @property
    def label(self) -> str:
        """A short name, good as a part of a file name."""
        return f"ladder-{self.rung}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinLinkRun:
    """Training on a thin and distant link in one way, see :mod:`gradbus.experiments.bench.thin_link`.

    Attributes:
        seconds: from the first step on. windows: equal parts of them, each with a mean loss.
    """

    kind: ClassVar[str] = "thin_link"
    way: str
    seconds: float = 60.0
    windows: int = 24
    seed: int = 0
    data: Data = "mnist"

    @property
    def label(self) -> str:
        """A short name, good as a part of a file name."""
        return f"thin-link-{self.way.lower()}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRun:
    """Ways to sum gradients, compared in the simulator; see :mod:`gradbus.commands.simulate.comparison`.

    Attributes:
        name: of the configuration, ``simulate.NAME.conf.json``. settings: what is in it, as JSON. trace: of the model.
    """

    kind: ClassVar[str] = "simulation"
    name: str
    settings: str
    trace: str | None = None
    seed: int = 0

    @property
    def label(self) -> str:
        """A short name, good as a part of a file name."""
        return f"simulation-{self.name}{'-' + self.trace if self.trace else ''}"


def simulation(name: str, *, quick: bool, trace: str | None = None) -> SimulationRun:
    """The run of a configuration that comes with the code. ``quick``: two conditions of each kind, and few packets."""
    text = files("gradbus.experiments.configs").joinpath(f"simulate.{name}.conf.json").read_text(encoding="utf-8")
    given = parse_json(text)["simulate"]
    if trace is not None:
        given["trace"] = trace
        given["compare"]["most_messages"] = TRACES[trace]
    if quick:
        given["worlds"] = given["worlds"][:2]
        for key in ("memory", "losses", "jobs", "seeds"):
            if key in given["compare"]:
                given["compare"][key] = given["compare"][key][-2:]
        given["compare"]["blocks"] = min(128, given["compare"]["blocks"])
    return SimulationRun(name=name, settings=json.dumps(given, sort_keys=True), trace=trace)


AnyRun = FederatedRun | ParallelRun | LadderRun | ThinLinkRun | SimulationRun


def settings_of(run: AnyRun) -> dict[str, Any]:
    """All that decides what a run does, as plain data."""
    return {"kind": run.kind, **asdict(run)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Tells how much is run.

    Attributes:
        seeds: of runs with equal shares. skewed_seeds: of those with unequal ones, which are evaluated only in every
            second round. samples: of a client and round. train_samples: of data-parallel training, None for all.
        ladder_samples, ladder_epochs: of each rung of the ladder. thin_link_s: of each way on a thin link.
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
    ladder_samples: int
    ladder_epochs: int
    thin_link_s: float
    data: Data = "mnist"

    @property
    def data_name(self) -> str:
        """What figures call the data."""
        return DATA_NAMES[self.data]


FULL = Scale(
    name="full",
    rounds=10,
    samples=6000,
    seeds=3,
    skewed_seeds=2,
    timed_rounds=6,
    epochs=10,
    warmup=3,
    train_samples=None,
    ladder_samples=12_800,
    ladder_epochs=6,
    thin_link_s=60.0,
)
QUICK = Scale(
    name="quick",
    rounds=2,
    samples=500,
    seeds=1,
    skewed_seeds=1,
    timed_rounds=0,
    epochs=3,
    warmup=1,
    train_samples=None,
    ladder_samples=1024,
    ladder_epochs=2,
    thin_link_s=10.0,
)


Plan = dict[str, tuple[AnyRun, ...]]
"""Runs by the name of their group, in the order in which they are run: what is quick, and needed by most figures, comes
first."""


def runs_of(plan: Plan) -> list[tuple[str, AnyRun]]:
    """Each run with the name of its group; first one seed of all, so that a plan cut short is still of use.

    A run that two groups share comes twice.
    """
    return sorted(((name, run) for name, runs in plan.items() for run in runs), key=lambda item: item[1].seed)


def make_plan(scale: Scale) -> Plan:
    """All runs of this scale."""
    federated = partial(FederatedRun, samples=scale.samples, data=scale.data)
    whole = partial(federated, rounds=scale.rounds)
    parallel = partial(
        ParallelRun, epochs=scale.epochs, warmup=scale.warmup, samples=scale.train_samples, data=scale.data
    )
    # IID, the codec in both directions: bytes and accuracy.
    codecs = tuple(whole(codec=codec, downlink=codec, seed=seed) for seed in range(scale.seeds) for codec in CODECS)
    # The same without evaluation: what a round takes, and what for.
    timed = partial(federated, rounds=scale.timed_rounds, eval_every=0)
    # One short round in version 1, with the model in plain float32, as the original had it: bytes only.
    old = partial(federated, downlink="fp32", version=1, rounds=1, samples=128, eval_every=0)
    # The codec in both directions on Dirichlet 0.5.
    skewed = partial(whole, partition="dirichlet:0.5", eval_every=1 if scale.rounds < 10 else 2)
    quick = scale.name == "quick"
    return {
        "scaling": tuple(simulation("scaling", quick=quick, trace=trace) for trace in TRACES),
        **{name: (simulation(name, quick=quick),) for name in ("memory", "jobs", "loss")},
        "old_bytes": tuple(old(codec=codec) for codec in CODECS),
        "ladder": tuple(
            LadderRun(rung=rung, samples=scale.ladder_samples, epochs=scale.ladder_epochs, data=scale.data)
            for rung in RUNGS
        ),
        "thin_link": tuple(
            ThinLinkRun(way=way, seconds=scale.thin_link_s, seed=seed, data=scale.data)
            for seed in range(scale.seeds)
            for way in WAYS
        ),
        "overlapped": (parallel(exchange="dense", overlap=True),),  # as it is by default
        # Every exchange, sending after the backward pass.
        "parallel": tuple(
            parallel(exchange=exchange, seed=seed) for seed in range(scale.seeds) for exchange in EXCHANGES
        ),
        "timing": tuple(timed(codec=codec, downlink=codec) for codec in CODECS)
        if scale.timed_rounds
        else codecs[: len(CODECS)],
        "codecs": codecs,
        "skewed": tuple(
            skewed(codec=codec, downlink=codec, seed=seed) for seed in range(scale.skewed_seeds) for codec in CODECS
        ),
    }
