"""The command ``run``: arguments and environment of each rank, and one error in place of one from every rank."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
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
    for name in ("rank", "world"):
        if options[name] is not None:
            raise ConfigError(f"--{name} is not for 'gradbus run', which gives every rank its own: use -n N")
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

    width = shutil.get_terminal_size((120, 24)).columns

    def command(rank: int) -> list[str]:
        # -P: Python would put the current directory in front of everything that is installed. With prefixes the log is
        # no JSON any more, so it is for people, and at warnings; options of the user's come later, and win.
        own = ["--rank", str(rank), "--world", str(world), "--log-style", "console", "--log-level", "warning"]
        return [sys.executable, "-P", "-m", "gradbus", "worker", *own, *arguments]

    def environment(rank: int) -> dict[str, str | None]:
        return {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "GRADBUS_RANK": None, "GRADBUS_WORLD": None, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
            "COLUMNS": str(max(40, width - len(f"[rank {rank}] "))),
            **({} if job is None else {"GRADBUS_BUS__JOB": job}),
        }  # fmt: skip

    return Launch(world=world, command=command, environment=environment, grace_s=grace_s)
