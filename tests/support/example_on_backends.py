"""What torchrun starts in test_integrations.py: an example on one backend after the other, in the same processes.

Each of these libraries takes seconds to load. So what it remembers of the group that is gone is taken from it here.
"""

from __future__ import annotations

import importlib
import sys


def forget(name: str) -> None:
    """Have a library begin anew with the next process group."""
    if name == "accelerate":
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    elif name == "deepspeed":
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        groups._release_process_group_references(group=None)
        comm.cdb = None


if __name__ == "__main__":
    NAME = sys.argv[1]
    EXAMPLE = importlib.import_module(f"gradbus.experiments.examples.{NAME}_training")
    for backend in sys.argv[2:]:
        EXAMPLE.main(["--backend", backend])
        forget(NAME)
