"""The message of a step: its bytes, what becomes of any others, and the mean that all ranks take from them."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.codecs.dgc import wire as dgc_wire

LAYOUT = codecs.DgcLayout.of([("w", torch.zeros(6, 10)), ("b", torch.zeros(3)), ("k", torch.zeros(2, 2, 2))])
HEADER_BYTES = 24
VALUES_AT = HEADER_BYTES + 4 * 3
DTYPES = [{"value_dtype": one, "dense_dtype": other} for one in ("fp32", "fp16") for other in ("fp32", "fp16")]


def message(seed: int = 1, layout: codecs.DgcLayout = LAYOUT, **options: object) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(slot.shape, generator=generator) for slot in layout.slots]
    config = codecs.DgcConfig(**{"density": 0.1, **options})  # type: ignore[arg-type]
    return codecs.dgc_step(grads, codecs.DgcState.zeros(layout), config)[0]


def encode(indices: list[int], values: list[float], value_dtype: str = "fp32") -> tuple[bytes, Tensor]:
    return dgc_wire.encode_dgc(
        LAYOUT, torch.zeros(3), torch.tensor(indices, dtype=torch.int64), torch.tensor(values), value_dtype=value_dtype
    )


def test_the_layout_puts_compressed_tensors_first_and_keeps_the_order() -> None:
    assert (LAYOUT.sparse_elems, LAYOUT.dense_elems, LAYOUT.dim) == (68, 3, 71)
    assert [(slot.name, slot.start, slot.stop, slot.is_sparse) for slot in LAYOUT.slots] == [
        ("w", 0, 60, True),
        ("b", 68, 71, False),
        ("k", 60, 68, True),
    ]
    assert LAYOUT.slot("k").shape == (2, 2, 2)
    assert [tuple(view.shape) for view in LAYOUT.views(torch.zeros(71))] == [(6, 10), (3,), (2, 2, 2)]


def test_layouts_differ_where_ranks_could_misunderstand_each_other() -> None:
    named = [("w", torch.zeros(6, 10)), ("b", torch.zeros(3)), ("k", torch.zeros(2, 2, 2))]
    digests = {
        codecs.DgcLayout.of(named).digest,
        codecs.DgcLayout.of(named, min_numel=9).digest,
        codecs.DgcLayout.of([("w", torch.zeros(10, 6)), *named[1:]]).digest,
        codecs.DgcLayout.of([("v", torch.zeros(6, 10)), *named[1:]]).digest,
        codecs.DgcLayout.of(named[::-1]).digest,
    }
    assert len(digests) == 5


def test_the_digest_is_that_of_the_names_the_shapes_and_the_decisions() -> None:
    text = b'[["w", [6, 10], true], ["b", [3], false], ["k", [2, 2, 2], true]]'
    assert LAYOUT.digest == int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def test_a_layout_of_other_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="'w' is given twice"):
        codecs.DgcLayout.of([("w", torch.zeros(1)), ("w", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"'w' must be of floating point, got torch\.int64"):
        codecs.DgcLayout.of([("w", torch.zeros(1, dtype=torch.int64))])
    with pytest.raises(KeyError, match="no tensor 'x'"):
        LAYOUT.slot("x")


def test_a_message_of_two_entries_is_these_bytes() -> None:
    indices, values = torch.tensor([3, 60]), torch.tensor([1.5, -2.0])
    payload, _ = dgc_wire.encode_dgc(LAYOUT, torch.tensor([1.0, 0, -1]), indices, values, value_dtype="fp32")
    coding, coded = codecs.encode_indices(indices, 68)
    header = b"DG\0\1" + struct.pack("<BBhQII", 0, coding, 0, LAYOUT.digest, 2, len(coded))
    assert payload == header + struct.pack("<3f2f", 1.0, 0.0, -1.0, 1.5, -2.0) + coded
    # 2.0 = 2**2 / 2, and is brought to 2**14 by 2**-13.
    payload, _ = dgc_wire.encode_dgc(LAYOUT, torch.tensor([1.0, 0, -1]), indices, values, value_dtype="fp16")
    header = b"DG\0\1" + struct.pack("<BBhQII", 2, coding, -13, LAYOUT.digest, 2, len(coded))
    assert payload == header + struct.pack("<3f2e", 1.0, 0.0, -1.0, 1.5 * 8192, -16384.0) + coded
    # Dense tensors have an exponent of their own: 1.0 = 2**1 / 2 is brought to 2**14 by 2**-14.
    payload, _ = dgc_wire.encode_dgc(
        LAYOUT, torch.tensor([1.0, 0, -1]), indices, values, value_dtype="fp32", dense_dtype="fp16"
    )
    header = b"DG\0\1" + struct.pack("<BBhQII", 4, coding, 0, LAYOUT.digest, 2, len(coded))
    assert payload == header + struct.pack("<h3e2f", -14, 16384.0, 0.0, -16384.0, 1.5, -2.0) + coded


@pytest.mark.parametrize("value_dtype", ["fp32", "fp16"])
def test_a_message_comes_back_as_its_sender_was_told(value_dtype: str) -> None:
    payload, decoded = encode([0, 7, 59, 60, 67], [1.0, -3.14159, 1e-3, 70000.0, -0.5], value_dtype)
    read = codecs.decode_dgc(payload, LAYOUT)
    assert read.indices is not None
    assert read.indices.tolist() == [0, 7, 59, 60, 67]
    assert torch.equal(read.values, decoded)


@pytest.mark.parametrize("value_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("scale", [1e-38, 1e-6, 1.0, 1e6, 3.4e38])
def test_dense_tensors_in_fp16_neither_overflow_nor_vanish(value_dtype: str, scale: float) -> None:
    dense = torch.tensor([1.0, -0.3, 1e-5]) * scale
    payload, decoded = dgc_wire.encode_dgc(
        LAYOUT, dense, torch.tensor([3]), torch.tensor([70000.0]), value_dtype=value_dtype, dense_dtype="fp16"
    )
    read = codecs.decode_dgc(payload, LAYOUT)
    assert torch.allclose(read.dense, dense, rtol=2**-11, atol=0)
    assert torch.equal(read.values, decoded)


def test_dense_tensors_in_fp16_take_half_the_bytes_and_a_model_without_any_sends_none() -> None:
    assert len(message()) - len(message(dense_dtype="fp16")) == 2 * 3 - 2
    layout = codecs.DgcLayout.of([("w", torch.zeros(6, 10))])
    assert message(layout=layout) == message(layout=layout, dense_dtype="fp16")
    damaged = bytearray(message(layout=layout))
    damaged[4] = 4
    with pytest.raises(codecs.CodecError, match="unknown bits in flags 0x04"):
        codecs.decode_dgc(damaged, layout)


def test_an_empty_message_and_a_full_one_need_no_index_bytes() -> None:
    empty, _ = encode([], [])
    assert len(empty) == VALUES_AT
    assert codecs.decode_dgc(empty, LAYOUT).values.numel() == 0
    assert len(encode([], [], "fp16")[0]) == VALUES_AT
    full, _ = encode(list(range(68)), [1.0] * 68)
    assert len(full) == VALUES_AT + 4 * 68
    assert codecs.decode_dgc(full, LAYOUT).indices is None


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-10, 1.0, 65504.0, 1e6, 1e30, 3.4028234e38])
def test_fp16_values_of_any_magnitude_neither_overflow_nor_vanish(scale: float) -> None:
    values = (torch.tensor([1.0, -1.0, 0.999999, 0.3, 1e-6]).double() * scale).float()
    _, decoded = encode([1, 2, 3, 4, 5], values.tolist(), "fp16")
    assert decoded.isfinite().all()
    assert torch.allclose(decoded, values, rtol=2**-11, atol=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_fp16_rounding_leaves_a_rest_that_float32_holds_exactly(values: list[float]) -> None:
    payload, decoded = encode(list(range(len(values))), values, "fp16")
    exact = torch.tensor(values)
    assert torch.equal((exact - decoded).double(), exact.double() - decoded.double())
    peak = float(exact.abs().max())
    assert ((exact - decoded).abs().double() <= exact.abs().double() * 2**-11 + peak * 2**-39).all()
    assert torch.equal(codecs.decode_dgc(payload, LAYOUT).values, decoded)


def test_no_message_is_longer_than_the_limit_for_receivers() -> None:
    for density in (0.001, 0.1, 0.3, 0.5, 0.9, 1.0):
        for dtypes in DTYPES:
            assert len(message(density=density, **dtypes)) <= codecs.max_dgc_bytes(LAYOUT)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_message_cut_at_any_byte_or_with_more_after_it_is_refused(dtypes: dict[str, str]) -> None:
    payload = message(**dtypes)
    for bad in (*(payload[:length] for length in range(len(payload))), payload + b"\0", payload + payload):
        with pytest.raises(codecs.CodecError):
            codecs.decode_dgc(bad, LAYOUT)


def test_a_message_for_another_layout_is_refused_by_its_digest() -> None:
    other = codecs.DgcLayout.of([("w", torch.zeros(6, 10)), ("b", torch.zeros(3)), ("other", torch.zeros(2, 2, 2))])
    with pytest.raises(codecs.DimMismatchError, match="same model and min_numel on all ranks"):
        codecs.decode_dgc(message(), other)


BAD_FIELDS = {
    "magic": (0, b"XX", "expected b'DG"),
    "flags": (4, b"\x08", "unknown bits in flags 0x08"),
    "non-finite with values": (4, b"\x01", "nothing follows"),
    "non-finite in fp16": (4, b"\x03", "unknown bits"),
    "coding": (5, b"\x09", "unknown coding 9"),
    "all, but some": (5, b"\x00", "all 68 entries without indices"),
    "exponent": (6, b"\x01\x00", "exponent 1, expected 0"),
    "k": (16, struct.pack("<I", 69), "k=69 entries, expected 0 .. 68"),
    "index bytes": (20, struct.pack("<I", 1 << 31), "needs"),
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_bad_header_field_is_named(field: str) -> None:
    offset, content, text = BAD_FIELDS[field]
    payload = bytearray(message())
    payload[offset : offset + len(content)] = content
    with pytest.raises(codecs.CodecError, match=text):
        codecs.decode_dgc(payload, LAYOUT)


@pytest.mark.parametrize("exponent", [-164, 114, 32767, -32768])
def test_an_exponent_that_no_float32_has_is_refused(exponent: int) -> None:
    payload = bytearray(message(value_dtype="fp16"))
    struct.pack_into("<h", payload, 6, exponent)
    with pytest.raises(codecs.CodecError, match=r"expected -163 \.\. 113"):
        codecs.decode_dgc(payload, LAYOUT)
    payload = bytearray(message(dense_dtype="fp16"))
    struct.pack_into("<h", payload, HEADER_BYTES, exponent)
    with pytest.raises(codecs.CodecError, match=r"exponent of the dense tensors .* expected -163 \.\. 113"):
        codecs.decode_dgc(payload, LAYOUT)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_told_from_malformed_bytes(bad: float) -> None:
    for value_dtype, kind, offset in (("fp32", "f", HEADER_BYTES), ("fp32", "f", VALUES_AT), ("fp16", "e", VALUES_AT)):
        payload = bytearray(message(value_dtype=value_dtype))
        struct.pack_into(f"<{kind}", payload, offset, bad)
        with pytest.raises(codecs.NonFiniteError):
            codecs.decode_dgc(payload, LAYOUT)
    for dtypes, exponent_at, value_at in (
        ({"value_dtype": "fp16"}, 6, VALUES_AT),
        ({"dense_dtype": "fp16"}, HEADER_BYTES, HEADER_BYTES + 2),
    ):
        payload = bytearray(message(**dtypes))
        struct.pack_into("<h", payload, exponent_at, 113)
        struct.pack_into("<e", payload, value_at, 65504.0)
        with pytest.raises(codecs.NonFiniteError):
            codecs.decode_dgc(payload, LAYOUT)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    flags=st.integers(0, 8),
    coding=st.integers(0, 6),
    exponent=st.integers(-200, 200),
    k=st.integers(0, 70),
    index_bytes=st.integers(0, 60),
    body=st.binary(max_size=400),
    is_fitting=st.booleans(),
)
def test_any_bytes_behind_a_header_give_a_message_or_a_codec_error(
    flags: int, coding: int, exponent: int, k: int, index_bytes: int, body: bytes, is_fitting: bool
) -> None:
    header = struct.pack("<4sBBhQII", b"DG\0\1", flags, coding, exponent, LAYOUT.digest, k, index_bytes)
    if is_fitting:
        dense_bytes = 8 if flags & 4 else 12
        body = (body + bytes(700))[: dense_bytes + (2 if flags & 2 else 4) * k + index_bytes]
    check_or_refused(header + body)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(payload=st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_codec_error(payload: bytes) -> None:
    check_or_refused(payload)
    check_or_refused(b"DG\0\1" + payload)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), dtypes=st.sampled_from(DTYPES))
def test_a_damaged_message_gives_a_message_or_a_codec_error(data: st.DataObject, dtypes: dict[str, str]) -> None:
    payload = bytearray(message(**dtypes))
    edits = st.lists(st.tuples(st.integers(0, len(payload) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    for position, value in data.draw(edits):
        payload[position] = value
    check_or_refused(bytes(payload))


def check_or_refused(payload: bytes) -> None:
    try:
        read = codecs.decode_dgc(payload, LAYOUT)
    except codecs.CodecError:
        return
    assert read.dense.shape == (3,)
    assert read.dense.isfinite().all()
    assert read.values.isfinite().all()
    if read.indices is None:
        assert read.values.shape == (68,)
    else:
        assert read.indices.shape == read.values.shape
        assert all(0 <= index < 68 for index in read.indices.tolist())
        assert (read.indices.diff() > 0).all()


def test_a_claimed_size_allocates_nothing() -> None:
    big = codecs.DgcLayout((), 1 << 39, 1 << 39, 7)
    header = struct.pack("<4sBBhQII", b"DG\0\1", 0, 0, 0, 7, 2**32 - 1, 2**32 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(codecs.CodecError):
            codecs.decode_dgc(header + bytes(100), big)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_mean_is_the_sum_in_rank_order_times_one_nth() -> None:
    payloads = [message(seed, value_dtype="fp16" if seed == 2 else "fp32") for seed in range(3)]
    total = torch.zeros(71)
    for payload in payloads:
        read = codecs.decode_dgc(payload, LAYOUT)
        assert read.indices is not None
        one = torch.zeros(71)
        one[read.indices] = read.values
        one[68:] = read.dense
        total = total + one
    mean = codecs.combine_dgc(payloads, LAYOUT)
    assert torch.equal(mean.flat, total * (1 / 3))
    w, b, k = mean.gradients()
    assert torch.equal(torch.cat([w.reshape(-1), k.reshape(-1), b]), mean.flat)
    assert (w.shape, b.shape, k.shape) == ((6, 10), (3,), (2, 2, 2))


def test_the_mean_is_bit_equal_whoever_computes_it_and_wherever_it_goes() -> None:
    payloads = [message(seed) for seed in range(5)]
    out = torch.full((71,), float("nan"))
    mean = codecs.combine_dgc(payloads, LAYOUT, out=out)
    assert mean.flat is out
    shifted = memoryview(b"x" + payloads[0])[1:]  # as a receiver may have it: within a larger buffer
    again = codecs.combine_dgc([shifted, *map(bytearray, payloads[1:])], LAYOUT)
    assert torch.equal(again.flat.view(torch.int32), out.view(torch.int32))


def test_a_bad_message_names_its_rank_and_leaves_the_output_alone() -> None:
    out = torch.full((71,), 7.0)
    with pytest.raises(codecs.CodecError, match="rank 1 of 3: DGC payload cut short"):
        codecs.combine_dgc([message(0), message(1)[:-1], message(2)], LAYOUT, out=out)
    assert (out == 7).all()


def test_bad_arguments_of_the_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="one payload per rank, got none"):
        codecs.combine_dgc([], LAYOUT)
    with pytest.raises(ValueError, match=r"out must be float32 of shape \(71,\)"):
        codecs.combine_dgc([message()], LAYOUT, out=torch.zeros(70))


def test_writing_the_mean_keeps_the_storage_of_the_gradients() -> None:
    """They may be parts of one buffer: a new tensor in their place would cut them off from it."""
    bucket = torch.zeros(71)
    parameters = [torch.zeros(slot.shape, requires_grad=True) for slot in LAYOUT.slots]
    for parameter, view in zip(parameters, LAYOUT.views(bucket), strict=True):
        parameter.grad = view
    mean = codecs.combine_dgc([message()], LAYOUT)
    mean.write_to(parameters)
    assert torch.equal(bucket, mean.flat)
    parameters[1].grad = None
    mean.write_to(parameters)
    assert parameters[1].grad is not None
    mean.flat.zero_()  # a reused output must not reach into the parameters
    assert parameters[1].grad.any()
