"""The files of gradbus that a run enters on one way, such as that of a bucket of gradients: traced in a real run.

    make walks                                                       # all ways
    PYTHONPATH=tests/tools .venv/bin/python -P -m walks bucket       # one of them, file by file

A file is entered when one of its functions is called, on any thread of the process that is traced. What modules do when
they are imported does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dis
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import gradbus
import gradbus.actors
from gradbus.actors.data_parallel.buckets import GradientBuckets
from gradbus.actors.data_parallel.optimization import RunOptimizer
from gradbus.models import ClassificationTask, glyphs, mnist_mlp
from gradbus.runtime import logs

PACKAGES = ("actors", "codecs", "experiments", "models", "runtime")
BUCKET_STEPS = 6
_ROOT = f"{Path(gradbus.actors.__file__).resolve().parents[1]}/"


class Call(NamedTuple):
    """A call of a function of gradbus: on which thread, in which file, and from which file of gradbus, if from one."""

    thread: str
    file: str
    function: str
    caller: str


@dataclass
class Walk:
    """The calls between two moments, in their order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Each file that was entered, in the order of the first call."""
        return list(dict.fromkeys(call.file for call in self.calls))

    def legs(self) -> list[tuple[str, list[tuple[str, int]]]]:
        """By thread the files that it entered, with how often it did so from another file."""
        found: dict[str, dict[str, int]] = {}
        for call in self.calls:
            files = found.setdefault(call.thread, {})
            files[call.file] = files.get(call.file, 0) + (call.caller != call.file)
        return [(thread, list(files.items())) for thread, files in found.items()]

    def text(self, title: str) -> str:
        """Return a leg for each thread, and how many files there are in all."""
        lines = [f"{title}: {len(self.files)} files"]
        for thread, files in self.legs():
            lines.append(f"  on {thread}")
            lines += [f"    {file}" + (f" x {times}" if times > 1 else "") for file, times in files]
        return "\n".join(lines)


class Tracer:
    """Notes the calls of functions of gradbus while a walk is open. It sees the thread that enters it, and those that
    start meanwhile."""

    def __init__(self) -> None:
        self.walks: list[Walk] = []
        self._open: Walk | None = None

    def begin(self) -> None:
        """Open a walk, if none is."""
        if self._open is None:
            self._open = Walk()

    def end(self) -> None:
        """Close the walk that is open."""
        walk, self._open = self._open, None
        if walk is not None:
            self.walks.append(walk)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """For :func:`sys.setprofile`."""
        walk = self._open
        if walk is None or event != "call" or frame.f_lasti > _first_of(frame.f_code):
            return
        if file := _file_of(frame):
            caller = "" if frame.f_back is None else _file_of(frame.f_back)
            thread, function = threading.current_thread().name, frame.f_code.co_qualname
            if function != "<module>":
                walk.calls.append(Call(thread, file, function, caller))

    def __enter__(self) -> Tracer:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as sys.setprofile takes it


@functools.cache
def _first_of(code: CodeType) -> int:
    """Where a function begins. One that waits for something, or yields, goes on behind it: it was entered before."""
    return next((one.offset for one in dis.get_instructions(code) if one.opname == "RESUME"), 0)


def _file_of(frame: FrameType) -> str:
    """The file below the root of the packages; empty: it is not one of gradbus."""
    path = frame.f_code.co_filename
    name = path.removeprefix(_ROOT)
    return name if name is not path and name.partition("/")[0] in PACKAGES else ""


@contextlib.contextmanager
def moments(*placed: tuple[type, str, Callable[[], None]]) -> Iterator[None]:
    """Have something called before each call of these methods."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in placed]
    try:
        for (owner, name, call), (_, _, method) in zip(placed, before, strict=True):
            setattr(owner, name, _preceded(method, call))
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _preceded(method: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def preceded(*arguments: Any, **keywords: Any) -> Any:
        call()
        return method(*arguments, **keywords)

    return preceded


# A bucket


def bucket(domain: int) -> list[Walk]:
    """The steps of rank 0 of two, each a process: from the first bucket that is complete until the mean gradients are
    in all buckets, and the optimizer takes them."""
    job = f"walks-{os.getpid()}"
    other = multiprocessing.get_context("spawn").Process(target=_run_rank, args=(job, domain, 1))
    other.start()
    tracer = Tracer()
    try:
        # torch keeps the buckets' hooks, so the moment is a method that they call.
        with moments((GradientBuckets, "_complete", tracer.begin), (RunOptimizer, "step", tracer.end)), tracer:
            _run_rank(job, domain, 0)
    finally:
        other.join(60.0)
        if other.is_alive():
            other.kill()
    return tracer.walks[1:]  # some things are made in the first step


def _run_rank(job: str, domain: int, rank: int) -> None:
    torch.set_num_threads(1)
    logs.configure(level="error")

    async def train() -> None:
        task = ClassificationTask(
            functools.partial(mnist_mlp, hidden=600), lambda: glyphs(train=32 * BUCKET_STEPS, test=16), batch_size=16
        )
        async with (
            gradbus.connect(job, domain=domain, load_actors=False) as bus,
            gradbus.join_group(bus, rank=rank, world=2) as group,
        ):
            await gradbus.Worker(group, task, gradbus.DataParallelConfig()).run()

    asyncio.run(train())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=int, default=72)
    options = parser.parse_args(arguments)
    walks = bucket(options.domain)
    for number, walk in enumerate(walks):
        print(number, len(walk.files))
    print(walks[2].text("bucket"))
    print(len(set.intersection(*(set(w.files) for w in walks))), len(set.union(*(set(w.files) for w in walks))))
    once = set.union(*(set(w.files) for w in walks)) - set.intersection(*(set(w.files) for w in walks))
    print("not always", once)


if __name__ == "__main__":
    main()
