"""A process prepared for simulations: patched, with its logs captured, in a folder in memory."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_simulation import kernel, patches
from fault_simulation.findings import EXCEPTIONS

MEMORY = Path("/dev/shm")  # a disk that costs no time; a simulated fsync is none


def _import_product() -> None:
    import gradbus.actors
    import gradbus.commands.history.invariants
    import gradbus.commands.history.replay
    import gradbus.models  # noqa: F401 - before the names in them are replaced


def _capture(logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
    """Give a log event to the world of its process, and end it there."""
    import structlog

    process = kernel.current()
    if process is not None:
        error = traceback.format_exc() if event.pop("exc_info", None) else ""
        event.pop("source", None)
        process.world.on_log(process, method, str(event.pop("event")), dict(event), error)
    raise structlog.DropEvent


def _unraisable(hook: Any) -> None:
    """Report an error that a finalizer raises in a live process; those of dead processes have no effect."""
    process = kernel.current()
    if kernel.CLOCK.now_s is not None and process is not None and not process.dead:
        process.world.finding(EXCEPTIONS, f"a finalizer of {process.name} raised {hook.exc_value!r} in {hook.object!r}")


@contextmanager
def prepared() -> Iterator[None]:
    """Prepare this process, for its life, and change into a folder that is removed at the end. Once in a process."""
    patches.install(_import_product)
    import structlog
    import torch

    from gradbus.runtime.optimization.deferred_compiler import defer_compiler

    torch.set_num_threads(1)
    defer_compiler()
    structlog.configure(processors=[_capture], wrapper_class=structlog.make_filtering_bound_logger(20))
    folder = Path(tempfile.mkdtemp(prefix="simulated-faults-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    before = Path.cwd()
    os.chdir(folder)  # paths are logged, and so in the trace: they must be the same everywhere
    sys.unraisablehook = _unraisable
    gc.collect()
    gc.freeze()
    gc.disable()  # what a killed process has left is taken apart between two runs, not in one
    try:
        yield
    finally:
        gc.enable()
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def collect() -> None:
    """Take apart what finished runs have left."""
    gc.collect()
