"""Which worker of pytest-xdist runs which files of tests, where there are more than two of them."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

FROM_THE_FRONT = 2  # workers


class FromBothEnds(LoadFileScheduling):
    """Workers beyond the second take files from the end of the list, where those without slow tests are.

    Slow tests wait for their processes most of the time, and depend on deadlines. So, as long as there are quick ones,
    there are no more slow ones beside each other than with two workers, while quick ones use what these leave of the
    processors. At the end of the list, which does not say where the quick ones begin, all workers take what is left.
    """

    def _assign_work_unit(self, node: Any) -> None:
        # By place: one that replaces a worker which has crashed comes last, with a new number.
        if self.nodes.index(node) >= FROM_THE_FRONT:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
