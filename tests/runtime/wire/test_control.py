"""Control messages: each kind there and back, and every way in which a body can be wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import (
    MAX_BODY_BYTES,
    PROTOCOL,
    Body,
    Closing,
    EvaluationRequest,
    EvaluationResult,
    Grant,
    GroupHello,
    GroupLeave,
    GroupView,
    Hello,
    Leave,
    LocalModelRequest,
    MaskAnswer,
    MaskRoster,
    MaskShares,
    MaskSurvivors,
    ModelAvailable,
    ModelRequest,
    PacketRequest,
    PacketsMissing,
    RankStatus,
    Receipt,
    Refused,
    RepeatedCommand,
    RetransmitRequest,
    RoundTerms,
    RunEnded,
    Status,
    TrainingFailure,
    UploadRequest,
    Welcome,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "control.json"

EXAMPLES: list[Body] = [
    Hello(PROTOCOL, 1_199_882, (1 << 64) - 1, True, 5, "training", 3, 2, "host:1234", 3, "host/boot/1"),
    Welcome(7, 1 << 60, 5, 4, "sq8", '{"density": 0.1, "chunk_elems": 8192}', 10, 0.5, "host/boot/1"),
    Refused(7, 1 << 60, "its model is not the same \u2260"),
    Status(5, -1, "waiting", 0, 0),
    UploadRequest(
        5, 3, 1, 4_799_528, 600, 0.25, 1.5, 0.01, "host/boot/1 1234 7 ab", 0.5, 3.25, 0.75, 10, {"loss_before": 2.5}
    ),
    PacketRequest(5, 3, 2, 959_916, 600, 0.25, 1.5, 0.01, update=1, packet=2, last=True),
    Grant(7, 1 << 60, 3, 1),
    Receipt(7, 1 << 60, 5, 3, 1, False, "non-finite"),
    RetransmitRequest(7, 1 << 60, 3, 1, [0, 5, (1 << 20) - 1]),
    PacketsMissing(7, 1 << 60, 3, 2, [1, 256]),
    MaskRoster(5, 3, 1, 2, 2400, bytes(range(200)), 500, 8192, b"\xe2\x00\x10"),
    MaskShares(7, 1 << 60, 5, 3, 1, [3, 7], bytes(range(82))),
    MaskSurvivors(5, 3, 1, [3, 7]),
    MaskAnswer(5, 3, 1, 0, bytes(range(96))),
    ModelAvailable(5, 3, 7, True, 4_799_528, "host/boot/1 1234 7 ab"),
    ModelRequest(5, 3, 0, []),
    TrainingFailure(5, 3, "Traceback ...", name="site-1", attempt=2),
    EvaluationRequest(5, 3, "0,3-7,12", 29.5),
    EvaluationResult(5, 3, 60, {"loss": 0.25, "accuracy": 0.9}, "no data held out", 1.5),
    LocalModelRequest(7, 1 << 60, 5, 0x7FFE_0001),
    Leave("done"),
    RunEnded(5, True, "all rounds are done"),
    RepeatedCommand(5, 4, 100, 2, 0.05, -7, 1),
    RoundTerms(5, 4, {"mu": 0.5}, "0,3-7,12", each='{"0,3":{"lr":0.5}}'),
    Closing("its bus was closed"),
    GroupHello("world", 4, (1 << 64) - 1, True, False, 1 << 63, "host (process 1234)", "host/boot/1 1234 7 ab", [1, 3]),
    GroupLeave("world", (1 << 64) - 1, False, "ValueError: no", [1, 3], ["its process is gone"]),
    RankStatus("world", 4, "host", 9.5, 100, 2, 3.5, 1 << 40, 9, 2, "grad/0", 1.5, [1], [3], {"early": 7}, 3.25),
    GroupView(
        "world",
        7,
        3,
        [0, 2],
        [1, (1 << 64) - 1],
        2049,
        1025,
        [0],
        [1],
        0,
        True,
        False,
        True,
        False,
        {"model": 5},
        "host",
    ),
]


_OF_UPLOADS: dict[str, Any] = {
    "memory": "",
    "wait_s": 0.0,
    "update_norm": -1.0,
    "residual_norm": -1.0,
    "steps": 0,
    "metrics": {},
    "attempt": 0,
}
LATER: dict[type[Any], dict[str, Any]] = {
    Hello: {
        "memory": "",
        "phase_s": 0.0,
        "trained_dim": 0,
        "trained_layout": 0,
        "site": False,
        "ids": "",
        "shared_dim": 0,
        "shared_layout": 0,
        "masks": False,
        "grids": False,
        "name": "",
    },
    Welcome: {
        "memory": "",
        "frozen": 0,
        "rule": "plain",
        "options": {},
        "round_s": 0.0,
        "broadcast": 0,
        "has_terms": False,
        "fetch_models": False,
        "include": [],
        "exclude": [],
        "masked": False,
        "buffers": {},
        "buffer_layout": 0,
        "section_codec": "fp32",
        "section_options": "{}",
        "downlink_codec": "fp32",
        "client_id": -1,
        "name": "",
        "named_commands": False,
    },
    RoundTerms: {"participants": "", "held": False, "attempt": 0, "each": ""},
    TrainingFailure: {"reason": "training failed", "name": "", "attempt": 0},
    ModelAvailable: {"signature": ""},
    Status: {
        "host": "",
        "minimum": 0,
        "rounds": 0,
        "clients": 0,
        "round_s": 0.0,
        "remaining_s": 0.0,
        "awaited": [],
        "silent_s": [],
        "quarantined": [],
        "dropped": {},
        "last_s": 0.0,
        "bytes_up": 0,
        "bytes_down": 0,
        "accuracy": -1.0,
        "metrics": {},
        "epsilon": -1.0,
        "epsilon_budget": -1.0,
    },
    RankStatus: {
        "step": -1,
        "epoch": -1,
        "steps_per_s": 0.0,
        "bytes_out": 0,
        "bytes_in": 0,
        "pending": 0,
        "oldest": "",
        "oldest_s": 0.0,
        "missing": [],
        "lost": [],
        "dropped": {},
        "mean_ranks": 0.0,
    },
    RunEnded: {"final": False},
    GroupLeave: {"lost_reasons": []},
    MaskRoster: {"sent": 0, "block_elems": 0, "steps": b""},
    GroupView: {"traits": {}, "host": ""},
    UploadRequest: _OF_UPLOADS,
    PacketRequest: _OF_UPLOADS,
}


def packed(kind: Any, fields: Any) -> bytes:
    return msgpack.packb([kind, fields])


def fields_of(body: Body) -> dict[str, Any]:
    return {field.name: getattr(body, field.name) for field in dataclasses.fields(body)}


def refused(data: bytes) -> str:
    with pytest.raises(FrameError) as caught:
        control.decode(data)
    assert caught.value.reason == "control"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_there_is_an_example_of_each_kind() -> None:
    assert {type(body) for body in EXAMPLES} == set(get_args(Body))


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_a_message_comes_back_as_it_was(body: Body) -> None:
    assert control.decode(control.encode(body)) == body
    assert control.decode(memoryview(control.encode(body))) == body


def test_bodies_have_their_golden_bytes() -> None:
    """Names of messages and fields are on the wire: they change with :data:`PROTOCOL`, never without."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden == {"protocol": PROTOCOL} | {type(body).__name__: control.encode(body).hex() for body in EXAMPLES}


