"""Algorithms of data-parallel training against NumPy, with all ranks in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from default_dtype import default_dtype
from doc_pages import python_blocks
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms import powersgd
from gradbus.runtime.algorithms.base import ALGORITHMS, Algorithm, Place, Step, TensorBucket, bucket_of, make_algorithm
from gradbus.runtime.algorithms.parts import entries_of
from gradbus.runtime.algorithms.powersgd import PowerSGD
from gradbus.runtime.algorithms.randomk import RandomK
from gradbus.runtime.algorithms.requests import AllReduce, joined_results, simple_requests
from gradbus.runtime.errors import ConfigError

SHAPES = {"conv": (6, 3, 3, 3), "bias": (6,), "matrix": (40, 33), "row": (1, 50), "scalar": ()}
STEPS = 4
# Options with which an algorithm sends everything: the result is that of dense.
EXACT: dict[str, dict[str, Any]] = {
    "topk": {"density": 1.0}, "randomk": {"density": 1.0}, "ef21": {"density": 1.0}, "s4": {"density": 1.0},
    "powersgd": {"start_step": 1000}, "hybrid": {"density": 1.0, "patterns": {"": "topk"}},
}  # fmt: skip

Run = list[list[dict[str, Tensor]]]


def gradients(world: int, steps: int = STEPS, *, ties: bool = True) -> Run:
    """``[step][rank][name]``; those of some ranks are much larger. ``ties``: many entries are equal."""
    torch.manual_seed(world)
    return [
        [
            {name: (rounded if ties else torch.clone)(torch.randn(shape) * 4**rank) for name, shape in SHAPES.items()}
            for rank in range(world)
        ]
        for _ in range(steps)
    ]


def rounded(tensor: Tensor) -> Tensor:
    return tensor.mul(8).round().div(8)


def as_arrays(run: Run) -> oracles.Gradients:
    return [[{name: tensor.numpy() for name, tensor in rank.items()} for rank in step] for step in run]


class Ranks:
    """One algorithm on all ranks."""

    def __init__(self, name: str, world: int, *, hosts: tuple[str, ...] = (), **options: Any) -> None:
        self.algorithms = [make_algorithm(name, Place(rank, world, hosts), options) for rank in range(world)]
        self.lockstep = Lockstep(world)
        self.step = 0

    def exchange(self, own: list[dict[str, Tensor]], *, active: int | None = None) -> list[dict[str, Tensor]]:
        """One step. Returns what each rank has after it."""
        buckets = [bucket_of(tensors) for tensors in own]
        step = Step(self.step, active=active or len(own))
        self.lockstep.run([a.exchange(bucket, step) for a, bucket in zip(self.algorithms, buckets, strict=True)])
        is_finite = {bool(bucket.flat.isfinite().all()) for bucket in buckets}
        assert len(is_finite) == 1, "some ranks would skip the step"
        for algorithm in self.algorithms:
            (algorithm.commit if is_finite == {True} else algorithm.roll_back)()
        self.step += 1
        return [dict(bucket.tensors) for bucket in buckets]

    def run(self, run: Run) -> list[dict[str, Tensor]]:
        """All steps. Returns what rank 0 has after each; the others have equal bits where the algorithm says so."""
        results = []
        for own in run:
            first, *others = self.exchange(own)
            for other in others if self.algorithms[0].equal_replicas else ():
                assert all(torch.equal(first[name], other[name]) for name in first)
            results.append(first)
        return results


def check(found: list[dict[str, Tensor]], expected: oracles.Means, tolerance: float = 1e-6) -> None:
    for step, (here, there) in enumerate(zip(found, expected, strict=True)):
        for name, tensor in here.items():
            scale = max(1.0, float(np.abs(there[name]).max()))
            worst = float(np.abs(tensor.numpy() - there[name]).max())
            assert worst <= tolerance * scale, f"step {step}, {name}: {worst / scale}"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_dense_is_the_mean_in_rank_order_bit_by_bit(world: int) -> None:
    run = gradients(world)
    check(Ranks("dense", world).run(run), oracles.dense(as_arrays(run)), tolerance=0)


@pytest.mark.parametrize(("wire", "epsilon"), [("fp16", 2**-10), ("bf16", 2**-7)])
def test_dense_in_half_precision_is_within_two_roundings(wire: str, epsilon: float) -> None:
    run = gradients(3)
    check(Ranks("dense", 3, wire=wire).run(run), oracles.dense(as_arrays(run)), tolerance=2 * epsilon)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_topk_sends_the_largest_and_keeps_the_rest(world: int) -> None:
    run = gradients(world)
    check(Ranks("topk", world, density=0.05).run(run), oracles.topk(as_arrays(run), 0.05))


@pytest.mark.parametrize("eta", [1.0, 0.1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ef21_sends_differences_to_what_is_known(world: int, eta: float) -> None:
    run = gradients(world, ties=False)  # the order of equal entries follows from roundings, which differ
    found = Ranks("ef21", world, density=0.05, eta=eta).run(run)
    check(found, oracles.ef21(as_arrays(run), 0.05, eta), tolerance=1e-5)


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_powersgd_is_power_iterations_with_error_feedback(world: int, iterations: int) -> None:
    run = gradients(world)
    ranks = Ranks("powersgd", world, rank=2, min_rate=2, power_iterations=iterations)
    algorithm = ranks.algorithms[0]
    assert isinstance(algorithm, PowerSGD)

    def first_q(name: str) -> Any:
        shape = torch.Size(SHAPES[name])
        if algorithm.rank_of(shape) is None:
            return None
        return algorithm.first_q(name, 2, math.prod(shape[1:])).T.numpy()

    assert [name for name in SHAPES if first_q(name) is not None] == ["conv", "matrix"]
    expected = oracles.powersgd(as_arrays(run), 2, first_q, iterations=iterations)
    check(ranks.run(run), expected, tolerance=1e-5)


@pytest.mark.parametrize("name", ["powersgd", "adaptive-powersgd", "hybrid"])
def test_more_power_iterations_come_closer_to_the_best_approximation_for_as_many_times_the_bytes(name: str) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(60, 40)
    u, singular, v = torch.linalg.svd(matrix)
    best = float((matrix - u[:, :4] * singular[:4] @ v[:4]).norm())
    errors, phases = [], []
    for iterations in (1, 2, 8):
        algorithm = make_algorithm(name, Place(0, 1), {"power_iterations": iterations})
        bucket, lockstep = bucket_of({"matrix": matrix.clone()}), Lockstep(1)
        lockstep.run([algorithm.exchange(bucket, Step(0))])
        errors.append(float((matrix - bucket.tensors["matrix"]).norm()))
        phases.append(lockstep.cost.phases[0])
    assert best <= errors[2] < errors[1] < errors[0]
    assert phases == [2, 4, 16]


def test_powersgd_goes_on_from_a_checkpoint_with_memory_laid_out_as_without_one() -> None:
    """Processors differ in whether a dot product of strided rows has the bits of one of rows in one piece."""
    ranks = Ranks("powersgd", 1, rank=2, min_rate=2)
    ranks.run(gradients(1))
    algorithm = ranks.algorithms[0]
    assert isinstance(algorithm, PowerSGD)
    kinds = frozenset({"q", "error"})
    saved = {name: tensor.contiguous() for name, tensor in algorithm.memory.tensors(kinds).items()}
    algorithm.memory.load(saved, kinds)
    columns = SHAPES["matrix"][1]
    for rank in (2, 1):
        # Results show it by their last bits, and on some processors alone.
        assert algorithm._q("matrix", rank, columns).is_contiguous()  # noqa: SLF001


@pytest.mark.parametrize(
    ("shape", "most", "expected"),
    [
        ((128, 9216), None, (128, 9216)),
        ((128, 9216), 20, (256, 4608)),
        ((128, 9216), 1.2, (1024, 1152)),
        ((9216, 128), 20, (4608, 256)),
        ((64, 32, 3, 3), 2, (128, 144)),
        ((7, 5), 1, (7, 5)),
        ((1, 13), 2, (1, 13)),
        ((10, 128), 1, (40, 32)),
    ],
)
def test_long_matrices_are_cut_to_the_aspect_that_is_asked_for(shape: Any, most: float | None, expected: Any) -> None:
    algorithm = make_algorithm("powersgd", Place(0, 1), {"max_aspect": most})
    assert isinstance(algorithm, PowerSGD)
    assert algorithm.matrix_of(torch.Size(shape)) == expected


def test_powersgd_of_cut_matrices_is_that_of_the_reshaped_ones() -> None:
    run = gradients(3)
    ranks = Ranks("powersgd", 3, rank=2, max_aspect=1, min_rate=1)
    algorithm = ranks.algorithms[0]
    assert isinstance(algorithm, PowerSGD)

    def matrix(shape: Any) -> tuple[int, int]:
        return algorithm.matrix_of(torch.Size(shape))

    def first_q(name: str) -> Any:
        is_dense = algorithm.rank_of(torch.Size(SHAPES[name])) is None
        return None if is_dense else algorithm.first_q(name, 2, matrix(SHAPES[name])[1]).T.numpy()

    assert [name for name in SHAPES if first_q(name) is not None] == ["conv", "matrix", "row"]
    assert matrix(SHAPES["row"]) == (5, 10)
    check(ranks.run(run), oracles.powersgd(as_arrays(run), 2, first_q, matrix), tolerance=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 4, 64])
@pytest.mark.parametrize("min_rate", [0.5, 1, 2, 8])
def test_powersgd_compresses_what_the_hook_of_torch_compresses(rank: int, min_rate: float) -> None:
    algorithm = make_algorithm("powersgd", Place(0, 1), {"rank": rank, "min_rate": min_rate})
    assert isinstance(algorithm, PowerSGD)
    for shape in [(10, 128), (128, 9216), (64, 32, 3, 3), (32, 1, 3, 3), (10, 512), (1, 50), (8, 8), (16, 16), (5, 7)]:
        rows, columns = shape[0], math.prod(shape[1:])
        should_compress = powerSGD_hook._should_compress  # noqa: SLF001 - the hook itself does not say what it does
        expected = should_compress(rows, columns, min(rows, columns, rank), min_rate)[0]
        assert (algorithm.rank_of(torch.Size(shape)) is not None) == expected
    assert algorithm.rank_of(torch.Size((1000,))) is None


@pytest.mark.parametrize("by_blas", [True, False])
@pytest.mark.parametrize("rank", [1, 3, 4, 32])
@pytest.mark.parametrize("shape", [(128, 9216), (10, 128), (64, 288), (33, 1001), (1, 300), (2, 200_000), (5000, 7)])
def test_an_approximation_is_the_sum_of_outer_products_in_their_order_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], rank: int, by_blas: bool
) -> None:
    if not by_blas:
        monkeypatch.setattr(powersgd, "blas_adds_in_order", lambda *shape: False)
    rows, columns = shape
    torch.manual_seed(1)
    m, p, q = torch.randn(shape), torch.randn(rank, rows), torch.randn(rank, columns)
    expected, error, before = p[0].unsqueeze(1) * q[0], torch.empty(shape), m.clone()
    for one, other in zip(p[1:], q[1:], strict=True):
        expected.addcmul_(one.unsqueeze(1), other)
    powersgd.approximate(m, p, q, error)
    assert torch.equal(m, expected)
    assert torch.equal(error, before - expected)


@pytest.mark.parametrize("shape", [(128, 9216), (10, 128), (33, 1001), (5000, 7)])
def test_an_approximation_is_the_same_for_a_gradient_anywhere_in_its_bucket_and_for_columns_of_zeros(
    shape: tuple[int, int],
) -> None:
    rows, columns = shape
    torch.manual_seed(1)
    p, q = torch.randn(4, rows), torch.randn(4, columns)
    q[:, ::3], p[1] = 0, 0
    expected, bucket = torch.empty(shape), torch.randn(rows * columns + 3)
    powersgd.sum_outer_products(p, q, expected)
    for start in range(4):
        m = bucket[start : start + rows * columns].view(shape)
        before = m.clone()
        error = torch.empty(shape)
        powersgd.approximate(m, p, q, error)
        assert torch.equal(m, expected), "0.0 and -0.0 are equal"
        assert torch.equal(error, before - expected)


def test_powersgd_recovers_from_steps_without_a_gradient() -> None:
    shapes = {"w": (40, 30)}
    ranks = Ranks("powersgd", 2, rank=2, min_rate=1)
    matrix = torch.outer(torch.arange(40.0), torch.ones(30))
    for own in (torch.zeros(shapes["w"]), torch.zeros(shapes["w"]), matrix):
        found = ranks.exchange([{"w": own}] * 2)
    assert torch.allclose(found[0]["w"], matrix, rtol=1e-4)


@pytest.mark.parametrize(("name", "options"), [("powersgd", {}), ("hybrid", {"small_numel": 100})])
def test_matrices_and_the_small_tensors_beside_them_take_one_request_a_phase(
    name: str, options: dict[str, int]
) -> None:
    algorithm = make_algorithm(name, Place(0, 1), {"rank": 1, **options})
    program = algorithm.exchange(bucket_of({"matrix": torch.ones(16, 16), "bias": torch.ones(16)}), Step(0))
    first = next(program)
    (p,) = simple_requests(first)
    assert isinstance(p, AllReduce)
    second = program.send(joined_results(first, [p.tensor]))
    assert [(one.name, one.tensor.numel()) for one in (p, *simple_requests(second))] == [("p", 32), ("q", 16)]


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e5])
def test_powersgd_does_not_depend_on_the_scale_of_a_matrix_of_smaller_rank(scale: float) -> None:
    torch.manual_seed(1)
    matrix = torch.zeros(40, 30)
    matrix[:2] = torch.randn(2, 30) * scale
    ranks = Ranks("powersgd", 2, rank=4, min_rate=1)
    for _ in range(3):
        found = ranks.exchange([{"w": matrix}] * 2)
    assert float((found[0]["w"] - matrix).norm() / matrix.norm()) < 1e-3


def test_what_ef21_knows_of_a_rank_is_what_the_others_have_decoded() -> None:
    ranks = Ranks("ef21", 3, density=0.02)
    torch.manual_seed(2)
    for _ in range(200):
        ranks.exchange([{"w": torch.randn(40, 30) * 10 ** torch.randint(-2, 2, ()).item()} for _ in range(3)])
    known = torch.stack([a.memory.find("known", "w") for a in ranks.algorithms]).double().mean(0)  # type: ignore[misc]
    mean = ranks.algorithms[0].memory.find("mean", "w")
    assert mean is not None
    assert float((known - mean).abs().max()) < 1e-5


def test_ranks_without_data_do_not_vote() -> None:
    own = [{"w": torch.tensor([-1.0, -1.0, 1.0, 1.0])}, {"w": torch.zeros(4)}, {"w": torch.zeros(4)}]
    found = Ranks("signsgd", 3).exchange(own, active=1)[0]["w"]
    assert found.tolist() == [-1, -1, 1, 1]


def test_entries_that_stay_zero_do_not_drift_with_signsgd() -> None:
    ranks = Ranks("signsgd", 3)
    own = [{"w": torch.cat([torch.zeros(6), torch.ones(1)])} for _ in range(3)]
    assert (ranks.exchange(own)[0]["w"] + ranks.exchange(own)[0]["w"])[:6].tolist() == [0.0] * 6


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_signsgd_is_the_vote_of_the_majority(world: int) -> None:
    run = gradients(world)
    check(Ranks("signsgd", world).run(run), oracles.signsgd(as_arrays(run)), tolerance=0)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_bytegrad_is_within_the_steps_of_both_quantizations(world: int) -> None:
    run = gradients(world, steps=2)
    expected, step = oracles.bytegrad(as_arrays(run), 64)
    for here, there in zip(Ranks("bytegrad", world, chunk_elems=64).run(run), expected, strict=True):
        for name, tensor in here.items():
            assert np.abs(tensor.numpy() - there[name]).max() <= 1.01 * step  # a value in the middle of two may go up


def test_bytegrad_by_hosts_quantizes_the_sums_of_hosts() -> None:
    for hosts in (("a", "b"), ("a", "a", "b", "b"), ("a", "b", "a", "b"), ("a", "b", "b", "c", "c")):
        run = gradients(len(hosts), steps=2)
        flats = [[np.concatenate([t.reshape(-1) for t in rank.values()]) for rank in step] for step in as_arrays(run)]
        members = [[r for r, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
        found = Ranks("bytegrad", len(hosts), hosts=hosts, chunk_elems=64, hierarchical=True).run(run)
        for step, tensors in enumerate(found):
            sums = [sum(flats[step][rank].astype(np.float64) for rank in host) for host in members]
            # A quantization of each host's sum, of what one step of it may be off at most, and one of the whole sum.
            most = sum(float(one.max() - one.min()) for one in [*sums, sum(sums)]) / 255 / 2 / len(hosts)
            flat = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors.values()])
            assert np.abs(flat - sum(sums) / len(hosts)).max() <= 1.02 * most


def test_bytegrad_takes_hosts_and_racks_of_a_topology() -> None:
    hosts, racks = ("a", "b", "a", "b", "c", "c"), ("x", "x", "x", "x", "y", "y")
    run, world = gradients(6), len(hosts)
    options = {"hierarchical": True, "chunk_elems": 64}

    def by(**keys: tuple[str, ...]) -> list[dict[str, Tensor]]:
        ranks = [dict(zip(keys, one, strict=True)) for one in zip(*keys.values(), strict=True)]
        return Ranks("bytegrad", world, topology={"ranks": ranks}, **options).run(run)

    def check_equal(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
        assert all(
            torch.equal(one[name], other[name]) for one, other in zip(found, expected, strict=True) for name in one
        )

    check_equal(by(host=hosts), Ranks("bytegrad", world, hosts=hosts, **options).run(run))
    flats = [[np.concatenate([t.reshape(-1) for t in rank.values()]) for rank in step] for step in as_arrays(run)]
    for step, tensors in enumerate(by(host=hosts, rack=racks)):
        sums = [sum(flats[step][rank].astype(np.float64) for rank in rack) for rack in (range(4), range(4, 6))]
        most = sum(float(one.max() - one.min()) for one in [*sums, sum(sums)]) / 255 / 2 / world
        flat = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors.values()])
        assert 0 < np.abs(flat - sum(sums) / world).max() <= 1.02 * most
    check(by(host=hosts, rack=("x",) * world), oracles.dense(as_arrays(run)), tolerance=0)


@pytest.mark.parametrize("world", [1, 3])
def test_bytegrad_on_one_host_is_dense_bit_by_bit(world: int) -> None:
    run = gradients(world)
    found = Ranks("bytegrad", world, hosts=("a",) * world, hierarchical=True).run(run)
    check(found, oracles.dense(as_arrays(run)), tolerance=0)


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (4, 2), (2, 4)])
def test_bytegrad_sends_a_byte_for_each_entry_twice_between_hosts(hosts: int, ranks: int) -> None:
    world, numel, chunk = hosts * ranks, 64 * 1024, 1024
    places = [Place(rank, world, tuple(f"host {r // ranks}" for r in range(world))) for rank in range(world)]
    between = [0] * world

    def counted(rank: int, program: Any) -> Any:
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return
            for peer, tensor in request.send.items():
                if peer // ranks != rank // ranks:
                    between[rank] += tensor.numel() * tensor.element_size()
            answer = yield request

    algorithms = [make_algorithm("bytegrad", one, {"hierarchical": True, "chunk_elems": chunk}) for one in places]
    buckets = [bucket_of({"w": torch.randn(numel)}) for _ in places]
    Lockstep(world).run([counted(r, one.exchange(buckets[r], Step(0))) for r, one in enumerate(algorithms)])
    entries = 2 * (hosts - 1) * numel // hosts // ranks
    assert between == [entries + 8 * entries // chunk] * world


def test_randomk_takes_equal_entries_on_all_ranks_and_loses_nothing() -> None:
    run = gradients(3, steps=30)
    ranks = Ranks("randomk", 3, density=0.1)
    algorithm = ranks.algorithms[0]
    assert isinstance(algorithm, RandomK)
    found = ranks.run(run)
    sent = [set(algorithm.chosen("matrix", 40 * 33, step).tolist()) for step in range(30)]
    assert all(len(one) == 132 for one in sent)
    assert sent[0] != sent[1]
    assert set().union(*(set(algorithm.chosen("matrix", 40 * 33, step).tolist()) for step in range(300))) == set(
        range(40 * 33)
    )
    for step, entries in enumerate(sent):
        assert set(found[step]["matrix"].reshape(-1).nonzero().reshape(-1).tolist()) <= entries
    total = sum(one["matrix"].double() for one in found)
    left = sum(a.memory.find("residual", "matrix").double() for a in ranks.algorithms) / 3  # type: ignore[union-attr]
    dense = sum(rank["matrix"].double() for step in run for rank in step) / 3
    assert torch.allclose(total.reshape(-1) + left, dense.reshape(-1), atol=1e-3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_randomk_keeps_what_it_does_not_send(world: int) -> None:
    run, ranks = gradients(world, ties=False), Ranks("randomk", world, density=0.1)
    algorithm = ranks.algorithms[0]
    assert isinstance(algorithm, RandomK)

    def chosen(name: str, step: int) -> Any:
        return algorithm.chosen(name, math.prod(SHAPES[name]), step).numpy()

    check(ranks.run(run), oracles.randomk(as_arrays(run), chosen))


@pytest.mark.parametrize("patterns", [{}, {"conv": "topk", "mat": "powersgd"}, {"row": "dense"}], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_hybrid_is_powersgd_topk_and_dense_by_name_and_shape(world: int, patterns: dict[str, str]) -> None:
    by_topk = {"row"} if not patterns else {"conv", "row"} if "conv" in patterns else set()
    run, ranks = gradients(world), Ranks("hybrid", world, rank=2, density=0.05, small_numel=40, patterns=patterns)
    powersgd_of = make_algorithm("powersgd", Place(0, 1), {"rank": 2})
    assert isinstance(powersgd_of, PowerSGD)

    def first_q(name: str) -> Any:
        shape = torch.Size(SHAPES[name])
        if name not in {"conv", "matrix"} - by_topk:
            return None
        return powersgd_of.first_q(name, 2, math.prod(shape[1:])).T.numpy()

    check(ranks.run(run), oracles.hybrid(as_arrays(run), 2, 0.05, first_q, by_topk), tolerance=1e-5)


@pytest.mark.parametrize(("numel", "density"), [(1, 0.1), (7, 0.5), (7, 1.0), (1000, 0.3), (1 << 40, 1e-9)])
def test_randomk_draws_as_many_numbers_as_it_sends(numel: int, density: float) -> None:
    """A permutation of 2^40 entries would not fit into any memory."""
    algorithm = make_algorithm("randomk", Place(0, 1), {"density": density})
    assert isinstance(algorithm, RandomK)
    found = algorithm.chosen("matrix", numel, 3)
    assert len(found) == entries_of(density, numel)
    assert bool((found.diff() > 0).all())
    assert 0 <= int(found[0]) <= int(found[-1]) < numel


def test_randomk_sends_every_entry_equally_often() -> None:
    algorithm = make_algorithm("randomk", Place(0, 1), {"density": 0.3})
    assert isinstance(algorithm, RandomK)
    counts = torch.zeros(11)
    for step in range(3000):
        counts[algorithm.chosen("matrix", 11, step)] += 1
    assert torch.allclose(counts / 3000, torch.full((11,), 4 / 11), atol=0.04)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_what_sends_everything_is_dense_bit_by_bit(name: str, world: int) -> None:
    run = gradients(world, ties=False)
    tolerance = 1e-6 if name == "ef21" else 0  # its mean is a sum of differences, each of which is rounded
    check(Ranks(name, world, **EXACT[name]).run(run), oracles.dense(as_arrays(run)), tolerance)


@pytest.mark.parametrize(("bad", "world"), [(math.nan, 2), (math.inf, 3)])
@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.table.items() if kind.scope == "bucket"])
def test_a_step_with_values_that_are_not_finite_is_skipped_by_all_ranks_and_leaves_no_trace(
    name: str, bad: float, world: int
) -> None:
    run = gradients(world)
    undisturbed = Ranks(name, world).run(run)
    for tensor in SHAPES:
        ranks = Ranks(name, world)
        first = ranks.exchange(run[0])
        spoilt = [{key: value.clone() for key, value in rank.items()} for rank in run[1]]
        spoilt[world - 1][tensor].reshape(-1)[-1:] = bad
        assert not all(bool(value.isfinite().all()) for value in ranks.exchange(spoilt)[0].values())
        ranks.step = 1
        again = [first[0], *(ranks.exchange(own)[0] for own in run[1:])]
        for here, there in zip(again, undisturbed, strict=True):
            assert all(torch.equal(here[key], there[key]) for key in here)


@pytest.mark.parametrize("name", ALGORITHMS.table)
def test_a_run_goes_on_from_its_saved_state_to_the_same_bits(name: str) -> None:
    run = gradients(3)
    expected = Ranks(name, 3).run(run)
    before, after = Ranks(name, 3), Ranks(name, 3)
    before.run(run[:2])
    shared = before.algorithms[0].shared_state()
    for old, new in zip(before.algorithms, after.algorithms, strict=True):
        new.load_state(old.own_state(), shared)
    after.step = 2
    for here, there in zip(after.run(run[2:]), expected[2:], strict=True):
        assert all(torch.equal(here[key], there[key]) for key in here)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ALGORITHMS.table),
        *(("dense", {"route": route}) for route in ("star", "ring", "halving-doubling")),
        *((name, {"warmup_steps": 1}) for name in ("qadam", "onebit-adam")),
        *((name, {"steps": 1}) for name in ("diloco", "sparseloco")),
    ],
    ids=str,
)
def test_the_default_dtype_of_the_script_changes_no_bit(name: str, options: dict[str, Any]) -> None:
    run, found = gradients(2), list[list[dict[str, Tensor]]]()
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            ranks = Ranks(name, 2, **options)
            for algorithm, tensors in zip(ranks.algorithms, run[0], strict=True):
                algorithm.begin(bucket_of(tensors))
            found.append(ranks.run(run))
    for here, there in zip(*found, strict=True):
        assert all(torch.equal(here[key], there[key]) for key in here)


def test_shared_state_is_equal_on_all_ranks() -> None:
    for name in ALGORITHMS.table:
        ranks = Ranks(name, 3)
        ranks.run(gradients(3))
        first, *others = [algorithm.shared_state() for algorithm in ranks.algorithms]
        for other in others:
            assert all(torch.equal(first[key], other[key]) for key in first | other), name


@pytest.mark.parametrize("name", ["dense", "topk", "bytegrad", "powersgd"])
def test_ranks_without_data_do_not_count_in_the_mean(name: str) -> None:
    own = gradients(3, steps=1)[0]
    own[2] = {key: torch.zeros_like(value) for key, value in own[2].items()}
    options = {"topk": {"density": 1.0}, "powersgd": {"start_step": 10}}.get(name, {})
    found = Ranks(name, 3, **options).exchange(own, active=2)[0]
    for key, tensor in found.items():
        mean = (own[0][key] + own[1][key]) / 2
        assert (tensor - mean).abs().max() <= (0.4 if name == "bytegrad" else 1e-5)


@pytest.mark.parametrize("name", ["qadam", "onebit-adam"])
def test_adam_does_not_depend_on_the_order_in_memory_which_may_change_from_step_to_step(name: str) -> None:
    """As with DDP, whose buckets have the order of the parameters, until one of them is not used in a step."""

    def trained(*in_memory: torch.memory_format) -> list[Tensor]:
        ranks = [make_algorithm(name, Place(rank, 2), {"warmup_steps": 2}) for rank in range(2)]
        found = []
        for number, order in enumerate(in_memory):
            torch.manual_seed(number)
            buckets = [bucket_in(order, torch.randn(4, 3, 2, 2)) for _ in ranks]
            Lockstep(2).run([a.exchange(b, Step(number, active=2)) for a, b in zip(ranks, buckets, strict=True)])
            for algorithm in ranks:
                algorithm.commit()
            found.append(buckets[0].tensors["w"].contiguous())
        return found

    rows, channels = torch.contiguous_format, torch.channels_last
    expected = trained(*[rows] * 5)
    for orders in ([channels] * 5, [channels, rows] * 2 + [channels]):
        assert all(map(torch.equal, trained(*orders), expected)), orders


def bucket_in(order: torch.memory_format, gradient: Tensor) -> TensorBucket:
    """A bucket whose memory has the entries of a gradient in this order."""
    like = torch.empty(gradient.shape, device="meta").to(memory_format=order)
    view = torch.empty(gradient.numel()).as_strided(gradient.shape, like.stride())
    view.copy_(gradient)
    return TensorBucket(0, view.as_strided((gradient.numel(),), (1,)), {"w": view})


def bytes_of(name: str, world: int, shapes: dict[str, tuple[int, ...]], **options: Any) -> int:
    """Sent by the busiest rank in the second step, as the lockstep driver counts it."""
    torch.manual_seed(0)
    ranks = Ranks(name, world, **options)
    for _ in range(2):
        ranks.lockstep.cost.bytes_out[:] = [0] * world
        ranks.exchange([{key: torch.randn(shape) for key, shape in shapes.items()} for _ in range(world)])
    return max(ranks.lockstep.cost.bytes_out)


CNN = {
    "1.weight": (32, 1, 3, 3), "1.bias": (32,), "2.weight": (64, 32, 3, 3), "2.bias": (64,), "3.weight": (128, 9216),
    "3.bias": (128,), "4.weight": (10, 128), "4.bias": (10,),
}  # fmt: skip
MLP = {"1.weight": (512, 784), "1.bias": (512,), "2.weight": (10, 512), "2.bias": (10,)}


def test_bytes_are_those_of_the_papers() -> None:
    for world in (2, 4, 8):
        dense = bytes_of("dense", world, CNN)
        assert abs(bytes_of("bytegrad", world, CNN) / dense - 0.25) <= 0.003
        of_the_mlp = bytes_of("dense", world, MLP)
        assert bytes_of("powersgd", world, MLP, rank=4, min_rate=1) * 50 <= of_the_mlp
        assert bytes_of("powersgd", world, MLP, rank=1) * 170 <= of_the_mlp
    of_the_cnn = bytes_of("dense", 2, CNN)
    assert bytes_of("powersgd", 2, CNN, rank=4) * 28 <= of_the_cnn
    assert bytes_of("powersgd", 2, CNN, rank=4, max_aspect=20) * 50 <= of_the_cnn
    assert bytes_of("powersgd", 2, CNN, rank=1, max_aspect=20) * 170 <= of_the_cnn
    assert bytes_of("hybrid", 2, CNN) <= 0.13 * of_the_cnn
    assert bytes_of("signsgd", 2, CNN) <= of_the_cnn / 31
    assert bytes_of("dense", 2, CNN, wire="fp16") * 2 == of_the_cnn


def test_an_unknown_algorithm_or_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'powersgd'\?"):
        make_algorithm("power-sgd", Place(0, 1))
    with pytest.raises(ConfigError, match=r"desnity: there is no such option, did you mean 'density'\?"):
        make_algorithm("topk", Place(0, 1), {"desnity": 0.1})
    with pytest.raises(ConfigError, match="density"):
        make_algorithm("topk", Place(0, 1), {"density": 1.5})


class Doubled(Algorithm):
    """An algorithm of somebody else's."""

    def exchange(self, bucket: Any, step: Step) -> Any:
        bucket.flat.mul_(2)
        return
        yield


