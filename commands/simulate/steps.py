"""Steps of data-parallel training on a model of a network: how long they take, and what for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradbus.actors.data_parallel.buckets import assign_buckets
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.sizes import size_only
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket, bucket_of, make_algorithm
from gradbus.runtime.choices import Choice

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Holds what every rank does in a step, beside the exchange.

    Attributes:
        shapes: of the parameters, by name, in the order of the model.
        forward_s: until the backward pass begins. backward_s: for each parameter, in the order of the model, how long
            the backward pass takes until its gradient is there, from the gradient before it on. update_s: of the
            optimizer.
        overlap: whether a bucket is sent as soon as its gradients are there.
        batch_size: samples of one rank.
    """

    shapes: Mapping[str, torch.Size]
    forward_s: float
    backward_s: Sequence[float]
    update_s: float = 0.0
    overlap: bool = True
    bucket_bytes: int = 25 * _MIB
    first_bucket_bytes: int = _MIB
    batch_size: int = 1

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients, in float32."""
        return 4 * sum(shape.numel() for shape in self.shapes.values())

    @property
    def compute_s(self) -> float:
        """All of it."""
        return self.forward_s + sum(self.backward_s) + self.update_s


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Ranks whose computing takes longer.

    Attributes:
        factor: of the time of these ``ranks``. jitter: standard deviation of the logarithm of a factor that is drawn
            for each rank and step.
    """

    ranks: tuple[int, ...] = ()
    factor: float = 1.0
    jitter: float = 0.0


@dataclass(slots=True)
class SimulatedSteps:
    """Holds what was simulated.

    Attributes:
        times_s: of each step, of the slowest rank. compute_s: that its own work takes, of a rank without delay.
        bytes_out: of a step, of the rank that sends most. link: the busiest link; link_use: the share of the time for
            which it carries something.
    """

    world: int
    compute_s: float
    batch_size: int
    times_s: list[float] = field(default_factory=list)
    bytes_out: float = 0.0
    link: str = ""
    link_use: float = 0.0

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.times_s)

    @property
    def utilisation(self) -> float:
        """The share of a step in which a rank computes."""
        return self.compute_s / self.step_s

    @property
    def exchange_share(self) -> float:
        """The rest: the share of a step in which a rank only waits for the exchange."""
        return max(0.0, 1.0 - self.utilisation)

    @property
    def samples_s(self) -> float:
        """Samples a second, of all ranks."""
        return self.world * self.batch_size / self.step_s


def simulate_steps(
    network: NetworkModel,
    choice: Choice,
    work: StepWork,
    steps: int,
    *,
    stragglers: Stragglers | None = None,
    values: bool = False,
    seed: int = 0,
) -> SimulatedSteps:
    """Run so many steps of all ranks.

    Args:
        choice: the algorithm, with its options.
        values: exchange random gradients, for algorithms that look at them; else only their sizes count.

    Raises:
        ConfigError: no such algorithm, or options that do not fit. Deadlock, Mismatch: see :class:`NetworkModel`.
    """
    topology = network.topology
    random = np.random.default_rng([seed, 1])
    slow = stragglers or Stragglers()
    ends: list[list[float]] = [[] for _ in range(topology.world)]
    began_bytes = list(network.bytes_out)
    for rank in range(topology.world):
        algorithm = make_algorithm(choice.name, Place(rank, topology.world, topology.hosts), choice.options)
        factors = (slow.factor if rank in slow.ranks else 1.0) * np.exp(slow.jitter * random.standard_normal(steps))
        buckets = _Buckets(work, seed=seed + rank if values else None)
        network.env.process(_rank(network, rank, algorithm, work, buckets, factors.tolist(), ends[rank]))
    network.run_all()
    last = [max(times) for times in zip(*ends, strict=True)]
    found = SimulatedSteps(topology.world, work.compute_s, work.batch_size)
    found.times_s = [end - begin for begin, end in zip([0.0, *last], last, strict=False)]
    found.bytes_out = max(np.subtract(network.bytes_out, began_bytes)) / steps
    busiest = max(topology.links.values(), key=lambda link: link.busy_s)
    found.link, found.link_use = busiest.name, busiest.busy_s / last[-1] if last[-1] else 0.0
    return found


