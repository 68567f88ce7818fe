"""The command ``run``: arguments and environment of each rank, and one error in place of one from every rank."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradbus.experiments.buses import check
from gradbus.experiments.files import WorkerFile, load
from gradbus.experiments.launch.launcher import Launch, Launcher
from gradbus.experiments.run.rank_environment import MAX_WORLD
from gradbus.runtime.errors import ConfigError


def launch_run(arguments: Sequence[str], options: Mapping[str, Any], *, ranks: int | None, grace_s: float) -> int:
    """Run ``gradbus run``. Returns the exit code of the launch.

    Args:
        arguments: of ``gradbus worker``, for every rank. options: the same, parsed.
        ranks: their number; None: that of the configuration.

    Raises:
        ConfigError: the error that every rank would report. LaunchFailed: a process could not be started.
    """
    return asyncio.run(Launcher(plan(arguments, options, ranks=ranks, grace_s=grace_s)).run())


def plan(arguments: Sequence[str], options: Mapping[str, Any], *, ranks: int | None, grace_s: float) -> Launch:
    """The processes to start; arguments as for :func:`launch_run`. Raises ConfigError."""
    for option in ("rank", "world", "job_name", "task_index"):
        if options.get(option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} is not for 'gradbus run', which gives every rank its own: use -n N"
            )
    file = load(
        WorkerFile, options["config"], overrides=options["overrides"] or (), data_root=options["data_root"]
    )  # fmt: skip
    check(file.bus, rank=0)  # the others have the same key file, and join rank 0
    world = file.world if ranks is None else ranks
    if world is None:
        raise ConfigError("the number of ranks is missing. Use -n N, or set world in the configuration")
    if not 1 <= world <= MAX_WORLD:
        raise ConfigError(f"-n must be 1 to {MAX_WORLD}, got {world}")
    job = None if "job" in file.bus.model_fields_set else f"{file.bus.job}-{secrets.token_hex(4)}"

    width, settings = shutil.get_terminal_size((120, 24)).columns, file.parameter_server

    def name(rank: int) -> str:
        return f"rank {rank}" if rank < world else f"server {rank - world}"

    def goes_on_without(ranks: Collection[int]) -> bool:
        # Rank 0 writes the run directory, and without a server nobody goes on.
        if not settings.servers or not all(0 < rank < world for rank in ranks):
            return False
        return world - len(ranks) >= settings.workers_needed(world)

    def command(rank: int) -> list[str]:
        # -P: Python would put the current directory in front of everything that is installed. With prefixes the log is
        # no JSON any more, so it is for people, and at warnings; options of the user's come later, and win.
        place = ["--rank", str(rank)] if rank < world else ["--job-name", "ps", "--task-index", str(rank - world)]
        own = [*place, "--world", str(world), "--log-style", "console", "--log-level", "warning"]
        return [sys.executable, "-P", "-m", "gradbus", "worker", *own, *arguments]

    def environment(rank: int) -> dict[str, str | None]:
        return {
            "RANK": str(rank) if rank < world else None, "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "GRADBUS_RANK": None, "GRADBUS_WORLD": None, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
            "TF_CONFIG": None, "COLUMNS": str(max(40, width - len(f"[{name(rank)}] "))),
            **({} if job is None else {"GRADBUS_BUS__JOB": job}),
        }  # fmt: skip

    return Launch(
        world=world + settings.servers, command=command, environment=environment, grace_s=grace_s, name=name,
        goes_on_without=goes_on_without,
    )  # fmt: skip
