"""The commands of docs/trees.md: a centre, two sites and their clients, as real processes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Forked
from fresh_shells import command_lines, write_mnist

from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.files import ClientFile, ControllerFile, load
from gradbus.commands.run import commands
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_the_commands_of_the_page_run_a_tree(root: Path, tmp_path: Path, domain: int) -> None:
    write_mnist(tmp_path / "data")
    variables = {
        "GRADBUS_DATA": str(tmp_path / "data"), "GRADBUS_BUS__DOMAIN": str(domain),
        "GRADBUS_UPSTREAM__BUS__DOMAIN": str(domain),
    }  # fmt: skip
    running, folders = [], []
    for number, line in enumerate(command_lines((root / "docs" / "trees.md").read_text(encoding="utf-8"))):
        if "robot_fleet" in line:  # tests/experiments/examples/test_robot_fleet.py runs it
            continue
        words = shlex.split(line)[1:]
        if words[0] == "controller":
            folders.append(tmp_path / f"run-{number}")
            words += ["--no-live", "--run-dir", str(folders[-1])]
        if words[1].endswith("tree-centre.conf.json"):
            words += ["--set", "federated.rounds=2", "--set", "federated.training.subset_size=8"]
        running.append(Forked(words, root, variables))
    try:
        assert len(running) == 7
        for process in running:
            out, errors = process.communicate(timeout=150.0)
            assert process.returncode == 0, out + errors
    finally:
        for process in running:
            process.kill()
    weights = [
        [json.loads(line)["weights_crc32"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert weights == [weights[0]] * 3  # at each level the same models
    assert len(set(weights[0])) == 2


def test_the_examples_of_a_tree_fit_each_other(configs: Path) -> None:
    centre, region, site = (load(ControllerFile, configs / f"tree-{name}.conf.json") for name in LEVELS)
    client = load(ClientFile, configs / "tree-client.conf.json")
    assert (centre.upstream.site, region.upstream.site, site.upstream.site) == (None, 0, 0)
    assert region.upstream.bus == site.upstream.bus == centre.bus
    assert client.bus == site.bus
    assert [file.federated.clients.kind for file in (centre, region, site)] == ["sites", "sites", "clients"]


LEVELS = ("centre", "region", "site")


@pytest.mark.parametrize(
    ("override", "text"),
    [("upstream.bus.job=site-0-{user}", "each level has a job of its own"), ("upstream.site=null", "site is missing")],
)
def test_a_level_without_a_name_of_its_own_is_refused(override: str, text: str, configs: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        load(ControllerFile, configs / "tree-site.conf.json", overrides=[override])


def test_rules_that_are_not_for_a_site_are_refused_before_its_data_are_looked_for(invoke: Any, configs: Path) -> None:
    ended = invoke("controller", configs / "tree-site.conf.json", "--set", "federated.strategy=median")
    assert "federated.strategy is median: a site adds up exact sums" in " ".join(ended.err.split())
    assert ended.code == ExitCode.CONFIG


@pytest.mark.parametrize("own_deadline", [{}, {"timeout_s": 100.0}])
def test_a_site_starts_again_from_the_configuration_that_it_has_written(
    own_deadline: dict[str, float], invoke: Any, domain: int, configs: Path, tmp_path: Path
) -> None:
    settings = json.loads((configs / "tree-site.conf.json").read_text(encoding="utf-8"))
    settings["bus"]["domain"] = settings["upstream"]["bus"]["domain"] = domain
    settings["upstream"]["timeout_s"] = 0.5  # there is no level above
    settings["task"] |= {"data": "glyphs", "data_options": {"train": 40, "test": 20}}
    settings["federated"]["round"] = own_deadline
    (tmp_path / "site.json").write_text(json.dumps(settings), encoding="utf-8")
    run = tmp_path / "run"
    first = invoke("controller", tmp_path / "site.json", "--run-dir", run)
    again = invoke("controller", run / "config.json")
    assert (first.code, again.code) == (ExitCode.NOBODY_CAME, ExitCode.NOBODY_CAME), first.err + again.err
    written = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert written["federated"]["clients"]["num"] == 2
    assert "timeout_s" not in written["federated"]["round"] or own_deadline
    assert load(ControllerFile, run / "config.json").federated.round.timeout_s == own_deadline.get("timeout_s", 300.0)


def test_a_site_without_protection_is_allowed_to_be_on_both_of_its_buses(
    invoke: Any, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def check(settings: BusSettings) -> None:
        seen.append(settings.insecure)
        if len(seen) == 2:
            raise ConfigError("both were looked at")

    monkeypatch.setattr(commands, "check", check)
    assert "both were looked at" in invoke("controller", configs / "tree-site.conf.json", "--insecure").err
    assert seen == [True, True]
