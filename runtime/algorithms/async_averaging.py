"""Asynchronous model averaging: ranks train by themselves, and their weights drift towards the mean of all.

Gan et al., "BAGUA: scaling up distributed learning with system relaxations", VLDB 2022 (arXiv:2107.01499), section 3.4,
"asynchronous"; in its code ``AsyncModelAverageAlgorithm``.

    snapshot = x;  ...training goes on...;  x += mean(snapshot over all ranks) - snapshot

An average does not change the mean of all ranks' weights, which is the model of a run. Staleness: it is applied
``delay_steps`` steps after it was taken (1, or what the run sets), so it lacks that many of each rank's own steps,
which stay in the weights; a change of one rank reaches the others after at most ``every_steps`` + ``delay_steps``
steps. Averages are applied in order, each by all ranks after the same step, the last one before the run ends.

Differs from the authors' code: an average is taken every so many steps, and applied after a given step, where theirs
goes by a timer, and takes effect whenever it is there. So a run can be repeated bit by bit, and all ranks end with the
same average without a vote. There is no warm-up with dense gradients.
"""

from __future__ import annotations

from pydantic import Field

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.local_sgd import LocalSGD


class AsyncAveraging(LocalSGD):
    """The mean of all weights every few steps, while training goes on."""

    choice = "async-averaging"
    is_elastic = False  # its exchanges are late
    delay_steps = 1

    class Options(base.Options):
        """Options of ``async-averaging``."""

        every_steps: int = Field(default=4, ge=1)
        """Number of steps between two averages."""

    @property
    def _every(self) -> int:
        return int(self.options.every_steps)