def test_a_body_is_a_msgpack_array_of_kind_and_fields() -> None:
    fields = {"to": 1, "incarnation": 2, "round_id": 3, "transfer": 4}
    assert control.encode(Grant(1, 2, 3, 4)) == packed("Grant", fields)


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_fields_that_we_do_not_know_are_skipped(body: Body) -> None:
    fields = fields_of(body) | {"later": 1, "nested": {"a": [1, {"b": None}]}, "self": 2, "": 3}
    assert control.decode(packed(type(body).__name__, fields)) == body


@pytest.mark.parametrize("name", ["__dataclass_self__", "__init__", "__class__", "__pydantic_validator__", "cls"])
def test_field_names_that_mean_something_to_python_are_skipped_too(name: str) -> None:
    assert control.decode(packed("Leave", {"reason": "x", name: 1})) == Leave("x")


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_a_message_without_one_of_its_fields_is_refused_by_name(body: Body) -> None:
    for name in fields_of(body).keys() - LATER.get(type(body), {}).keys():
        fields = fields_of(body)
        del fields[name]
        assert f"{type(body).__name__}.{name}" in refused(packed(type(body).__name__, fields))


@pytest.mark.parametrize("kind", LATER)
def test_older_programs_do_not_say_what_came_later(kind: type[Any]) -> None:
    (body,) = (example for example in EXAMPLES if type(example) is kind)
    fields = {name: value for name, value in fields_of(body).items() if name not in LATER[kind]}
    assert control.decode(packed(kind.__name__, fields)) == dataclasses.replace(body, **LATER[kind])


def wrong_values(value: Any) -> Iterator[Any]:
    yield from (None, [None], {}, {"a": 1}, msgpack.Timestamp(0))
    if not isinstance(value, str):
        yield "1"
    if not isinstance(value, bool):
        yield from (True, False)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        yield from (0, 1, 2.0)
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (-2, 1.0, 1.5, math.nan)
    if isinstance(value, list):
        yield from ([-1], [1 << 20], [0.5], ["1"], [[0]], "0")


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_a_value_of_the_wrong_type_is_refused_by_name(body: Body) -> None:
    for name, value in fields_of(body).items():
        for wrong in wrong_values(value):
            if any(wrong == fine for fine in NOT_WRONG.get(name, ())):
                continue
            data = packed(type(body).__name__, fields_of(body) | {name: wrong})
            text = refused(data)
            assert f"{type(body).__name__}.{name}" in text or "not msgpack within limits" in text


