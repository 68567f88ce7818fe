"""What torchrun starts in test_integrations.py: examples on one backend after the other, in the same processes.

Torch and each of these libraries take seconds to load. So what a library remembers of the group that is gone is taken
from it here. What an example prints is written to a file of its own: ``FOLDER/NAME-BACKEND-RANK.json``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, distributed_c10d


def forget(name: str) -> None:
    """Have a library begin anew with the next process group."""
    if name == "accelerate":
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - there is no public way to forget
        GradientState._reset_state()  # noqa: SLF001 - likewise
    elif name == "deepspeed":
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        groups._release_process_group_references(group=None)  # noqa: SLF001 - likewise
        comm.cdb = None


def with_a_store_for_each_group() -> None:
    """Else gloo would find the addresses of its earlier default groups in the store of torchrun."""
    plain, count = distributed_c10d.rendezvous, itertools.count()

    def rendezvous(*arguments: Any, **named: Any) -> Iterator[Any]:
        for store, rank, world in plain(*arguments, **named):
            yield PrefixStore(f"group {next(count)}", store), rank, world

    distributed_c10d.rendezvous = rendezvous  # type: ignore[assignment]


def run(name: str, backends: Sequence[str], folder: Path) -> None:
    """One example on all backends."""
    example = importlib.import_module(f"gradbus.experiments.examples.{name}_training")
    for backend in backends:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            example.main(["--backend", backend])
        # The libraries print lines of their own, before it.
        (report,) = [line for line in printed.getvalue().splitlines() if line.startswith('{"rank"')]
        (folder / f"{name}-{backend}-{os.environ['RANK']}.json").write_text(report, encoding="utf-8")
        forget(name)


if __name__ == "__main__":
    FOLDER, NAMES, BACKENDS = sys.argv[1:]
    with_a_store_for_each_group()
    for NAME in NAMES.split(","):
        run(NAME, BACKENDS.split(","), Path(FOLDER))
