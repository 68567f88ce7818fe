"""The command that a stopped run suggests: it continues that run, with the settings that it was started with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from gradbus.commands.run.commands import VirtualOptions
from gradbus.commands.run.continuation import command_to_continue


def words(command: str, overrides: list[str], **more: Any) -> list[str]:
    return shlex.split(command_to_continue(command, Path("my runs/c.json"), Path("out 1"), overrides, **more))


def test_settings_of_the_command_line_are_in_the_command_as_a_shell_takes_them() -> None:
    options = '{"dim": 10, "name": "it\'s"}'
    own = ["bus.job=a b", f"task.task_options={options}", "federated.rounds=5", "bus.insecure=true"]
    expected = [word for one in own for word in ("--set", one)]
    assert words("controller", own, data_root=Path("data set")) == [
        "gradbus",
        "controller",
        "my runs/c.json",
        "--run-dir",
        "out 1",
        "--data-root",
        "data set",
        *expected,
    ]


def test_settings_that_would_keep_the_run_from_being_continued_are_not() -> None:
    own = ['run_dir="elsewhere"', "federated.checkpoint.resume=false", "federated.checkpoint.keep=3"]
    assert words("controller", own)[3:] == ["--run-dir", "out 1", "--set", "federated.checkpoint.keep=3"]


def test_more_rounds_take_the_place_of_those_that_were_set() -> None:
    assert words("controller", ["federated.rounds=5", "bus.job=j"], rounds=10)[5:] == [
        "--set",
        "bus.job=j",
        "--set",
        "federated.rounds=10",
    ]


@pytest.mark.parametrize(
    ("virtual", "expected"),
    [
        (VirtualOptions(7, None, 0), ["--clients", "7"]),
        (
            VirtualOptions(7, 0.5, 2, "local", 0.25),
            ["--clients", "7", "--fraction", "0.5", "--processes", "2", "--ray", "local", "--gpus", "0.25"],
        ),
    ],
)
def test_virtual_clients_are_as_many_and_train_as_before(virtual: VirtualOptions, expected: list[str]) -> None:
    found = words("virtual", ["federated.clients.num=7"], options=virtual.words)
    assert found == ["gradbus", "virtual", "my runs/c.json", *expected, "--run-dir", "out 1"]
