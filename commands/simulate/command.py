"""``gradbus simulate``: steps of data-parallel training at all numbers of ranks of a configuration."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from gradbus.commands.simulate.comparison import ComparisonRow, compare, conditions
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.rank_programs import Deadlock, Mismatch
from gradbus.commands.simulate.settings import SimulationSettings
from gradbus.commands.simulate.steps import SimulatedSteps, StepWork, Stragglers, simulate_steps
from gradbus.commands.simulate.topology import NetworkTopology, cluster
from gradbus.commands.simulate.trace import read_trace, take_trace
from gradbus.runtime.choices import import_object
from gradbus.runtime.errors import ConfigError

COLUMNS = (
    "world",
    "step_s",
    "compute_s",
    "exchange_share",
    "utilisation",
    "samples_s",
    "bytes_out",
    "link",
    "link_use",
)


def work_of(settings: SimulationSettings) -> StepWork:
    """Return what a rank does in a step: of a trace, of a gradient without a model, or of a model, measured where not
    given.

    Raises:
        ConfigError: there is no such trace or model.
    """
    more = settings.model_dump(include={"update_s", "overlap", "bucket_bytes", "first_bucket_bytes"})
    if settings.trace is not None:
        trace = read_trace(settings.trace)
        work = trace.make_step_work(compute_scale=settings.compute_scale, **more)
    elif settings.gradient_bytes is not None:
        shapes = {"gradient": torch.Size([max(1, settings.gradient_bytes // 4)])}
        work = StepWork(shapes=shapes, forward_s=0.0, backward_s=[0.0], batch_size=settings.batch_size, **more)
    else:
        model = import_object(settings.model, key="simulate.model")(**settings.model_options)
        if settings.forward_s is None or settings.backward_s is None:
            torch.set_num_threads(1)
            trace = take_trace(model, torch.randn(settings.batch_size, *settings.input_shape))
            work = trace.make_step_work(compute_scale=settings.compute_scale, **more)
        else:
            shapes = {name: one.shape for name, one in model.named_parameters() if one.requires_grad}
            work = StepWork(
                shapes=shapes, forward_s=0.0, backward_s=[0.0] * len(shapes), batch_size=settings.batch_size, **more
            )
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
            world,
            network=given.network.spec,
            ranks_per_host=given.ranks_per_host,
            local=given.local.spec,
            hosts_per_rack=given.hosts_per_rack,
            uplink=given.uplink.spec if given.uplink else None,
        )
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
                network,
                settings.algorithm,
                work,
                settings.steps,
                stragglers=stragglers,
                values=settings.values,
                seed=settings.seed,
            )
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
    """Simulate, print a table, and write it as CSV, a line as soon as it is found."""
    # The progress bar takes what is written to sys.stdout, so as to stay below it: right on a terminal alone.
    screen = None if sys.stdout.isatty() else sys.stdout
    if settings.compare.ways:
        work = work_of(settings)
        rows = _shown(compare(settings, work), len(conditions(settings)))
        _print_comparison(settings, work, written(rows, out, tuple(ComparisonRow.model_fields)), screen)
    else:
        _print_steps(settings, written(_shown(simulate(settings), len(settings.worlds)), out, COLUMNS), screen)
    if out is not None:
        print(f"written: {out}")


T = TypeVar("T")


def _shown(found: Iterable[T], count: int) -> Iterable[T]:
    """The same, with a progress bar where somebody looks on."""
    return track(
        found,
        description="simulating",
        total=count,
        transient=True,
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
    )


def written(found: Iterable[T], path: Path | None, columns: Sequence[str]) -> Iterator[T]:
    """The same, each also a line of a CSV file with these attributes. Times are in seconds.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield from found
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another (--out)") from None
    with opened as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for one in found:
            writer.writerow([getattr(one, name) for name in columns])
            file.flush()
            yield one


def _print_steps(settings: SimulationSettings, found: Iterable[SimulatedSteps], screen: TextIO | None) -> None:
    print(f"{settings.algorithm.name}, {settings.trace or settings.model}, seed {settings.seed}", file=screen)
    table = _Lines(
        {
            "ranks": 6,
            "step": 12,
            "computing": 9,
            "exchange": 8,
            "samples/s": 12,
            "sent by a rank": 14,
            "busiest link": 0,
        },
        screen,
    )
    for one in found:
        table.add(
            f"{one.world}",
            _ms(one.step_s),
            f"{one.utilisation:.1%}",
            f"{one.exchange_share:.1%}",
            f"{one.samples_s:,.0f}",
            f"{one.bytes_out / 1e6:,.2f} MB",
            f"{one.link} {one.link_use:.0%}",
        )


def _print_comparison(
    settings: SimulationSettings, work: StepWork, rows: Iterable[ComparisonRow], screen: TextIO | None
) -> None:
    size = f"{work.gradient_bytes / 1e6:,.1f} MB"
    print(f"{settings.trace or 'gradient'}, {size}, computing {_ms(work.compute_s)}", file=screen)
    table = _Lines(
        {
            "ranks": 6,
            "loss": 6,
            "memory": 6,
            "jobs": 4,
            "seed": 4,
            "exchange": 13,
            "formula": 13,
            "off by": 7,
            "step": 13,
            "speed-up": 8,
            "way": 0,
        },
        screen,
    )
    for one in rows:
        off = one.exchange_s / one.formula_s - 1 if one.exchange_s is not None and one.formula_s else None
        table.add(
            f"{one.world}",
            f"{one.loss:.2%}",
            "" if one.memory is None else f"{one.memory:g}",
            f"{one.jobs}",
            f"{one.seed}",
            _ms(one.exchange_s),
            _ms(one.formula_s),
            "" if off is None else f"{off:+.2%}",
            _ms(one.step_s if one.step_s is not None else one.formula_step_s),
            "" if one.speed_up is None else f"{one.speed_up:,.1f}",
            one.way,
        )


class _Lines:
    """A table whose lines are printed as they come, so its columns have widths from the start. ``columns``: width by
    name, 0 for the last one, which is text."""

    def __init__(self, columns: Mapping[str, int], screen: TextIO | None) -> None:
        self._widths = list(columns.values())
        self._screen = screen
        self.add(*columns)

    def add(self, *cells: str) -> None:
        padded = [cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True)]
        print("  ".join(padded).rstrip(), file=self._screen, flush=True)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.1f} ms"
