"""Which worker of pytest-xdist runs which files of tests, also after one of them has crashed."""

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

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        # A worker begins its last test only when it has another one, or knows that there is none.
        if self.workqueue and self._pending_of(self.assigned_work[node]) == 1:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> Any:
        """Give what a worker has left to the others, but for the test that it has crashed in.

        xdist 3.8 gives back all files that the worker ever had. Who gets one with nothing left to run waits for ever:
        the run did not end.
        """
        files = self.assigned_work[node]
        left = [(file, test) for file, tests in files.items() for test, is_done in tests.items() if not is_done]
        if not left:
            return super().remove_node(node)
        file, crashed = left[0]  # files, and tests in them, are in the order in which they run
        files[file][crashed] = True
        for name in [name for name, tests in files.items() if all(tests.values())]:
            del files[name]
        super().remove_node(node)
        return crashed
