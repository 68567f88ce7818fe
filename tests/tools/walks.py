"""The files of gradbus that a run enters on one way, such as that of a bucket of gradients: traced in a real run.

    PYTHONPATH=tests/tools .venv/bin/python -P -m walks bucket             # or client, controller, command

A file is entered when one of its functions is called, on any thread of the process that is traced: whoever follows the
way has to open that file. So these do not count:

- what runs because a module is imported: its body, bodies of classes, decorators, what dataclasses and pydantic call of
  a new class. It depends on where imports stand, and nobody reads it on the way;
- a coroutine or generator that goes on after an await or a yield: it was entered before.

Constructors count, also of parts that have nothing to do yet, as do threads that a bus has for itself, and calls that
find nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dis
import functools
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
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

PACKAGES = ("actors", "codecs", "commands", "experiments", "models", "runtime")
BUCKET_STEPS = 6
ROUNDS = 3
START_S = 60.0  # for the other process to end
_IMPORTS = "<frozen importlib._bootstrap>"
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

    @property
    def only_made(self) -> list[str]:
        """The files that were entered only to make objects, which do nothing on this way."""
        used = {call.file for call in self.calls if not call.function.endswith(("__init__", "__post_init__"))}
        return [file for file in self.files if file not in used]

    def legs(self) -> list[tuple[str, list[tuple[str, int]]]]:
        """By thread the files that it entered, with how often it did so from another file."""
        found: dict[str, dict[str, int]] = {}
        for call in self.calls:
            files = found.setdefault(call.thread, {})
            files[call.file] = files.get(call.file, 0) + (call.caller != call.file)
        return [(thread, list(files.items())) for thread, files in found.items()]

    def calls_of(self, file: str) -> str:
        """Return the functions of a file that were called from others, each with the file that did so."""
        found = Counter((call.function, call.caller) for call in self.calls if call.file == file != call.caller)
        return "\n".join(
            f"    {function} <- {caller or 'no file of gradbus'} x {times}"
            for (function, caller), times in found.items()
        )

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

    def begin(self, *_: Any, **__: Any) -> None:
        """Open a walk, if none is. It takes the arguments of any call that it precedes."""
        if self._open is None:
            self._open = Walk()

    def end(self, *_: Any, **__: Any) -> None:
        """Close the walk that is open. It takes the arguments of any call that it precedes."""
        walk, self._open = self._open, None
        if walk is not None:
            self.walks.append(walk)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """For :func:`sys.setprofile`."""
        walk = self._open
        if walk is None or event != "call" or frame.f_lasti > _first_of(frame.f_code):
            return
        # Bodies of modules and classes are no functions: their code is not optimized.
        if (file := _file_of(frame)) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and not _is_import(frame):
            caller = "" if frame.f_back is None else _file_of(frame.f_back)
            thread, function = threading.current_thread().name, frame.f_code.co_qualname
            walk.calls.append(Call(thread, file, function, caller))

    def __enter__(self) -> Tracer:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


@functools.cache
def _first_of(code: CodeType) -> int:
    """Where a function begins. One that waits for something, or yields, goes on behind it: it was entered before."""
    return next((one.offset for one in dis.get_instructions(code) if one.opname == "RESUME"), 0)


def _is_import(frame: FrameType) -> bool:
    """Return whether an import has led to this call."""
    above: FrameType | None = frame
    while above is not None:
        if above.f_code.co_name == "_find_and_load" and above.f_code.co_filename == _IMPORTS:
            return True
        above = above.f_back
    return False


def _file_of(frame: FrameType) -> str:
    """The file below the root of the packages; empty: it is not one of gradbus."""
    path = frame.f_code.co_filename
    name = path.removeprefix(_ROOT)
    return name if name is not path and name.partition("/")[0] in PACKAGES else ""


@contextlib.contextmanager
def moments(*placed: tuple[type, str, Callable[..., object]]) -> Iterator[None]:
    """Have something called before each call of these methods, with the arguments of that call."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in placed]
    try:
        for (owner, name, call), (_, _, method) in zip(placed, before, strict=True):
            setattr(owner, name, _preceded(method, call))
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _preceded(method: Callable[..., Any], call: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def preceded(*arguments: Any, **keywords: Any) -> Any:
        call(*arguments, **keywords)
        return method(*arguments, **keywords)

    return preceded


@contextlib.contextmanager
def _beside(function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run a function in a process of its own until it returns, beside the block."""
    other = multiprocessing.get_context("forkserver").Process(target=_quietly, args=(function, *arguments), daemon=True)
    other.start()
    try:
        yield
        other.join(START_S)
    finally:
        if other.is_alive():
            other.kill()


def _quietly(function: Callable[..., None], *arguments: Any) -> None:
    logs.configure(level="error")
    function(*arguments)


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    torch.set_num_threads(1)
    asyncio.run(work())


# A bucket


def bucket(domain: int) -> list[Walk]:
    """The steps of rank 0 of two, each a process: from the first bucket that is complete until the mean gradients are
    in all buckets, and the optimizer takes them."""
    job, tracer = f"walks-{os.getpid()}", Tracer()
    # The hooks of a model hold the buckets, so the moment is a method that they call.
    begins, ends = (GradientBuckets, "_complete", tracer.begin), (RunOptimizer, "step", tracer.end)
    with _beside(_run_rank, job, domain, 1), moments(begins, ends), tracer:
        _run_rank(job, domain, 0)
    return tracer.walks[1:]  # some things are made in the first step


def _run_rank(job: str, domain: int, rank: int) -> None:
    async def train() -> None:
        data = functools.partial(glyphs, train=32 * BUCKET_STEPS, test=16)
        task = ClassificationTask(functools.partial(mnist_mlp, hidden=600), data, batch_size=16)
        async with (
            gradbus.connect(job, domain=domain, load_actors=False) as bus,
            gradbus.join_group(bus, rank=rank, world=2) as group,
        ):
            await gradbus.Worker(group, task, gradbus.DataParallelConfig()).run()

    _run(train)


# An update


def client(domain: int) -> list[Walk]:
    """The rounds of a client: from the end of its training until the controller has its update."""
    job, tracer = f"walks-{os.getpid()}", Tracer()
    with _beside(_run_controller, job, domain), tracer:
        _run_client(job, domain, tracer)
    return tracer.walks[1:]


def controller(domain: int) -> list[Walk]:
    """The rounds of a controller with one client: from the request of the update until the next model is computed."""
    from gradbus.actors.federated.controller.updates_in import (
        UpdateReceiver,  # a rank loads nothing of federated learning
    )

    job, tracer = f"walks-{os.getpid()}", Tracer()
    with _beside(_run_client, job, domain), moments((UpdateReceiver, "on_request", tracer.begin)), tracer:
        _run_controller(job, domain, tracer)
    return tracer.walks[1:]


class _Ends:
    """A callback that ends a walk: at a client with the report of a round, at a controller with the new model."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def on_report(self, _report: Any) -> None:
        self._tracer.end()

    def on_aggregate(self, _report: Any) -> None:
        self._tracer.end()


class SmallTask(ClassificationTask):
    """A small task. The end of its training begins a walk."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        super().__init__(mnist_mlp, functools.partial(glyphs, train=64, test=16), batch_size=16)
        self._tracer = tracer

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        outcome = super().train(*arguments, **keywords)
        if self._tracer is not None:
            self._tracer.begin()
        return outcome


def _run_controller(job: str, domain: int, tracer: Tracer | None = None) -> None:
    async def lead() -> None:
        config = gradbus.FederatedConfig.model_validate({"rounds": ROUNDS, "clients": {"num": 1, "min": 1}})
        callbacks = [] if tracer is None else [_Ends(tracer)]
        async with gradbus.connect(job, domain=domain) as bus:
            await gradbus.Controller(bus, SmallTask(), config, callbacks=callbacks).run()

    _run(lead)


def _run_client(job: str, domain: int, tracer: Tracer | None = None) -> None:
    async def follow() -> None:
        callbacks = [] if tracer is None else [_Ends(tracer)]
        async with gradbus.connect(job, domain=domain) as bus:
            await gradbus.Client(bus, SmallTask(tracer), client_id=0, callbacks=callbacks).run()

    _run(follow)


# A command


def command(domain: int) -> list[Walk]:
    """From the command ``gradbus controller FILE`` until it publishes the TrainCmd of its first round.

    It has a task of its own, one client that joins meanwhile, and the default settings.
    """
    from gradbus.__main__ import main as gradbus_command
    from gradbus.runtime.bus.bus import Bus
    from gradbus.runtime.wire.messages import TrainCmd

    def publishes(_bus: Bus, _sender: Any, message: object) -> None:
        if isinstance(message, TrainCmd):
            tracer.end()

    job, tracer = f"walks-{os.getpid()}", Tracer()
    with tempfile.TemporaryDirectory(prefix="gradbus-walks-") as folder:
        settings = {
            "bus": {"job": job, "domain": domain}, "task": {"task": "walks:SmallTask"}, "run_dir": f"{folder}/run",
            "federated": {"rounds": 1, "clients": {"num": 1, "min": 1}},
        }  # fmt: skip
        file = Path(folder, "controller.json")
        file.write_text(json.dumps(settings))
        with (
            _beside(_run_client, job, domain),
            moments((Bus, "publish", publishes)),
            tracer,
            _command_line("gradbus", "controller", str(file)),
        ):
            tracer.begin()
            gradbus_command()
    return tracer.walks


@contextlib.contextmanager
def _command_line(*arguments: str) -> Iterator[None]:
    """Run the block as a command with these arguments; its exit ends the block."""
    before, sys.argv = sys.argv, list(arguments)
    try:
        with contextlib.suppress(SystemExit):
            yield
    finally:
        sys.argv = before


WALKS: dict[str, Callable[[int], list[Walk]]] = {
    "bucket": bucket,
    "client": client,
    "controller": controller,
    "command": command,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", choices=WALKS, help="the way whose files are printed")
    parser.add_argument(
        "--calls", metavar="FILE", help="print which functions of this file were called, and from where"
    )
    parser.add_argument("--domain", type=int, default=72, help="DDS domain of the run")
    options = parser.parse_args(arguments)
    logs.configure(level="error")
    walks = WALKS[options.walk](options.domain)
    counts = sorted(len(walk.files) for walk in walks)
    middle = walks[len(walks) // 2]
    print(middle.text(options.walk) if options.calls is None else middle.calls_of(options.calls))
    print(f"{options.walk}: {counts[len(counts) // 2]} files, the median of {len(counts)} walks: {counts}")
    print(f"{len(middle.only_made)} of them are entered only to make objects", flush=True)


if __name__ == "__main__":
    main()
