"""The report on a data-parallel run."""

from __future__ import annotations

from collections.abc import Sequence

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.experiments.files import WorkerFile
from gradbus.experiments.report import figures_parallel as figures
from gradbus.experiments.report import style
from gradbus.experiments.report.federated import task_of
from gradbus.experiments.report.figures import draw_curves
from gradbus.experiments.report.page import (
    Column,
    Figure,
    Page,
    Section,
    Table,
    Tile,
    duration,
    facts_table,
    rows_of,
    settings_tables,
    thinned,
)
from gradbus.experiments.report.style import Look
from gradbus.experiments.run.live import percent, size
from gradbus.experiments.rundir.reading import MAX_TRACES, Run
from gradbus.runtime.profiling.summary import ProfileSummary

MAX_TABLE_ROWS = 400


def page_of(run: Run) -> Page:
    """All that its files tell."""
    outcome = str(run.summary.get("outcome") or "not finished")
    look = exchange_look(run)
    return Page(
        title=str(run.summary.get("job") or run.setting("bus", "job") or run.name),
        lead=_lead(run),
        state=outcome,
        good=outcome == "done",
        tiles=_tiles(run),
        notes=run.missing,
        sections=(
            Section(title="Learning", figures=[_learning(run, look)]),
            _time(run),
            Section(
                title="Bytes",
                figures=[
                    Figure(
                        picture=figures.draw_step_bytes(run.epochs, "bytes", look),
                        title="Bytes of a step",
                        caption="Payload that the rank that reports handed to the bus, mean of the epoch.",
                    )
                ],
            ),
            Section(title="Epochs", tables=[epochs_table(run.epochs)] if run.epochs else []),
            Section(
                title="Configuration",
                text="Settings in bold are not the default." if run.config else "",
                tables=settings_tables(run.config, WorkerFile().model_dump(mode="json")),
            ),
            Section(title="Versions and machine", tables=[facts_table(run.summary)] if run.summary else []),
        ),
    )


def exchange_look(run: Run) -> Look:
    """How curves of its exchange look."""
    name = _exchange(run) or "dense"
    return style.look_of(name) if name == "dense" or name in style.CODECS else style.nth_look(0, name)


def _exchange(run: Run) -> str:
    """Its name: of the one that was used, as the summary has it, else of the one that was asked for."""
    return str(run.summary.get("exchange") or run.setting("worker", "exchange") or "")


def _lead(run: Run) -> str:
    exchange = _exchange(run)
    world = run.summary.get("world") or run.config.get("world") or len(run.profiles) or None
    what = "Data-parallel run" + (f", {world} ranks" if world else "") + (f", exchange {exchange}" if exchange else "")
    return f"{what}; {told}." if (told := task_of(run)) else f"{what}."


def _tiles(run: Run) -> list[Tile]:
    epochs = run.epochs
    if not epochs:
        return []
    known = [report.accuracy for report in epochs if report.accuracy is not None]
    last = epochs[-1]
    wanted, skipped = run.setting("worker", "epochs"), sum(report.skipped_steps for report in epochs)
    return [
        Tile(
            name="test accuracy", value=percent(known[-1] if known else None),
            note=f"best {percent(max(known))}" if known else "",
        ),
        Tile(name="epochs", value=str(len(epochs)), note=f"of {wanted}" if wanted else ""),
        Tile(name="steps", value=f"{last.step:,}", note=f"{skipped} skipped: NaN or infinity" if skipped else ""),
        Tile(name="step", value=duration(last.step_s_mean), note="mean of the last epoch"),
        Tile(name="of it waiting", value=duration(last.wait_s_mean), note="for others and the network"),
        Tile(
            name="sent per step", value=size(round(last.bytes_out_per_step)),
            note=f"gradients, density {last.density:.3g}",
        ),
        *_totals(run),
    ]  # fmt: skip


def _totals(run: Run) -> list[Tile]:
    """What the summary says of the rank that wrote it."""
    sent, wall_s = (run.summary.get(key) for key in ("bytes_out", "wall_s"))
    eval_s = sum(profile.outside.get("eval_s", 0.0) for profile in run.profiles[:1])
    tiles = []
    if isinstance(sent, int):
        tiles.append(Tile(name="sent in all", value=size(sent), note="by rank 0, with evaluation and saving"))
    if isinstance(wall_s, int | float):
        tiles.append(Tile(name="the run", value=duration(wall_s), note=f"of it evaluation {duration(eval_s)}"))
    return tiles


