"""The report on a data-parallel run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.commands.amounts import duration, size
from gradbus.commands.files import WorkerFile
from gradbus.commands.report import figures as draw
from gradbus.commands.report import style
from gradbus.commands.report.metric_parts import accuracy_columns, metric_columns, quality_name, quality_tiles
from gradbus.commands.report.page import (
    Page,
    PageFigure,
    PageTable,
    Section,
    Tile,
    byte_column,
    column,
    column_table,
    run_page,
    time_column,
)
from gradbus.commands.rundir.reading import MAX_TRACES, RunFiles
from gradbus.runtime.profiling.summary import ProfileSummary


def page_of(run: RunFiles) -> Page:
    """The page on one run."""
    algorithm = algorithm_of(run)
    look = style.look_of(algorithm or "dense")
    curve = draw.curve_of_epochs(run.epochs, look, run.spent)
    world = run.summary.get("world") or run.config.get("world") or len(run.profiles) or None
    what = "Data-parallel run" + (f", {world} ranks" if world else "") + (f", {algorithm}" if algorithm else "")
    return run_page(
        run,
        what,
        WorkerFile(),
        tiles=tiles_of(run) if run.epochs else [],
        notes=run.missing,
        sections=[
            Section(
                title="Learning",
                figures=[
                    PageFigure(
                        "learning",
                        partial(draw.draw_curves, [curve], counted="epoch", sent="sent by a rank"),
                        f"{quality_name(run.epochs)} and loss over epochs, bytes and time",
                        f"Above: {quality_name(run.epochs)} on the test set. Below: mean loss of training, and of "
                        f"the test set. Bytes are the "
                        "payload that the rank that reports handed to the bus; time includes the evaluation.",
                    )
                ],
            ),
            _time(run),
            Section(
                title="Bytes",
                figures=[
                    PageFigure(
                        "bytes",
                        partial(draw.draw_step_bytes, run.epochs, look),
                        "Bytes of a step",
                        "Payload that the rank that reports handed to the bus, mean of the epoch.",
                    )
                ],
            ),
            Section(title="Epochs", tables=[epochs_table(run.epochs)] if run.epochs else []),
        ],
    )


def algorithm_of(run: RunFiles) -> str:
    """The name of the algorithm that was used, as the summary has it, else of the one that was asked for."""
    return str(run.summary.get("algorithm") or run.setting("parallel", "algorithm.name") or "")


def tiles_of(run: RunFiles) -> list[Tile]:
    """The key numbers of a run with a report."""
    epochs, last = run.epochs, run.epochs[-1]
    wanted, skipped = run.setting("parallel", "epochs"), sum(report.skipped_steps for report in epochs)
    tiles = [
        *quality_tiles(epochs),
        Tile("epochs", str(len(epochs)), f"of {wanted}" if wanted else ""),
        Tile("steps", f"{last.step:,}", f"{skipped} skipped: NaN or infinity" if skipped else ""),
        Tile("step", duration(last.step_s_mean), "mean of the last epoch"),
        Tile("of it waiting", duration(last.wait_s_mean), "for others and the network"),
        Tile("sent per step", size(last.bytes_out_per_step), f"gradients, density {last.density:.3g}"),
    ]
    sent, wall_s = run.number("bytes_out"), run.number("wall_s")
    if sent is not None:
        tiles.append(Tile("sent in all", size(sent), "by rank 0, with evaluation, saving and earlier starts"))
    if wall_s is not None:
        eval_s = sum(profile.outside.get("eval_s", 0.0) for profile in run.profiles[:1])
        tiles.append(Tile("the run", duration(wall_s), f"of it evaluation {duration(eval_s)}"))
    return tiles


def _time(run: RunFiles) -> Section:
    count = len(run.profiles)
    fewer = f" Of {count} ranks those {draw.MAX_RANKS} that wait least." if count > draw.MAX_RANKS else ""
    traced = f" The first {MAX_TRACES} ranks that left a trace." if len(run.spans) == MAX_TRACES else ""
    return Section(
        title="Time",
        figures=[
            PageFigure(
                "step-parts",
                partial(draw.draw_step_parts, run.profiles),
                "Where the time of a step goes",
                "Means over all steps. Wait: for the others and the network. A fast rank waits for a slow one, so the "
                f"rank that waits least holds up the others.{fewer}",
            ),
            PageFigure(
                "windows",
                partial(draw.draw_windows, run.windows),
                "Step time, wait and bytes over the run",
                "Means of windows of steps, from the profile of each rank.",
            ),
            PageFigure(
                "step-spans",
                partial(draw.draw_step, run.spans),
                f"A typical step, rank by rank: step {run.step}",
                "The step of median length. For each rank, above: what it computed; below: the exchanges of gradients "
                "on their way, from call to end, and under them the wait for the last one. Ranks are aligned by the "
                f"wall clocks of their machines.{traced}",
            ),
        ],
        tables=[ranks_table(run.profiles)] if run.profiles else [],
    )


def ranks_table(profiles: Sequence[ProfileSummary]) -> PageTable:
    """The mean step of each rank."""

    def means(key: str) -> list[float]:
        return [profile.mean.get(key, 0.0) for profile in profiles]

    def sums(key: str) -> list[float]:
        return [profile.outside.get(key, 0.0) for profile in profiles]

    columns = [
        column("rank", [profile.rank for profile in profiles]),
        column("steps", [profile.steps for profile in profiles]),
        time_column("step", means("step_s")),
        *(
            time_column(name, means(key))
            for key, (name, _) in draw.STEP_PARTS.items()
            if any(key in profile.mean for profile in profiles)
        ),
        byte_column("out", means("bytes_out")),
        byte_column("in", means("bytes_in")),
        time_column("evaluation", sums("eval_s")),
        time_column("checkpoints", sums("checkpoint_s")),
        column("failed", [profile.failed_steps for profile in profiles]),
    ]
    caption = "Evaluation and checkpoints: in all."
    return column_table("ranks", columns, "ranks", title="Ranks: means per step", caption=caption)


def epochs_table(reports: Sequence[EpochReport]) -> PageTable:
    """A row for each epoch."""
    parameters = column("parameters", [0] * len(reports))._replace(cells=[f"{r.params_hash:016x}" for r in reports])
    columns = [
        column("epoch", [r.epoch + 1 for r in reports]),
        column("step", [r.step for r in reports]),
        column("loss", [r.loss for r in reports], digits=4),
        *accuracy_columns(reports),
        column("test loss", [r.eval_loss for r in reports], digits=4),
        *metric_columns([r.metrics for r in reports]),
        *metric_columns([r.train_metrics for r in reports], " (training)"),
        time_column("a step", [r.step_s_mean for r in reports]),
        time_column("waiting", [r.wait_s_mean for r in reports]),
        byte_column("sent per step", [r.bytes_out_per_step for r in reports]),
        column("density", [r.density for r in reports], unit="%", factor=0.01, digits=2),
        time_column("epoch", [r.seconds for r in reports]),
        column("skipped", [r.skipped_steps for r in reports]),
        parameters,
    ]
    caption = "Equal numbers under parameters, equal models."
    return column_table("epochs", columns, "epochs", file="epochs.jsonl", caption=caption)
