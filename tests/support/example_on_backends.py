"""The examples of other libraries, for test_integrations.py: ``PYTHON example_on_backends.py FOLDER NAMES BACKENDS``.

Torch and each of these libraries take seconds to load. So one process loads them all, and those that run the examples
are forked from it: one for peft, and two ranks, which torchrun's launcher starts there as torchrun does. The ranks run
one example after the other, on each backend, and what a library remembers of the group that is gone is taken from it
here. What an example prints is written to a file of its own: ``FOLDER/peft.json``, ``FOLDER/NAME-BACKEND-RANK.json``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed import PrefixStore, distributed_c10d
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

RANKS = 2


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


def train(names: Sequence[str], backends: Sequence[str], folder: Path) -> None:
    """All examples on all backends, as one rank."""
    with_a_store_for_each_group()
    for name in names:
        for backend in backends:
            report = printed_by(load(name), ["--backend", backend])
            (folder / f"{name}-{backend}-{os.environ['RANK']}.json").write_text(report, encoding="utf-8")
            forget(name)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"gradbus.experiments.examples.{name}_training")


def train_adapters(folder: Path) -> None:
    from gradbus.experiments.examples import peft_lora

    (folder / "peft.json").write_text(printed_by(peft_lora, ["--rounds", "3"]), encoding="utf-8")


def printed_by(example: ModuleType, arguments: Sequence[str]) -> str:
    """Run an example. Returns its report."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main(arguments)
    # The libraries print lines of their own, before it.
    (report,) = [line for line in printed.getvalue().splitlines() if line.startswith("{")]
    return report


if __name__ == "__main__":
    FOLDER, NAMES, BACKENDS = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
    for NAME in NAMES:
        load(NAME)
    from gradbus.experiments.examples import peft_lora as _  # noqa: F401 - loaded before the fork, as the others

    ADAPTERS = multiprocessing.get_context("fork").Process(target=train_adapters, args=[FOLDER])
    ADAPTERS.start()
    ADAPTERS.join()
    HERE = LaunchConfig(1, 1, RANKS, rdzv_endpoint="localhost:0", rdzv_backend="c10d", run_id="1", start_method="fork")
    elastic_launch(HERE, train)(NAMES, BACKENDS, FOLDER)
