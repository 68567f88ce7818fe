"""Whole runs with secure aggregation and a codec that compresses: the model has the bits of the plain sum of the same
integers on the common grid, worked out here by NumPy alone, whoever drops out and whoever is started again."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from secure_runs import DIM, Moving, Observer, Run, delta_of, replace_masking, restarted
from structlog.testing import capture_logs
from torch import Tensor

import gradbus
from gradbus.actors.aggregation.common_grid import MAX_SCALES, CommonGrid
from gradbus.actors.aggregation.grid_steps import CommonSteps
from gradbus.actors.federated.client import local_training
from gradbus.actors.federated.client.update_masks import ClientMasking
from gradbus.actors.federated.controller.masked_attempt import MaskedAttempt
from gradbus.actors.secure_aggregation.keys import ENTRY_BYTES, TooFewMembers
from gradbus.actors.secure_aggregation.masked_values import SMALL_BYTES, size_of
from gradbus.codecs import random_k
from gradbus.models.task import TrainResult
from gradbus.runtime.errors import RoundTimeout
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import MaskAnswer, MaskRoster, Welcome
from gradbus.runtime.wire.messages import Identity

CHUNK = 512
Q8: dict[str, Any] = {"name": "q8", "chunk_elems": CHUNK}
SQ8: dict[str, Any] = {"name": "sq8", "chunk_elems": CHUNK, "density": 0.1}
S4: dict[str, Any] = {"name": "s4", "density": 0.1}


def peaks_of(total: NDArray[np.float64]) -> list[float]:
    return [float(np.abs(total[at : at + CHUNK]).max()) for at in range(0, DIM, CHUNK)]


def dither_of(run_id: int, round_id: int, client_id: int, count: int) -> NDArray[np.float64]:
    name = struct.pack("<QII", run_id, round_id, client_id)
    key = hashlib.blake2b(b"gradbus dither 1" + name, digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-count // 4))
    return raw.astype("<u8").view("<i2")[:count] * (7 / 8 / 65536)


def next_reach(reach: float, peak: float, now: int | None) -> int:
    assert peak, "all blocks change here"
    wanted = max(-23, math.frexp(reach * peak)[1])
    if now is None:
        return wanted
    if abs(peak / 2.0**now - 1) <= 1 / 16:
        wanted = max(wanted, now + 3)
    return wanted if wanted <= now - 3 else min(max(wanted, now - 1), now + 4)


class Oracle:
    """The rounds of a run with a common grid, step by step as the module common_grid describes them."""

    def __init__(self, codec: Mapping[str, Any], run_id: int, change: Any = delta_of) -> None:
        self.weights = np.zeros(DIM, np.float32)
        self.residuals: dict[int, NDArray[np.float32]] = {}
        self._is_small, self._density = codec["name"] != "s4", codec.get("density")
        self.exponents: list[int] | None = None
        self._run_id, self._change = run_id, change
        self.clamped = 0

    def round(self, round_id: int, clients: Sequence[int], members: int = 0) -> None:
        """``members``: of the roster, where those are more than have an update in the sum."""
        where = np.arange(DIM)
        if self._density:
            seed = b"gradbus positions 1" + self._run_id.to_bytes(8, "little") + round_id.to_bytes(4, "little")
            where = random_k(DIM, math.ceil(DIM * self._density), seed).numpy()
        steps, bits = np.full(DIM, 2.0**-30), 15 - ((members or len(clients)) - 1).bit_length()
        if self.exponents is not None:
            steps = 2.0 ** (np.repeat(self.exponents, CHUNK)[:DIM] - bits)
        total, samples = np.zeros(DIM), 0
        for one in clients:
            weight = 20 + one
            trained = self.weights + self._change(one, round_id).numpy()
            p = trained - self.weights + self.residuals.get(one, np.float32(0))
            q = np.rint(p.astype(np.float64) * weight / steps)
            if self.exponents is not None:
                dither, limit = np.zeros(DIM), 2**bits - 1
                dither[where] = dither_of(self._run_id, round_id, one, len(where))
                q = np.clip(np.rint(p.astype(np.float64) * (weight / steps) + dither), -limit, limit)
                self.clamped += int((np.abs(q[where]) == limit).sum())
                left = (p - q * (steps / weight)).astype(np.float32)
            else:
                left = np.zeros(DIM, np.float32)
            self.residuals[one] = p * np.float32(0.5)  # of what is not sent
            self.residuals[one][where] = left[where]
            total[where] += (q * steps)[where]
            samples += weight
        mean = total * 2.0**30 * (1.0 / (samples * 2.0**30))
        self.weights = (mean + self.weights).astype(np.float32)
        if self._is_small:
            limit = 2 ** (15 - (len(clients) - 1).bit_length()) - 1
            reach, peaks = max(9 / 8, limit / 128 / math.sqrt(len(clients))), peaks_of(total)
            before = self.exponents or [None] * len(peaks)
            self.exponents = [next_reach(reach, peak, now) for peak, now in zip(peaks, before, strict=True)]


def oracle_of(controller: Any, codec: Mapping[str, Any], rounds: Sequence[Sequence[int]], **more: Any) -> Oracle:
    oracle = Oracle(codec, controller.run_id, **more)
    for number, clients in enumerate(rounds, 1):
        oracle.round(number, clients)
    return oracle


@pytest.mark.parametrize(
    ("codec", "first", "then"),
    [
        (Q8, size_of(DIM), size_of(DIM, SMALL_BYTES)),
        (SQ8, size_of(DIM // 10), size_of(DIM // 10, SMALL_BYTES)),
        (S4, size_of(DIM // 10), size_of(DIM // 10)),
    ],
    ids=["q8", "sq8", "s4"],
)
def test_the_model_is_that_of_the_plain_sum_of_the_same_integers(codec: dict[str, Any], first: int, then: int) -> None:
    ids = tuple(range(5))
    controller = Run(ids, rounds=4, codec=codec)()
    oracle = oracle_of(controller, codec, [ids] * 4)
    assert np.array_equal(controller.weights.numpy(), oracle.weights)
    assert [report.bytes_up for report in controller.progress.reports] == [
        5 * size for size in (first, then, then, then)
    ]
    assert all(one.residual_norm is None for report in controller.progress.reports for one in report.timeline)
    if codec is Q8:  # else most of what was trained has not been sent yet
        mean = sum((20 + one) * delta_of(one, number) for one in ids for number in range(1, 5)) / 110
        assert float((controller.weights - mean).norm()) < 0.06 * float(mean.norm())  # of the last round


def test_so_it_is_with_more_clients_which_have_fewer_bits_each() -> None:
    controller = Run(
        range(17), rounds=3, codec=Q8, secure_aggregation={"keys_timeout_s": 20.0, "shares_timeout_s": 20.0}
    )()
    assert [report.clients for report in controller.progress.reports] == [tuple(range(17))] * 3
    oracle = oracle_of(controller, Q8, [range(17)] * 3)
    assert np.array_equal(controller.weights.numpy(), oracle.weights)


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
def test_where_two_of_five_drop_out_it_is_that_of_those_whose_updates_came(phase: int) -> None:
    run = Run(range(5), rounds=3, codec=Q8, quits={3: phase, 4: phase}, secure_aggregation={"threshold": 0.6})
    run.quits_in = 3  # which is on the grid
    controller = run()
    assert [report.attempt for report in controller.progress.reports] == [1, 1, 1]
    third = range(5 if phase == 3 else 3)
    oracle = oracle_of(controller, Q8, [range(5), range(5)])
    oracle.round(3, third, members=5 if phase else 3)
    assert [report.clients for report in controller.progress.reports][2] == tuple(third)
    assert np.array_equal(controller.weights.numpy(), oracle.weights)


class Bursting(Moving):
    """Changes a hundred times as much in the second round as in the first, and nothing after that."""

    @staticmethod
    def change(client_id: int, round_id: int) -> Tensor:
        return delta_of(client_id, round_id) * {1: 1.0, 2: 100.0}.get(round_id, 0.0)

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
        with torch.no_grad():
            model.vector.add_(self.change(client_id, round_id))
        return TrainResult(20 + client_id, 1.25)


def test_values_beyond_the_reach_are_clamped_and_what_is_missing_comes_in_later_rounds() -> None:
    run = Run(range(5), rounds=6, codec=Q8)
    run.task = Bursting()
    controller = run()
    oracle = oracle_of(controller, Q8, [range(5)] * 6, change=Bursting.change)
    assert oracle.clamped > DIM // 2
    assert np.array_equal(controller.weights.numpy(), oracle.weights)
    mean = sum((20 + one) * Bursting.change(one, number) for one in range(5) for number in (1, 2)) / 110
    assert float((controller.weights - mean).norm()) < 0.02 * float(mean.norm())


class Approaching(Moving):
    """Goes half of the way to a target of each client, so that each round corrects the last one."""

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
        with torch.no_grad():
            model.vector.lerp_(100.0 * delta_of(client_id, 0), 0.5)
        return TrainResult(20 + client_id, 1.25)


def test_training_comes_as_close_to_its_optimum_as_with_the_plain_codec() -> None:
    optimum = sum((20 + one) * 100.0 * delta_of(one, 0) for one in range(4)) / 86
    left: dict[str, float] = {}
    for name, codec, secure in (("plain q8", Q8, False), ("q8", Q8, True), ("sq8", {**SQ8, "density": 0.25}, True)):
        run = Run(range(4), rounds=10, codec=codec, secure=secure)
        run.task = Approaching()
        left[name] = float((run().weights - optimum).norm() / optimum.norm())
    assert left["plain q8"] < 0.01
    assert left["q8"] < 0.03, "clients that pull in different directions at the optimum, by far more than their sum"
    assert left["sq8"] < 0.35, "a value has had its turn two or three times"


@pytest.mark.parametrize("codec", [Q8, SQ8], ids=["q8", "sq8"])
def test_after_an_attempt_that_came_to_nothing_the_residual_is_that_before_the_round(
    codec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unmask, calls = MaskedAttempt.unmask, itertools.count(1)

    async def fails_in_the_second_round(attempt: MaskedAttempt) -> Any:
        if next(calls) == 2:
            raise TooFewMembers("none")
        return await unmask(attempt)

    monkeypatch.setattr(MaskedAttempt, "unmask", fails_in_the_second_round)
    controller = Run(range(3), rounds=3, codec=codec)()
    assert [report.attempt for report in controller.progress.reports] == [1, 2, 1]
    assert np.array_equal(controller.weights.numpy(), oracle_of(controller, codec, [range(3)] * 3).weights)


def test_a_client_whose_update_does_not_count_keeps_the_residual_before_it() -> None:
    class Slow(ClientMasking):
        """Has no masks in time in the second round."""

        async def take(self, round_id: int, check: Any) -> Any:
            masks = await super().take(round_id, check)
            if round_id == 2:
                while check():
                    await self._changed.wait()
                    self._changed.clear()
                return None
            return masks

    def make_client(bus: Any, task: Any, *, client_id: int, config: Any) -> Any:
        client = gradbus.Client(bus, task, client_id=client_id, config=config)
        if client_id == 3:
            replace_masking(client, Slow)
        return client

    run = Run(range(4), rounds=3, codec=Q8, round={"quorum": 0.7, "grace_s": 0.3})
    run.make_client = make_client
    controller = run()
    rounds = [range(4), range(3), range(4)]
    assert [report.clients for report in controller.progress.reports] == [tuple(one) for one in rounds]
    assert np.array_equal(controller.weights.numpy(), oracle_of(controller, Q8, rounds).weights)


def test_a_controller_that_is_started_again_in_mid_round_has_the_same_grid_and_comes_to_the_same_bits(
    tmp_path: Path,
) -> None:
    run = Run(range(3), rounds=3, codec=Q8, checkpoint={"dir": tmp_path})
    observer = Observer(run)
    restarted(run, round_id=3)
    controller = run()
    assert np.array_equal(controller.weights.numpy(), oracle_of(controller, Q8, [range(3)] * 3).weights)
    of_third = {(one.incarnation, body.steps) for one, body in observer.all(MaskRoster) if body.round_id == 3}
    assert len(of_third) == 2
    assert len({steps for _, steps in of_third}) == 1


def test_on_the_bus_is_no_small_integer_of_a_single_client() -> None:
    run = Run(range(3), rounds=2, codec=Q8, shared_memory=False)
    observer = Observer(run)
    controller = run()
    seen = b"".join(observer.frames)
    assert len(observer.frames) == 6
    first = Oracle(Q8, controller.run_id)
    first.round(1, range(3))
    exponents = first.exponents
    assert exponents is not None
    assert [np.frombuffer(body.steps, np.int8).tolist() for _, body in observer.all(MaskRoster)][-1] == exponents
    at = slice(DIM // 2, DIM // 2 + 16)
    for one in range(3):
        change = (first.weights + delta_of(one, 2).numpy()) - first.weights + first.residuals[one]
        exact = change.astype(np.float64) * (20 + one) / 2.0 ** (np.repeat(exponents, CHUNK)[:DIM] - 13)
        q = np.rint(exact + dither_of(controller.run_id, 2, one, DIM))
        assert q[at].any()
        assert q[at].astype("<i2").tobytes() not in seen
        assert q[at].astype(np.int8).tobytes() not in seen


def test_the_steps_tell_nothing_that_the_sums_do_not() -> None:
    """Two runs whose sums are the same, of updates that are not, have the same steps."""

    class Shared(Moving):
        """The same sum in other shares: client 0 sends more, and client 1 as much less."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

        def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
            factor = {0: 1.0 + self.share, 1: 1.0 - self.share}.get(client_id, 1.0)
            with torch.no_grad():
                model.vector.add_(torch.round(delta_of(9, round_id) * 2.0**12) * 2.0**-12 * factor)
            return TrainResult(16, 1.25)

    found = []
    for share in (0.0, 0.5):
        run = Run(range(4), rounds=2, codec=Q8)
        run.task = Shared(share)
        observer = Observer(run)
        run()
        found.append(observer.all(MaskRoster)[-1][1].steps)
    assert found[0] == found[1] != b""


