"""Check that a codec keeps what senders and receivers rely on; :func:`check_codec` is for tests of a codec of your own.

The vectors are random with a fixed seed, and special ones: zeros, equal values, a single large one, very large and very
small ones. The damaged messages are cut, lengthened, with bits flipped, of another size and of random bytes.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs import (
    Codec,
    CodecError,
    Decoded,
    NonFiniteError,
    Parsed,
    SparseBlock,
    check_codec_class,
    decode,
    parse,
    residual_step,
)
from gradbus.codecs.base import Parser
from gradbus.codecs.registry import MAGIC_BYTES
from gradbus.runtime.choices import CODECS, Choice, options_as_json

DIMS = (0, 1, 2, 7, 100, 1000, 8193)
_DAMAGED = 200  # messages of each kind
_FEEDBACK_STEPS = 30
_MOST_BYTES, _MOST_BYTES_AN_ELEMENT = 1 << 22, 256  # of memory that reading a message may take


def check_codec(codec: Codec | type[Codec] | str, *, dims: Sequence[int] = DIMS, seed: int = 0, **options: Any) -> None:
    """Check a codec as a federated run uses it. Takes about a second.

    Args:
        codec: an object, or a class, or the name of one as ``package.module:Name``, made with ``options``.
        dims: numbers of elements to check it with. seed: of the random vectors and bytes.

    Raises:
        AssertionError: the codec does not keep one of the rules; the text says which, expected, got, and what to do.
        ConfigError: there is no class of this name, or it does not have these options.
    """
    if isinstance(codec, str):
        codec = CODECS.make(Choice.model_validate({**options, "name": codec}))
    elif isinstance(codec, type):
        _check_class(codec)
        codec = codec(**options)
    assert isinstance(codec, Codec), f"check_codec takes a codec, a class or a name, got a {type(codec).__name__}"
    _check_class(type(codec))
    _check_options(codec)
    random_bytes = random.Random(seed)
    for dim in dims:
        for what, vector in _vectors(dim, seed):
            _check_round_trip(codec, vector, f"{what} of {dim} elements")
        if dim:
            _check_own_memory(codec, dim)
            _check_not_finite(codec, dim)
            _check_feedback(codec, dim, seed)
        _check_damaged(codec, dim, random_bytes)


def _check_class(kind: type) -> None:
    try:
        check_codec_class(kind)
    except ValueError as error:
        raise AssertionError(str(error)) from None


def _check_options(codec: Codec) -> None:
    """The options travel as JSON, and make the same codec at the other end."""
    kind, given = type(codec), {}
    for field in kind.Options.model_fields:
        source = codec if hasattr(codec, field) else getattr(codec, "options", None)
        assert hasattr(source, field), (
            f"{codec.name}: the option {field} is a field of Options, and no attribute of the codec or its options"
        )
        given[field] = getattr(source, field)
    text = options_as_json(kind.Options(**given), codec.name)
    again = kind(**dict(kind.Options.model_validate_json(text)))
    assert again == codec, (
        f"{codec.name}: the options {text} make another codec at the receiver: let Options hold all that it is made of"
    )


def _vectors(dim: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    drawn = torch.randn(dim, generator=torch.Generator().manual_seed(seed + dim))
    yield "a random vector", drawn
    yield "zeros", torch.zeros(dim)
    yield "equal values", torch.full((dim,), -0.75)
    yield "one large value", torch.cat([torch.full((min(dim, 1),), 1e6), drawn[1:]])
    yield "values of 1e30", drawn * 1e30
    yield "values of 1e-40", drawn * 1e-40


def _decoded(codec: Codec, payload: bytes, dim: int, what: str) -> Decoded:
    try:
        found = decode(payload, expected_dim=dim, own=(type(codec),))
    except CodecError as error:
        raise AssertionError(f"{codec.name}: the codec refuses its own message for {what}: {error}") from error
    assert bool(found.vector.isfinite().all()), f"{codec.name}: {what} come back with NaN or infinity"
    return found


def _check_round_trip(codec: Codec, vector: Tensor, what: str) -> None:
    dim, before = vector.numel(), vector.clone()
    payload = codec.encode(vector)
    assert torch.equal(vector, before), f"{codec.name}: encode has changed its input, {what}: work on a copy"
    assert codec.encode(vector) == payload, (
        f"{codec.name}: two messages for {what} differ: an update that is sent again has to have the same bytes. Draw "
        f"random numbers from a seed that is an option"
    )
    most = codec.max_bytes(dim)
    assert len(payload) <= most, (
        f"{codec.name}: {what} have {len(payload)} bytes, max_bytes({dim}) is {most}: receivers would refuse the "
        f"message. Raise max_bytes"
    )
    magics = [magic for magic, _ in type(codec).formats]
    assert payload[:MAGIC_BYTES] in magics, (
        f"{codec.name}: the message for {what} begins with {payload[:MAGIC_BYTES]!r}, expected one of {magics}"
    )
    found = _decoded(codec, payload, dim, what)
    assert found.is_delta, f"{codec.name}: the message for {what} says that it holds weights, expected a difference"
    if codec.lossless:
        assert torch.equal(found.vector, vector), (
            f"{codec.name}: {what} come back changed, and lossless is set: leave it out, so that there is a residual"
        )
    weights = _decoded(codec, codec.encode(vector, is_delta=False), dim, what)
    assert not weights.is_delta, f"{codec.name}: a message of weights says that it holds a difference"
    assert torch.equal(weights.vector, found.vector), f"{codec.name}: is_delta changes the values of {what}"
    # Senders overwrite the tensor as soon as encode() has returned.
    vector.fill_(9.0)
    again = _decoded(codec, payload, dim, what)
    assert torch.equal(again.vector, found.vector), f"{codec.name}: the message changes with the tensor: copy its bytes"


def _check_own_memory(codec: Codec, dim: int) -> None:
    """A receiver holds the updates of many clients, and reads one after it has parsed the next."""
    payloads = [codec.encode(torch.full((dim,), value)) for value in (1.0, -1.0)]
    own = (type(codec),)
    first = parse(payloads[0], expected_dim=dim, own=own)
    before = [tensor.clone() for tensor in _tensors_of(first)]
    parse(payloads[1], expected_dim=dim, own=own)
    assert all(map(torch.equal, before, _tensors_of(first))), (
        f"{codec.name}: reading a message changes what was read of another one: return memory of its own"
    )


def _tensors_of(parsed: Parsed) -> list[Tensor]:
    blocks = list(parsed.blocks())
    return [*(one.values for one in blocks), *(one.indices for one in blocks if isinstance(one, SparseBlock))]


def _check_not_finite(codec: Codec, dim: int) -> None:
    for bad in (float("nan"), float("inf")):
        vector = torch.ones(dim)
        vector[-1] = bad
        try:
            codec.encode(vector)
        except NonFiniteError:
            continue
        raise AssertionError(f"{codec.name}: encode takes {bad}: raise NonFiniteError, as check_finite does")


def _check_feedback(codec: Codec, dim: int, seed: int) -> None:
    """What a message leaves out is added to the next vector: it must get through at some time, and never grow."""
    vector = torch.randn(dim, generator=torch.Generator().manual_seed(seed + dim))
    residual: Tensor | None = None
    for _ in range(_FEEDBACK_STEPS):
        _, residual = residual_step(vector, residual, codec)
    assert residual is not None
    left, most = float(residual.norm()), _FEEDBACK_STEPS * float(vector.norm())
    assert left < most, (
        f"{codec.name}: with the same vector of {dim} elements in each of {_FEEDBACK_STEPS} messages the residual has "
        f"norm {left:.3g}, {most:.3g} is all that was to be sent: the messages say nothing of it, or more than it is. "
        f"What decode gives of x must be nearer to x than 0 is"
    )


def _check_damaged(codec: Codec, dim: int, draw: random.Random) -> None:
    payload = codec.encode(torch.randn(dim, generator=torch.Generator().manual_seed(dim)))
    places = range(MAGIC_BYTES, len(payload))
    for end in draw.sample(places, min(len(places), _DAMAGED)):
        _refused(codec, payload[:end], dim, f"cut to {end} of {len(payload)} bytes")
    _refused(codec, payload + b"\0", dim, "with a byte more")
    _refused(codec, payload, dim + 1, f"of {dim} elements where {dim + 1} are expected")
    for _ in range(_DAMAGED):
        flipped = bytearray(payload)
        flipped[draw.randrange(MAGIC_BYTES, len(payload))] ^= 1 << draw.randrange(8)
        _read_or_refused(codec, bytes(flipped), dim, "with a bit flipped")
        header = payload[: draw.randrange(MAGIC_BYTES, 32)]
        _read_or_refused(codec, header + draw.randbytes(draw.randrange(64)), dim, "of random bytes")


def _refused(codec: Codec, payload: bytes, dim: int, what: str) -> None:
    if len(payload) == 4 * dim:
        return  # any bytes of this length may be float32 without a header
    if _read_or_refused(codec, payload, dim, what):
        raise AssertionError(f"{codec.name}: a message {what} is read: compare its length with what it must be")


def _read_or_refused(codec: Codec, payload: bytes, dim: int, what: str) -> bool:
    """Whether a message is read; if not, it is refused by a CodecError."""
    view = memoryview(payload)
    parser = _parser(codec, payload)
    if is_first := not tracemalloc.is_tracing():
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        parser(view, dim)
        for _ in parse(view, expected_dim=dim, own=(type(codec),)).blocks(64):
            pass
    except CodecError:
        return False
    except Exception as error:
        raise AssertionError(
            f"{codec.name}: a message {what} ends in {type(error).__name__}: {error}. Check the bytes of a peer before "
            f"they are used, and raise CodecError"
        ) from error
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        if is_first:
            tracemalloc.stop()
        assert peak <= _MOST_BYTES + _MOST_BYTES_AN_ELEMENT * dim, (
            f"{codec.name}: a message {what}, {len(payload)} bytes for {dim} elements, takes {peak:,} bytes of memory: "
            f"compare lengths in it with what is there before memory is allocated"
        )
    return True


def _parser(codec: Codec, payload: bytes) -> Parser:
    return next(parser for magic, parser in type(codec).formats if magic == payload[:MAGIC_BYTES])