def _rank(
    network: NetworkModel,
    rank: int,
    algorithm: Algorithm,
    work: StepWork,
    buckets: _Buckets,
    factors: Sequence[float],
    ends: list[float],
) -> Generator[Any, Any, None]:
    """Yield what one rank does, as a process of SimPy."""
    env, world = network.env, network.topology.world

    def launch(bucket: TensorBucket) -> Any:
        return network.launch(rank, algorithm.exchange(bucket, step), f"{step.number}/{bucket.index}")

    for number, factor in enumerate(factors):
        step, running = Step(number, active=world), []
        gradients = buckets.of_step(number, whole=algorithm.scope != "bucket")
        if algorithm.scope == "weights" and algorithm.overlaps and algorithm.is_due(step):
            running.append(launch(gradients[0]))
        yield env.timeout(factor * work.forward_s)
        for bucket, backward_s in zip(buckets.plan, buckets.backward_s, strict=True):
            yield env.timeout(factor * backward_s)
            if algorithm.scope == "bucket" and work.overlap:
                running.append(launch(gradients[buckets.plan.index(bucket)]))
        if not running and algorithm.is_due(step):
            running = [launch(bucket) for bucket in gradients]
        yield env.all_of(running)
        algorithm.commit()
        yield env.timeout(factor * work.update_s)
        ends.append(float(env.now))


class ReadyBucket(NamedTuple):
    """A bucket of a step.

    Attributes:
        members: positions of its parameters. size_bytes: of its gradients, in float32. ready_s: when the last one is
            there, from the beginning of the backward pass.
    """

    members: list[int]
    size_bytes: int
    ready_s: float


def ready_buckets(work: StepWork) -> list[ReadyBucket]:
    """The buckets of a step in the order in which they are full."""
    like = [torch.empty(shape, device="meta") for shape in work.shapes.values()]
    plan = assign_buckets(like, bucket_bytes=work.bucket_bytes, first_bucket_bytes=work.first_bucket_bytes)
    # A bucket is full when the last of its parameters, the first one in the model, has its gradient; buckets follow one
    # another in this order but for single large parameters, which are sent when they are there.
    there_s = np.cumsum(np.asarray(work.backward_s)[::-1])[::-1]
    found = [
        ReadyBucket(members, sum(like[at].nbytes for at in members), float(max(there_s[at] for at in members)))
        for members in plan
    ]
    return sorted(found, key=lambda bucket: bucket.ready_s)


def overlapped_s(work: StepWork, exchange_s: Callable[[int], float]) -> float:
    """A step in which buckets are exchanged one after the other, each as soon as it is full and those before it are
    through.

    Args:
        exchange_s: the time of one exchange of so many bytes.
    """
    end_s = work.forward_s
    for bucket in ready_buckets(work):
        end_s = max(end_s, work.forward_s + bucket.ready_s) + exchange_s(bucket.size_bytes)
    return max(end_s, work.forward_s + sum(work.backward_s)) + work.update_s


class _Buckets:
    """The gradients of one rank in buckets, in the order in which they come.

    Attributes:
        plan: positions of the parameters in each. backward_s: from one bucket to the next.
    """

    def __init__(self, work: StepWork, *, seed: int | None) -> None:
        """``seed``: of the values; None: sizes alone."""
        self._shapes, self._seed = work.shapes, seed
        buckets = ready_buckets(work)
        self.plan = [bucket.members for bucket in buckets]
        self.backward_s = np.diff([0.0, *(bucket.ready_s for bucket in buckets)]).tolist()
        self.backward_s[-1] += sum(work.backward_s) - buckets[-1].ready_s

    def of_step(self, number: int, *, whole: bool) -> list[TensorBucket]:
        """The gradients of a step. ``whole``: all in one bucket."""
        names = list(self._shapes)
        plan = [list(range(len(names)))] if whole else self.plan
        return [self._bucket(index, [names[at] for at in members], number) for index, members in enumerate(plan)]

    def _bucket(self, index: int, names: Sequence[str], number: int) -> TensorBucket:
        if self._seed is None:
            sizes = {name: self._shapes[name].numel() for name in names}
            tensors: dict[str, Tensor] = {name: size_only(*self._shapes[name]) for name in names}
            return TensorBucket(index, size_only(sum(sizes.values())), tensors)
        random = torch.Generator().manual_seed(1_000_003 * number + 1009 * self._seed + index)
        return bucket_of({name: torch.randn(self._shapes[name], generator=random) for name in names}, index)
