"""Codecs that are not built in: what their base class does for them, and that no one else's bytes reach them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from gradbus import codecs
from gradbus.codecs.registry import TABLE, check_magics
from gradbus.codecs.s4 import S4


class Coarse(codecs.CustomCodec):
    """Multiples of a step, as many bytes as float16."""

    name = "coarse"
    magic = b"COA1"
    gives: ClassVar[Any] = None  # in place of what the body holds

    class Options(codecs.CodecOptions):
        step: Annotated[float, Field(gt=0)] = 0.25

    def max_body_bytes(self, dim: int) -> int:
        return 2 * dim

    def encode_body(self, vector: Tensor) -> bytes:
        return ((vector / self.options.step).round() * self.options.step).half().numpy().tobytes()

    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Any:
        if cls.gives is not None:
            return cls.gives
        return torch.frombuffer(bytearray(body), dtype=torch.float16)[:dim].float()


class Named(codecs.CodecOptions):
    """Has an option that the name of a codec would hide."""

    name: str = "a"


def test_a_message_is_the_common_header_and_the_body() -> None:
    codec = Coarse(step=0.5)
    payload = codec.encode(torch.tensor([0.6, -1.2]))
    assert payload == b"COA1\1\0\0\0\2" + bytes(7) + torch.tensor([0.5, -1.0]).half().numpy().tobytes()
    decoded = codecs.decode(payload, expected_dim=2, own=(Coarse,))
    assert (decoded.codec, decoded.is_delta, decoded.vector.tolist()) == ("coarse", True, [0.5, -1.0])
    assert not codecs.decode(codec.encode(torch.ones(2), is_delta=False), expected_dim=2, own=[Coarse]).is_delta


def test_its_messages_are_read_only_where_the_caller_names_it() -> None:
    payload = Coarse().encode(torch.ones(3))
    with pytest.raises(codecs.CodecError, match="known magic"):
        codecs.decode(payload, expected_dim=3)
    vector = torch.zeros(3)
    codecs.add_into(vector, payload, (Coarse,))
    assert vector.tolist() == [1.0, 1.0, 1.0]


def test_weights_of_a_length_that_begin_like_its_magic_are_still_weights() -> None:
    weights = torch.ones(16)
    raw = b"COA1" + weights.numpy().tobytes()[4:]
    assert codecs.decode(raw, expected_dim=16, own=(Coarse,)).codec == "fp32"


def test_its_residual_is_taken_against_its_own_message() -> None:
    x = torch.tensor([0.3, -0.4, 2.0])
    payload, residual = codecs.residual_step(x, None, Coarse())
    sent = codecs.decode(payload, expected_dim=3, own=(Coarse,)).vector
    assert torch.equal(residual, x - sent)
    assert residual.norm() > 0


def test_codecs_with_equal_options_are_equal_and_frozen() -> None:
    assert Coarse(step=0.5) == Coarse(step=0.5) != Coarse()
    assert hash(Coarse(step=0.5)) == hash(Coarse(step=0.5))
    with pytest.raises(AttributeError):
        Coarse().options = None  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [{"step": 0}, {"stepp": 1.0}, {"version": 1}])
def test_its_options_are_checked_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Coarse(**wrong)


@pytest.mark.parametrize(
    ("gives", "text"),
    [
        (torch.ones(2), "expected float32 of shape"),
        (torch.ones(3).double(), "expected float32 of shape"),
        ([1.0, 1.0, 1.0], "gave a list"),
        (torch.tensor([1.0, float("nan"), 0.0]), "non-finite coarse values"),
        (codecs.SparseVector(3, torch.tensor([1, 1]), torch.ones(2)), "strictly ascending"),
        (codecs.SparseVector(3, torch.tensor([0, 3]), torch.ones(2)), "strictly ascending"),
        (codecs.SparseVector(3, torch.tensor([0, 1], dtype=torch.int32), torch.ones(2)), "expected int64"),
        (codecs.SparseVector(4, torch.tensor([0, 1]), torch.ones(2)), "for 3"),
        (codecs.SparseVector(3, torch.tensor([0]), torch.tensor([float("inf")])), "non-finite coarse values"),
    ],
)
def test_what_it_decodes_is_checked_before_anybody_reads_it(gives: Any, text: str) -> None:
    kind = type("Wrong", (Coarse,), {"gives": gives})
    payload = Coarse().encode(torch.ones(3))
    with pytest.raises(codecs.CodecError, match=text):
        codecs.parse(payload, expected_dim=3, own=(kind,))


def test_it_may_decode_to_the_entries_of_a_sparse_vector() -> None:
    sparse = codecs.SparseVector(3, torch.tensor([0, 2]), torch.tensor([5.0, 7.0]))
    kind = type("Sparse", (Coarse,), {"gives": sparse})
    parsed = codecs.parse(Coarse().encode(torch.ones(3)), expected_dim=3, own=(kind,))
    assert parsed.is_sparse
    assert [block.values.tolist() for block in parsed.blocks(1)] == [[5.0], [7.0]]


def test_any_fault_of_its_decoder_is_a_codec_error_about_that_message() -> None:
    payload = Coarse().encode(torch.ones(3))
    with pytest.raises(codecs.CodecError, match=r"b'COA1' message of 21 bytes: its codec failed with ValueError"):
        codecs.parse(payload[:-1], expected_dim=3, own=(Coarse,))
    with pytest.raises(codecs.DimMismatchError):
        codecs.parse(payload, expected_dim=4, own=(Coarse,))


def test_a_body_longer_than_it_says_is_not_sent() -> None:
    kind = type("Short", (Coarse,), {"max_body_bytes": lambda self, dim: dim})
    with pytest.raises(ValueError, match=r"3 elements has 6 bytes, and max_body_bytes allows 3"):
        kind().encode(torch.ones(3))


def encoding(body: Any) -> codecs.CustomCodec:
    kind: Any = type("Encoding", (Coarse,), {"encode_body": lambda self, vector: body})
    return kind()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (None, "a NoneType"),
        ("abc", "a str"),
        ([1, 2], "a list"),
        (torch.ones(3), "torch.float32 of shape"),
        (memoryview(b"abcdef")[::2], "a memoryview"),
    ],
)
def test_a_body_that_is_no_bytes_is_an_error_that_names_the_codec(body: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"coarse: encode_body returned {shown}.*, expected bytes"):
        encoding(body).encode(torch.ones(3))


def test_a_body_is_counted_in_bytes_whatever_its_items_are() -> None:
    with pytest.raises(ValueError, match="3 elements has 12 bytes, and max_body_bytes allows 6"):
        encoding(torch.ones(3).numpy().data).encode(torch.ones(3))
    assert encoding(np.arange(3, dtype="<f2")).encode(torch.ones(3))[16:] == np.arange(3, dtype="<f2").tobytes()


@pytest.mark.parametrize("most", [None, 2.5, -1, "6"])
def test_a_longest_body_that_is_no_number_of_bytes_is_named(most: Any) -> None:
    kind: Any = type("Wrong", (Coarse,), {"max_body_bytes": lambda self, dim: most})
    for act in (lambda: kind().max_bytes(3), lambda: kind().encode(torch.ones(3))):
        with pytest.raises(
            TypeError, match=r"coarse: max_body_bytes\(3\) returned .*, expected a whole number of bytes"
        ):
            act()
    kind = type("Right", (Coarse,), {"max_body_bytes": lambda self, dim: np.int64(2 * dim)})
    assert kind().max_bytes(3) == 22


def test_two_codecs_whose_messages_begin_alike_are_named() -> None:
    other: Any = type("Other", (Coarse,), {"name": "other"})
    with pytest.raises(ValueError, match="messages of codecs Coarse and Other both begin with b'COA1'"):
        check_magics([Coarse, other])
    check_magics([Coarse, Coarse, type("Denser", (S4,), {}), S4])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (type("Plain", (Coarse,), {"Options": dict}), "Options is no pydantic model"),
        (type("Plain", (Coarse,), {"Options": codecs.CodecOptions()}), "Options is no pydantic model"),
        (type("Named", (Coarse,), {"Options": Named}), "an option cannot be called name"),
        (dict, "is no codec: inherit from gradbus.codecs.CustomCodec"),
        (codecs.CustomCodec, "has no decode_body, encode_body, max_body_bytes"),
        (type("NoMagic", (codecs.CustomCodec,), {**vars(Coarse), "magic": b"abc"}), "expected 4 bytes"),
        (type("Taken", (Coarse,), {"magic": b"Q8\0\2"}), "messages of a built-in codec begin with"),
        (type("Nameless", (Coarse,), {"name": ""}), "has no name"),
    ],
)
def test_a_class_that_cannot_be_a_codec_is_refused_with_what_to_change(kind: type, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        codecs.check_codec_class(kind)
    codecs.check_codec_class(Coarse)
    codecs.check_codec_class(type("Denser", (S4,), {}))  # its messages are those of s4


def test_the_table_has_every_codec_of_the_package_and_each_magic_once() -> None:
    found = []
    package = importlib.import_module("gradbus.codecs")
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"gradbus.codecs.{info.name}")
        found += [kind for kind in vars(module).values() if isinstance(kind, type) and "choice" in vars(kind)]
    assert {kind.choice: kind for kind in found} == dict(TABLE)
    assert tuple(TABLE) == codecs.ALL == ("fp32", "loco", "q2", "q4", "q8", "s4", "sq8")
    magics = [magic for kind in TABLE.values() for magic, _ in kind.formats]
    assert len(magics) == len(set(magics)) == 11