def test_a_client_takes_no_part_with_a_grid_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    of_another = CommonGrid(0, CHUNK, bytes(100))  # ten times as large
    monkeypatch.setattr(CommonSteps, "masked_grid", property(lambda steps: of_another))
    run = Run(range(3), codec=Q8, round={"max_attempts": 1})
    observer = Observer(run)
    with pytest.raises(RoundTimeout, match="0 clients have shared their secrets"):
        run()
    assert {body.data for _, body in observer.all(MaskAnswer, 1)} == {b""}
    assert not observer.frames, "no update has been masked"


def test_the_roster_of_most_clients_with_most_steps_is_one_control_message() -> None:
    roster = MaskRoster(2**64 - 1, 1, 1, 128, 2**40, bytes(255 * ENTRY_BYTES), 2**40, 2**30, bytes(MAX_SCALES))
    assert control.decode(control.encode(roster)) == roster


def test_an_update_in_the_width_of_another_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = local_training.masked_values.encode

    def too_wide(update: Any, base: Tensor, masks: Any, num_samples: int) -> Any:
        if masks.roster.grid.is_small and num_samples == 22:
            roster = dataclasses.replace(masks.roster, grid=CommonGrid())
            exact = masks._replace(roster=roster, total=np.zeros(DIM, np.uint64))
            return encode(update, base, exact, 22)._replace(residual=torch.zeros(DIM))
        return encode(update, base, masks, num_samples)

    monkeypatch.setattr(local_training.masked_values, "encode", too_wide)
    run = Run(range(3), rounds=2, codec=Q8)
    controller = run()
    second = controller.progress.reports[1]
    assert second.clients == (0, 1)
    assert second.strikes[0].client_id == 2
    oracle = oracle_of(controller, Q8, [range(3)])
    oracle.round(2, range(2), members=3)
    assert np.array_equal(controller.weights.numpy(), oracle.weights)