def test_the_example_of_the_page_does_what_it_says(root: Path) -> None:
    page = (root / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (code,) = (block for block in python_blocks(page) if "class HalfMean" in block)
    found: dict[str, Any] = {"__name__": "page"}
    exec(code, found)  # noqa: S102 - the code of the page
    kind: type[Algorithm] = found["HalfMean"]
    buckets = [bucket_of({"a": torch.full((3,), float(rank))}) for rank in range(2)]
    algorithms = [kind(Place(rank, 2), kind.Options()) for rank in range(2)]
    Lockstep(2).run([a.exchange(b, Step(0, active=2)) for a, b in zip(algorithms, buckets, strict=True)])
    assert [bucket.flat.tolist() for bucket in buckets] == [[0.25] * 3] * 2


def test_dense_copies_nothing() -> None:
    bucket = bucket_of({"a": torch.ones(3)})
    request = next(make_algorithm("dense", Place(0, 2)).exchange(bucket, Step(0, active=2)))
    assert isinstance(request, AllReduce)
    assert request.tensor is bucket.flat
    assert request.out is bucket.flat


def test_what_is_no_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no Algorithm"):
        make_algorithm("collections:OrderedDict", Place(0, 1))


def test_a_tensor_without_entries_is_sent_by_all() -> None:
    for name in ("topk", "randomk", "ef21", "hybrid", "powersgd"):
        Ranks(name, 2).exchange([{"w": torch.ones(2, 2), "none": torch.zeros(0, 3)} for _ in range(2)])


def test_an_algorithm_of_ones_own_is_named_by_its_module() -> None:
    algorithm = make_algorithm(f"{__name__}:Doubled", Place(0, 1))
    bucket = bucket_of({"a": torch.ones(3)})
    Lockstep(1).run([algorithm.exchange(bucket, Step(0))])
    assert bucket.flat.tolist() == [2.0] * 3


def test_one_bit_adam_keeps_one_error_for_each_tensor_however_buckets_are_formed() -> None:
    algorithms = [make_algorithm("onebit-adam", Place(rank, 2), {"warmup_steps": 1}) for rank in range(2)]
    tensors = {name: torch.ones(8) for name in "abc"}
    for number, names in enumerate(["abc", "abc", "ab", "ac", "a", "bc", "abc", "b"]):
        buckets = [bucket_of({name: tensors[name] for name in names}) for _ in algorithms]
        Lockstep(2).run([a.exchange(b, Step(number)) for a, b in zip(algorithms, buckets, strict=True)])
        for algorithm in algorithms:
            algorithm.commit()
            kept = [key.partition("/")[2] for key in algorithm.own_state() if key.startswith("server_error/")]
            assert sum(key.split("+").count(name) for key in kept for name in "abc") <= 3
            assert number == 0 or "+".join(names) in kept
