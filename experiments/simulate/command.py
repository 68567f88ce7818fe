"""``gradbus simulate``: steps of data-parallel training at all numbers of ranks of a configuration."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradbus.experiments.simulate.lockstep import Deadlock, Mismatch
from gradbus.experiments.simulate.network import NetworkModel
from gradbus.experiments.simulate.settings import SimulationSettings
from gradbus.experiments.simulate.steps import SimulatedSteps, StepWork, Stragglers, simulate_steps
from gradbus.experiments.simulate.topology import NetworkTopology, cluster
from gradbus.experiments.simulate.trace import read_trace, take_trace
from gradbus.runtime.choices import import_object
from gradbus.runtime.errors import ConfigError

COLUMNS = (
    "world", "step_s", "compute_s", "exchange_share", "utilisation", "samples_s", "bytes_out", "link", "link_use"
)  # fmt: skip


def work_of(settings: SimulationSettings) -> StepWork:
    """What a rank does in a step: of a trace, of a gradient without a model, or of a model, measured where not given.

    Raises:
        ConfigError: there is no such trace or model.
    """
    more = settings.model_dump(include={"update_s", "overlap", "bucket_bytes", "first_bucket_bytes"})
    if settings.trace is not None:
        trace = read_trace(settings.trace)
        work = trace.work(compute_scale=settings.compute_scale, **more)
    elif settings.gradient_bytes is not None:
        shapes = {"gradient": torch.Size([max(1, settings.gradient_bytes // 4)])}
        work = StepWork(shapes=shapes, forward_s=0.0, backward_s=[0.0], batch_size=settings.batch_size, **more)
    else:
        model = import_object(settings.model, key="simulate.model")(**settings.model_options)
        if settings.forward_s is None or settings.backward_s is None:
            torch.set_num_threads(1)
            trace = take_trace(model, torch.randn(settings.batch_size, *settings.input_shape))
            work = trace.work(compute_scale=settings.compute_scale, **more)
        else:
            shapes = {name: one.shape for name, one in model.named_parameters() if one.requires_grad}
            work = StepWork(
                shapes=shapes, forward_s=0.0, backward_s=[0.0] * len(shapes), batch_size=settings.batch_size, **more
            )  # fmt: skip
    if settings.forward_s is not None:
        work = replace(work, forward_s=settings.forward_s)
    if settings.backward_s is not None:
        work = replace(work, backward_s=[settings.backward_s / len(work.shapes)] * len(work.shapes))
    return work


def topology_of(settings: SimulationSettings, world: int) -> NetworkTopology:
    """Hosts and racks for so many ranks. Raises ConfigError: the ranks do not fill the hosts."""
    given = settings.topology
    try:
        return cluster(
            world, network=given.network.spec, ranks_per_host=given.ranks_per_host, local=given.local.spec,
            hosts_per_rack=given.hosts_per_rack, uplink=given.uplink.spec if given.uplink else None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"simulate.worlds: {error}: change it, or simulate.topology.ranks_per_host") from None


def simulate(settings: SimulationSettings) -> Iterator[SimulatedSteps]:
    """One simulation for each world.

    Raises:
        ConfigError: no such model or algorithm, or an algorithm that looks at values without ``values``.
    """
    topologies = [topology_of(settings, world) for world in settings.worlds]
    work = work_of(settings)
    stragglers = Stragglers(**settings.stragglers.model_dump())
    for topology in topologies:
        network = NetworkModel(topology, seed=settings.seed)
        try:
            yield simulate_steps(
                network, settings.algorithm, work, settings.steps, stragglers=stragglers, values=settings.values,
                seed=settings.seed,
            )  # fmt: skip
        except (ConfigError, Deadlock, Mismatch):
            raise
        except Exception as error:  # there are many ways to look at a value
            if settings.values:
                raise
            raise ConfigError(
                f"algorithm {settings.algorithm.name!r} looks at values, and has sizes alone here: set "
                f"simulate.values=true ({type(error).__name__}: {str(error)[:200]})"
            ) from error


def run(settings: SimulationSettings, out: Path | None) -> None:
    """Simulate, print a table, and write it as CSV."""
    found = list(
        track(
            simulate(settings), description="simulating", total=len(settings.worlds), transient=True,
            console=Console(file=sys.stderr), disable=not sys.stderr.isatty(),
        )
    )  # fmt: skip
    table = Table(title=f"{settings.algorithm.name}, {settings.model}, seed {settings.seed}", title_justify="left")
    for name in ("ranks", "step", "computing", "exchange", "samples/s", "sent by a rank", "busiest link"):
        table.add_column(name, justify="left" if name == "busiest link" else "right")
    for one in found:
        table.add_row(
            f"{one.world}", f"{1e3 * one.typical_s:,.1f} ms", f"{one.utilisation:.1%}", f"{one.exchange_share:.1%}",
            f"{one.samples_s:,.0f}", f"{one.bytes_out / 1e6:,.2f} MB", f"{one.link} {one.link_use:.0%}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if out is not None:
        write_csv(out, found)
        print(f"written: {out}")


def write_csv(path: Path, found: Sequence[SimulatedSteps]) -> None:
    """A line for each simulation, with COLUMNS; times in seconds, the median step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in found:
            writer.writerow([one.typical_s if name == "step_s" else getattr(one, name) for name in COLUMNS])
