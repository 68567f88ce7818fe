"""A client's copy of the model: brought up to date from frames in any order, never to something half."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.actors.federated.client import global_model as model_replica
from gradbus.actors.federated.client.global_model import ModelReplica
from gradbus.codecs import Parsed
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import ModelBlob

RUN, SESSION = 0xABC, 5
DIM = 100
CHUNK_BYTES = 64


def vector(seed: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def key_of(round_id: int, transfer: int, run_id: int = RUN, session: int = SESSION) -> FrameKey:
    return FrameKey(Kind.MODEL, run_id, round_id, CONTROLLER, session, transfer)


def messages(key: FrameKey, payload: bytes, flags: int = Flags.NONE) -> list[ModelBlob]:
    parts = frames.split(key, payload, chunk_bytes=CHUNK_BYTES, flags=flags)
    return [ModelBlob(key.round_id, frames.parse(head + bytes(data))) for head, data in parts]


def full(round_id: int, transfer: int, model: Tensor, run_id: int = RUN) -> list[ModelBlob]:
    return messages(key_of(round_id, transfer, run_id), model.numpy().tobytes())


def difference(round_id: int, transfer: int, delta: Tensor) -> list[ModelBlob]:
    return messages(key_of(round_id, transfer), codecs.get("fp32").encode(delta), Flags.DELTA)


def new_copy(run_id: int = RUN) -> ModelReplica:
    copy = ModelReplica(DIM, max_bytes=8 * DIM + 4096)
    copy.start(run_id, SESSION)
    return copy


def take(copy: ModelReplica, complete: tuple[FrameKey, memoryview]) -> bool:
    return copy.adopt(complete[0], copy.decode(*complete))


def give(copy: ModelReplica, blobs: Iterable[ModelBlob]) -> int:
    """Feed all; returns how many models were taken."""
    taken = 0
    for blob in blobs:
        complete = copy.feed(blob)
        taken += complete is not None and take(copy, complete)
    return taken


def collected(copy: ModelReplica) -> tuple[int, int]:
    """Models of which frames are held, and those that are followed."""
    return len(copy._assembler), len(copy._keys)  # noqa: SLF001 - of memory that is never given back nothing else tells


def assert_holds(copy: ModelReplica, round_id: int, model: Tensor | None) -> None:
    assert copy.round_id == round_id
    if model is None:
        assert copy.vector is None
    else:
        assert copy.vector is not None
        assert torch.equal(copy.vector, model)


def test_there_is_no_model_at_first() -> None:
    assert_holds(new_copy(), -1, None)


@settings(derandomize=True, deadline=None)
@given(seed=st.integers(0, 1 << 16), repeats=st.integers(1, 3))
def test_frames_may_come_in_any_order_and_more_than_once(seed: int, repeats: int) -> None:
    copy = new_copy()
    blobs = full(0, 1, vector(0)) * repeats
    random.Random(seed).shuffle(blobs)
    assert give(copy, blobs) == 1
    assert_holds(copy, 0, vector(0))


def test_until_the_last_frame_has_come_nothing_changes() -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0)))
    *most, last = full(1, 2, vector(1))
    assert give(copy, most) == 0
    assert_holds(copy, 0, vector(0))
    assert give(copy, [last]) == 1
    assert_holds(copy, 1, vector(1))


def test_models_of_a_foreign_run_are_dropped() -> None:
    copy = new_copy()
    assert give(copy, full(0, 1, vector(0), run_id=RUN + 1)) == 0
    assert_holds(copy, -1, None)


def test_a_model_that_is_not_newer_is_dropped() -> None:
    copy = new_copy()
    give(copy, full(5, 1, vector(5)))
    assert give(copy, full(5, 2, vector(0))) == 0
    assert give(copy, full(4, 3, vector(0))) == 0
    assert_holds(copy, 5, vector(5))


def test_a_full_model_may_skip_rounds() -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0)))
    assert give(copy, full(7, 2, vector(7))) == 1
    assert_holds(copy, 7, vector(7))


def test_a_difference_is_added_to_the_model_of_the_round_before() -> None:
    copy = new_copy()
    give(copy, full(3, 1, vector(0)))
    assert give(copy, difference(4, 2, vector(1))) == 1
    assert_holds(copy, 4, vector(0) + vector(1))


@pytest.mark.parametrize("round_id", [3, 5, 6])
def test_a_difference_to_another_model_is_dropped(round_id: int) -> None:
    copy = new_copy()
    give(copy, full(3, 1, vector(0)))
    assert give(copy, difference(round_id, 2, vector(1))) == 0
    assert_holds(copy, 3, vector(0))


def test_a_difference_without_a_model_is_dropped() -> None:
    copy = new_copy()
    assert give(copy, difference(1, 1, vector(1))) == 0
    assert_holds(copy, -1, None)


def test_a_difference_that_no_longer_fits_when_it_is_applied_is_dropped() -> None:
    copy = new_copy()
    give(copy, full(3, 1, vector(3)))
    *most, last = difference(4, 2, vector(1))
    give(copy, most)
    complete = copy.feed(last)
    assert complete is not None
    give(copy, full(4, 3, vector(4)))  # overtaken by the model in full
    assert not take(copy, complete)
    assert_holds(copy, 4, vector(4))


def test_the_model_of_before_stays_as_it_is_for_whoever_trains_from_it() -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0)))
    held = copy.vector
    give(copy, difference(1, 2, vector(1)))
    give(copy, full(2, 3, vector(2)))
    assert held is not None
    assert torch.equal(held, vector(0))


def test_the_newest_of_several_models_on_their_way_wins() -> None:
    copy = new_copy()
    *most, last = full(1, 1, vector(1))
    give(copy, most)
    assert give(copy, full(2, 2, vector(2))) == 1
    assert give(copy, [last]) == 0
    assert_holds(copy, 2, vector(2))


def test_frames_of_an_older_model_do_not_disturb_a_newer_one_on_its_way() -> None:
    copy = new_copy()
    newer = full(2, 2, vector(2))
    give(copy, newer[:-1])
    assert give(copy, full(1, 1, vector(1))) == 0
    assert give(copy, newer[-1:]) == 1
    assert_holds(copy, 2, vector(2))


def test_full_model_and_difference_of_one_round_may_come_interleaved() -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0)))
    both = [blob for pair in zip(full(1, 2, vector(1)), difference(1, 3, vector(9)), strict=False) for blob in pair]
    rest = difference(1, 3, vector(9))[len(full(1, 2, vector(1))) :]
    assert give(copy, both + rest) == 1
    assert_holds(copy, 1, vector(1))


def bad_payloads() -> dict[str, tuple[bytes, int]]:
    not_finite = vector(1)
    not_finite[3] = float("inf")
    return {
        "no known format": (b"\xff" * 37, Flags.NONE),
        "another size": (codecs.get("fp32").encode(torch.zeros(DIM + 1)), Flags.NONE),
        "non-finite": (not_finite.numpy().tobytes(), Flags.NONE),
        "sparse in full": (codecs.get("s4").encode(vector(1), is_delta=False), Flags.NONE),
        "difference in full": (codecs.get("q8").encode(vector(1)), Flags.NONE),
        "weights as a difference": (vector(1).numpy().tobytes(), Flags.DELTA),
        "cut short": (codecs.get("sq8").encode(vector(1))[:-1], Flags.DELTA),
        "empty": (b"", Flags.DELTA),
    }


@pytest.mark.parametrize("fault", bad_payloads())
def test_a_malformed_model_is_dropped_and_the_next_one_taken(fault: str) -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0)))
    payload, flags = bad_payloads()[fault]
    assert give(copy, messages(key_of(1, 2), payload, flags)) == 0
    assert_holds(copy, 0, vector(0))
    assert give(copy, full(1, 3, vector(1))) == 1
    assert_holds(copy, 1, vector(1))


@pytest.mark.parametrize("name", ["fp32", "q8"])
def test_a_full_model_may_be_coded_densely(name: str) -> None:
    copy = new_copy()
    payload = codecs.get(name).encode(vector(0), is_delta=False)
    assert give(copy, messages(key_of(0, 1), payload)) == 1
    assert_holds(copy, 0, codecs.decode(payload, expected_dim=DIM).vector)


@pytest.mark.parametrize("name", codecs.ALL)
def test_a_difference_may_be_coded_in_any_way(name: str) -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0)))
    payload = codecs.get(name).encode(vector(1))
    assert give(copy, messages(key_of(1, 2), payload, Flags.DELTA)) == 1
    assert_holds(copy, 1, vector(0) + codecs.decode(payload, expected_dim=DIM).vector)


def test_a_payload_longer_than_a_model_can_be_is_dropped() -> None:
    copy = ModelReplica(DIM, max_bytes=4 * DIM)
    copy.start(RUN, SESSION)
    assert give(copy, messages(key_of(0, 1), bytes(4 * DIM + 4))) == 0
    assert copy.dropped > 0
    assert_holds(copy, -1, None)
    assert give(copy, full(0, 2, vector(0))) == 1


def test_at_most_two_models_are_being_collected_at_one_time() -> None:
    copy = new_copy()
    for transfer in range(1, 60):
        give(copy, full(transfer // 3, transfer, vector(transfer))[:-1])
        assert max(collected(copy)) <= 2


def test_nothing_is_collected_once_the_newest_model_is_there() -> None:
    copy = new_copy()
    give(copy, full(0, 1, vector(0))[:-1])
    give(copy, full(1, 2, vector(1)))
    give(copy, full(0, 1, vector(0)))
    assert collected(copy) == (0, 0)


def test_a_frame_that_is_repeated_while_its_model_is_decoded_begins_nothing() -> None:
    copy = new_copy()
    blobs = full(1, 1, vector(1))
    complete = [found for blob in blobs if (found := copy.feed(blob)) is not None]
    assert copy.feed(blobs[0]) is None
    assert collected(copy)[0] == 0
    assert take(copy, complete[0])


def test_a_model_of_another_start_of_the_controller_is_not_the_model_of_a_round() -> None:
    """Both may make one of the same round, of other updates: as where the earlier start was paused and goes on."""
    copy, frame = new_copy(), vector(3).numpy().tobytes()
    for other in (SESSION - 1, SESSION + 1):
        key = key_of(3, 1, session=other)
        assert give(copy, messages(key, frame)) == 0
        assert not copy.expect(key, Flags.NONE, len(frame))
    assert_holds(copy, -1, None)
    assert give(copy, full(3, 1, vector(4))) == 1
    assert_holds(copy, 3, vector(4))
    copy.start(RUN, SESSION + 1)
    assert give(copy, full(4, 2, vector(4))) == 0
    assert give(copy, messages(key_of(4, 2, session=SESSION + 1), frame)) == 1


def test_another_run_starts_from_nothing() -> None:
    copy = new_copy()
    give(copy, full(4, 1, vector(4)))
    give(copy, full(5, 2, vector(5))[:-1])
    copy.start(RUN + 1, SESSION)
    assert_holds(copy, -1, None)
    assert give(copy, full(5, 2, vector(5))) == 0
    assert give(copy, full(0, 1, vector(0), run_id=RUN + 1)) == 1
    assert_holds(copy, 0, vector(0))


def test_a_controller_that_went_back_is_followed_after_its_welcome() -> None:
    copy = new_copy()
    give(copy, full(4, 1, vector(4)))
    copy.start(RUN, SESSION)
    assert give(copy, full(3, 1, vector(3))) == 1
    assert_holds(copy, 3, vector(3))


def test_a_model_that_was_complete_before_another_run_started_is_not_taken() -> None:
    copy = new_copy()
    *most, last = full(4, 1, vector(4))
    give(copy, most)
    complete = copy.feed(last)
    assert complete is not None
    copy.start(RUN + 1, SESSION)
    assert not take(copy, complete)
    assert_holds(copy, -1, None)


def test_a_model_that_is_being_decoded_while_another_run_starts_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = new_copy()

    def interrupted(payload: memoryview, *, expected_dim: int, own: Any) -> Parsed:
        copy.start(RUN + 1, SESSION)  # on the loop, while the compute thread is here
        return codecs.parse(payload, expected_dim=expected_dim)

    monkeypatch.setattr(model_replica, "parse", interrupted)
    assert give(copy, full(4, 1, vector(4))) == 0
    assert_holds(copy, -1, None)


def test_what_is_missing_is_named_by_transfer_and_number() -> None:
    copy = new_copy()
    assert copy.missing(0) == (0, [])  # nothing has come: all of it
    blobs = full(0, 7, vector(0))
    give(copy, [blob for seq, blob in enumerate(blobs) if seq not in (1, 4)])
    assert copy.missing(0) == (7, [1, 4])
    assert copy.missing(1) == (0, [])
    give(copy, [blobs[1]])
    assert copy.missing(0) == (7, [4])
    give(copy, [blobs[4]])
    assert copy.missing(0) == (0, [])
    assert_holds(copy, 0, vector(0))


def test_only_new_frames_are_progress() -> None:
    copy = new_copy()
    blobs = full(0, 1, vector(0))
    copy.progress_s = 0.0
    give(copy, full(0, 1, vector(0), run_id=RUN + 1))
    assert copy.progress_s == 0.0
    give(copy, blobs[:1])
    assert copy.progress_s > 0.0
    copy.progress_s = 0.0
    give(copy, blobs[:1])
    assert copy.progress_s == 0.0


def test_a_full_model_in_float32_is_taken_without_a_copy() -> None:
    copy = new_copy()
    *most, last = full(0, 1, vector(0))
    give(copy, most)
    complete = copy.feed(last)
    assert complete is not None
    assert take(copy, complete)
    assert copy.vector is not None
    assert copy.vector.data_ptr() == np.frombuffer(complete[1], np.uint8).ctypes.data
