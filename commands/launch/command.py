"""The command ``run``: arguments and environment of each rank, and one error in place of one from every rank."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gradbus.commands.buses import check
from gradbus.commands.files import WorkerFile, load
from gradbus.commands.launch.launcher import Launch, Launcher
from gradbus.commands.overrides import settings_of
from gradbus.commands.rank_environment import MAX_WORLD
from gradbus.commands.rundir.directory import begun_at, new_path, outcome_of
from gradbus.runtime.errors import ConfigError

LAST_CALL_S = 60.0
"""Process 0 waits for so long for a rank that it has not seen, unless the configuration says otherwise: it cannot know
whether that has been killed or takes long to load. On one machine nobody can be cut off from the others, and found a
second group."""


@dataclass(frozen=True, slots=True)
class ElasticLaunch:
    """Ranks that may die and come again: bounds of their number, and how often ranks are started again in all."""

    min_world: int
    max_world: int
    restarts: int

    @classmethod
    def parse(cls, text: str, *, restarts: int) -> Self:
        """From ``MIN:MAX``. Raises ConfigError."""
        found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"--elastic must be MIN:MAX, such as 2:4, got {text!r}")
        return cls(int(found[1]), int(found[2]), restarts)

    def options(self, file: WorkerFile, run_dir: Path) -> list[str]:
        """Options of each rank. Raises ConfigError: the job has parameter servers."""
        if file.parameter_server.servers:
            raise ConfigError("--elastic is not for parameter servers, which go on without some workers by themselves")
        values: dict[str, float] = {"min_world": self.min_world, "max_world": self.max_world}
        if "last_call_s" not in file.parallel.elastic.model_fields_set:
            values["last_call_s"] = min(LAST_CALL_S, file.parallel.elastic.wait_s / 2)
        options = [part for key, value in values.items() for part in ("--set", f"parallel.elastic.{key}={value:g}")]
        return options if file.run_dir is not None else [*options, "--run-dir", str(run_dir)]


def launch_run(
    arguments: Sequence[str],
    options: Mapping[str, Any],
    *,
    ranks: int | None,
    grace_s: float,
    elastic: ElasticLaunch | None = None,
) -> int:
    """Run ``gradbus run``. Returns the exit code of the launch.

    Args:
        arguments: of ``gradbus worker``, for every rank. options: the same, parsed. Paths may be texts: typer before
            0.29 converts them only when it calls the function of a command.
        ranks: their number; None: that of the configuration.

    Raises:
        ConfigError: the error that every rank would report. LaunchFailed: a process could not be started.
    """
    return asyncio.run(Launcher(plan(arguments, options, ranks=ranks, grace_s=grace_s, elastic=elastic)).run())


def plan(
    arguments: Sequence[str],
    options: Mapping[str, Any],
    *,
    ranks: int | None,
    grace_s: float,
    elastic: ElasticLaunch | None = None,
) -> Launch:
    """The processes to start; arguments as for :func:`launch_run`. Raises ConfigError."""
    for option in ("rank", "world", "job_name", "task_index"):
        if options.get(option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} is not for 'gradbus run', which gives every rank its own: use -n N"
            )
    overrides = settings_of(
        options["overrides"], insecure=bool(options.get("insecure")), run_dir=options.get("run_dir")
    )
    file = load(WorkerFile, Path(options["config"]), overrides=overrides, data_root=options["data_root"])
    check(file.bus, rank=0)  # the others have the same key file, and join rank 0
    world = _world(file, ranks, elastic)
    job = None if "job" in file.bus.model_fields_set else f"{file.bus.job}-{secrets.token_hex(4)}"

    width, settings = shutil.get_terminal_size((120, 24)).columns, file.parameter_server

    def name(rank: int) -> str:
        return f"rank {rank}" if rank < world else f"server {rank - world}"

    run_dir = file.run_dir or new_path(file.bus.job)
    more = [] if elastic is None else elastic.options(file, run_dir)
    before = outcome_of(run_dir), begun_at(run_dir)  # of an earlier start
    failed_at_start: set[int] = set()

    def has_begun() -> bool:
        return begun_at(run_dir) != before[1]

    def goes_on_without(ranks: Mapping[int, int]) -> bool:
        if elastic is not None:
            # What a rank fails with before the first generation, the others would fail with as well. Of one that was
            # killed this is not so, but process 0 alone makes that generation.
            if not has_begun():
                failed_at_start.update(rank for rank, code in ranks.items() if code > 0 or not rank)
            return not failed_at_start and world - len(ranks) >= elastic.min_world
        # Rank 0 writes the run directory, and without a server nobody goes on.
        if not settings.servers or not all(0 < rank < world for rank in ranks):
            return False
        return world - len(ranks) >= settings.workers_needed(world)

    def has_ended() -> bool:
        found = outcome_of(run_dir)
        return found is not None and found != before[0] and found[0] == "done"

    def command(rank: int, again: bool) -> list[str]:
        # -P: Python would put the current directory in front of everything that is installed. With prefixes the log is
        # no JSON any more, so it is for people, and at warnings; options of the user's come later, and win.
        place = ["--rank", str(rank)] if rank < world else ["--job-name", "ps", "--task-index", str(rank - world)]
        own = [*place, "--world", str(world), "--log-style", "console", "--log-level", "warning", *more]
        # Process 0 begins the run, if it was killed before it has: there is nothing to join.
        join = ["--join"] if again and (rank or has_begun()) else []
        return [sys.executable, "-P", "-m", "gradbus", "worker", *own, *join, *arguments]

    def environment(rank: int) -> dict[str, str | None]:
        return {
            "RANK": str(rank) if rank < world else None,
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "GRADBUS_RANK": None,
            "GRADBUS_WORLD": None,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TF_CONFIG": None,
            "COLUMNS": str(max(40, width - len(f"[{name(rank)}] "))),
            **({} if job is None else {"GRADBUS_BUS__JOB": job}),
        }

    return Launch(
        world=world + settings.servers,
        command=command,
        environment=environment,
        grace_s=grace_s,
        name=name,
        goes_on_without=goes_on_without,
        ends_together=elastic is not None,
        has_ended=has_ended,
        restarts=0 if elastic is None else elastic.restarts,
    )


def _world(file: WorkerFile, ranks: int | None, elastic: ElasticLaunch | None) -> int:
    """The number of ranks to start. Raises ConfigError."""
    if elastic is not None:
        world = elastic.max_world if ranks is None else ranks
        if not elastic.min_world <= world <= elastic.max_world:
            raise ConfigError(f"-n must be {elastic.min_world} to {elastic.max_world}, as --elastic says, got {world}")
        return world
    found = file.world if ranks is None else ranks
    if found is None:
        raise ConfigError("the number of ranks is missing. Use -n N, or set world in the configuration")
    if not 1 <= found <= MAX_WORLD:
        raise ConfigError(f"-n must be 1 to {MAX_WORLD}, got {found}")
    return found
