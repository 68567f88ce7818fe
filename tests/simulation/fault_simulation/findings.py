"""What does not hold in a run, and of which kind it is."""

from __future__ import annotations

from typing import NamedTuple

# Kinds beside the invariants I1 to I8 of ``gradbus check``.
COMMITTED = "a model is committed first"
COUNTED_ONCE = "an update is in one model"
VERSIONS = "versions only grow"
STALENESS = "no worker is too far ahead"
HEALTHY = "who is there is not dropped"
MEMBERS = "a generation has one list of members"
STEPS = "a step is applied by all or by none"
RECEIPTS = "clients know what counts"
ROUNDS = "rounds in order"
ENDS = "actors end well"
DEADLINES = "deadlines"
EXCEPTIONS = "no exception is lost"
LOGS = "no error in the log"
ORDER = "a sample arrives once, in order"
TASKS = "no task is left"
BOUNDS = "queues are bounded"
REPLACED = "a controller that was replaced ends"
MEAN = "the model is the mean of what was learned"
ADMISSION = "only admitted nodes count"
LEVELS = "both levels of a tree agree"
TREE_MODEL = "models of a tree are the oracle's"
SAME_MODEL = "the model of a run without faults"


class Finding(NamedTuple):
    """One thing that does not hold. ``at_s``: the virtual time, from the start of the run."""

    invariant: str
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"at {self.at_s:.3f} s, {self.invariant}: {self.text}"
