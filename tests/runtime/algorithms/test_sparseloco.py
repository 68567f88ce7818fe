"""SparseLoCo against NumPy, with all ranks in one process."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from local_training import LocalTraining, gradients_of

from gradbus import codecs
from gradbus.codecs.base import SparseBlock
from gradbus.runtime.algorithms.base import Step, bucket_of
from gradbus.runtime.algorithms.sparseloco import mean_of_senders

LR, SIZE = 0.05, 5000


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("clip", [True, False])
def test_weights_are_those_of_the_formulas(world: int, clip: bool) -> None:
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(9))
    training = LocalTraining("sparseloco", world, start, LR, steps=2, clip=clip)
    oracle = oracles.SparseLocoOracle(start.numpy(), world, LR, steps=2, decay=0.95, clip=clip)
    for gradients in gradients_of(world, 9, SIZE):
        training.step(gradients)
        oracle.step([one.numpy() for one in gradients])
        for own, rank in zip(training.weights, oracle.ranks, strict=True):
            assert np.abs(own.numpy() - rank.theta).max() < 1e-5
        if training.number % 2 == 0:
            assert all(torch.equal(own, training.weights[0]) for own in training.weights)


def test_an_entry_is_the_mean_over_the_ranks_that_have_sent_it() -> None:
    sent = [
        SparseBlock(torch.tensor([0, 3]), torch.tensor([1.0, 2.0])),
        SparseBlock(torch.tensor([3, 7]), torch.tensor([4.0, 5.0])),
    ]
    assert mean_of_senders(sent, 8, clip=False).tolist() == [1, 0, 0, 3, 0, 0, 0, 5]


def test_a_rank_that_sends_much_larger_values_than_the_others_is_shortened_to_their_norm() -> None:
    index = torch.tensor([0])
    sent = [SparseBlock(index, torch.tensor([value])) for value in (1.0, 1.5, 1000.0)]
    assert mean_of_senders(sent, 1, clip=True).tolist() == pytest.approx([(1 + 1.5 + 1.5) / 3])


@pytest.mark.parametrize("others", [1, 2])
def test_a_change_that_one_rank_alone_has_in_a_block_is_not_taken_away(others: int) -> None:
    index, empty = torch.tensor([0, 5]), torch.tensor([], dtype=torch.int64)
    sent = [SparseBlock(index, torch.tensor([1.0, -2.0])), *[SparseBlock(empty, torch.tensor([]))] * others]
    assert mean_of_senders(sent, 8, clip=True).tolist() == [1, 0, 0, 0, 0, -2, 0, 0]


def test_an_exchange_is_116_bytes_for_4096_weights_to_each_other_rank() -> None:
    for world in (2, 4):
        training = LocalTraining("sparseloco", world, torch.zeros(40_960), LR, steps=3)
        for gradients in gradients_of(world, 3, 40_960):
            training.step(gradients)
        assert training.lockstep.cost.bytes_out == [(world - 1) * (1 + 16 + 10 * 116)] * world


def test_what_is_not_sent_is_kept_and_fades() -> None:
    training = LocalTraining("sparseloco", 1, torch.zeros(SIZE), LR, steps=1)
    (gradient,) = gradients_of(1, 1, SIZE)[0]
    training.step([gradient])
    residual = training.algorithms[0].own_state()["residual/weights"]
    payload, left = codecs.residual_step(LR * gradient, None, codecs.get("loco"), is_delta=True)
    assert torch.allclose(residual, left, atol=1e-7)
    training.step([torch.zeros(SIZE)])
    payload, left = codecs.residual_step(torch.zeros(SIZE), residual * 0.95, codecs.get("loco"), is_delta=True)
    assert torch.allclose(training.algorithms[0].own_state()["residual/weights"], left, atol=1e-7)
    assert len(payload) == codecs.get("loco").max_bytes(SIZE)


@pytest.mark.parametrize("world", [2, 3])
def test_weights_of_one_rank_that_are_not_finite_make_no_result_finite_and_leave_no_trace(world: int) -> None:
    training = LocalTraining("sparseloco", world, torch.zeros(SIZE), LR, steps=2)
    for gradients in gradients_of(world, 2, SIZE):
        training.step(gradients)
    before = [{**a.shared_state(), **a.own_state()} for a in training.algorithms]
    buckets = [bucket_of({"w": weights}) for weights in training.weights]
    buckets[-1].flat[3] = torch.nan
    training.lockstep.run([a.exchange(b, Step(3)) for a, b in zip(training.algorithms, buckets, strict=True)])
    assert not any(bool(bucket.flat.isfinite().any()) for bucket in buckets)
    for one, algorithm in zip(before, training.algorithms, strict=True):
        algorithm.roll_back()
        now = {**algorithm.shared_state(), **algorithm.own_state()}
        assert all(torch.equal(one[key], now[key]) for key in one | now)
