"""All figures, the page that names the data, the runs and the command of each, and their copies for the documents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from gradbus.experiments.figures import aggregation, federated, ladder, parallel, thin_link
from gradbus.experiments.figures.canvas import PublishedFile
from gradbus.experiments.figures.plan import Scale
from gradbus.experiments.figures.store import StoredRun
from gradbus.runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BYTES = 120_000  # of a picture in the repository
_COLORS = 128  # of a copy, which takes a third of the bytes and looks the same


class FigureEntry(NamedTuple):
    """One figure.

    Attributes:
        title: of its section. table: that it is drawn from. groups: of runs that it needs.
        draw: takes the rows of that table. in_docs: whether docs/images has a copy; times belong to a machine, so that
            figures of times are drawn where they are looked at.
    """

    title: str
    table: str
    groups: tuple[str, ...]
    draw: Callable[[Any, Scale], Figure]
    in_docs: bool = False


CATALOGUE: Mapping[str, FigureEntry] = {
    "parallel_bytes": FigureEntry(
        "Data parallel: bytes of a step", "epochs", ("parallel",), parallel.draw_bytes, in_docs=True
    ),
    "parallel_accuracy": FigureEntry(
        "Data parallel: accuracy over epochs", "epochs", ("parallel",), parallel.draw_accuracy, in_docs=True
    ),
    "parallel_wait": FigureEntry(
        "Data parallel: communication time of a step", "ranks", ("parallel", "overlapped"), parallel.draw_wait
    ),
    "ladder": FigureEntry(
        "Data parallel: the ladder on a slow link", "ladder", ("ladder",), ladder.draw_ladder
    ),
    "thin_link_loss": FigureEntry(
        "Data parallel: loss over time on a thin link", "thin_link", ("thin_link",), thin_link.draw_loss, in_docs=True
    ),
    "aggregation_resnet50": FigureEntry(
        "Aggregation: ResNet-50 on 8 to 1,024 ranks", "simulations", ("scaling",), aggregation.draw_resnet50,
        in_docs=True,
    ),
    "aggregation_vgg19": FigureEntry(
        "Aggregation: VGG19 on 8 to 1,024 ranks", "simulations", ("scaling",), aggregation.draw_vgg19, in_docs=True
    ),
    "aggregation_memory": FigureEntry(
        "Aggregation: memory of the switch", "simulations", ("memory",), aggregation.draw_memory, in_docs=True
    ),
    "aggregation_jobs": FigureEntry(
        "Aggregation: jobs on one switch", "simulations", ("jobs",), aggregation.draw_jobs, in_docs=True
    ),
    "aggregation_loss": FigureEntry(
        "Aggregation: lost packets", "simulations", ("loss",), aggregation.draw_loss, in_docs=True
    ),
    "aggregation_break_even": FigureEntry(
        "Aggregation: break-even", "simulations", ("scaling",), aggregation.draw_break_even, in_docs=True
    ),
    "aggregation_cost": FigureEntry(
        "Aggregation: what it takes", "deployments", (), aggregation.draw_deployment, in_docs=True
    ),
    "federated_bytes": FigureEntry(
        "Federated: bytes of a round, up and down", "rounds", ("codecs", "old_bytes"), federated.draw_bytes,
        in_docs=True,
    ),
    "federated_dds": FigureEntry("Federated: DDS time of each client", "updates", ("timing",), federated.draw_dds),
    "federated_time": FigureEntry(
        "Federated: where the time of a round goes", "rounds", ("timing",), federated.draw_time
    ),
    "federated_accuracy": FigureEntry(
        "Federated: accuracy over rounds", "rounds", ("codecs",), federated.draw_accuracy, in_docs=True
    ),
    "tradeoff": FigureEntry(
        "Federated: accuracy against bytes sent", "rounds", ("codecs", "skewed"), federated.draw_tradeoff, in_docs=True
    ),
}  # fmt: skip

_MACHINE = ("cpu", "cores", "system", "python", "torch", "cyclonedds")


def entries_of(groups: Collection[str]) -> dict[str, FigureEntry]:
    """The figures that need no other groups of runs than these."""
    return {name: entry for name, entry in CATALOGUE.items() if set(entry.groups) <= set(groups)}


def write_index(
    out: Path, command: str, finished: Sequence[tuple[str, StoredRun]], failures: Mapping[str, str | None], *, code: str
) -> Path:
    """Write ``index.md`` beside the figures.

    Args:
        command: that makes them.
        failures: by figure, why it could not be drawn; None: it was.
        code: hash of the code that draws; runs may be of another.
    """
    lines = [
        "# Figures", "", *_about(command, [done for _, done in finished], code), "",
        "Each figure is drawn from one table, a CSV file, which is made of the JSONL files that the runs left. "
        "docs/figures.md explains them.", "",
    ]  # fmt: skip
    groups = Counter(group for group, _ in finished)
    for name, failure in failures.items():
        entry = CATALOGUE[name]
        used = ", ".join(f"`{group}` ({groups[group]})" for group in entry.groups) or "of formulas alone"
        drawn = (
            f"![{entry.title}]({name}.png)\n\n[PNG]({name}.png), [SVG]({name}.svg); data: [{entry.table}.csv]"
            f"(data/{entry.table}.csv), runs below: {used}; command: `{command}`"
        )
        lines += [f"## {entry.title}", "", drawn if failure is None else f"Not drawn: {failure}", ""]
    lines += ["## Runs", "", "| group | run | seconds | code |", "|---|---|---|---|"]
    for group, done in finished:
        where = Path(os.path.relpath(done.path, out)).as_posix()
        lines.append(f"| {group} | [{done.run.label}]({where}) | {done.seconds:g} | {done.code} |")
    lines += ["", f"Published figures: {PublishedFile.load().source}", ""]
    path = out / "index.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _about(command: str, finished: Sequence[StoredRun], code: str) -> Iterator[str]:
    if not finished:
        yield "No run is done yet."
        return
    by_date = sorted(finished, key=lambda done: str(done.machine.get("date", "")))
    first, last = by_date[0].machine.get("date", ""), by_date[-1].machine
    where = ", ".join(f"{key} {last[key]}" for key in _MACHINE if key in last)
    loads = [float(done.machine.get("load_1min", 0)) for done in finished]
    minutes = sum(done.seconds for done in finished) / 60
    yield f"`{command}`: {len(finished)} runs, {minutes:.0f} minutes in all, from {first} to {last.get('date', '')}."
    yield f"{where}. Load of the machine at the end of the runs: {min(loads):g} to {max(loads):g}."
    others = sorted({done.code for done in finished} - {code})
    if others:
        yield f"Runs by another version of the code than the one here ({code}): {', '.join(others)}."


def install(out: Path, images: Path, entries: Mapping[str, FigureEntry] = CATALOGUE) -> list[Path]:
    """Copy what the documents show of these figures, and return the copies.

    Raises:
        ConfigError: there is no folder of images here, or a picture is too large for the repository.
    """
    if not images.is_dir():
        raise ConfigError(f"no folder {images} here: run this from the root of the repository")
    copies = []
    for name, entry in entries.items():
        if not entry.in_docs:
            continue
        copy = images / f"{name.replace('_', '-')}.png"
        with Image.open(out / f"{name}.png") as picture:
            picture.convert("RGB").quantize(_COLORS).save(copy, optimize=True)
        if copy.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{copy}: {copy.stat().st_size:,} bytes, at most {MAX_BYTES:,} are meant to be kept here")
        copies.append(copy)
    return copies
