"""The commands of docs/personal.md as real processes: adapters alone travel, and the run can be exported."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from forked_commands import Forked
from fresh_shells import command_lines
from safetensors.torch import load_file

from gradbus.commands.rundir.export import export
from gradbus.experiments.examples.client_text import ClientTextTask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_the_example_of_adapters_trains_and_is_exported_whole(root: Path, tmp_path: Path, domain: int) -> None:
    lines = [shlex.split(line)[1:] for line in command_lines((root / "docs/personal.md").read_text("utf-8"))]
    commands = [words for words in lines if words[0] in ("controller", "client")]
    assert [words[0] for words in commands] == ["controller", "client", "client"]
    commands[0] += ["--no-live", "--run-dir", str(tmp_path / "run"), "--set", "federated.rounds=2"]
    small = 'task.task_options={"samples": 16, "lora": {"rank": 4, "alpha": 16}}'
    running = [Forked([*words, "--set", small], root, {"GRADBUS_BUS__DOMAIN": str(domain)}) for words in commands]
    try:
        for process in running:
            out, errors = process.communicate(timeout=100.0)
            assert process.returncode == 0, out + errors
    finally:
        for process in running:
            process.kill()
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert all(report["bytes_up"] < 2 * 50_000 for report in rounds)
    assert all(report["eval_loss"] > 0 for report in rounds), "no tensor is personal: there is a whole model"
    done = export(tmp_path / "run")
    assert done.is_whole
    assert done.personal == []
    model = ClientTextTask(lora={"rank": 4, "alpha": 16}).build_model()
    found = load_file(done.path)
    changed = {name for name, tensor in model.state_dict().items() if not tensor.equal(found[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"lora_a", "lora_b"}
