"""The mean in fixed point, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
from gradbus.runtime.errors import ConfigError


def means(inputs: list[torch.Tensor], active: int) -> list[torch.Tensor]:
    world = len(inputs)
    buckets = [bucket_of({"w": x}) for x in inputs]
    algorithms = [make_algorithm("fixed-point", Place(rank, world), {"chunk_elems": 16}) for rank in range(world)]
    step = Step(0, active=active)
    Lockstep(world).run([one.exchange(bucket, step) for one, bucket in zip(algorithms, buckets, strict=True)])
    return [bucket.flat for bucket in buckets]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_the_mean_is_that_of_float64_to_the_bits_that_are_left_for_each_rank(world: int) -> None:
    inputs = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) * 3.0**rank for rank in range(world)]
    active = max(1, world - 1)
    exact = np.sum([x.numpy().astype(np.float64) for x in inputs], axis=0) / active
    found = means(inputs, active)
    assert all(other.equal(found[0]) for other in found)
    largest = max(float(x.abs().max()) for x in inputs)
    half_a_unit = largest * 2.0 ** (-30 + (world - 1).bit_length())
    rounding = np.abs(exact) * 2.0**-24
    assert (np.abs(found[0].numpy() - exact) <= world / active * half_a_unit + rounding).all()


def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all() -> None:
    bad = torch.ones(40)
    bad[20] = torch.nan
    for mean in means([torch.ones(40), bad], 2):
        assert not mean[16:32].isfinite().any()
        assert mean[:16].tolist() == [1.0] * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"route": "ra-ina", "topology": "tree", "leaves": 2}, "ra-ina has one aggregator, got topology tree"),
        ({"route": "ra-ina", "roots": 2}, "got topology single with 2 roots"),
        ({"route": "ina", "leaves": 2}, "leaves are of a tree or a chain, got 2"),
        ({"route": "ina", "topology": "chain", "roots": 2}, "a chain has one end, got 2 roots"),
        ({"route": "ina", "topology": "tree", "leaves": 0}, "leaves"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("fixed-point", Place(0, 4), options)
