"""Which worker of pytest-xdist runs which files of tests, where there are more than two of them."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

FROM_THE_FRONT = 2  # workers


class FromBothEnds(LoadFileScheduling):
    """Workers beyond the second take files from the end of the list, where those without slow tests are.

    Slow tests wait for their processes most of the time, and depend on deadlines. So there are no more of them beside
    each other than with two workers, while quick tests use what these leave of the processors.
    """

    def _assign_work_unit(self, node: Any) -> None:
        if int(node.gateway.id.removeprefix("gw")) >= FROM_THE_FRONT:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