def _learning(run: Run, look: Look) -> Figure:
    return Figure(
        picture=draw_curves(
            [figures.curve_of_epochs(run.epochs, look)], "learning", counted="epoch", sent="sent by a rank"
        ),
        title="Accuracy and loss over epochs, bytes and time",
        caption="Above: accuracy on the test set. Below: mean loss of training, and of the test set. Bytes are the "
        "payload that the rank that reports handed to the bus; time includes the evaluation.",
    )


def _time(run: Run) -> Section:
    count = len(run.profiles)
    fewer = f" Of {count} ranks those {figures.MAX_RANKS} that wait least." if count > figures.MAX_RANKS else ""
    ranks = f" The first {MAX_TRACES} ranks that left a trace." if len(run.spans) == MAX_TRACES else ""
    return Section(
        title="Time",
        figures=[
            Figure(
                picture=figures.draw_step_parts(run.profiles, "step-parts"),
                title="Where the time of a step goes",
                caption="Means over all steps. Wait: for the others and the network. A fast rank waits for a slow one, "
                f"so the rank that waits least holds up the others.{fewer}",
            ),
            Figure(
                picture=figures.draw_windows(run.windows, "windows"),
                title="Step time and wait over the run",
                caption="Means of windows of steps, from the profile of each rank.",
            ),
            Figure(
                picture=figures.draw_step(run.spans, "step-spans"),
                title=f"A typical step, rank by rank: step {run.step}",
                caption="The step of median length. For each rank, above: what it computed; below: the exchanges of "
                "gradients on their way, from call to end, and under them the wait for the last one. Ranks are aligned "
                f"by the wall clocks of their machines.{ranks}",
            ),
        ],
        tables=[ranks_table(run.profiles)] if run.profiles else [],
    )


def ranks_table(profiles: Sequence[ProfileSummary]) -> Table:
    """Mean step of each rank."""
    keys = [key for key in figures.PARTS if any(key in profile.mean for profile in profiles)]

    def means(key: str) -> list[float]:
        return [profile.mean.get(key, 0.0) for profile in profiles]

    def sums(key: str) -> list[float]:
        return [profile.outside.get(key, 0.0) for profile in profiles]

    columns = [
        Column(name="rank", values=[profile.rank for profile in profiles]),
        Column(name="steps", values=[profile.steps for profile in profiles]),
        Column.of_times("step", means("step_s")),
        *(Column.of_times(figures.PARTS[key][0], means(key)) for key in keys),
        Column.of_bytes("out", means("bytes_out")),
        Column.of_bytes("in", means("bytes_in")),
        Column.of_times("evaluation", sums("eval_s")),
        Column.of_times("checkpoints", sums("checkpoint_s")),
        Column(name="failed", values=[profile.failed_steps for profile in profiles]),
    ]
    shown, left_out = thinned(rows_of(columns), MAX_TABLE_ROWS)
    return Table(
        name="ranks", title="Ranks: means per step", head=[column.head for column in columns], rows=shown,
        caption="Evaluation and checkpoints: in all." + (f" {left_out} ranks are left out." if left_out else ""),
    )  # fmt: skip


def epochs_table(reports: Sequence[EpochReport]) -> Table:
    """A row for each epoch."""
    columns = [
        Column(name="epoch", values=[r.epoch + 1 for r in reports]),
        Column(name="step", values=[r.step for r in reports]),
        Column(name="loss", values=[r.loss for r in reports], digits=4),
        Column(name="accuracy", values=[r.accuracy for r in reports], unit="%", factor=0.01, digits=2),
        Column(name="test loss", values=[r.eval_loss for r in reports], digits=4),
        Column.of_times("a step", [r.step_s_mean for r in reports]),
        Column.of_times("waiting", [r.wait_s_mean for r in reports]),
        Column.of_bytes("sent per step", [r.bytes_out_per_step for r in reports]),
        Column(name="density", values=[r.density for r in reports], unit="%", factor=0.01, digits=2),
        Column.of_times("epoch", [r.seconds for r in reports]),
        Column(name="skipped", values=[r.skipped_steps for r in reports]),
    ]
    rows = [[*row, f"{r.params_hash:016x}"] for row, r in zip(rows_of(columns), reports, strict=True)]
    shown, left_out = thinned(rows, MAX_TABLE_ROWS)
    return Table(
        name="epochs",
        head=[*(column.head for column in columns), "parameters\n"],
        rows=shown,
        caption="Equal numbers under parameters, equal models."
        + (f" {left_out} epochs are left out; epochs.jsonl has all of them." if left_out else ""),
    )  # fmt: skip
