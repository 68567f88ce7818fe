"""Ranks that join, leave or are replaced, in the midst of a run, with all ranks in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import ALGORITHMS, Algorithm, Place, Step, TensorBucket, bucket_of, make_algorithm

SHAPES = {"matrix": (20, 15), "bias": (7,)}
CHANGES = {"replaced": [0, None, 2], "joined": [0, 1, 2, None], "left": [0, 2], "left alone": [1]}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "decentralized": [{"peers": peers} for peers in ("all", "shift-one", "ring", "choco")],
    "ef21": [{}, {"eta": 0.3}],
    "qadam": [{"warmup_steps": 2}],
    "onebit-adam": [{"warmup_steps": 2}],
    "powersgd": [{"min_rate": 0}],
    "adaptive-powersgd": [{"min_rate": 0}],
    "async-averaging": [{"every_steps": 1}],
    "local-sgd": [{"steps": 1}],
    "sparseloco": [{"steps": 1}],
    "noloco": [{"steps": 1}],
    "diloco": [{"steps": 1, "codec": codec} for codec in ("fp32", "q8")],
}
CASES = [(name, options) for name in ALGORITHMS.table for options in OPTIONS.get(name, [{}])]


def beginning() -> TensorBucket:
    """The weights that a run begins with."""
    return bucket_of({name: torch.ones(shape) for name, shape in SHAPES.items()})


def play(ranks: list[Algorithm], first: int, steps: int) -> list[torch.Tensor]:
    """Steps of all ranks. Returns what each has after the last one."""
    lockstep, buckets = Lockstep(len(ranks)), []
    for number in range(first, first + steps):
        torch.manual_seed(number)
        buckets = [bucket_of({name: torch.randn(shape) for name, shape in SHAPES.items()}) for _ in ranks]
        step = Step(number, active=len(ranks), loss=1.0)
        lockstep.run([a.exchange(b, step) for a, b in zip(ranks, buckets, strict=True)])
        for algorithm in ranks:
            algorithm.commit()
    return [bucket.flat for bucket in buckets]


def regrouped(ranks: list[Algorithm], stay: list[int | None], name: str, options: dict[str, Any]) -> list[Algorithm]:
    """The ranks from now on; None: one that joins, with the shared state of one that stays."""
    shared = ranks[next(rank for rank in stay if rank is not None)].shared_state()
    found = []
    for rank, old in enumerate(stay):
        place = Place(rank, len(stay))
        algorithm = ranks[old] if old is not None else make_algorithm(name, place, options)
        if old is None:
            algorithm.load_state({}, shared)
        algorithm.begin(beginning())
        algorithm.regroup(place)
        found.append(algorithm)
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_training_goes_on_among_other_ranks(name: str, options: dict[str, Any], change: str) -> None:
    ranks = [make_algorithm(name, Place(rank, 3), options) for rank in range(3)]
    for algorithm in ranks:
        algorithm.begin(beginning())
    play(ranks, 0, 4)
    ranks = regrouped(ranks, CHANGES[change], name, options)
    found = play(ranks, 4, 4)
    assert all(bool(one.isfinite().all()) for one in found)
    if ranks[0].equal_replicas:
        assert all(torch.equal(one, found[0]) for one in found)
    if ranks[0].equal_replicas or name in ("diloco", "sparseloco"):
        states = [algorithm.shared_state() for algorithm in ranks]
        assert all(torch.equal(state[key], states[0][key]) for state in states for key in states[0] | state)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_the_mean_of_ef21_stays_that_of_what_is_known_of_the_ranks(eta: float, change: str) -> None:
    options = {"density": 0.05, "eta": eta}
    ranks = [make_algorithm("ef21", Place(rank, 3), options) for rank in range(3)]
    play(ranks, 0, 3)
    ranks = regrouped(ranks, CHANGES[change], "ef21", options)
    for step in range(3, 6):
        play(ranks, step, 1)
        known = torch.stack([a.memory.find("known", "matrix") for a in ranks]).mean(0)  # type: ignore[misc]
        mean = ranks[0].memory.find("mean", "matrix")
        assert mean is not None
        assert torch.allclose(mean.reshape(-1), known, atol=1e-6)


def test_an_ef21_rank_that_joins_unannounced_says_what_to_do() -> None:
    ranks = [make_algorithm("ef21", Place(rank, 2)) for rank in range(2)]
    play(ranks, 0, 2)
    joined = make_algorithm("ef21", Place(1, 2))
    joined.load_state({}, ranks[0].shared_state())
    with pytest.raises(RuntimeError, match=r"join by regroup\(\)"):
        play([ranks[0], joined], 2, 1)


@pytest.mark.parametrize("change", ["replaced", "joined", "left"])
def test_replicas_of_neighbours_are_theirs_after_a_change(change: str) -> None:
    ranks = [make_algorithm("decentralized", Place(rank, 3), {"peers": "ring"}) for rank in range(3)]
    play(ranks, 0, 3)
    ranks = regrouped(ranks, CHANGES[change], "decentralized", {"peers": "ring"})
    for step in range(3, 6):
        play(ranks, step, 1)
        for rank, algorithm in enumerate(ranks):
            for kind, peer in (("left", rank - 1), ("right", (rank + 1) % len(ranks))):
                kept, theirs = algorithm.memory.find(kind, "bucket0"), ranks[peer].memory.find("replica", "bucket0")
                assert kept is not None
                assert theirs is not None
                assert torch.equal(kept, theirs)


@pytest.mark.parametrize("name", ALGORITHMS.table)
def test_the_document_says_what_a_rank_that_joins_gets(name: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    assert f"| `{name}` | {ALGORITHMS.table[name].joiner_gets() or 'ranks cannot come and go'} |" in text


def test_1_bit_adam_keeps_no_error_of_a_part_that_another_rank_adds_up_now() -> None:
    options = {"warmup_steps": 2}
    ranks = [make_algorithm("onebit-adam", Place(rank, 3), options) for rank in range(3)]
    play(ranks, 0, 4)
    assert all("server_error/matrix+bias" in one.own_state() for one in ranks)
    first, *_ = regrouped(ranks, [1, 2, None], "onebit-adam", options)
    assert first.own_state().keys() == {"worker_error/matrix", "worker_error/bias"}
