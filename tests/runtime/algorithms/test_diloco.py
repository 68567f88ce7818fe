"""DiLoCo and streaming DiLoCo against NumPy, bit by bit, with all ranks in one process."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from local_training import LocalTraining, gradients_of
from pydantic import ValidationError
from torch import nn

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
from gradbus.runtime.algorithms.diloco import StreamingDiLoCo
from gradbus.runtime.errors import ConfigError

LR, SIZE = 0.05, 103
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
EXACT = {**OUTER, "codec": "fp32"}


def start() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(9))


def trained(world: int, count: int, *, fails_at: tuple[int, ...] = (), **options: Any) -> LocalTraining:
    training = LocalTraining("diloco", world, start(), LR, **{**EXACT, **options})
    training.fails_at = fails_at
    for gradients in gradients_of(world, count, SIZE):
        training.step(gradients)
    training.drain()
    return training


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"steps": 4},
        {"steps": 1, "outer_lr": 0.5},
        {"steps": 6, "fragments": 3},
        {"steps": 6, "delay": 2, "alpha": 0.0},
        {"steps": 6, "fragments": 3, "delay": 2, "alpha": 0.5},
        {"steps": 5, "fragments": 5, "delay": 4, "alpha": 0.25},
    ],
    ids=str,
)
def test_weights_are_those_of_the_formulas(world: int, options: dict[str, Any]) -> None:
    """Without a delay bit by bit; with one to the rounding of what a rank has done meanwhile."""
    oracle = oracles.DilocoOracle(start().numpy(), world, LR, **{**OUTER, **options})
    training = LocalTraining("diloco", world, start(), LR, **{**EXACT, **options})
    for gradients in gradients_of(world, 20, SIZE):
        training.step(gradients)
        oracle.step([one.numpy() for one in gradients])
        for own, rank in zip(training.weights, oracle.ranks, strict=True):
            assert np.allclose(own.numpy(), rank.theta, rtol=0, atol=2e-6 if "delay" in options else 0)
    training.drain()
    oracle.end()
    for own, rank in zip(training.weights, oracle.ranks, strict=True):
        assert np.allclose(own.numpy(), rank.theta, rtol=0, atol=2e-6 if "delay" in options else 0)


def test_one_step_goes_where_the_ranks_went_and_not_back() -> None:
    """The sign of the pseudo-gradient: with a gradient of 1 on all ranks weights fall, by more than the local step."""
    training = LocalTraining("diloco", 2, torch.zeros(4), LR, **{**EXACT, "steps": 1})
    training.step([torch.ones(4)] * 2)
    assert torch.allclose(training.weights[0], torch.full((4,), -0.7 * 1.9 * LR))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_one_local_step_with_outer_rate_1_and_no_momentum_is_the_mean_of_all_weights_bit_by_bit(world: int) -> None:
    means = LocalTraining("local-sgd", world, start(), LR, steps=1)
    training = LocalTraining("diloco", world, start(), LR, steps=1, outer_lr=1.0, outer_momentum=0.0, codec="fp32")
    by_hand = [start().clone() for _ in range(world)]
    for gradients in gradients_of(world, 9, SIZE):
        means.step(gradients)
        training.step(gradients)
        local = [own - LR * gradient for own, gradient in zip(by_hand, gradients, strict=True)]
        average = torch.from_numpy(oracles.mean([one.numpy() for one in local]))
        by_hand = [average.clone() for _ in range(world)]
        for own, other, hand in zip(training.weights, means.weights, by_hand, strict=True):
            assert torch.equal(own, other)
            assert torch.equal(own, hand)


@pytest.mark.parametrize("world", [2, 3])
def test_one_fragment_without_a_delay_is_diloco_bit_by_bit(world: int) -> None:
    """Streaming and its parent: by hand here, from the first paper alone."""
    training = trained(world, 12, steps=4, fragments=1, delay=0)
    theta, momentum = start(), torch.zeros(SIZE)
    ranks = [theta.clone() for _ in range(world)]
    for number, gradients in enumerate(gradients_of(world, 12, SIZE), 1):
        ranks = [own - LR * gradient for own, gradient in zip(ranks, gradients, strict=True)]
        if number % 4 == 0:
            change = torch.from_numpy(oracles.mean([(theta - own).numpy() for own in ranks]))
            momentum = 0.9 * momentum + change
            theta = theta - 0.7 * (change + 0.9 * momentum)
            ranks = [theta.clone() for _ in range(world)]
    assert all(torch.equal(own, theta) for own in training.weights)
    assert torch.equal(training.shared()[0]["momentum/fragment0"], momentum)


@pytest.mark.parametrize("fragments", [1, 3])
def test_after_synchronous_steps_it_begins_with_what_they_have_led_to(fragments: int) -> None:
    all_gradients = gradients_of(2, 20, SIZE)
    options = {**OUTER, "steps": 6, "fragments": fragments, "codec": "q8"}
    training = LocalTraining("diloco", 2, start(), LR, **options, dense_steps=12)
    means = LocalTraining("local-sgd", 2, start(), LR, steps=1)
    for gradients in all_gradients[:12]:
        training.step(gradients)
        means.step(gradients)
        assert all(torch.equal(own, means.weights[0]) for own in training.weights)
    after = LocalTraining("diloco", 2, means.weights[0], LR, **options)
    for gradients in all_gradients[12:]:
        training.step(gradients)
        after.step(gradients)
    assert all(torch.equal(*pair) for pair in zip(training.weights, after.weights, strict=True))


def test_a_delay_that_the_algorithm_does_not_know_of_is_refused_with_what_to_set() -> None:
    algorithm = make_algorithm("diloco", Place(0, 2), {"steps": 8})
    assert algorithm.check_delay(None) == algorithm.check_delay(0) == 0
    with pytest.raises(ConfigError, match=r"would lose what it trains .* set parallel.algorithm.delay=2 instead"):
        algorithm.check_delay(2)
    assert make_algorithm("diloco", Place(0, 2), {"steps": 8, "delay": 2}).check_delay(2) == 2


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "q8", "q4", "q2"])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_after_every_exchange_all_ranks_have_the_same_bits_of_weights_and_outer_momentum(
    codec: str, fragments: int, world: int
) -> None:
    training = LocalTraining("diloco", world, start(), LR, steps=3, fragments=fragments, codec=codec)
    for gradients in gradients_of(world, 9, SIZE):
        training.step(gradients)
        first, *others = training.shared()
        assert all(torch.equal(other[key], first[key]) for other in others for key in first | other)
        if fragments == 1 and training.number % 3 == 0:
            assert all(torch.equal(own, training.weights[0]) for own in training.weights)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "q8", "q4", "q2"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_a_codec_rounds_off_is_sent_later(codec: str, world: int) -> None:
    """Sums over many exchanges differ from exact ones by a rounding of the last, not by one of each."""
    coarse = LocalTraining("diloco", world, start(), LR, steps=1, outer_lr=1.0, outer_momentum=0.0, codec=codec)
    exact = LocalTraining("local-sgd", world, start(), LR, steps=1)
    bias = torch.linspace(-1, 1, SIZE) ** 3  # the same in each step: without feedback errors would add up
    for _ in range(60):
        coarse.step([bias + 1e-4] * world)
        exact.step([bias + 1e-4] * world)
    rounding = LR * {"fp16": 2**-11, "bf16": 2**-8, "q8": 2 / 254, "q4": 2 / 14, "q2": 1}[codec]
    assert float((coarse.weights[0] - exact.weights[0]).abs().max()) <= 3 * rounding


def test_an_exchange_that_fails_keeps_what_the_ranks_have_changed_for_the_next() -> None:
    """As if the local steps had gone on for twice as long."""
    failed = trained(2, 10, steps=5, fails_at=(4,))
    longer = trained(2, 10, steps=10)
    assert torch.equal(failed.weights[0], longer.weights[0])
    assert failed.shared()[0].keys() == longer.shared()[0].keys()


@pytest.mark.parametrize("codec", ["fp32", "fp16", "q8"])
@pytest.mark.parametrize("world", [2, 3])
def test_weights_of_one_rank_that_are_not_finite_make_no_result_finite_and_leave_no_trace(
    codec: str, world: int
) -> None:
    training = LocalTraining("diloco", world, start(), LR, steps=2, codec=codec)
    gradients = gradients_of(world, 6, SIZE)
    training.step(gradients[0])
    training.step(gradients[1])
    before, own = training.shared(), [dict(a.own_state()) for a in training.algorithms]
    buckets = [bucket_of({"w": weights}) for weights in training.weights]
    buckets[-1].flat[3] = torch.nan
    training.lockstep.run([a.exchange(b, Step(3)) for a, b in zip(training.algorithms, buckets, strict=True)])
    assert not any(bool(bucket.flat.isfinite().all()) for bucket in buckets)
    for algorithm in training.algorithms:
        algorithm.roll_back()
    for one, other in zip(before, training.shared(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one | other)
    for one, algorithm in zip(own, training.algorithms, strict=True):
        assert all(torch.equal(one[key], algorithm.own_state()[key]) for key in one)


@pytest.mark.parametrize("fragments", [2, 3, 8])
def test_fragments_have_equal_sizes_and_steps_of_their_own_and_each_weight_is_in_one(fragments: int) -> None:
    algorithm = make_algorithm("diloco", Place(0, 1), {"steps": 8, "fragments": fragments, "codec": "fp32"})
    assert isinstance(algorithm, StreamingDiLoCo)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight  # tied: one parameter, so it is in the exchange once
    bucket = bucket_of(dict(model.named_parameters()))
    assert bucket.flat.numel() == 40 + 20
    algorithm.begin(bucket)
    anchors = algorithm.shared_state()
    sizes = [anchors[f"anchor/fragment{number}"].numel() for number in range(fragments)]
    assert sum(sizes) == 60
    assert max(sizes) - min(sizes) <= 1
    exchanged = []  # in each step
    for number in range(16):
        bucket.flat.add_(1.0)  # trained
        before = bucket.flat.clone()
        Lockstep(1).run([algorithm.exchange(bucket, Step(number))])
        algorithm.commit()
        exchanged.append([name for name, part in algorithm.parts(bucket.flat != before).items() if part.any()])
    assert max(map(len, exchanged)) == 1  # no step has two of them: the load of the network has no peaks
    assert Counter(itertools.chain(*exchanged)) == dict.fromkeys(algorithm.parts(bucket.flat), 2)


def test_a_rank_that_joins_has_weights_and_outer_momentum_of_the_others_and_sends_no_change_once() -> None:
    training = trained(2, 6, steps=3, codec="fp32")
    shared = training.shared()[0]
    joined = make_algorithm("diloco", Place(2, 3), {"steps": 3, "codec": "fp32"})
    joined.load_state({}, shared)
    ranks = [*training.algorithms, joined]
    for number, algorithm in enumerate(ranks):
        algorithm.regroup(Place(number, 3))
    own = [*(weights.clone() for weights in training.weights), shared["anchor/fragment0"].clone()]
    joined.begin(bucket_of({"w": torch.full((SIZE,), 99.0)}))  # a fresh process does not seed the others
    assert torch.equal(joined.shared_state()["anchor/fragment0"], shared["anchor/fragment0"])
    gradients = gradients_of(2, 3, SIZE, seed=5)
    for step in gradients:
        for weights, gradient in zip(own, step, strict=False):
            weights.sub_(LR * gradient)
    expected = (shared["anchor/fragment0"] - own[0] + shared["anchor/fragment0"] - own[1]) * (1 / 3)
    buckets = [bucket_of({"w": weights}) for weights in own]
    lockstep = type(training.lockstep)(3)
    lockstep.run([a.exchange(b, Step(8)) for a, b in zip(ranks, buckets, strict=True)])
    for algorithm in ranks:
        algorithm.commit()
    momentum = 0.9 * shared["momentum/fragment0"] + expected
    assert torch.allclose(joined.shared_state()["momentum/fragment0"], momentum, atol=1e-7)
    assert all(torch.equal(bucket.flat, buckets[0].flat) for bucket in buckets)


@pytest.mark.parametrize(("codec", "bits"), [("fp32", 32), ("fp16", 16), ("q8", 8), ("q4", 4), ("q2", 2)])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_formula(codec: str, bits: int, world: int) -> None:
    """2 (N - 1) / N of the weights in the bits of the codec, once in H steps, and nothing else."""
    size, steps = 40_000, 5
    training = LocalTraining("diloco", world, torch.zeros(size), LR, steps=steps, codec=codec)
    for gradients in gradients_of(world, 2 * steps, size):
        training.step(gradients)
    formula = 2 * 2 * (world - 1) / world * size * bits / 8
    assert training.lockstep.cost.bytes_out[0] == pytest.approx(formula, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 9, "steps": 8},
        {"delay": 8, "steps": 8},
        {"outer_momentum": 1.0},
        {"dense_steps": 5, "delay": 1},
        {"dense_steps": 5, "alpha": 0.5},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        StreamingDiLoCo.Options(**options)


def test_without_a_beginning_the_error_says_what_is_missing() -> None:
    algorithm = make_algorithm("diloco", Place(0, 1), {"steps": 1})
    with pytest.raises(RuntimeError, match=r"call begin\(\)"):
        next(iter(algorithm.exchange(bucket_of({"w": torch.ones(3)}), Step(0))))
