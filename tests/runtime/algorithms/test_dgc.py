"""DGC as a rank program: the bits of the codec's functions over a run, its state, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
from gradbus.runtime.algorithms.dgc import Dgc
from gradbus.runtime.errors import ConfigError

SHAPES = {"conv": (6, 3, 3, 3), "bias": (6,), "matrix": (40, 33), "scalar": ()}
SETTINGS = SimpleNamespace(lr=0.1, momentum=0.8, nesterov=False, weight_decay=1e-2, clip_norm=None)
Gradients = dict[str, Tensor]


def gradients(step: int, rank: int) -> Gradients:
    random = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def parameters() -> Gradients:
    return {name: torch.ones(shape, requires_grad=True) for name, shape in SHAPES.items()}


class Ranks:
    """DGC on all ranks, with the optimizer that it makes on rank 0."""

    def __init__(self, world: int = 2, settings: Any = SETTINGS, **options: Any) -> None:
        made = [make_algorithm("dgc", Place(rank, world), {"density": 0.05, **options}) for rank in range(world)]
        self.algorithms = [one for one in made if isinstance(one, Dgc)]
        self.parameters = parameters()
        for one in self.algorithms[1:]:
            one.make_optimizer(parameters(), settings)
        self.optimizer = self.algorithms[0].make_optimizer(self.parameters, settings)

    def step(self, number: int, own: list[Gradients], *, active: int | None = None) -> tuple[int, ...]:
        """One step of all ranks, taken if it counts. Returns the ranks that were not finite."""
        buckets = [bucket_of(tensors) for tensors in own]
        step = Step(number, epoch=number // 2, active=active or len(own))
        programs = [a.exchange(bucket, step) for a, bucket in zip(self.algorithms, buckets, strict=True)]
        Lockstep(len(own)).run(programs)
        assert all(torch.equal(bucket.flat.nan_to_num(), buckets[0].flat.nan_to_num()) for bucket in buckets)
        counts = bool(buckets[0].flat.isfinite().all())
        for algorithm in self.algorithms:
            (algorithm.commit if counts else algorithm.roll_back)()
        if counts:
            for name, gradient in buckets[0].tensors.items():
                self.parameters[name].grad = gradient.clone()
            self.optimizer.step()
        return self.algorithms[0].not_finite


class Plain:
    """The same run, with the codec's functions alone."""

    def __init__(self, world: int, settings: Any, schedule: tuple[float, ...], **options: Any) -> None:
        self.world, self.schedule = world, schedule
        self.parameters = parameters()
        self.config = codecs.DgcConfig(
            density=0.05,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            clip_norm=settings.clip_norm,
            world=world,
            **options,
        )
        self.layout = codecs.DgcLayout.of(self.parameters.items())
        self.states = [codecs.DgcState.zeros(self.layout, seed=7) for _ in range(world)]
        self.dense = codecs.DenseMomentum.zeros(self.layout)
        self.optimizer = codecs.DgcSgd(
            self.parameters.values(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )

    def step(self, number: int, own: list[Gradients], active: int) -> None:
        density = codecs.warmup_density(number // 2, density=0.05, schedule=self.schedule)
        config, payloads = self.config, []
        if config.clip_norm is not None:
            config = dataclasses.replace(config, clip_norm=config.clip_norm * self.world / active)
        for rank, tensors in enumerate(own):
            scaled = [gradient * (self.world / active) for gradient in tensors.values()]
            payload, self.states[rank] = codecs.dgc_step(scaled, self.states[rank], config, density=density)
            payloads.append(payload)
        mean = codecs.combine_dgc(payloads, self.layout)
        if mean.skipped_by:
            taken = zip(payloads, self.states, strict=True)
            self.states = [codecs.undo_step(payload, state) for payload, state in taken]
            return
        self.dense = codecs.dense_momentum_step(mean, self.dense, self.config)
        mean.write_to(self.parameters.values())
        self.optimizer.step()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"nesterov": True, "clip_norm": 5.0}, {"value_dtype": "fp16"}),
        ({"momentum": 0.0}, {"masking": False, "sampling": "random", "sample_ratio": 0.5}),
        ({}, {"dense_dtype": "fp16", "resample": False, "upper_bound": 1.01, "lower_bound": 0.99, "max_iterations": 3}),
    ],
    ids=str,
)
def test_a_run_has_the_bits_of_the_codec(world: int, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Over a warm-up, a step that is skipped, and one that a rank has no data for."""
    given = SimpleNamespace(**{**vars(SETTINGS), **settings})
    ranks = Ranks(world, given, warmup=[0.5, 0.2], seed=7, **options)
    plain = Plain(world, given, (0.5, 0.2), **options)
    for number in range(6):
        own, active = [gradients(number, rank) for rank in range(world)], world
        if number == 2:
            own[-1]["conv"][0, 0, 0, 0] = math.nan
        if number == 4 and world > 1:
            own[0], active = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, world - 1
        skipped_by = ranks.step(number, [{n: g.clone() for n, g in one.items()} for one in own], active=active)
        assert skipped_by == ((world - 1,) if number == 2 else ())
        plain.step(number, own, active)
        for name, parameter in ranks.parameters.items():
            assert torch.equal(parameter, plain.parameters[name]), (number, name)
        assert ranks.algorithms[0].density == (0.5, 0.2, 0.05)[number // 2]


def test_a_sum_that_overflows_is_skipped_and_leaves_the_momentum_of_dense_tensors_alone() -> None:
    ranks = Ranks()
    ranks.step(0, [gradients(0, rank) for rank in range(2)])
    before = ranks.algorithms[0].shared_state()["M/bias"].clone()
    own = [gradients(1, rank) for rank in range(2)]
    for tensors in own:
        tensors["bias"].fill_(3e38)
    ranks.step(1, own)
    assert torch.equal(ranks.algorithms[0].shared_state()["M/bias"], before)


def test_everything_sent_is_sgd_with_momentum() -> None:
    ranks = Ranks(2, density=1.0)
    usual = parameters()
    optimizer = torch.optim.SGD(usual.values(), lr=0.1, momentum=0.8, weight_decay=1e-2)
    for number in range(5):
        own = [gradients(number, rank) for rank in range(2)]
        ranks.step(number, own)
        for name, parameter in usual.items():
            parameter.grad = (own[0][name] + own[1][name]) / 2
        optimizer.step()
    for name, parameter in usual.items():
        assert (parameter - ranks.parameters[name]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("warmup", "schedule"),
    [
        ("paper", codecs.PAPER_WARMUP),
        ("none", ()),
        (0, ()),
        (2, codecs.geometric_warmup(2, density=0.01)),
        ([0.5, 0.1], (0.5, 0.1)),
    ],
)
def test_the_warmup_is_a_list_of_densities(warmup: Any, schedule: tuple[float, ...]) -> None:
    ranks = Ranks(1, density=0.01, warmup=warmup)
    for epoch in range(5):
        ranks.step(2 * epoch, [gradients(epoch, 0)])
        assert ranks.algorithms[0].density == max(0.01, schedule[epoch] if epoch < len(schedule) else 0.01)


SEARCH = {
    "upper_bound": (1.05, 1.3),
    "lower_bound": (0.95, 0.8),
    "max_iterations": (0, 10),
    "resample": (False, True),
}


@pytest.mark.parametrize("name", SEARCH)
def test_each_option_of_the_search_for_a_threshold_changes_what_is_sent(name: str) -> None:
    """In some of 30 steps: where the first threshold lets enough through there is nothing to search for."""
    base = {"upper_bound": 1.3, "lower_bound": 0.8, "max_iterations": 10, "resample": name != "upper_bound"}
    sent = []
    for value in SEARCH[name]:
        algorithm = make_algorithm("dgc", Place(0, 1), {"density": 0.02, "warmup": "none", **base, name: value})
        assert isinstance(algorithm, Dgc)
        for number in range(30):
            random = torch.Generator().manual_seed(number)
            bucket = bucket_of({"matrix": torch.randn(100, 100, generator=random).pow(5)})
            Lockstep(1).run([algorithm.exchange(bucket, Step(number))])
            algorithm.commit()
            sent.append(bucket.flat.nonzero().flatten().tolist())
    assert sent[:30] != sent[30:]


@pytest.mark.parametrize(
    "options",
    [
        {"upper_bound": 1.0},
        {"upper_bound": math.inf},
        {"lower_bound": 0.0},
        {"lower_bound": 1.0},
        {"max_iterations": -1},
        {"max_iterations": 1001},
        {"dense_dtype": "bf16"},
    ],
    ids=str,
)
def test_bounds_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Ranks(1, **options)


@pytest.mark.parametrize("warmup", ["papers", -1, True, [0.5, 2.0], [False]])
def test_another_warmup_is_refused(warmup: Any) -> None:
    with pytest.raises(ConfigError, match="a number of epochs, or a list of densities"):
        Ranks(1, warmup=warmup)


def test_the_momentum_is_that_of_the_option_before_that_of_the_optimizer() -> None:
    own = [gradients(0, 0)]
    firsts = []
    for settings, options in (({"momentum": 0.5}, {}), ({"momentum": 0.8}, {"momentum": 0.5}), ({"momentum": 0.8}, {})):
        ranks = Ranks(1, SimpleNamespace(**{**vars(SETTINGS), **settings}), **options)
        for number in range(3):
            ranks.step(number, own)
        firsts.append(ranks.parameters["bias"].detach())
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])


def test_the_limit_of_norms_goes_by_the_ranks_that_there_are() -> None:
    """A rank clips its own gradient at clip_norm / sqrt(world)."""
    norms = []
    for world in (1, 4):
        ranks = Ranks(1, density=1.0, clip_norm=1.0)
        ranks.algorithms[0].regroup(Place(0, world))
        bucket = bucket_of(gradients(0, 0))
        Lockstep(1).run([ranks.algorithms[0].exchange(bucket, Step(0, active=world))])
        norms.append(float(bucket.flat.norm()))
    assert norms == pytest.approx([1.0, 0.5], rel=1e-5)


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_step_that_is_given_up_leaves_no_trace_and_its_gradients_count_once(is_complete: bool) -> None:
    """Before the messages of the others have come, and after the mean was made."""
    usual, disturbed = (Ranks(1, nesterov=True).algorithms[0] for _ in range(2))
    disturbed.may_give_up = True
    for number in range(3):
        before = {name: one.clone() for name, one in state_of(disturbed).items()}
        program = disturbed.exchange(bucket_of(gradients(number, 0)), Step(number))
        if is_complete:
            Lockstep(1).run([program])
        else:
            next(program)
            program.close()
        disturbed.give_up()
        assert all(torch.equal(state_of(disturbed)[name], one) for name, one in before.items())
        buckets = [bucket_of(gradients(number, 0)) for _ in range(2)]
        for algorithm, bucket in zip((usual, disturbed), buckets, strict=True):
            Lockstep(1).run([algorithm.exchange(bucket, Step(number))])
            algorithm.commit()
        disturbed.give_up()  # between two steps there is nothing to give up
        assert torch.equal(buckets[0].flat, buckets[1].flat)
        assert all(torch.equal(state_of(disturbed)[name], one) for name, one in state_of(usual).items())


def state_of(algorithm: Dgc) -> Gradients:
    return {**algorithm.own_state(), **algorithm.shared_state()}


@pytest.mark.parametrize("active", [4, 2, 1])
def test_the_limit_of_norms_is_that_of_the_mean_over_ranks_that_have_data(active: int) -> None:
    ranks = Ranks(4, density=1.0, clip_norm=1.0)
    buckets = [bucket_of(gradients(0, 0)) for _ in range(4)]
    for bucket in buckets[active:]:
        bucket.flat.zero_()
    step = Step(0, active=active)
    Lockstep(4).run([one.exchange(bucket, step) for one, bucket in zip(ranks.algorithms, buckets, strict=True)])
    assert float(buckets[0].flat.norm()) == pytest.approx(0.5, rel=1e-5)


def test_an_optimizer_that_adds_momentum_is_refused() -> None:
    algorithm = Ranks(1).algorithms[0]
    named = parameters()
    for optimizer in (torch.optim.SGD(named.values(), lr=0.1, momentum=0.9), torch.optim.Adam(named.values())):
        with pytest.raises(ConfigError, match=r"needs an optimizer without momentum, got (SGD|Adam)"):
            algorithm.check(named, optimizer)
    algorithm.check(named, torch.optim.SGD(named.values(), lr=0.1))
    algorithm.check(named, codecs.DgcSgd(named.values(), lr=0.1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"U/conv": torch.ones(3)}, r"U/conv is \(\(3,\), torch.float32\), .* need \(\(6, 3, 3, 3\), torch.float32\)"),
        ({"V/other": torch.ones(3)}, "V/other is .* need None"),
        ({"V/matrix": None}, "V/matrix is None"),
    ],
)
def test_a_state_of_another_model_is_refused_with_the_tensor(change: dict[str, Tensor | None], told: str) -> None:
    saved = Ranks(1)
    saved.step(0, [gradients(0, 0)])
    own = {**saved.algorithms[0].own_state(), **change}
    fresh = Ranks(1)
    given = {name: tensor for name, tensor in own.items() if tensor is not None}
    fresh.algorithms[0].load_state(given, saved.algorithms[0].shared_state())
    with pytest.raises(ValueError, match=told):
        fresh.step(1, [gradients(1, 0)])


def test_a_damaged_place_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="numbers of steps and the seed"):
        Ranks(1).algorithms[0].load_state({"samples/place": torch.tensor([-1, 3])}, {})


def test_a_state_that_was_loaded_is_there_before_the_next_step() -> None:
    saved = Ranks(1)
    saved.step(0, [gradients(0, 0)])
    own, shared = saved.algorithms[0].own_state(), saved.algorithms[0].shared_state()
    fresh = Ranks(1).algorithms[0]
    fresh.load_state(own, shared)
    assert fresh.own_state().keys() == own.keys()
    assert all(torch.equal(fresh.own_state()[name], tensor) for name, tensor in own.items())
    assert all(torch.equal(fresh.shared_state()[name], tensor) for name, tensor in shared.items())