NOT_WRONG: dict[str, list[Any]] = {
    "metrics": [{}, {"a": 1}],
    "seed": [-2],
    "awaited": [[1 << 20]],
    "quarantined": [[1 << 20]],
    "clients": [[1 << 20]],
    "senders": [[1 << 20]],
    "silent_s": [[1 << 20], [0.5]],
    "dropped": [{}, {"a": 1}],
    "options": [{}, {"a": 1}],
    "traits": [{}, {"a": 1}],
    "incarnations": [[1 << 20]],
    "next_incarnations": [[1 << 20]],
    "include": [["1"]],
    "lost_reasons": [["1"]],
    "exclude": [["1"]],
    "buffers": [{}],
}


OUT_OF_RANGE = [
    ("MaskRoster", "members", bytes(32 * 1024 + 1)),
    ("MaskRoster", "threshold", 1),
    ("MaskRoster", "sent", (1 << 40) + 1),
    ("MaskRoster", "block_elems", (1 << 30) + 1),
    ("MaskRoster", "steps", bytes(16 * 1024 + 1)),
    ("MaskShares", "attempt", 0),
    ("MaskSurvivors", "clients", list(range(257))),
    ("MaskAnswer", "phase", 4),
    ("Status", "awaited", list(range(257))),
    ("Welcome", "include", ["*"] * 65),
    ("Welcome", "exclude", ["x" * 201]),
    ("Welcome", "buffers", {"x" * 201: "max"}),
    ("Welcome", "buffers", {"x": "max" * 6}),
    ("Welcome", "buffers", {str(number): "max" for number in range(35)}),
    ("Status", "silent_s", [math.nan]),
    ("Status", "dropped", {str(number): 1 for number in range(33)}),
    ("Status", "dropped", {"a": -1}),
    ("Status", "dropped", {1: 1}),
    ("RankStatus", "missing", [1 << 20]),
    ("GroupLeave", "lost_reasons", ["x"] * 17),
    ("GroupLeave", "lost_reasons", ["x" * 501]),
    ("RankStatus", "mean_ranks", math.nan),
    ("Hello", "protocol", 1 << 32),
    ("Hello", "round_id", 1 << 31),
    ("Hello", "round_id", -2),
    ("Hello", "phase", "x" * 257),
    ("Welcome", "codec_options", "x" * 4097),
    ("Welcome", "section_options", "x" * 4097),
    ("Welcome", "downlink_codec", "x" * 257),
    ("Welcome", "heartbeat_s", -0.5),
    ("Welcome", "heartbeat_s", math.inf),
    ("Welcome", "heartbeat_s", math.nan),
    ("Welcome", "heartbeat_s", 1e10),
    ("UploadRequest", "num_samples", -1),
    ("UploadRequest", "num_samples", (1 << 40) + 1),
    ("UploadRequest", "train_s", math.nan),
    ("UploadRequest", "transfer", 1 << 32),
    ("RetransmitRequest", "seqs", list(range(257))),
    ("PacketRequest", "packet", 0),
    ("PacketRequest", "packet", 257),
    ("PacketRequest", "num_samples", -1),
    ("PacketsMissing", "packets", []),
    ("PacketsMissing", "packets", [0]),
    ("PacketsMissing", "packets", list(range(1, 258))),
    ("TrainingFailure", "text", "x" * (32 * 1024 + 1)),
]


@pytest.mark.parametrize(
    "changes",
    [
        {"numbers": [0, 1, 2]},
        {"incarnations": []},
        {"numbers": [0, 0], "incarnations": [1, 1]},
        {"generation": 0},
        {"numbers": [], "incarnations": []},
        {"next_numbers": [1] * 256, "next_incarnations": [1] * 256},
        {"next_numbers": [], "next_incarnations": []},
    ],
    ids=str,
)
def test_members_that_are_no_list_of_processes_are_refused(changes: dict[str, Any]) -> None:
    (body,) = (body for body in EXAMPLES if isinstance(body, GroupView))
    refused(packed("GroupView", fields_of(body) | changes))


