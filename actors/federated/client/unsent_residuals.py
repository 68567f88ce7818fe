"""What a client may still add to an update, with secure aggregation: no content goes out in two rounds.

A residual is what earlier updates have left. It goes out with the next one, and is kept until a receipt says that this
counts: without one, the round after would begin with the same residual again. With masks that is one time too many.
Whether there is a receipt is the Controller's word, and the sum of A, B, C and D in one round less that of A, B and C
in the next would be the residual of D, but for the training of a round. So what a client has added to an update counts
as sent for all other rounds once it has helped to unmask a sum with that update. An attempt at the same round has the
same update, and :mod:`gradbus.actors.secure_aggregation.answered_sets` compares its sums.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

from torch import Tensor

_MAX_ROUNDS = 64
_MAX_TERMS = 4  # of one round

Name = tuple[int, int]  # run, round


class UnsentResiduals:
    """The residuals that the rounds of one client begin with. For as long as its process runs."""

    def __init__(self) -> None:
        self._began: OrderedDict[Name, int] = OrderedDict()  # with the state after which round
        self._of: Name = 0, 0
        self._last: tuple[Name, Tensor] | None = None
        self._left: OrderedDict[Hashable, Tensor] = OrderedDict()  # by that round, by terms

    def before(self, name: Name, after: int, kept: Tensor | None, spent: Mapping[int, Hashable]) -> Tensor | None:
        """The residual to begin a round with, float32, shape (D,); None: there is none.

        Args:
            name: of the round. after, kept: the last round that counted before it, and what that has left.
            spent: rounds of the run in which this client has helped to unmask a sum with its update, with the terms on
                which that was masked.
        """
        self._began[name] = after
        while len(self._began) > _MAX_ROUNDS:
            self._began.popitem(last=False)
        run_id, round_id = name
        others = [one for one in spent if one != round_id and self._began.get((run_id, one)) == after]
        if not others:
            return kept
        newest = (run_id, max(others))
        if self._of == newest and (left := self._left.get(spent[newest[1]])) is not None:
            self._last = newest, left  # also once another round has been masked, without being unmasked
        return self._last[1] if self._last is not None and self._last[0] == newest else None

    def note(self, name: Name, terms: Hashable, left: Tensor) -> None:
        """The update of a round has been masked on these terms, and leaves so much."""
        if name != self._of:
            self._of = name
            self._left.clear()
        self._left[terms] = left
        while len(self._left) > _MAX_TERMS:
            self._left.popitem(last=False)
