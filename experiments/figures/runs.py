"""The runs behind the figures, each in processes of its own: ``gradbus demo``, and ranks that train a perceptron."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import gradbus
from gradbus.commands.lab.namespaces import NoNamespaces
from gradbus.commands.simulate.command import work_of, written
from gradbus.commands.simulate.comparison import ComparisonRow, compare
from gradbus.commands.simulate.settings import SimulationSettings
from gradbus.experiments.bench.processes import BenchRank, ProcessFailed, run_ranks
from gradbus.experiments.bench.rungs import LadderPlan, Rung, climb
from gradbus.experiments.bench.thin_link import ThinLinkPlan, Way, train_on_a_thin_link
from gradbus.experiments.bench.training import Training
from gradbus.experiments.figures.plan import AnyRun, FederatedRun, LadderRun, ParallelRun, SimulationRun, ThinLinkRun
from gradbus.models import mnist_mlp
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.json_text import json_text, parse_json
from gradbus.runtime.network.network_config import NetworkConfig

_TIMEOUT_S = 3600.0  # on a very busy machine; an idle one takes a minute

# It is DDS that is measured, not the memory that processes of one machine share. And nobody is to die: where other
# work is going on a client may be silent for seconds.
_SETTINGS = (
    "bus.shared_memory=false",
    "federated.clients.start_timeout_s=1800", "federated.clients.dead_after_s=120", "federated.round.timeout_s=1800",
    "bus.lease_s=10",
)  # fmt: skip


class RunFailed(GradbusError):
    """A run ended with an error, or took too long."""


def execute(run: AnyRun, folder: Path) -> None:
    """Do a run in an empty folder. Raises RunFailed."""
    match run:
        case FederatedRun():
            run_federated(run, folder)
        case ParallelRun():
            run_parallel(run, folder)
        case LadderRun():
            run_ladder(run, folder)
        case ThinLinkRun():
            run_thin_link(run, folder)
        case SimulationRun():
            run_simulation(run, folder)


def command(run: FederatedRun, run_dir: Path) -> list[str]:
    """The arguments of ``gradbus`` for a run."""
    return [
        "demo",
        "--no-live",
        "--rounds",
        str(run.rounds),
        "--clients",
        str(run.clients),
        "--samples",
        str(run.samples),
        "--data",
        run.data,
        "--codec",
        run.codec,
        "--downlink-codec",
        run.downlink,
        "--partition",
        run.partition,
        "--seed",
        str(run.seed),
        "--run-dir",
        str(run_dir),
        "--set",
        f"federated.codec.version={run.version}",
        "--set",
        f"federated.eval_every={run.eval_every}",
        *(word for text in _SETTINGS for word in ("--set", text)),
    ]


def run_federated(run: FederatedRun, folder: Path) -> None:
    """Do the run; ``rounds.jsonl`` is then in ``folder / "run"``.

    Raises:
        RunFailed: the command failed or took too long; with the last lines of its output.
    """
    # Settings in the environment would change the run without changing its hash; the place of the data does not.
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("GRADBUS_") or name == "GRADBUS_DATA"
    }
    log = folder / "output.log"
    command_line = [sys.executable, "-P", "-m", "gradbus", *command(run, folder / "run")]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command_line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            code = process.wait(timeout=_TIMEOUT_S)
        except BaseException as error:
            process.terminate()  # it ends its clients
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunFailed(f"{run.label}: not done after {_TIMEOUT_S:g} s; see {log}") from None
            raise
    if code:
        last = " | ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
        raise RunFailed(f"{run.label}: gradbus demo ended with exit code {code}: {last or 'no output'}; see {log}")
    shutil.rmtree(folder / "run" / "state", ignore_errors=True)  # checkpoints: nobody resumes these runs


def run_ladder(run: LadderRun, folder: Path) -> None:
    """Do the run; ``ladder.json`` is then in ``folder``: what it has come to, or why it cannot be done here.

    Raises:
        RunFailed: a rank failed, or took too long.
    """
    plan = LadderPlan(samples=run.samples, epochs=run.epochs, seed=run.seed, data=run.data)
    try:
        found = climb(cast(Rung, run.rung), plan, timeout_s=_TIMEOUT_S).to_json()
    except NoNamespaces as error:
        found = {"missing": str(error)}
    except ProcessFailed as error:
        raise RunFailed(f"{run.label}: {str(error).strip().splitlines()[-1]}") from None
    (folder / "ladder.json").write_text(json_text(found) + "\n", encoding="utf-8")


def run_thin_link(run: ThinLinkRun, folder: Path) -> None:
    """Do the run; ``thin_link.json`` is then in ``folder``: the windows, or why they cannot be had here.

    Raises:
        RunFailed: a rank failed, or took too long.
    """
    plan = ThinLinkPlan(seconds=run.seconds, windows=run.windows, seed=run.seed, data=run.data)
    try:
        windows = train_on_a_thin_link(cast(Way, run.way), plan)
        found: dict[str, Any] = {"windows": [window.to_json() for window in windows]}
    except NoNamespaces as error:
        found = {"missing": str(error)}
    except ProcessFailed as error:
        raise RunFailed(f"{run.label}: {str(error).strip().splitlines()[-1]}") from None
    (folder / "thin_link.json").write_text(json_text(found) + "\n", encoding="utf-8")


class _Spec(NamedTuple):
    run: ParallelRun
    folder: Path


def run_parallel(run: ParallelRun, folder: Path) -> None:
    """Do the run; ``epochs-rank-R.jsonl`` and ``profile-rank-R.jsonl`` are then in ``folder``.

    Raises:
        RunFailed: a rank failed, took too long, or ended with other parameters.
    """
    try:
        hashes = run_ranks(_train, run.world, _Spec(run, folder.absolute()), timeout_s=_TIMEOUT_S)
    except ProcessFailed as error:
        (folder / "output.log").write_text(f"{error}\n", encoding="utf-8")
        raise RunFailed(f"{run.label}: {str(error).strip().splitlines()[-1]}; see {folder / 'output.log'}") from None
    if len(set(hashes)) != 1:
        raise RunFailed(f"{run.label}: the ranks ended with different parameters")


async def _train(place: BenchRank) -> Any:
    """The role of a rank: train to the end, write a line for each epoch, and return the hash of the parameters."""
    run, folder = place.spec
    task = Training(
        model=mnist_mlp, batch_size=run.batch_size, samples=run.samples, data=run.data, config={"seed": run.seed}
    ).task()
    dgc = {"name": "dgc", "density": run.density, "warmup": run.warmup}
    algorithms = {"dgc": dgc, "dense": "dense", "int8": "gradbus.experiments.figures.int8:Int8"}
    config = gradbus.DataParallelConfig(
        epochs=run.epochs,
        optimizer={"lr": run.lr},
        seed=run.seed,
        algorithm=algorithms[run.exchange],
        overlap=run.overlap,
        profile={"dir": folder},
        timeouts={"join_s": 1800, "collective_s": 1800},
    )
    # The bus is measured: by default, ranks of one machine pass large data through memory they share.
    async with place.group(NetworkConfig(shared_memory=False, lease_s=10.0)) as group:
        worker = gradbus.Worker(group, task, config)
        with (folder / f"epochs-rank-{place.rank}.jsonl").open("w", encoding="utf-8") as file:
            async for report in worker.epochs():
                file.write(json_text({"rank": place.rank, **report.to_json()}) + "\n")
    return worker.summary.params_hash


def run_simulation(run: SimulationRun, folder: Path) -> None:
    """Do the run, in this process; ``comparison.csv`` is then in ``folder``."""
    settings = SimulationSettings.model_validate(parse_json(run.settings))
    rows = written(compare(settings, work_of(settings)), folder / "comparison.csv", tuple(ComparisonRow.model_fields))
    for _ in rows:
        pass
