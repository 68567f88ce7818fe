"""Translate the variables of a launcher (Slurm, Open MPI, PMI) into those of torchrun.

The rest of gradbus reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE only. A launcher with other names is
translated here, once, where a process begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from gradbus.runtime.errors import ConfigError

MAX_NODELIST_CHARS = 65_536
_MAX_DIGITS = 9
_HOW = "A launcher sets it: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE to use these instead"
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9])?")
_FIRST_PORT = 20_000  # below the ports that systems give to outgoing connections


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables to the place that another launcher has given to this process; keep those that are set.

    Raises:
        ConfigError: a launcher's variable is not what it should be.
    """
    for name, text in torchrun_variables(environment).items():
        if not environment.get(name, "").strip():
            environment[name] = text


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables from those of Open MPI, Slurm or PMI; none where RANK or WORLD_SIZE is set.

    MASTER_ADDR is the first host of a Slurm job, where its first task runs, or this machine where all ranks are on it.
    Open MPI's variables come first: below ``mpirun`` in a Slurm job, Slurm's are those of its daemon on this node.

    Raises:
        ConfigError: a variable of the launcher is not what it should be.
    """
    if any(environment.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")):
        return {}
    if "OMPI_COMM_WORLD_RANK" in environment:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        found = _numbers(environment, *names)
    elif _is_slurm_task(environment):
        found = _numbers(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        found["LOCAL_WORLD_SIZE"] = str(_slurm_tasks_here(environment))
    elif "PMI_RANK" in environment:
        found = _numbers(environment, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    else:
        return {}
    return found | _master(environment, found)


def launch_name(environment: Mapping[str, str]) -> str | None:
    """Return a name that the processes of this launch share, and no other launch has; None: the launcher gives none.

    A Slurm job that was requeued has its old number, and processes of the earlier start may still run on a lost node:
    so the restart is part of the name.
    """
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        found = f"torchrun-{name}"
    elif _is_slurm_task(environment):
        numbers = (_number(environment, f"SLURM_{part}", "0") for part in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
        found = "slurm-" + "-".join(map(str, numbers))
    else:
        return None
    return re.sub(r"[^A-Za-z0-9._-]", "-", found)[:64]


def first_host(nodelist: str) -> str:
    """Return the first host of a list as Slurm writes it: ``gpu[07-09,12],login`` begins with ``gpu07``.

    Raises:
        ConfigError: it is no such list, or longer than MAX_NODELIST_CHARS.
    """
    if len(nodelist) > MAX_NODELIST_CHARS:
        raise ConfigError(
            f"the node list has {len(nodelist)} characters, expected at most {MAX_NODELIST_CHARS}: set MASTER_ADDR to "
            f"the host of rank 0"
        )
    first = re.match(r"[^\[,]*(?:\[[^\]]*\][^\[,]*)*(?=,|\Z)", nodelist)
    text = "" if first is None else re.sub(r"\[(\d{1,9})(?:[-,][\d,-]*)?\]", r"\1", first[0])
    if _HOST.fullmatch(text) is None:
        raise ConfigError(
            f"the node list begins with {nodelist[:80]!r}, expected hosts such as 'gpu[07-09],login': set MASTER_ADDR "
            f"to the host of rank 0"
        )
    return text


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether ``srun`` has started this process: a batch script has only a part of the variables.

    With PMI of another size, a process manager has started this process, and ``srun`` the manager.
    """
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return False
    ours = environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"]
    return (environment.get("PMI_RANK", ours[0]), environment.get("PMI_SIZE", ours[1])) == ours


def _master(environment: Mapping[str, str], place: Mapping[str, str]) -> dict[str, str]:
    job = _number(environment, "SLURM_JOB_ID", "0")
    port = {"MASTER_PORT": str(_FIRST_PORT + job % 10_000 if job else 29_500)}  # 29500: torch's own
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if "OMPI_COMM_WORLD_RANK" in environment:  # the step is that of mpirun's daemons, on the other nodes only
        nodes = environment.get("SLURM_JOB_NODELIST")
    if place.get("LOCAL_WORLD_SIZE") == place["WORLD_SIZE"]:
        return {"MASTER_ADDR": "127.0.0.1", **port}
    return {"MASTER_ADDR": first_host(nodes), **port} if nodes else {}


def _numbers(environment: Mapping[str, str], *variables: str) -> dict[str, str]:
    """Return rank, world, local rank and local world; the first two are needed."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        name: str(_number(environment, variable))
        for name, variable in zip(names, variables, strict=False)
        if name in names[:2] or variable in environment
    }


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks on this node, of a list such as ``2(x3),1``: three nodes with two, one with one."""
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text, node = environment.get(variable, ""), _number(environment, "SLURM_NODEID", "0")
    left = node
    for group in text[:MAX_NODELIST_CHARS].split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", group, re.ASCII)
        if found is None:
            break
        times = int(found[2] or 1)
        if left < times:
            return int(found[1])
        left -= times
    raise ConfigError(
        f"${variable} is {text[:80]!r}, expected the tasks of each node, such as '2(x3),1', and of node {node}. {_HOW}"
    )


def _number(environment: Mapping[str, str], variable: str, default: str = "") -> int:
    text = environment.get(variable, default)
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ConfigError(
            f"${variable} must be a whole number of at most {_MAX_DIGITS} digits, got {text[:40]!r}. {_HOW}"
        )
    return int(text)
