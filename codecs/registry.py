"""The table of codecs: by name, and by the first four bytes of a message.

A codec is a file in this package with a class that has a ``choice``: it is found by looking, and nothing else is
edited. Codecs from elsewhere are classes that a caller hands over: they are in no table, so that the bytes of a peer
reach a parser that is not built in only where the caller names it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from gradbus.codecs import fp32
from gradbus.codecs.base import Codec, Decoded, DenseBlock, Parsed, Parser, Payload, as_view
from gradbus.codecs.errors import CodecError, DimMismatchError

MAGIC_BYTES = 4

_ALIASES = {"chunk": "chunk_elems"}


def get(name: str, **options: float) -> Codec:
    """The built-in codec ``name`` (one of :data:`ALL`) with its options, which ``docs/codecs.md`` lists.

    Raises:
        ValueError: no such codec or option (the text names a near one), or a value out of range.
    """
    if name not in TABLE:
        raise ValueError(f"no codec {name!r}{_nearest(name, ALL)}; there are {', '.join(ALL)}")
    codec = TABLE[name]
    known = [field.name for field in fields(codec)]
    arguments: dict[str, Any] = {_ALIASES.get(option, option): value for option, value in options.items()}
    for option in arguments:
        if option not in known:
            raise ValueError(
                f"codec {name!r} has no option {option!r}{_nearest(option, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
    if len(arguments) < len(options):
        raise ValueError(f"codec {name!r}: chunk and chunk_elems are the same option, give one of them")
    return codec(**arguments)


def parse(payload: Payload, *, expected_dim: int, own: Sequence[type[Codec]] = ()) -> Parsed:
    """Check every byte of a message of any codec and version, and make its content readable block by block.

    A known magic followed by ``expected_dim`` decides: from there on every fault is an error. Other bytes of exactly
    ``4 * expected_dim`` are headerless FP32. So weights that begin with a magic by chance are still weights, and a
    damaged message is not taken for weights because of its length.

    Args:
        payload: any contiguous buffer; kept alive by the result, and not to be changed while that is used.
        expected_dim: elements of our own model: a limit on what is allocated, whatever the message claims.
        own: codecs that are not built in, whose messages are read, too.

    Raises:
        NonFiniteError: well-formed, but with NaN or infinity.
        DimMismatchError: a message for a model of another size.
        CodecError: anything else that is wrong.
    """
    if expected_dim < 0:
        raise ValueError(f"expected_dim must be >= 0, got {expected_dim}")
    view = as_view(payload)
    is_headerless_length = len(view) == 4 * expected_dim
    magic = bytes(view[:MAGIC_BYTES])
    parser = _PARSERS.get(magic) or (_parser_of(magic, own) if own else None)
    if parser is not None:
        try:
            return parser(view, expected_dim)
        except DimMismatchError:
            if not is_headerless_length:
                raise
    if is_headerless_length:
        return fp32.parse_fp32_v1(view, expected_dim)
    raise CodecError(
        f"payload of {len(view)} bytes starts with {magic!r}, expected a known magic, "
        f"or headerless FP32 of exactly {4 * expected_dim} bytes for {expected_dim} elements"
    )


def decode(
    payload: Payload, *, expected_dim: int, out: Tensor | None = None, own: Sequence[type[Codec]] = ()
) -> Decoded:
    """The whole vector of a message of any codec and version; see :func:`parse`.

    Args:
        out: float32, shape (expected_dim,), any device: written and returned as ``vector``; untouched on an error.

    Raises:
        CodecError: bad bytes, or :class:`NonFiniteError` for bad values.
        ValueError: ``out`` does not fit.
    """
    if out is not None and (out.shape != (expected_dim,) or out.dtype != torch.float32):
        raise ValueError(f"out must be float32 of shape ({expected_dim},), got {out.dtype} of {tuple(out.shape)}")
    parsed = parse(payload, expected_dim=expected_dim, own=own)
    vector = torch.empty(expected_dim, dtype=torch.float32) if out is None else out
    with torch.no_grad():
        if parsed.is_sparse:
            vector.zero_()
        for block in parsed.blocks():
            if isinstance(block, DenseBlock):
                vector[block.start : block.start + block.values.numel()].copy_(block.values)
            else:
                vector[block.indices.to(vector.device)] = block.values.to(vector.device)
    return Decoded(vector, parsed.is_delta, parsed.codec)


def check_codec_class(kind: type) -> None:
    """Look whether a class can be used as a codec beside the built-in ones.

    Raises:
        ValueError: it is no codec, cannot be made, or has no magic of its own; the text says what to change.
    """
    if not (inspect.isclass(kind) and issubclass(kind, Codec)):
        raise ValueError(f"{getattr(kind, '__name__', kind)} is no codec: inherit from gradbus.codecs.CustomCodec")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ValueError(f"codec {kind.__name__} has no {', '.join(missing)}: write it")
    if not isinstance(getattr(kind, "name", None), str) or not kind.name:
        raise ValueError(f"codec {kind.__name__} has no name: set the class attribute name to a text")
    if not (inspect.isclass(kind.Options) and issubclass(kind.Options, BaseModel)):
        raise ValueError(
            f"codec {kind.__name__}: Options is no pydantic model: inherit from gradbus.codecs.CodecOptions"
        )
    if "name" in kind.Options.model_fields:
        raise ValueError(f"codec {kind.__name__}: an option cannot be called name, which names the codec: rename it")
    if not kind.formats:
        raise ValueError(
            f"codec {kind.__name__} has no magic: set the class attribute magic to {MAGIC_BYTES} bytes that no other "
            f"codec's messages begin with"
        )
    for magic, parser in kind.formats:
        if not isinstance(magic, bytes) or len(magic) != MAGIC_BYTES:
            raise ValueError(f"codec {kind.__name__}: magic is {magic!r}, expected {MAGIC_BYTES} bytes")
        if _PARSERS.get(magic, parser) is not parser:
            raise ValueError(f"codec {kind.__name__}: messages of a built-in codec begin with {magic!r}; take another")


def check_magics(own: Iterable[type[Codec]]) -> None:
    """Raises ValueError: messages of two of these codecs begin with the same magic: which is which cannot be told."""
    owners: dict[bytes, type[Codec]] = {}
    for kind in own:
        for magic, _ in kind.formats:
            if (other := owners.setdefault(magic, kind)) is not kind and magic not in _PARSERS:
                raise ValueError(
                    f"messages of codecs {other.__name__} and {kind.__name__} both begin with {magic!r}: give each a "
                    f"magic of its own"
                )


def _parser_of(magic: bytes, own: Sequence[type[Codec]]) -> Parser | None:
    """The parser of a codec that is not built in. Whatever goes wrong in it concerns this message alone."""
    found = next((parser for kind in own for known, parser in kind.formats if known == magic), None)
    if found is None:
        return None
    parser = found

    def guarded(view: memoryview, expected_dim: int) -> Parsed:
        try:
            return parser(view, expected_dim)
        except CodecError:
            raise
        except Exception as error:
            raise CodecError(
                f"{magic!r} message of {len(view)} bytes: its codec failed with {type(error).__name__}: {error}"
            ) from error

    return guarded


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    near = get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _built_in() -> dict[str, type[Codec]]:
    """The classes of this package that have a ``choice``, by it, in the order of their names."""
    found: dict[str, type[Codec]] = {}
    package = importlib.import_module("gradbus.codecs")
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for kind in vars(module).values():
            is_here = isinstance(kind, type) and kind.__module__ == module.__name__
            if is_here and issubclass(kind, Codec) and "choice" in vars(kind):
                found[kind.choice] = kind
    return dict(sorted(found.items()))


# At the end: modules that are looked at may import this one.
TABLE: Mapping[str, type[Codec]] = _built_in()
"""The built-in codecs by name."""
ALL: tuple[str, ...] = tuple(TABLE)
_PARSERS: dict[bytes, Parser] = {magic: parser for kind in TABLE.values() for magic, parser in kind.formats}
