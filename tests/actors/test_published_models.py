"""A client's copy of the model where models are signed: what a member makes up moves nothing."""

from __future__ import annotations

import numpy as np
import pytest
from joining_hall import ONE, Hall

from gradbus.actors.federated.client.global_model import ModelReplica
from gradbus.runtime.security.identity.controller_signatures import sign_model
from gradbus.runtime.security.identity.membership import ClientMembership, ControllerMembership
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import ModelBlob

RUN, DIM, CHUNK_BYTES = 7, 1000, 1000
MODEL = np.arange(DIM, dtype=np.float32).tobytes()


def of(round_id: int, transfer: int, name: str = "") -> FrameKey:
    return FrameKey(Kind.MODEL, RUN, round_id, CONTROLLER, 1, transfer, name)


def blobs(key: FrameKey, payload: bytes, chunk_bytes: int = CHUNK_BYTES) -> list[ModelBlob]:
    parts = frames.split(key, payload, chunk_bytes=chunk_bytes)
    return [ModelBlob(key.round_id, frames.parse(head + bytes(data))) for head, data in parts]


def scene() -> tuple[Hall, ModelReplica, FrameKey]:
    """A copy that follows the run, and the key of the model of round 1 as the controller signs it."""
    hall = Hall(ONE)
    copy = ModelReplica(DIM, access_policy=ClientMembership(hall.nodes[0]))
    copy.start(RUN, 1)
    key = of(1, 2)
    return hall, copy, key._replace(name=ControllerMembership(hall.controller).sign_model(key, 0, MODEL))


def give(copy: ModelReplica, some: list[ModelBlob]) -> bool:
    """Whether they make a model that is taken."""
    for blob in some:
        complete = copy.feed(blob)
        if complete is not None:
            return copy.adopt(complete[0], copy.decode(*complete))
    return False


def forged(hall: Hall, honest: FrameKey) -> dict[str, FrameKey]:
    """Keys of transfers that a member can make up."""
    far = of(1 << 31, 1)
    epoch = hall.controller.group.key.epoch
    own = sign_model(hall.controller.job, ONE, hall.controller.session, epoch, far, 0, MODEL)
    return {
        "no name": far,
        "zeros": far._replace(name="0" * 200),
        "own key": far._replace(name=own),
        "another's name": far._replace(name=honest.name),
        "another transfer": honest._replace(transfer=99),
    }


@pytest.mark.parametrize("what", ["no name", "zeros", "own key", "another's name", "another transfer"])
def test_a_transfer_that_the_controller_has_not_signed_is_not_followed(what: str) -> None:
    hall, copy, honest = scene()
    false = forged(hall, honest)[what]
    first, *others = blobs(honest, MODEL)
    copy.feed(first)  # on its way
    assert not give(copy, blobs(false, MODEL)[:2])
    assert not copy.expect(false, 0, len(MODEL))
    assert copy.missing(1) == (honest.transfer, [1, 2, 3])  # nothing was dropped for it
    assert give(copy, others)
    assert copy.round_id == 1


def test_a_model_in_memory_is_read_only_if_it_is_signed_with_that_size() -> None:
    _, copy, honest = scene()
    assert not copy.expect(honest, 0, len(MODEL) - 4)
    assert not copy.expect(honest, int(Flags.DELTA), len(MODEL))
    assert copy.expect(honest, 0, len(MODEL))


def test_a_frame_of_another_size_under_the_true_name_does_not_begin_its_transfer() -> None:
    _, copy, honest = scene()
    assert not give(copy, blobs(honest, bytes(8 * DIM))[:1])
    assert give(copy, blobs(honest, MODEL))


def test_a_payload_that_is_not_the_one_of_the_name_is_dropped_and_the_true_one_taken_after_it() -> None:
    _, copy, honest = scene()
    assert not give(copy, blobs(honest, bytes(4 * DIM)))
    assert copy.round_id == -1
    assert give(copy, blobs(honest, MODEL))
    assert copy.round_id == 1


def test_a_frame_that_was_cut_otherwise_does_not_keep_the_others_out() -> None:
    _, copy, honest = scene()
    copy.feed(blobs(honest, MODEL, 800)[0])
    assert not give(copy, blobs(honest, MODEL))
    transfer, missing = copy.missing(1)
    assert transfer == honest.transfer
    assert give(copy, [blobs(honest, MODEL)[seq] for seq in missing])
