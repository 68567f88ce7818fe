"""The command ``run`` for a script of one's own: the environment of each rank, as torchrun gives it.

With ``--elastic`` a rank that is killed is started again and joins the others. The script's training function must be
one of ``gradbus.torch.elastic.run``.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from gradbus.commands.launch.command import LAST_CALL_S, ElasticLaunch
from gradbus.commands.launch.launcher import Launch, Launcher
from gradbus.commands.rank_environment import MAX_WORLD
from gradbus.runtime.config.bus import default_job
from gradbus.runtime.cores import usable_cores
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.nearest import nearest

_PYTHON = re.compile(r"python[0-9.]*(\.exe)?")
_JOIN_WAIT_S = 30.0
"""How long a rank that is started again looks for the others, which may have ended meanwhile."""


def is_script(arguments: Sequence[str]) -> bool:
    """Return whether these name a Python script, or a module with ``-m``, instead of a configuration file; also where
    Python itself is named before it, which :func:`plan_script` refuses."""
    return arguments[0] == "-m" or arguments[0].endswith((".py", ".pyc")) or _names_python(arguments)


def _names_python(arguments: Sequence[str]) -> bool:
    return _PYTHON.fullmatch(os.path.basename(arguments[0])) is not None


def launch_script(arguments: Sequence[str], *, ranks: int | None, grace_s: float, elastic: ElasticLaunch | None) -> int:
    """Start the ranks and wait for their end. Returns the exit code of the launch.

    Args:
        arguments: the script and its own arguments, for every rank.
        ranks: their number; None: the most that ``elastic`` allows.

    Raises:
        ConfigError: the number of ranks is missing or out of range, or there is no such script or module.
        LaunchFailed: a process could not be started.
    """
    plan = plan_script(arguments, ranks=ranks, grace_s=grace_s, elastic=elastic)
    check_exists(arguments)
    return asyncio.run(Launcher(plan).run())


def plan_script(
    arguments: Sequence[str],
    *,
    ranks: int | None,
    grace_s: float,
    elastic: ElasticLaunch | None,
    variables: Mapping[str, str] = os.environ,
) -> Launch:
    """Return the processes to start; arguments as for :func:`launch_script`. Raises ConfigError."""
    if arguments[0] == "-m" and len(arguments) < 2:
        raise ConfigError("-m: the name of a module is missing, as in: gradbus run -n 2 -- -m package.train")
    if _names_python(arguments):
        rest = " ".join(arguments[1:]) or "train.py"
        raise ConfigError(
            f"{arguments[0]}: ranks are started with the Python of this command, so name the script only, as in: "
            f"gradbus run -n 2 -- {rest}"
        )
    world = elastic.max_world if ranks is None and elastic is not None else ranks
    if world is None:
        raise ConfigError("the number of ranks is missing: use -n N, or --elastic MIN:MAX")
    bounds = (1, MAX_WORLD) if elastic is None else (elastic.min_world, elastic.max_world)
    if not bounds[0] <= world <= bounds[1]:
        raise ConfigError(f"-n must be {bounds[0]} to {bounds[1]}, got {world}")
    own = _common(world, variables)
    own |= _elastic(elastic, variables) if elastic is not None else _rendezvous()
    again: set[int] = set()

    def command(rank: int, is_again: bool) -> list[str]:
        again.update({rank} if is_again else ())
        return [sys.executable, *arguments]

    def environment(rank: int) -> dict[str, str | None]:
        joins = {"GRADBUS_ELASTIC__JOIN": "true", "GRADBUS_ELASTIC__WAIT_S": f"{_JOIN_WAIT_S:g}"}
        joins["GRADBUS_ELASTIC__LAST_CALL_S"] = f"{_JOIN_WAIT_S / 2:g}"
        return {**own, "RANK": str(rank), "LOCAL_RANK": str(rank), **(joins if rank in again else {})}

    def goes_on_without(failed: Mapping[int, int]) -> bool:
        return elastic is not None and world - len(failed) >= elastic.min_world

    return Launch(
        world=world,
        command=command,
        environment=environment,
        grace_s=grace_s,
        goes_on_without=goes_on_without,
        ends_together=elastic is not None,
        restarts=0 if elastic is None else elastic.restarts,
    )


def check_exists(arguments: Sequence[str]) -> None:
    """Raises ConfigError: there is no such script or module, which each rank would report by itself."""
    if fault := _fault_of_module(arguments[1]) if arguments[0] == "-m" else _fault_of_script(Path(arguments[0])):
        raise ConfigError(fault)


def _fault_of_script(script: Path) -> str:
    """Return why Python could not run this script; empty: it can."""
    try:
        if script.is_file() or (script / "__main__.py").is_file():
            return ""
        if script.is_dir():
            return f"{script} is a folder: name the script in it, as in: gradbus run -n 2 -- {script}/train.py"
        others = [one.name for one in script.parent.glob("*.py")] if script.parent.is_dir() else []
        near = nearest(script.name, others)
        advice = f"Did you mean {script.parent / near}?" if near else "Give its path from there, or an absolute one"
        return f"there is no script {str(script)!r}, as seen from {Path.cwd()}. {advice}"
    except OSError as error:  # a name that is too long, a folder that this user may not enter, ...
        return f"the script {str(script)!r:.200} cannot be read: {error.strerror}. Check its path and its permissions"


def _fault_of_module(name: str) -> str:
    """Return why ``python -m`` would not find this module; empty: it would, or its finder cannot tell before the
    packages around it are imported. Nothing is imported, as that is for the ranks."""
    try:
        fault = _missing_of(name)
        return f"-m {name}: {fault}" if fault else ""
    except Exception:  # finders are others' code, and may need an import first: the ranks report what is wrong
        return ""


def _missing_of(name: str) -> str:
    package, path = "", None
    for part in name.split("."):
        found = None if package and path is None else _spec_of(part, package, path)
        if found is None:
            where = f"package {package!r} has no module {part!r}" if package else f"there is no module {part!r}"
            return (
                f"{where}, as seen from {Path.cwd()}. Start the command in the folder that has it, or install it into "
                f"the Python of this command, {sys.executable}"
            )
        path = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if path is not None and _changes_its_path(found):
            return ""
        package = f"{package}.{part}" if package else part
    if path is not None and _spec_of("__main__", package, path) is None:
        return f"it is a package without __main__.py. Name a module in it, as -m {name}.train"
    return ""


def _spec_of(part: str, package: str, path: list[str] | None) -> ModuleSpec | None:
    """Find a module as an import in a rank does, which has the current directory in front.

    Args:
        part: the last part of its name. package: in which it is, which is not imported for that; empty: in none.
        path: the folders of that package.
    """
    full = f"{package}.{part}" if package else part
    for finder in sys.meta_path:
        if finder is PathFinder:
            # One search, for an installed package comes before folders of its name. By the full name, a namespace in a
            # package would look for that among the imported modules.
            found = PathFinder.find_spec(part, [os.getcwd(), *sys.path] if path is None else path)
        else:
            find = getattr(finder, "find_spec", None)
            found = None if find is None else find(full, path)
        if found is not None:
            return found
    return None


def _changes_its_path(package: ModuleSpec) -> bool:
    """Whether a package sets where its modules are only when it is imported."""
    try:
        return "__path__" in Path(package.origin or "").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a package without a file of its own has its modules where they are found
        return False


def _common(world: int, variables: Mapping[str, str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in variables:
        found["OMP_NUM_THREADS"] = str(max(1, usable_cores() // world))
    if "GRADBUS_BUS__JOB" not in variables:  # so that two launches do not disturb each other
        found["GRADBUS_BUS__JOB"] = f"{default_job()[:40]}-{secrets.token_hex(4)}"
    return found


def _elastic(elastic: ElasticLaunch, variables: Mapping[str, str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "GRADBUS_ELASTIC__MIN_WORLD": str(elastic.min_world), "GRADBUS_ELASTIC__MAX_WORLD": str(elastic.max_world),
        "GRADBUS_ELASTIC__JOIN": None, "TORCHELASTIC_RUN_ID": None,
    }  # fmt: skip
    if "GRADBUS_ELASTIC__LAST_CALL_S" not in variables and "GRADBUS_ELASTIC__WAIT_S" not in variables:
        found["GRADBUS_ELASTIC__LAST_CALL_S"] = f"{LAST_CALL_S:g}"
    return found


def _rendezvous() -> dict[str, str | None]:
    """For ``init_process_group`` without an address: rank 0 listens there, as it does under torchrun --standalone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": None,
        "TORCHELASTIC_RUN_ID": None,
    }