@pytest.mark.parametrize("codec", [Q8, SQ8], ids=["q8", "sq8"])
def test_what_a_client_has_helped_to_unmask_goes_out_in_no_later_round_though_the_controller_says_it_does_not_count(
    codec: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The difference of the sums of two rounds would be what clients had kept. The model is that with all receipts."""
    on_receipt, refused = local_training.LocalTraining.on_receipt, []

    def told_otherwise(training: Any, update: Any, receipt: Any) -> None:
        if receipt.round_id in (2, 3) and (client_id := receipt.to):
            refused.append((client_id, receipt.round_id))
            receipt = dataclasses.replace(receipt, accepted=False, reason="none")
        on_receipt(training, update, receipt)

    monkeypatch.setattr(local_training.LocalTraining, "on_receipt", told_otherwise)
    controller = Run(range(3), rounds=5, codec=codec)()
    assert sorted(refused) == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert np.array_equal(controller.weights.numpy(), oracle_of(controller, codec, [range(3)] * 5).weights)


@pytest.mark.parametrize(
    ("name", "grid", "why"),
    [
        ("fp32", (0, 512, b"\0" * 10), "0 values and blocks of 512: the codec fp32 of this run has 0 and 0"),
        ("fp32", (500, 0, b""), "500 values and blocks of 0: the codec fp32"),
        ("s4", (1, 0, b""), "1 values and blocks of 0: the codec s4 of this run has 500 and 0"),
        ("q8", (0, 1, b"\0" * DIM), "0 values and blocks of 1: the codec q8 of this run has 0 and 512"),
        ("q9", (0, 0, b""), "there is no such codec here"),
        ("sq8", (0, 512, b"\0" * 10), "0 values and blocks of 512: the codec sq8 of this run has 500 and 512"),
    ],
)
def test_a_client_takes_no_grid_that_is_not_of_the_codec_of_its_welcome(
    name: str, grid: tuple[int, int, bytes], why: str
) -> None:
    """With another one a single value could be sent, or what is rounded away would be lost."""
    options = {"fp32": {}, "q8": {"chunk_elems": CHUNK}, "s4": {"density": 0.1}}.get(
        name, {"density": 0.1, "chunk_elems": CHUNK}
    )
    welcome = Welcome(1, 1, 1, 1, name, json.dumps(options), 3, 1.0, masked=True)
    sent: list[MaskAnswer] = []

    async def publish(identity: Identity, answer: MaskAnswer) -> None:
        sent.append(answer)

    async def main() -> None:
        bus: Any = SimpleNamespace(job="job", publish=publish)
        masking = ClientMasking(bus, Identity(1, 1), least_members=0)
        try:
            async with asyncio.timeout(10), asyncio.TaskGroup() as group:
                masking.begin(1, 2, 3, 4, group)
                masking.on_request(MaskRoster(1, 3, 4, 2, 0, b"", *grid), welcome, DIM, group)
        finally:
            masking.close()

    with capture_logs() as lines:
        asyncio.run(main())
    (line,) = [line for line in lines if line["event"] == "no part in this attempt"]
    assert why in line["reason"]
    assert [answer.data for answer in sent if answer.phase] == [b""]


class Steady(Moving):
    """Changes the same in each round."""

    def train(self, model: Any, *, client_id: int, round_id: int, **_: Any) -> TrainResult:
        with torch.no_grad():
            model.vector.add_(delta_of(client_id, 0))
        return TrainResult(20, 1.25)


def test_a_client_says_once_that_most_of_what_it_has_trained_has_not_gone_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(steps: CommonSteps) -> CommonGrid:
        """Steps with which nothing comes through."""
        found: CommonGrid = grid(steps)
        return dataclasses.replace(found, exponents=bytes([23]) * len(found.exponents))

    grid = CommonSteps.masked_grid.__get__
    monkeypatch.setattr(CommonSteps, "masked_grid", property(coarse))
    run = Run(range(2), rounds=8, codec=Q8)
    run.task = Steady()
    with capture_logs() as lines:
        run()
    found = [line for line in lines if line["event"] == "most of what was trained has not gone out"]
    assert sorted(line["client"] for line in found) == [0, 1]
    assert all(5.0 <= line["updates"] <= 6.0 for line in found)
    assert {line["values_at_the_limit"] for line in found} == {0}
