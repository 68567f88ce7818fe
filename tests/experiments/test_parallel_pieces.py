"""The pieces of the commands of data-parallel training that need no other process."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from gradbus.actors import EpochReport
from gradbus.experiments.cli.exit_codes import exit_code_of
from gradbus.experiments.files import WorkerFile, load
from gradbus.experiments.launch.command import plan
from gradbus.experiments.run.configured_task import ConfiguredShardTask
from gradbus.experiments.run.data_parallel import check_equal_facts
from gradbus.experiments.run.live import Lines, epoch_line, epochs_table
from gradbus.experiments.run.rank_environment import RankPlace, find_place
from gradbus.experiments.rundir.directory import WorkerDirectory
from gradbus.runtime import errors
from gradbus.runtime.errors import ConfigError

REPORT = EpochReport(
    epoch=1, step=20, loss=0.5, accuracy=0.9, step_s_mean=0.0123, wait_s_mean=0.004, bytes_out_per_step=1_628_200,
    density=0.001, seconds=2.5,
)  # fmt: skip
DEFAULTS = {"rank": None, "world": None, "overrides": None, "data_root": None}


# -- which rank --------------------------------------------------------------------------------------------------------


def test_rank_and_world_come_from_the_strongest_that_gives_them() -> None:
    """One by one: an option for the rank, and the environment for the world, for example."""
    everything = {"GRADBUS_RANK": "3", "GRADBUS_WORLD": "4", "RANK": "5", "WORLD_SIZE": "6", "WORLD": "7"}
    assert find_place(rank=0, world=1, file_rank=1, file_world=2, environment=everything) == (0, 1)
    assert find_place(rank=0, file_rank=1, file_world=2, environment=everything) == (0, 2)
    assert find_place(environment=everything) == (3, 4)
    assert find_place(environment={"RANK": "5", "WORLD_SIZE": "6", "WORLD": "7"}) == (5, 6)
    assert find_place(environment={"RANK": "5", "WORLD": "7", "GRADBUS_RANK": ""}) == RankPlace(5, 7)


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ({}, {}, "no world is given"),
        ({"world": 2}, {}, "no rank is given"),
        ({"rank": 2}, {"WORLD": "2"}, r"rank must be 0 to 1, for world is 2 \(\$WORLD\); got 2 \(--rank\)"),
        ({"rank": -1, "world": 2}, {}, "rank must be 0 to 1"),
        ({"file_rank": 1, "world": 1}, {}, r"rank must be 0; got 1 \(the configuration\)"),
        ({"rank": 0, "world": 0}, {}, "world must be 1 to 1024, got 0"),
        ({"rank": 0, "world": 1025}, {}, "world must be 1 to 1024, got 1025"),
        ({}, {"RANK": "0", "WORLD_SIZE": "two"}, r"\$WORLD_SIZE must be a whole number, got 'two'"),
    ],
)
def test_a_wrong_place_is_an_error_that_says_how_to_give_it(given, environment, said) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        find_place(**given, environment=environment)
    assert "'gradbus run -n N'" in str(caught.value)


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", "ddp-dgc", "ddp.two-machines"])
def test_every_example_loads_and_names_a_task_for_workers(name: str, configs: Path) -> None:
    file = load(WorkerFile, configs / f"{name}.conf.json")
    assert file.worker.exchange == ("dgc" if "dgc" in name else "dense")
    model = ConfiguredShardTask(file.task).build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 407_050


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_a_setting_of_clients_is_refused_rather_than_ignored(key: str, configs: Path) -> None:
    with pytest.raises(ConfigError, match=f"task.{key} is a setting of federated clients; workers take worker.{key}"):
        load(WorkerFile, configs / "ddp.conf.json", overrides=[f"task.{key}=0.5"])


def test_a_task_of_ones_own_without_the_methods_of_a_worker_is_refused(configs: Path) -> None:
    file = load(WorkerFile, configs / "ddp.conf.json", overrides=["task.task=gradbus.models:FlatModel"])
    with pytest.raises(ConfigError, match="options"):
        ConfiguredShardTask(file.task)
    settings = file.task.model_copy(update={"task_options": {"dim": 3}})
    with pytest.raises(ConfigError, match=r"FlatModel, has no .*prepare_shard.*; see gradbus.actors.DataParallelTask"):
        ConfiguredShardTask(settings)


def test_ranks_with_other_data_are_refused() -> None:
    facts = {"task.data": "mnist", "task.batch_size": 64}
    check_equal_facts([facts, dict(facts)])
    check_equal_facts([{}, {}])
    with pytest.raises(ConfigError, match=r"task.data: rank 1 has 'glyphs', rank 0 has 'mnist'"):
        check_equal_facts([facts, facts | {"task.data": "glyphs"}])


def test_every_error_of_a_worker_has_its_exit_code() -> None:
    codes = {
        errors.PeerLost("world", {1: "left"}): 9,
        errors.CollectiveTimeout("x", [1], 1.0): 9,
        errors.ReplicasDiverged(1, [1, 2]): 10,
        errors.CollectiveError("x"): 11,
        errors.BarrierTimeout("x", missing=(1,), ready=1, needed=2, timeout_s=1.0): 4,
    }
    assert {error: exit_code_of(error) for error in codes} == codes


# -- what is launched --------------------------------------------------------------------------------------------------


def launch(arguments: list[str], ranks: int | None = 2, **options):
    return plan(arguments, {**DEFAULTS, "config": Path(arguments[0]), **options}, ranks=ranks, grace_s=5.0)


def test_a_job_without_a_name_gets_its_own_in_every_launch(configs: Path) -> None:
    arguments = [str(configs / "ddp.conf.json")]
    first, second = launch(arguments), launch(arguments)
    names = [planned.environment(rank)["GRADBUS_BUS__JOB"] for planned in (first, second) for rank in (0, 1)]
    assert names[0] == names[1] != names[2] == names[3]
    assert all(name.startswith("default-") for name in names)


@pytest.mark.parametrize("how", ["file", "option", "environment"])
def test_a_job_with_a_name_keeps_it(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"bus": {"job": "mine"}} if how == "file" else {}))
    if how == "environment":
        monkeypatch.setenv("GRADBUS_BUS__JOB", "mine")
    planned = launch(["mine.json"], overrides=["bus.job=mine"] if how == "option" else None)
    assert "GRADBUS_BUS__JOB" not in planned.environment(0)


def test_every_rank_is_told_its_place_in_all_the_usual_ways(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    planned = launch(["x.json", "--set", "worker.lr=1"], ranks=3)
    variables = planned.environment(2)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["GRADBUS_RANK"]) == ("2", "3", None)
    command = list(planned.command(2))
    assert command[command.index("worker") :] == [
        "worker", "--rank", "2", "--world", "3", "--log-style", "console", "--log-level", "warning", "x.json", "--set",
        "worker.lr=1",
    ]  # fmt: skip


def test_the_number_of_ranks_may_be_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"world": 3}')
    assert launch(["x.json"], ranks=None).world == 3
    assert launch(["x.json"], ranks=2).world == 2


# -- the run directory -------------------------------------------------------------------------------------------------


def test_a_rank_that_sees_the_directory_of_rank_0_shares_it(tmp_path: Path) -> None:
    first = WorkerDirectory(Path("runs/one"), 0)
    assert WorkerDirectory.meet(first.invitation(), Path("mine"), 1).path == tmp_path / "runs" / "one"


@pytest.mark.parametrize(("own", "path"), [(Path("mine"), "mine"), (None, "runs/one")])
def test_a_rank_on_another_machine_has_a_directory_of_its_own(own: Path | None, path: str, tmp_path: Path) -> None:
    """There may be one at that very path: left by another run, or by an earlier start of this one."""
    told = WorkerDirectory(tmp_path / "there" / "one", 0).invitation()
    WorkerDirectory(tmp_path / "there" / "one", 0)
    assert WorkerDirectory.meet(told, own, 1).path == Path(path)


def test_what_was_done_after_the_checkpoint_of_a_resume_is_taken_out_of_the_reports(tmp_path: Path) -> None:
    reports = [EpochReport(epoch=epoch, step=10 * epoch, loss=1.0) for epoch in range(4)]
    before = [*(json.dumps(report.to_json()) for report in reports[:3]), '{"epoch": 3, "cut off']
    (tmp_path / "epochs.jsonl").write_text("\n".join(before))
    directory = WorkerDirectory(tmp_path, 0)
    directory.add(reports[2])
    directory.add(reports[3])
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    assert [EpochReport.from_json(json.loads(line)) for line in lines] == reports


def test_the_best_accuracy_of_a_run_is_that_of_all_its_epochs_also_after_a_resume(tmp_path: Path) -> None:
    for epoch, accuracy in enumerate((0.8, 0.9, None, 0.7)):
        started_again = WorkerDirectory(tmp_path, 0)
        started_again.add(EpochReport(epoch=epoch, step=10, loss=1.0, accuracy=accuracy))
    started_again.finish(outcome="done")
    assert json.loads((tmp_path / "summary.json").read_text())["best_accuracy"] == 0.9
    assert [report.accuracy for report in started_again.reports()] == [0.8, 0.9, None, 0.7]


def test_an_epoch_of_a_rank_other_than_0_is_one_short_line() -> None:
    assert epoch_line(REPORT, 3, of_all=False) == (
        "epoch 2/3: loss 0.5000, step 12.3 ms, wait 4.0 ms, sent 1.63 MB per step"
    )


def test_the_configuration_that_is_kept_can_be_read_again(configs: Path, tmp_path: Path) -> None:
    overrides = ["rank=0", "world=2", "run_dir=runs/x", "task.batch_size=7"]
    file = load(WorkerFile, configs / "ddp-dgc.conf.json", overrides=overrides)
    WorkerDirectory(tmp_path, 0).write_config(file)
    assert load(WorkerFile, tmp_path / "config.json") == file.model_copy(update={"rank": None})


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run directory file/run cannot be written: Not a directory"):
        WorkerDirectory(Path("file/run"), 0)


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_an_epoch_is_one_plain_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    Lines(console, lambda report: epoch_line(report, 3)).done(REPORT)
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "epoch 2/3: step 20, loss 0.5000, accuracy 90.00 %, step 12.3 ms, wait 4.0 ms, sent 1.63 MB per step, "
        "density 0.1 %, epoch 2.50 s\n"
    )


def test_the_table_shows_the_same() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(epochs_table([REPORT]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("epoch", "20", "0.5000", "90.00 %", "12.3", "4.0", "1.63 MB", "0.1 %", "2.50"):
        assert text in shown


@pytest.fixture(autouse=True)
def _no_rank_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"RANK", "WORLD", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        monkeypatch.delenv(name)