@pytest.mark.parametrize(("kind", "name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(kind: str, name: str, value: Any) -> None:
    (body,) = (body for body in EXAMPLES if type(body).__name__ == kind)
    refused(packed(kind, fields_of(body) | {name: value}))


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_what_a_receiver_would_refuse_cannot_be_made(body: Body) -> None:
    for name, value in fields_of(body).items():
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(body, **{name: None if not isinstance(value, str) else 1})


def test_the_loss_of_an_offer_may_be_any_float() -> None:
    offer = dataclasses.replace(EXAMPLES[4], loss=math.nan)
    assert math.isnan(control.decode(control.encode(offer)).loss)  # type: ignore[union-attr]


def test_the_norms_of_an_offer_may_be_any_float() -> None:
    """They are only shown; and a model may have become so large that its norm is infinite."""
    offer = dataclasses.replace(EXAMPLES[4], update_norm=math.inf, residual_norm=-5.0)
    assert control.decode(control.encode(offer)) == offer


SHAPES: list[Any] = [
    None, 1, "Leave", [], ["Leave"], ["Leave", {"reason": "x"}, 1], {"Leave": {"reason": "x"}}, ["Leave", ["x"]],
    ["Leave", None], [1, {"reason": "x"}], [b"Leave", {"reason": "x"}], [["Leave"], {"reason": "x"}],
    ["Leave", {b"": 1, "reason": "x"}],
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_body_of_another_shape_is_refused(shape: Any) -> None:
    refused(msgpack.packb(shape))


@pytest.mark.parametrize("kind", ["", "hello", "Body", "dict", "__class__", "x" * 10_000])
def test_an_unknown_kind_is_refused_and_named_shortly(kind: str) -> None:
    assert len(refused(packed(kind, {}))) < 200


BOMBS = {
    "an array that claims 2^32 entries": b"\x92\xa5Leave\xdd\xff\xff\xff\xff",
    "a map that claims 2^32 entries": b"\x92\xa5Leave\xdf\xff\xff\xff\xff",
    "a string that claims 2^32 bytes": b"\x92\xdb\xff\xff\xff\xff",
    "bytes that claim 2^32": b"\x92\xc6\xff\xff\xff\xff",
    "an extension that claims 2^32 bytes": b"\x92\xc9\xff\xff\xff\xff\x01",
    "a map of 65 entries": msgpack.packb(["Leave", {str(index): 0 for index in range(65)}]),
    "an array of 257": msgpack.packb(["Leave", {"reason": "x", "more": [0] * 257}]),
    "arrays in arrays": b"\x91" * 60_000,
    "empty maps without end": b"\xdc\xff\xff" + b"\x80" * 60_000,
    "maps in an array of arrays": b"\xdc\x01\x00" + (b"\xdc\x00\xff" + b"\x80" * 255) * 250,
    "something behind the body": control.encode(Leave("x")) + b"\xc0",
    "two bodies": control.encode(Leave("x")) * 2,
    "text that is not UTF-8": b"\x92\xa5Leave\x81\xa6reason\xa1\xff",
    "more than 64 KiB": bytes(MAX_BODY_BYTES + 1),
    "nothing": b"",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_body_that_claims_more_than_it_holds_costs_no_memory(what: str) -> None:
    refused(BOMBS[what])  # so that what is made once is not counted
    tracemalloc.start()
    try:
        refused(BOMBS[what])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize(
    "body",
    [
        TrainingFailure(1, 1, "x" * 32 * 1024),
        GroupLeave("g", 1, False, "\U0001f916" * 1000, [(1 << 20) - 1] * 256, ["\U0001f916" * 500] * 16),
    ],
    ids=lambda body: type(body).__name__,
)
def test_the_longest_texts_still_fit_into_a_body(body: Body) -> None:
    assert control.decode(control.encode(body)) == body


def test_a_body_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most 65536"):
        control.encode(TrainingFailure(1, 1, "\U0001f600" * 32 * 1024))


def check_body_or_error(data: bytes) -> None:
    try:
        body = control.decode(data)
    except FrameError:
        return
    assert isinstance(body, get_args(Body))
    assert control.encode(body)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_frame_error(data: bytes) -> None:
    check_body_or_error(data)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(which=st.integers(0, len(EXAMPLES) - 1), seed=st.integers(0, 1 << 20), changes=st.integers(1, 4))
def test_a_damaged_body_is_a_body_or_a_frame_error(which: int, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    data = bytearray(control.encode(EXAMPLES[which]))
    for _ in range(changes):
        data[rng.randrange(len(data))] = rng.randrange(256)
    check_body_or_error(bytes(data))
    check_body_or_error(bytes(data[: rng.randrange(len(data))]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(which=st.integers(0, len(EXAMPLES) - 1), data=st.data())
def test_any_values_in_the_fields_are_a_body_or_a_frame_error(which: int, data: st.DataObject) -> None:
    fields = fields_of(EXAMPLES[which])
    name = data.draw(st.sampled_from(sorted(fields)))
    check_body_or_error(packed(type(EXAMPLES[which]).__name__, fields | {name: data.draw(VALUES)}))
