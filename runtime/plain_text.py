"""Text that comes from elsewhere, made harmless for whoever reads it on a terminal or in a log.

The one place for it: what a peer says of itself is made plain as it is read from the wire, and all that a command shows
passes here once more. Taken out is what a terminal obeys and what an eye cannot see: control characters (C0, DEL, C1),
marks that turn the direction of writing or have no width, tags, line separators of Unicode, halves of surrogate pairs.
"""

from __future__ import annotations

import re
import unicodedata

REPLACED = "\N{REPLACEMENT CHARACTER}"
_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,32}m)")


def plain_text(text: str) -> str:
    """Lines of text: ends of lines and tabs stay, each other character without a picture of its own is replaced."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or _is_shown(char) else REPLACED for char in text)


def plain_line(text: str) -> str:
    """The same for what must be one line, as it stands between other words: ends of lines and tabs become blanks."""
    return text if text.isprintable() else plain_text(text).replace("\n", " ").replace("\t", " ")


def plain_but_colours(text: str) -> str:
    """The same for text that one of our own programs has coloured: sequences that set colours stay, all others go."""
    pieces = _COLOUR.split(text)
    pieces[::2] = map(plain_text, pieces[::2])
    return "".join(pieces)


def _is_shown(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"  # blanks of other widths, as French has them
