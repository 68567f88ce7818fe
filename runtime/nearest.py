"""Which known name a wrong one was probably meant to be, or none.

A far-fetched guess is worse than none: among hundreds of settings some name always shares letters with a wrong one.
Two names are near here if one becomes the other by a slip of the keyboard or two, or by one word more or less:
``rouds`` and ``rounds``, ``batchsize`` and ``batch_size``, ``num_rounds`` and ``rounds``; not ``samples_per_round`` and
``staleness_power``, of which difflib says that half of their letters agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MAX_CHARS = 80  # of a wrong name; no name that is known is longer
_WORD_MORE = 1.0  # the rank of such a name, behind all with slips
_LETTERS_PER_SLIP = 4  # a name of 3 to 6 letters may have one slip, of 7 to 10 two


def nearest(wrong: str, known: Iterable[str], *, slips_alone: bool = False) -> str | None:
    """Return the known name nearest to ``wrong``, the first of several; None: none is near enough.

    Args:
        slips_alone: whether a word more or less is too much, as among many names of many subjects.
    """
    words = _words(wrong[:_MAX_CHARS])
    ranked = [(rank, name) for name in known if (rank := _rank(words, _words(name))) is not None]
    if slips_alone:
        ranked = [one for one in ranked if one[0] < _WORD_MORE]
    return min(ranked, key=lambda one: one[0], default=(None, None))[1]


def _rank(wrong: list[str], known: list[str]) -> float | None:
    """How far apart two names are, from 0 for the same letters; None: too far."""
    ours, theirs = "".join(wrong), "".join(known)
    longest = max(len(ours), len(theirs))
    most = min(max(1, (longest + 1) // _LETTERS_PER_SLIP), longest - 1)
    slips = _slips(ours, theirs, most)
    if slips <= most:
        return slips / longest
    fewer, more = sorted((wrong, known), key=len)
    is_part = len(more) == len(fewer) + 1 and (more[1:] == fewer or more[:-1] == fewer)
    return _WORD_MORE if is_part and len("".join(fewer)) > 2 else None


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _slips(one: str, other: str, most: int) -> int:
    """Count the letters to add, to remove, to replace, and the neighbours to swap, that make one name of the other;
    more than ``most`` of them are not counted exactly."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    last, row = before, list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, last, row = last, row, [i]
        for j, theirs in enumerate(other, start=1):
            count = min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != theirs))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == theirs:
                count = min(count, before[j - 2] + 1)
            row.append(count)
    return row[-1]
