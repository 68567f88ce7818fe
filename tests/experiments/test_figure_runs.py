"""The runs of the figures: what is found again, what is done anew, and what is compared."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from int8_role import SHAPES, gradients, int8_step

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.experiments.bench.processes import run_ranks
from gradbus.experiments.figures import store as store_module
from gradbus.experiments.figures.int8 import Int8
from gradbus.experiments.figures.plan import CODECS, EXCHANGES, FULL, QUICK, FederatedRun, make_plan, runs_of
from gradbus.experiments.figures.runs import RunFailed, command, run_federated
from gradbus.experiments.figures.store import Store, code_version
from gradbus.runtime.algorithms.base import Place, Step, bucket_of

RUN = FederatedRun(codec="q8", downlink="fp32", rounds=1, samples=16)


class Work:
    """What a run would do; counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        assert list(folder.iterdir()) == [folder / "run.json"], "a run starts in a folder of its own"
        (folder / "left.txt").write_text(str(self.times))


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    work = Work()
    first, was_done = Store(tmp_path, code="a").ensure(RUN, work)
    again, was_done_again = Store(tmp_path, code="a").ensure(RUN, work)
    assert (work.times, was_done, was_done_again) == (1, False, True)
    assert first == again
    assert (again.path / "left.txt").read_text() == "1"
    asked = json.loads((again.path / "run.json").read_text(encoding="utf-8"))
    assert (asked["codec"], asked["samples"], asked["code"]) == ("q8", 16, "a")


@pytest.mark.parametrize(
    ("run", "code"),
    [(replace(RUN, samples=17), "a"), (replace(RUN, codec="s4"), "a"), (replace(RUN, seed=1), "a"), (RUN, "b")],
)
def test_other_settings_or_other_code_are_another_run(run: FederatedRun, code: str, tmp_path: Path) -> None:
    work = Work()
    Store(tmp_path, code="a").ensure(RUN, work)
    assert Store(tmp_path, code=code).find(run) is None
    Store(tmp_path, code=code).ensure(run, work)
    assert work.times == 2


def test_a_run_that_was_interrupted_is_done_again_from_an_empty_folder(tmp_path: Path) -> None:
    store, work = Store(tmp_path, code="a"), Work()

    def is_interrupted(folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.ensure(RUN, is_interrupted)
    assert store.find(RUN) is None
    done, _ = store.ensure(RUN, work)
    assert work.times == 1
    assert not (done.path / "half.txt").exists()


def test_two_programs_that_need_the_same_run_do_it_once(tmp_path: Path) -> None:
    work, inside, may_end = Work(), threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        inside.set()
        assert may_end.wait(10)
        work(folder)

    first = threading.Thread(target=Store(tmp_path, code="a").ensure, args=(RUN, slow))
    second = threading.Thread(target=Store(tmp_path, code="a").ensure, args=(RUN, work))
    first.start()
    assert inside.wait(10)
    second.start()
    may_end.set()
    for thread in (first, second):
        thread.join(10)
        assert not thread.is_alive()
    assert work.times == 1


def test_without_running_the_newest_of_any_version_is_taken_and_this_one_first(tmp_path: Path) -> None:
    here = Store(tmp_path, code="here")
    assert here.find_any(RUN) is None
    for code in ("b", "a"):
        Store(tmp_path, code=code).ensure(RUN, Work())
    for code, date in (("b", "2026-01-02"), ("a", "2026-01-01")):
        path = Store(tmp_path, code=code).folder(RUN) / "done.json"
        facts = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(facts | {"machine": {"date": date}}), encoding="utf-8")
    found = here.find_any(RUN)
    assert found is not None
    assert found.code == "b"
    assert here.find(RUN) is None
    here.ensure(RUN, Work())
    found = here.find_any(RUN)
    assert found is not None
    assert found.code == "here"


def test_the_version_of_the_code_follows_the_files_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    version = code_version()
    assert version == code_version()
    monkeypatch.setattr(store_module, "RUNNING", store_module.RUNNING[:-1])
    assert code_version() != version


def test_the_plans_have_what_every_figure_needs_and_share_it() -> None:
    for scale in (FULL, QUICK):
        plan = make_plan(scale)
        runs = [run for _, run in runs_of(plan)]
        shared = len(CODECS) if scale is QUICK else 0  # time is taken from the runs that are evaluated
        assert len(set(runs)) == len(runs) - shared, "a run that differs in nothing is done once"
        groups: dict[str, Any] = dict(plan)
        assert {run.codec for run in groups["old_bytes"]} == {run.codec for run in groups["timing"]} == set(CODECS)
        seeds = range(scale.seeds)
        assert {(run.codec, run.seed) for run in groups["codecs"]} == {(c, s) for c in CODECS for s in seeds}
        assert {run.exchange for run in groups["parallel"]} == set(EXCHANGES)
        assert {run.version for run in groups["old_bytes"]} == {1}
    assert FULL.seeds == 3


def test_a_command_says_all_that_a_run_is() -> None:
    words = " ".join(command(replace(RUN, version=1, partition="dirichlet:0.5", seed=7, eval_every=2), Path("here")))
    for part in (
        "demo --no-live --rounds 1 ",
        "--samples 16 ",
        "--codec q8 ",
        "--downlink-codec fp32 ",
        "--seed 7 ",
        "--partition dirichlet:0.5 ",
        "--run-dir here ",
        "federated.codec.version=1 ",
        "federated.eval_every=2 ",
    ):
        assert part in words, part


def test_a_run_that_fails_says_why_and_where(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"exit code 2: .*unheard.*output\.log"):
        run_federated(replace(RUN, codec="unheard"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("idle", [None, 1])
def test_the_int8_baseline_takes_the_mean_of_what_was_quantized_with_one_scale_per_tensor(idle: int | None) -> None:
    ranks = run_ranks(int8_step, 2, idle, timeout_s=60)
    for name in SHAPES:
        decoded = []
        for rank in (0, 1):
            gradient = gradients(rank)[name].numpy()
            scale = np.float32(np.abs(gradient).max() / 127)
            decoded.append(np.round(gradient / scale) * scale if rank != idle else np.zeros_like(gradient))
        expected = sum(decoded) / (2 if idle is None else 1)
        for found in ranks:
            np.testing.assert_allclose(found["mean"][name], expected, atol=1e-5)
            np.testing.assert_array_equal(found["mean"][name], ranks[0]["mean"][name])
    elems = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert [found["sent"] for found in ranks] == [4 * len(SHAPES) + elems] * 2


def test_the_int8_baseline_skips_a_step_that_is_not_finite_on_a_rank() -> None:
    def outcome(*factors: float) -> tuple[int, ...]:
        ranks = [Int8(Place(rank, 2), Int8.Options()) for rank in (0, 1)]
        buckets = [bucket_of({"weight": torch.ones(3) * factor}) for factor in factors]
        Lockstep(2).run([one.exchange(bucket, Step(0, active=2)) for one, bucket in zip(ranks, buckets, strict=True)])
        assert all(bool(bucket.flat.isfinite().all()) != bool(ranks[0].not_finite) for bucket in buckets)
        assert ranks[0].not_finite == ranks[1].not_finite
        return ranks[0].not_finite

    assert outcome(1.0, 1.0) == ()
    assert outcome(1.0, np.nan) == (1,)
    assert outcome(np.inf, np.nan) == (0, 1)
