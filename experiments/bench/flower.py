"""Flower apps over the bus and with Flower's own SuperLink and SuperNodes: how long rounds take, and what comes out.

For the time, the app has one array of the given size, and clients that return it at once, so a round is what lies
between. FedAvg of Flower aggregates in both. For the accuracy it is the apps of the tests, with their seeds. All run in
the environment that ``make setup-flower`` makes.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gradbus.commands.exit_codes import NoData
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.scale import available_bytes
from gradbus.experiments.bench.timing import by_turns

PROGRAMS = Path(".venv-flower/bin")
SIZES = (4_800_000, 100_000_000, 500_000_000)  # bytes of the model
LARGE = 4_000_000_000
MOST_S = {500_000_000: 5.0, LARGE: 35.0}  # of a round on one host
COPIES = 9  # of the model in memory, of all processes together: measured
APPS = Path("tests/flower_apps")
ACCURACY_ROUNDS = 3
MOST_POINTS = 0.2  # of accuracy between the two
CLIENTS = 2
ROUNDS = 3
ENDS_S = 500.0
_PROJECT = """
[project]
name = "echo"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "gradbus"
[tool.flwr.app.components]
serverapp = "echo.server_app:app"
clientapp = "echo.client_app:app"
[tool.flwr.app.config]
nodes = 2
rounds = 3
values = 10
"""
_CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
"""
_SERVER = """
import time
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
app = ServerApp()
@app.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(0.2)
    arrays = ArrayRecord([np.arange(context.run_config["values"], dtype=np.float32)])
    clock = lambda number, arrays: print(f"round {number} at {time.monotonic():.4f}", flush=True)
    FedAvg(fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=arrays, num_rounds=context.run_config["rounds"], evaluate_fn=clock
    )
"""
_CONFIG = """
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:8000"
insecure = true
"""


def write_app(folder: Path) -> Path:
    """Write the app. Returns its folder."""
    app = folder / "echo"
    (app / "echo").mkdir(parents=True)
    for name, text in {
        "pyproject.toml": _PROJECT,
        "echo/__init__.py": "",
        "echo/client_app.py": _CLIENT,
        "echo/server_app.py": _SERVER,
    }.items():
        (app / name).write_text(text, encoding="utf-8")
    return app


@contextmanager
def process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the environment, with what it prints in a file; ended afterwards. ``prefix``: of its command."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            [*prefix, str(PROGRAMS.resolve() / command[0]), *command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def round_seconds(printed: str, rounds: int = ROUNDS) -> list[float]:
    """Seconds of each round, from the times that the app has printed."""
    at_s = [float(text) for text in re.findall(r"round \d+ at ([\d.]+)", printed)]
    if len(at_s) != rounds + 1:
        raise RuntimeError(f"expected {rounds} rounds, got {len(at_s) - 1}: {printed[-2000:]}")
    return [after - before for before, after in pairwise(at_s)]


def printed_over_the_bus(app: Path, config: str, folder: Path, *, shared_memory: bool = True) -> str:
    """Run an app with ``gradbus flower``. Returns what it has printed. ``folder``: for what the processes print."""
    with ExitStack() as stack:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        options = ["--set", f"bus.shared_memory={str(shared_memory).lower()}", "--set", f"bus.job=bench-{os.getpid()}"]
        command = ["gradbus", "flower", "run", str(app), "--run-config", config, *options]
        server = stack.enter_context(process(command, folder / "run.txt", environment))
        for one in range(CLIENTS):
            node = ["gradbus", "flower", "node", str(app), "--partition", str(one), "--of", str(CLIENTS), *options]
            stack.enter_context(process(node, folder / f"node-{one}.txt", environment))
        server.wait(ENDS_S)
    return (folder / "run.txt").read_text(encoding="utf-8")


def printed_over_superlink(app: Path, config: str, folder: Path) -> str:
    """Run an app with SuperLink, SuperNodes and ``flwr run``, on this machine without encryption. Returns what it has
    printed. ``folder``: Flower's home."""
    with ExitStack() as stack:
        (folder / "config.toml").write_text(_CONFIG, encoding="utf-8")
        environment = flower_environment(folder)
        link = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
        stack.enter_context(process(link, folder / "link.txt", environment))
        until_printed(folder / "link.txt", "Uvicorn running")
        for one in range(CLIENTS):
            node = ["flower-supernode", "--insecure", "--superlink", "127.0.0.1:8000", "--host", "127.0.0.1"]
            node += ["--port", str(9194 + one), "--node-config", f"partition-id={one} num-partitions={CLIENTS}"]
            stack.enter_context(process(node, folder / f"node-{one}.txt", environment))
        command = ["flwr", "run", str(app), "here", "--stream", "--run-config", config]
        running = stack.enter_context(process(command, folder / "run.txt", environment))
        running.wait(ENDS_S)
    return (folder / "run.txt").read_text(encoding="utf-8")


