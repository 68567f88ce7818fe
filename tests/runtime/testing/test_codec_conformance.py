"""``check_codec``: a good codec passes, and each rule has a codec that breaks it and is told so."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pytest
import torch
from pydantic import Field
from torch import Tensor

from gradbus.codecs import CodecError, CodecOptions, CustomCodec
from gradbus.codecs.registry import TABLE
from gradbus.runtime.errors import ConfigError
from gradbus.testing import check_codec

DIMS = (0, 1, 50)


class Halves(CustomCodec):
    """float16, after division by a power of two."""

    name = "halves"
    magic = b"HLF1"

    class Options(CodecOptions):
        most: Annotated[float, Field(gt=0)] = 1e4

    def max_body_bytes(self, dim: int) -> int:
        return 4 + 2 * dim

    def encode_body(self, vector: Tensor) -> bytes:
        scale = (vector.abs().max() / self.options.most).reshape(1) if vector.numel() else torch.zeros(1)
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        return scale.numpy().tobytes() + (vector / scale).half().numpy().tobytes()

    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        if len(body) != 4 + 2 * dim:
            raise CodecError(f"halves body of {len(body)} bytes, expected {4 + 2 * dim}")
        data = bytearray(body)
        values = torch.frombuffer(data, dtype=torch.float16, offset=4).float() if dim else torch.empty(0)
        return values * torch.frombuffer(data, dtype=torch.float32, count=1)


class Forgets(Halves):
    """Lossy, and says that it is not."""

    lossless = True


class Changes(Halves):
    def encode_body(self, vector: Tensor) -> bytes:
        return super().encode_body(vector.mul_(1.0 + 1e-3))


class Counts(Halves):
    """Another message each time."""

    calls: ClassVar[list[int]] = []

    def encode_body(self, vector: Tensor) -> bytes:
        self.calls.append(0)
        return super().encode_body(vector * (1 + len(self.calls) % 2))


class TakesLonger(Halves):
    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        return super().decode_body(body[: 4 + 2 * dim], dim)


class Trusts(Halves):
    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        if not dim:
            return super().decode_body(body, dim)
        return torch.frombuffer(bytearray(body), dtype=torch.float16, offset=4, count=dim).float() * 1e-3


class Allocates(Halves):
    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        bytearray(1 << 24)
        return super().decode_body(body, dim)


class SaysNothing(Halves):
    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        return super().decode_body(body, dim) * 0.0


class Doubles(Halves):
    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        return super().decode_body(body, dim) * 3.0


class Reuses(Halves):
    """Returns memory that its next call writes to."""

    memory: ClassVar[dict[int, Tensor]] = {}

    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        return cls.memory.setdefault(dim, torch.empty(dim)).copy_(super().decode_body(body, dim))


class TooShort(Halves):
    def max_bytes(self, dim: int) -> int:
        return 16


@pytest.mark.parametrize("kind", [Halves, *TABLE.values()], ids=lambda kind: kind.__name__)
def test_a_codec_that_keeps_the_rules_passes(kind: Any) -> None:
    check_codec(kind, dims=DIMS)


def test_it_takes_an_object_a_class_or_a_name_with_options() -> None:
    check_codec(Halves(most=100.0), dims=DIMS)
    check_codec(Halves, most=100.0, dims=DIMS)
    check_codec("gradbus.experiments.examples.custom_codec:Ternary", threshold=0.4, chunk_elems=100)
    with pytest.raises(ConfigError, match="threshold"):
        check_codec("gradbus.experiments.examples.custom_codec:Ternary", threshold=2)
    with pytest.raises(ConfigError, match="did you mean 'Ternary'"):
        check_codec("gradbus.experiments.examples.custom_codec:Ternery")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Forgets, "come back changed, and lossless is set"),
        (Changes, "has changed its input"),
        (Counts, "two messages for a random vector of 1 elements differ"),
        (TakesLonger, "a message with a byte more is read: compare its length"),
        (Trusts, "ends in ValueError: .* and raise CodecError"),
        (Allocates, "bytes of memory: compare lengths"),
        (SaysNothing, "the messages say nothing of it, or more than it is"),
        (Doubles, "the messages say nothing of it, or more than it is|NaN or infinity|its own message"),
        (TooShort, "Raise max_bytes"),
        (Reuses, "changes what was read of another one: return memory of its own"),
        (dict, "is no codec: inherit from gradbus.codecs.CustomCodec"),
        (CustomCodec, "has no decode_body, encode_body, max_body_bytes: write it"),
    ],
)
def test_a_codec_that_breaks_a_rule_is_told_which(kind: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_codec(kind, dims=DIMS)
