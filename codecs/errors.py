"""Errors about bytes of peers. Bad local arguments are plain ``ValueError``."""

from __future__ import annotations


class CodecError(ValueError):
    """The bytes are no valid message: the text says what, where, expected and got."""


class DimMismatchError(CodecError):
    """The header is that of a message for a model of another size."""


class NonFiniteError(CodecError):
    """A value is NaN or infinite, in a vector to be sent or in a message that is well-formed otherwise: training has
    diverged, the peer is not broken."""
