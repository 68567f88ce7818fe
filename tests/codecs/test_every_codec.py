"""What must hold for every codec in both versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.codecs.fp32 import Fp32

VARIANTS = [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]
each_variant = pytest.mark.parametrize(("name", "version"), VARIANTS)
DIMS = (0, 1, 2, 7, 8, 9, 100, 8191, 8192, 8193, 20_000)


def random_vector(dim: int, seed: int = 0) -> Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: codecs.Codec, vector: Tensor) -> Tensor:
    return codecs.decode(codec.encode(vector), expected_dim=vector.numel()).vector


@each_variant
@pytest.mark.parametrize("dim", DIMS)
def test_a_round_trip_keeps_what_the_codec_promises(name: str, version: int, dim: int) -> None:
    codec = codecs.get(name, version=version)
    x = random_vector(dim)
    x_hat = round_trip(codec, x)
    assert x_hat.dtype == torch.float32
    assert x_hat.shape == (dim,)
    if codec.lossless:
        assert torch.equal(x_hat, x)
    elif dim:
        sent = x_hat != 0
        rounding = {"q4": 1 / 14, "q2": 1.0, "loco": 1.0}.get(name, 1 / 254)  # of the largest value
        assert (x_hat - x)[sent].abs().max() <= x.abs().max() * rounding * 1.0001
        assert (x_hat - x).norm() <= x.norm() * (1 if name in ("loco", "s4", "sq8") else 0.5)  # what feedback needs
        assert x[~sent].numel() == 0 or x[~sent].abs().max() <= x.abs().max()


@each_variant
@pytest.mark.parametrize("dim", DIMS)
def test_no_message_is_longer_than_max_bytes(name: str, version: int, dim: int) -> None:
    options = [{}] if name not in ("s4", "sq8") else [{}, {"density": 0.001}, {"density": 0.5}, {"density": 1.0}]
    for extra in options:
        codec = codecs.get(name, version=version, **extra)
        assert len(codec.encode(random_vector(dim))) <= codec.max_bytes(dim)


@each_variant
def test_all_zeros_come_back_as_zeros(name: str, version: int) -> None:
    assert torch.equal(round_trip(codecs.get(name, version=version), torch.zeros(1000)), torch.zeros(1000))


@each_variant
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 8200, 9999])
def test_non_finite_input_is_refused_and_named(name: str, version: int, bad: float, position: int) -> None:
    x = random_vector(10_000)
    x[position] = bad
    with pytest.raises(codecs.NonFiniteError, match=f"element {position} of 10000"):
        codecs.get(name, version=version).encode(x)


@each_variant
def test_encode_takes_any_float_vector_and_refuses_the_rest(name: str, version: int) -> None:
    codec = codecs.get(name, version=version)
    x = random_vector(64)
    payload = codec.encode(x)
    assert codec.encode(x.double()) == payload
    assert codec.encode(torch.nn.Parameter(x)) == payload
    assert codec.encode(x.repeat_interleave(2)[::2]) == payload  # not contiguous
    for wrong in (x.view(8, 8), torch.arange(64)):
        with pytest.raises(ValueError, match="vector must be float"):
            codec.encode(wrong)


@each_variant
def test_the_message_does_not_change_with_the_tensor(name: str, version: int) -> None:
    codec = codecs.get(name, version=version)
    x = random_vector(100)
    payload = codec.encode(x)
    before = bytes(payload)
    x.zero_()
    assert payload == before


@pytest.mark.parametrize("name", codecs.ALL)
@pytest.mark.parametrize("is_delta", [True, False])
def test_version_2_says_whether_it_is_a_delta(name: str, is_delta: bool) -> None:
    payload = codecs.get(name).encode(random_vector(50), is_delta=is_delta)
    decoded = codecs.decode(payload, expected_dim=50)
    assert decoded.is_delta is is_delta
    assert decoded.codec == name


@pytest.mark.parametrize(("name", "is_delta"), [("fp32", False), ("q8", False), ("s4", True), ("sq8", True)])
def test_version_1_has_one_meaning_per_format_and_refuses_the_other(name: str, is_delta: bool) -> None:
    codec = codecs.get(name, version=1)
    x = random_vector(50)
    assert codecs.decode(codec.encode(x), expected_dim=50).is_delta is is_delta
    assert codec.encode(x, is_delta=is_delta) == codec.encode(x)
    with pytest.raises(ValueError, match="version 1 always carries"):
        codec.encode(x, is_delta=not is_delta)


@each_variant
@pytest.mark.parametrize("block_elems", [1, 7, 1000, 65_536])
def test_blocks_add_up_to_the_decoded_vector(name: str, version: int, block_elems: int) -> None:
    x = random_vector(3000)
    options = {"chunk_elems": 64} if name in ("q8", "q4", "q2", "sq8") else {}
    payload = codecs.get(name, version=version, **options).encode(x)
    parsed = codecs.parse(payload, expected_dim=3000)
    assert (parsed.codec, parsed.version, parsed.dim) == (name, version, 3000)
    total = torch.zeros(3000)
    for block in parsed.blocks(block_elems):
        assert block.values.numel() <= block_elems
        if isinstance(block, codecs.DenseBlock):
            assert not parsed.is_sparse
            total[block.start : block.start + block.values.numel()] += block.values
        else:
            assert parsed.is_sparse
            total[block.indices] += block.values
    assert torch.equal(total, codecs.decode(payload, expected_dim=3000).vector)


@each_variant
def test_decode_writes_into_the_tensor_given(name: str, version: int) -> None:
    payload = codecs.get(name, version=version).encode(random_vector(500))
    out = torch.full((500,), 9.0)
    assert codecs.decode(payload, expected_dim=500, out=out).vector is out
    assert torch.equal(out, codecs.decode(payload, expected_dim=500).vector)
    with pytest.raises(ValueError, match="out must be float32"):
        codecs.decode(payload, expected_dim=500, out=torch.empty(499))


@each_variant
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_any_buffer_at_any_address_is_read(name: str, version: int, shift: int, kind: type) -> None:
    payload = codecs.get(name, version=version).encode(random_vector(500))
    expected = codecs.decode(payload, expected_dim=500).vector
    view = memoryview(kind(b"\xff" * shift + payload))[shift:]
    assert torch.equal(codecs.decode(view, expected_dim=500).vector, expected)


@pytest.mark.parametrize("shift", [0, 4])
def test_fp32_blocks_look_at_the_payload_itself(shift: int) -> None:
    buffer = bytearray(b"\xff" * shift + codecs.get("fp32").encode(torch.zeros(10)))
    (block,) = codecs.parse(memoryview(buffer)[shift:], expected_dim=10).blocks()
    buffer[-4:] = b"\x00\x00\x80\x3f"
    assert block.values[-1] == 1.0


def test_a_strided_buffer_is_refused() -> None:
    with pytest.raises(codecs.CodecError, match="strided"):
        codecs.decode(memoryview(bytes(80))[::2], expected_dim=10)


@pytest.mark.parametrize("name", ["s4", "sq8"])
def test_version_2_leaves_zeros_out_and_version_1_sends_exactly_k(name: str) -> None:
    x = torch.zeros(1000)
    x[::100] = 1.0
    (v2,) = codecs.parse(codecs.get(name).encode(x), expected_dim=1000).blocks()
    (v1,) = codecs.parse(codecs.get(name, version=1).encode(x), expected_dim=1000).blocks()
    assert v2.indices.tolist() == list(range(0, 1000, 100))
    assert v1.indices.numel() == 100


def test_density_rounds_down_in_version_1_and_up_in_version_2() -> None:
    x = random_vector(1009)
    for version, k in ((1, 100), (2, 101)):
        (block,) = codecs.parse(codecs.get("s4", version=version).encode(x), expected_dim=1009).blocks()
        assert block.indices.numel() == k


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_variant
def test_a_cuda_tensor_gives_the_same_bytes(name: str, version: int) -> None:
    x = random_vector(20_000).round(decimals=1)  # many ties
    codec = codecs.get(name, version=version)
    payload = codec.encode(x)
    assert codec.encode(x.cuda()) == payload
    out = torch.empty(20_000, device="cuda")
    assert torch.equal(
        codecs.decode(payload, expected_dim=20_000, out=out).vector.cpu(),
        codecs.decode(payload, expected_dim=20_000).vector,
    )


@each_variant
@pytest.mark.parametrize("vector", [torch.zeros(0), torch.tensor([-3.0, 2.0]), torch.tensor([0.5, 4.0, -1.0])])
def test_the_largest_value_is_known_of_the_values_that_were_checked_and_of_no_others(
    name: str, version: int, vector: Tensor
) -> None:
    codec = codecs.get(name, version=version)
    parsed = codecs.parse(codec.encode(vector), expected_dim=vector.numel())
    largest = max((float(block.values.abs().max()) for block in parsed.blocks()), default=0.0)
    assert parsed.max_abs == (largest if name == "fp32" else None)
    other = parsed.replaced(lambda _: iter([codecs.DenseBlock(0, 9 * vector)]), is_sparse=False)
    assert other.max_abs is None
    assert other.is_delta


def test_a_difference_in_fp32_has_the_bytes_of_its_encoding_and_shares_memory_with_them() -> None:
    vector, base, codec = random_vector(1001), random_vector(1001, seed=1), Fp32()
    message, difference = codec.difference(vector, base)
    assert bytes(message) == codec.encode(vector - base)
    assert torch.equal(difference, vector - base)
    assert difference.data_ptr() == torch.frombuffer(message, dtype=torch.uint8).data_ptr() + 16
    vector[7] = torch.inf
    with pytest.raises(codecs.NonFiniteError, match="element 7 of 1001"):
        codec.difference(vector, base)
