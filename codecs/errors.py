"""What a codec raises about bytes it was given. Bad local arguments are plain ``ValueError``."""

from __future__ import annotations


class CodecError(ValueError):
    """These bytes are not a message of ours: the text says what, where, expected and got."""


class DimMismatchError(CodecError):
    """A message for a model of another size, by its own header."""


class NonFiniteError(CodecError):
    """Well-formed, but a value is NaN or infinite: raised for a vector to be sent and for a message that came.

    Kept apart from malformed bytes because the remedy differs: a diverged training, not a broken or hostile peer.
    """