def flower_environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's programs. ``folder``: their home."""
    path = f"{PROGRAMS.resolve()}{os.pathsep}{os.environ['PATH']}"
    own = {"FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


AppRun = Callable[[Path, str, Path], str]
"""Runs an app, with a configuration and a folder for what it leaves, and returns what it has printed."""


def seconds_of_a_round(run: AppRun, size_bytes: int) -> float:
    """Median seconds of a round of the app whose clients return a model of this size."""
    with tempfile.TemporaryDirectory() as name:
        app = write_app(Path(name))
        return statistics.median(round_seconds(run(app, f"values={size_bytes // 4} rounds={ROUNDS}", Path(name))))


def accuracies(run: AppRun, app: Path) -> list[float]:
    """Accuracy after each round of an app of the tests, of a copy of it."""
    with tempfile.TemporaryDirectory() as name:
        copy = shutil.copytree(app, Path(name) / app.name, ignore=shutil.ignore_patterns("__pycache__"))
        printed = run(copy, f"num-server-rounds={ACCURACY_ROUNDS}", Path(name))
    found = [float(text) for text in re.findall(r"^accuracy ([\d.]+)$", printed, re.MULTILINE)]
    if len(found) != ACCURACY_ROUNDS:
        raise RuntimeError(f"expected {ACCURACY_ROUNDS} accuracies, got {len(found)}: {printed[-2000:]}")
    return found


class AppLaunch(NamedTuple):
    """Holds what one launch has taken: seconds of a round, and processor time of all its processes, in seconds, with
    their start. That hardly depends on what else the machine does, and the round does."""

    round_s: float
    processor_s: float


def launched(run: Callable[[], float]) -> AppLaunch:
    """Call what launches processes and waits for them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    round_s = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return AppLaunch(round_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def until_printed(log: Path, text: str, limit_s: float = 60.0) -> None:
    """Wait until a program has printed this. Raises RuntimeError: it has not in time."""
    until_s = time.monotonic() + limit_s
    while text not in log.read_text(encoding="utf-8", errors="replace"):
        if time.monotonic() > until_s:
            raise RuntimeError(f"not printed within {limit_s:g} s: {text}")
        time.sleep(0.1)


def need_flower() -> None:
    """Raises NoData: it is not set up."""
    if not (PROGRAMS / "flwr").exists():
        raise NoData("Flower is not set up here: make setup-flower")


def measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Each size both ways, by turns, and over DDS alone. Raises NoData: Flower is not set up."""
    need_flower()
    alone = partial(printed_over_the_bus, shared_memory=False)
    ways: Mapping[str, AppRun] = {
        "one host": printed_over_the_bus,
        "DDS only": alone,
        "SuperLink": printed_over_superlink,
    }
    for size_bytes in chosen.bytes or SIZES:
        taken = by_turns(
            {way: partial(launched, partial(seconds_of_a_round, run, size_bytes)) for way, run in ways.items()},
            chosen.launches,
        )
        rounds = {way: [launch.round_s for launch in launches] for way, launches in taken.items()}
        processor = {way: [launch.processor_s for launch in launches] for way, launches in taken.items()}
        for way in ("one host", "DDS only"):
            name = f"{size_bytes / 1e6:.3g} MB, {CLIENTS} nodes, {way}"
            yield measurement(
                f"round of a Flower app, {name}",
                "s",
                rounds[way],
                against=("SuperLink", rounds["SuperLink"]),
                note=f"median of {ROUNDS} rounds in each launch",
            )
            yield measurement(
                f"processor time of {ROUNDS} rounds, {name}",
                "s",
                processor[way],
                against=("SuperLink", processor["SuperLink"]),
                note="of all processes, with their start",
            )
        yield _within_limit(size_bytes, rounds["one host"])


def _within_limit(size_bytes: int, rounds_s: Sequence[float]) -> Measurement:
    """The rounds on one host by themselves, with the limit of this size."""
    return measurement(
        f"round by itself, {size_bytes / 1e6:.4g} MB, {CLIENTS} nodes, one host",
        "s",
        rounds_s,
        at_most=MOST_S.get(size_bytes),
        note=f"median of {ROUNDS} rounds in each launch",
    )


def measure_large(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """A model beyond the 2 GiB of protobuf, on one host. Raises NoData: Flower is not set up, or it does not fit."""
    need_flower()
    for size_bytes in chosen.bytes or (LARGE,):
        free = available_bytes()
        if free < COPIES * size_bytes:
            raise NoData(
                f"{CLIENTS} nodes and a server with a model of {size_bytes / 1e9:.3g} GB need some "
                f"{COPIES * size_bytes / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free: try it with --bytes"
            )
        over_the_bus = partial(seconds_of_a_round, printed_over_the_bus, size_bytes)
        yield _within_limit(size_bytes, [over_the_bus() for _ in range(chosen.launches)])


def measure_accuracy(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """The accuracy of each app both ways: how far apart they are. Raises NoData: Flower is not set up."""
    need_flower()
    for app in [APPS / name for name in chosen.app] or sorted(path for path in APPS.iterdir() if path.is_dir()):
        over_the_bus, over_superlink = (accuracies(run, app) for run in (printed_over_the_bus, printed_over_superlink))
        apart = [100 * abs(one - other) for one, other in zip(over_the_bus, over_superlink, strict=True)]
        yield measurement(
            f"accuracy apart from SuperLink's, {app.name}, most of {ACCURACY_ROUNDS} rounds",
            "points",
            [max(apart)],
            at_most=MOST_POINTS,
            note=f"{over_the_bus[-1]:.4f} and {over_superlink[-1]:.4f} after the last one",
        )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=int, action="append", help="of the model; may be repeated")
    parser.add_argument("--launches", type=int, default=1, help="of each way")
    parser.add_argument("--app", action="append", default=[], help=f"in {APPS}; may be repeated. By default all")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "flower-rounds": Part(measure, "Flower: rounds of apps", 300),
        "flower-accuracy": Part(measure_accuracy, "Flower: accuracy of apps, beside SuperLink", 240),
        "flower-large": Part(measure_large, "Flower: rounds of a model of 4 GB", 240),
    },
    _options,
    ("flower-rounds", "flower-accuracy"),
)
