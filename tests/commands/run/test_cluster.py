"""Roles as TensorFlow names them: a job name and an index, or TF_CONFIG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.run.cluster import Role, find_role
from gradbus.runtime.errors import ConfigError

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]}


def config(kind: Any, index: Any, cluster: Any = CLUSTER) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_without_either_there_is_no_role() -> None:
    assert find_role(environment={}) is None
    assert find_role(environment={**config("ps", 0), "RANK": "1"}) is None, "a rank is stronger"


@pytest.mark.parametrize(
    ("kind", "index", "role"),
    [
        ("chief", 0, Role("worker", 0, 3, 2)),
        ("worker", 0, Role("worker", 1, 3, 2)),
        ("worker", 1, Role("worker", 2, 3, 2)),
        ("ps", 1, Role("server", 1, 3, 2)),
    ],
)
def test_tf_config_gives_ranks_and_numbers(kind: str, index: int, role: Role) -> None:
    assert find_role(environment=config(kind, index)) == role
    assert find_role(kind, index, config("ps", 0)) == role, "options are stronger than its task"


def test_a_job_name_and_an_index_are_enough() -> None:
    assert find_role("ps", 3, {}) == Role("server", 3)
    assert find_role("worker", 3, {}) == Role("worker", 3)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (config("ps", 2), r"index of 0 to 1, for the cluster has 2 of type ps, got 2"),
        (config("worker", -1), "got -1"),
        (config("worker", "0"), "got '0'"),
        (config("evaluator", 0), "there is no evaluator"),
        (config("tpu", 0), "expected worker, chief or ps, got 'tpu'"),
        (config("ps", 0, {"worker": ["a:1"], "ps": []}), "of type ps, and the cluster has none. List the addresses"),
        (config("ps", 0, {"worker": ["a:1"]}), "of type ps, and the cluster has none"),
        (config("ps", 0, {"ps": 2}), "cluster.ps must be a list of addresses"),
        ({"TF_CONFIG": "{"}, "Expected JSON such as"),
        ({"TF_CONFIG": "[]"}, "Expected JSON such as"),
        ({"TF_CONFIG": "{}"}, "expected worker, chief or ps, got None"),
    ],
)
def test_what_cannot_be_read_is_named(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_role(environment=environment)


def test_a_job_name_needs_its_index() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        find_role("ps", None, {})


@pytest.mark.parametrize("cluster", [{"worker": ["a:1"]}, {"worker": ["a:1"], "ps": []}])
def test_a_cluster_without_servers_and_a_file_with_some_are_not_taken_for_a_run_without(
    cluster: dict[str, Any], invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "served.json"
    path.write_text('{"parameter_server": {"servers": 2}}')
    monkeypatch.setenv("TF_CONFIG", config("worker", 0, cluster)["TF_CONFIG"])
    ended = invoke("worker", path)
    assert ended.code == ExitCode.CONFIG
    assert "the cluster has no ps, but parameter_server.servers is 2" in " ".join(ended.err.split())
