"""The role of a process as TensorFlow's ClusterSpec has it: a job name and a task index, or the variable TF_CONFIG.

    TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "ps", "index": 0}}'

Only the numbers of processes are read, and which one this is: DDS finds them by the name of the job, so addresses are
not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json

_MAX_CHARS = 1 << 20
_RANK_VARIABLES = ("GRADBUS_RANK", "RANK")
_EXPECTED = "worker, chief or ps"


@dataclass(frozen=True, slots=True)
class Role:
    """Holds what a process is. ``workers``, ``servers``: of the job, where they are known; 0 servers: a cluster
    without."""

    kind: Literal["worker", "server"]
    index: int
    workers: int | None = None
    servers: int | None = None


def find_role(
    job_name: str | None = None, task_index: int | None = None, environment: Mapping[str, str] | None = None
) -> Role | None:
    """From the options, else from TF_CONFIG, unless RANK or GRADBUS_RANK gives a rank; None: from neither.

    A chief is worker 0, and the others come behind it.

    Raises:
        ConfigError: the options or TF_CONFIG are wrong; the text says what was expected and what was found.
    """
    variables = os.environ if environment is None else environment
    has_options = job_name is not None or task_index is not None
    if has_options and (job_name is None or task_index is None):
        raise ConfigError("--job-name and --task-index belong together: give both, or --rank")
    text = variables.get("TF_CONFIG", "").strip()
    if not has_options and (not text or any(variables.get(name, "").strip() for name in _RANK_VARIABLES)):
        return None
    cluster, task = _read(text) if text else ({}, {})
    if has_options:
        task = {"type": job_name, "index": task_index}
    where = "--job-name, --task-index" if has_options else "$TF_CONFIG, task"
    chiefs = cluster.get("chief", 0) + cluster.get("master", 0)
    workers = chiefs + cluster.get("worker", 0) if cluster else None
    servers = cluster.get("ps", 0) if cluster else None
    kind, index = task.get("type"), task.get("index")
    count: int | None
    if kind in ("chief", "master"):
        kind, first, count = "worker", 0, chiefs if cluster else 1
    elif kind == "worker":
        first, count = chiefs, cluster.get("worker", 0) if cluster else None
    elif kind == "ps":
        first, count = 0, servers
    elif kind == "evaluator":
        raise ConfigError(f"{where}: there is no evaluator, each worker evaluates its part of the test set")
    else:
        raise ConfigError(f"{where}: expected {_EXPECTED}, got {kind!r:.100}")
    if count == 0:
        raise ConfigError(
            f"{where}: it is a process of type {task['type']}, and the cluster has none. List the addresses of all of "
            f"them in cluster.{task['type']}"
        )
    if not isinstance(index, int) or isinstance(index, bool) or index < 0 or (count is not None and index >= count):
        of = "0 or more" if count is None else f"0 to {count - 1}, for the cluster has {count} of type {task['type']}"
        raise ConfigError(f"{where}: expected an index of {of}, got {index!r:.100}")
    return Role("server" if kind == "ps" else "worker", first + index, workers, servers)


def _read(text: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The number of processes of each type, and the task."""
    try:
        if len(text) > _MAX_CHARS:
            raise ValueError(f"it has {len(text)} characters")
        found = parse_json(text)
        cluster, task = found.get("cluster", {}), found.get("task", {})
        if not isinstance(cluster, dict) or not isinstance(task, dict):
            raise ValueError("cluster and task must be objects")
        counts = {}
        for kind, addresses in cluster.items():
            if not isinstance(addresses, list | dict):
                raise ValueError(f"cluster.{kind:.50} must be a list of addresses")
            counts[kind] = len(addresses)
        return counts, task
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'$TF_CONFIG: {error}. Expected JSON such as {{"cluster": {{"worker": [...], "ps": [...]}}, "task": '
            f'{{"type": "ps", "index": 0}}}}'
        ) from None
