"""``q8``, ``s4``, ``sq8`` and a codec of the user's as algorithms of a Worker: messages and residuals as of clients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.data_parallel.algorithm import AlgorithmLabel
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.experiments.examples.custom_codec import Ternary
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, bucket_of, make_algorithm
from gradbus.runtime.choices import CODECS, Choice
from gradbus.runtime.errors import ConfigError

SHAPES = {"conv": (6, 3, 3, 3), "bias": (6,), "matrix": (40, 33), "scalar": ()}
DIM = sum(math.prod(shape) for shape in SHAPES.values())
TERNARY = "gradbus.experiments.examples.custom_codec:Ternary"
OPTIONS: dict[str, dict[str, Any]] = {
    "q8": {"chunk_elems": 100}, "s4": {"density": 0.05}, "sq8": {"density": 0.05, "chunk_elems": 16},
    TERNARY: {"threshold": 0.6, "chunk_elems": 50},
}  # fmt: skip
each = pytest.mark.parametrize("name", OPTIONS)


class Named(Ternary):
    """Other messages than those of the codec that it is like."""

    magic = b"NAM1"


def gradients(world: int, step: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(world)]


def made(name: str, world: int) -> list[Algorithm]:
    return [make_algorithm(name, Place(rank, world), OPTIONS[name]) for rank in range(world)]


def exchanged(ranks: list[Algorithm], own: list[dict[str, Tensor]], step: int, active: int = 0) -> list[Tensor]:
    buckets = [bucket_of(tensors) for tensors in own]
    lockstep, number = Lockstep(len(ranks)), Step(step, active=active or len(ranks))
    lockstep.run([rank.exchange(bucket, number) for rank, bucket in zip(ranks, buckets, strict=True)])
    for rank in ranks:
        rank.commit()
    return [bucket.flat for bucket in buckets]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


@each
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_step_is_the_mean_of_what_clients_with_these_gradients_would_send(name: str, world: int) -> None:
    """With more than two ranks the means of q8 are rounded a second time, by half a scale at most."""
    ranks, codec = made(name, world), CODECS.make(Choice.model_validate({**OPTIONS[name], "name": name}))
    residuals: list[Tensor | None] = [None] * world
    for step in range(5):
        own, total = gradients(world, step), torch.zeros(DIM)
        for rank, tensors in enumerate(own):
            payload, residuals[rank] = codecs.residual_step(flat(tensors), residuals[rank], codec)
            total += codecs.decode(payload, expected_dim=DIM, own=(type(codec),)).vector
        found = exchanged(ranks, own, step)
        assert all(torch.equal(found[0], other) for other in found)
        if name == "q8" and world == 3:
            assert float((found[0] - total / world).abs().max()) < 3 * 5.0 / 127
        else:
            assert torch.equal(found[0], total.mul_(1 / world))
            for rank, residual in zip(ranks, residuals, strict=True):
                assert residual is not None
                assert torch.equal(torch.cat([rank.own_state()[f"residual/{name}"] for name in SHAPES]), residual)


@each
def test_what_is_left_out_comes_later(name: str) -> None:
    ranks, own, total = made(name, 3), gradients(3, 0), torch.zeros(DIM)
    mean = torch.stack([flat(tensors) for tensors in own]).mean(0)
    for step in range(60):
        total += exchanged(ranks, [dict(tensors) for tensors in own], step)[0]
    assert float((total / 60 - mean).abs().max()) < 0.5 * float(mean.abs().max())
    assert float((total / 60 - mean).norm()) < 0.3 * float(mean.norm())


@each
def test_residuals_are_by_tensor_so_that_buckets_may_be_cut_anew(name: str) -> None:
    ranks, own = made(name, 2), gradients(2, 0)
    exchanged(ranks, own, 0)
    before = ranks[0].own_state()["residual/matrix"].clone()
    assert float(before.norm()) > 0
    exchanged(ranks, [{"bias": tensors["bias"]} for tensors in own], 1)
    assert torch.equal(ranks[0].own_state()["residual/matrix"], before)


@each
def test_a_rank_without_data_does_not_count_in_the_mean(name: str) -> None:
    own = gradients(2, 0)
    own[1] = {key: torch.zeros_like(tensor) for key, tensor in own[1].items()}
    alone = exchanged(made(name, 1), own[:1], 0)[0]
    both = exchanged(made(name, 2), own, 0, active=1)[0]
    torch.testing.assert_close(both, alone, rtol=1e-6, atol=1e-6)


def test_q8_of_more_than_two_ranks_sends_a_quarter_of_dense() -> None:
    sent = {}
    for name in ("dense", "q8"):
        lockstep, ranks = Lockstep(4), [make_algorithm(name, Place(rank, 4)) for rank in range(4)]
        buckets = [bucket_of({"w": torch.randn(40_000)}) for _ in range(4)]
        lockstep.run([rank.exchange(bucket, Step(0, active=4)) for rank, bucket in zip(ranks, buckets, strict=True)])
        sent[name] = lockstep.cost.bytes_out[0]
    assert sent["q8"] < 0.26 * sent["dense"]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("q8", {"density": 0.1}, "this is an option of"),
        ("s4", {"density": 0}, "greater than 0"),
        ("sq8", {"chunk_elems": 0}, "greater than or equal to 1"),
        ("q8", {"version": 1}, "no such option"),
        (TERNARY, {"threshold": 2.0}, "parallel.algorithm.threshold: Input should be less than"),
        (TERNARY, {"density": 0.1}, "this is an option of"),
        ("gradbus.codecs:CustomCodec", {}, "codec CustomCodec has no decode_body, encode_body, max_body_bytes: write"),
        ("gradbus.codecs:SparseVector", {}, "is no Algorithm, and no codec: inherit from"),
    ],
)
def test_their_options_are_checked(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_algorithm(name, Place(0, 1), options)


def test_ranks_compare_the_name_and_the_options_of_a_codec() -> None:
    (rank,) = made(TERNARY, 1)
    label = AlgorithmLabel.of(rank)
    assert label.name == TERNARY
    assert label.kept["algorithm.threshold"] == 0.6
    assert type(rank) is type(made(TERNARY, 1)[0])
    assert rank.called == TERNARY


def test_messages_of_no_codec_but_the_own_one_are_read() -> None:
    ranks, own = made(TERNARY, 2), gradients(2, 0)
    ranks[1]._codec = Named()  # type: ignore[attr-defined]  # noqa: SLF001 - as of a rank with another file
    with pytest.raises(codecs.CodecError, match="known magic"):
        exchanged(ranks, own, 0)


@each
def test_a_rank_that_is_not_finite_makes_the_step_so_on_all(name: str) -> None:
    ranks, own = made(name, 3), gradients(3, 0)
    own[1]["bias"][0] = math.nan
    assert all(not found.isfinite().all() for found in exchanged(ranks, own, 0))
