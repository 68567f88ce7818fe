"""Which rank a process is, what its configuration may hold, and what a launch gives its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradbus.commands import configured_task
from gradbus.commands.configured_task import ConfiguredShardTask, local_device
from gradbus.commands.exit_codes import exit_code_of
from gradbus.commands.files import WorkerFile, load
from gradbus.commands.launch import command
from gradbus.commands.launch.command import ElasticLaunch, plan
from gradbus.commands.rank_environment import RankPlace, find_number, find_place
from gradbus.commands.run.data_parallel import check_equal_facts
from gradbus.commands.rundir.directory import write_json
from gradbus.runtime import errors
from gradbus.runtime.errors import ConfigError

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
    assert file.parallel.algorithm.name == ("dgc" if "dgc" in name else "dense")
    model = ConfiguredShardTask(file.task).build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 407_050


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_a_setting_of_clients_is_refused_rather_than_ignored(key: str, configs: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"task.{key} is a setting of federated clients; workers take parallel.optimizer.{key}"
    ):
        load(WorkerFile, configs / "ddp.conf.json", overrides=[f"task.{key}=0.5"])


def test_a_task_of_ones_own_without_the_methods_of_a_worker_is_refused(configs: Path) -> None:
    file = load(WorkerFile, configs / "ddp.conf.json", overrides=["task.task=gradbus.models:VectorModel"])
    with pytest.raises(ConfigError, match="options"):
        ConfiguredShardTask(file.task)
    settings = file.task.model_copy(update={"task_options": {"dim": 3}})
    with pytest.raises(
        ConfigError, match=r"VectorModel, has no .*prepare_shard.*; see gradbus.actors.DataParallelTask"
    ):
        ConfiguredShardTask(settings)


def test_ranks_with_other_data_are_refused() -> None:
    facts = {"task.data": "mnist", "task.batch_size": 64}
    check_equal_facts([facts, dict(facts)])
    check_equal_facts([{}, {}])
    with pytest.raises(ConfigError, match=r"task.data: rank 1 has 'glyphs', rank 0 has 'mnist'"):
        check_equal_facts([facts, facts | {"task.data": "glyphs"}])


def test_ranks_with_data_of_another_seed_and_equal_size_are_refused(configs: Path) -> None:
    """Also where they are no elastic ones."""
    facts = []
    for seed in (0, 1):
        more = ["task.data=glyphs", f'task.data_options={{"seed": {seed}, "train": 50, "test": 5}}']
        task = ConfiguredShardTask(load(WorkerFile, configs / "ddp.conf.json", overrides=more).task)
        task.load()
        facts.append(task.facts())
        assert task.data_digest() == facts[-1]["digest of the data"]
    with pytest.raises(ConfigError, match=r"digest of the data: rank 1 has .* with the same task.data_options"):
        check_equal_facts(facts)


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


def launch(arguments: list[str], ranks: int | None = 2, elastic: ElasticLaunch | None = None, **options):
    given = {**DEFAULTS, "config": Path(arguments[0]), **options}
    return plan(arguments, given, ranks=ranks, grace_s=5.0, elastic=elastic)


def test_a_job_without_a_name_gets_its_own_in_every_launch(configs: Path) -> None:
    arguments = [str(configs / "ddp.conf.json")]
    first, second = launch(arguments), launch(arguments)
    names = [planned.environment(rank)["GRADBUS_BUS__JOB"] for planned in (first, second) for rank in (0, 1)]
    assert names[0] == names[1] != names[2] == names[3]
    assert all(name.startswith("default-") for name in names)


def test_paths_may_be_texts_as_typer_before_0_29_parses_them(configs: Path, tmp_path: Path) -> None:
    folder, config = str(tmp_path / "run"), str(configs / "ddp.conf.json")
    planned = launch([config], None, ElasticLaunch.parse("2:2", restarts=0), config=config, run_dir=folder)
    assert planned.world == 2
    assert "--run-dir" not in planned.command(0, False)  # the ranks need no other: one is given


def test_elastic_ranks_get_their_bounds_one_run_directory_and_join_when_they_are_started_again(configs: Path) -> None:
    arguments = [str(configs / "ddp.conf.json")]
    planned = launch(arguments, None, elastic=ElasticLaunch.parse("2:4", restarts=3))
    assert (planned.world, planned.restarts) == (4, 3)
    commands = [planned.command(rank, again) for rank, again in ((0, False), (1, False), (1, True))]
    for words in commands:
        assert {"parallel.elastic.min_world=2", "parallel.elastic.max_world=4"} < set(words)
        assert "parallel.elastic.last_call_s=60" in words
    places = {words[words.index("--run-dir") + 1] for words in commands}
    assert len(places) == 1
    assert ["--join" in words for words in commands] == [False, False, True]


def test_a_last_call_of_the_configuration_is_left_alone_and_that_of_the_launcher_ends_before_all_give_up(
    configs: Path,
) -> None:
    def words(*settings: str) -> list[str]:
        arguments = [str(configs / "ddp.conf.json"), *(word for one in settings for word in ("--set", one))]
        elastic = ElasticLaunch.parse("1:2", restarts=0)
        planned = launch(arguments, None, elastic=elastic, overrides=settings)
        return [word for word in planned.command(1, False) if "last_call_s" in word]

    assert words("parallel.elastic.last_call_s=5") == ["parallel.elastic.last_call_s=5"]
    assert words("parallel.elastic.wait_s=30") == ["parallel.elastic.last_call_s=15"]
    with pytest.raises(ConfigError, match=r"last_call_s \(30\) has to be less than wait_s \(30\)"):
        words("parallel.elastic.last_call_s=30", "parallel.elastic.wait_s=30")


def test_process_0_of_an_elastic_launch_begins_the_run_until_it_has_begun_and_joins_it_later(
    configs: Path, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", {})  # of an earlier start
    bounds = ElasticLaunch.parse("2:4", restarts=3)
    planned = launch([str(configs / "ddp.conf.json")], None, elastic=bounds, run_dir=tmp_path)
    assert "--join" not in planned.command(0, True)
    write_json(tmp_path / "config.json", {})
    assert "--join" in planned.command(0, True)


def test_a_launch_without_protection_is_allowed_as_its_ranks_are(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(command, "check", lambda settings, rank: seen.append(settings.insecure))
    for insecure in (True, False):
        launch([str(configs / "ddp.conf.json"), "--insecure"], insecure=insecure)
    assert seen == [True, False]


def test_elastic_ranks_go_on_while_enough_of_them_are_left_whichever_they_are(configs: Path, tmp_path: Path) -> None:
    bounds = ElasticLaunch.parse("2:4", restarts=0)
    planned = launch([str(configs / "ddp.conf.json")], None, elastic=bounds, run_dir=tmp_path)
    write_json(tmp_path / "config.json", {})
    assert planned.goes_on_without({1: 1})
    assert planned.goes_on_without({0: -9, 3: 1})
    assert not planned.goes_on_without({0: -9, 1: -9, 3: -9})
    assert planned.ends_together


@pytest.mark.parametrize("failed", [{3: 1}, {0: -9}, {1: -9, 2: -9, 3: -9}], ids=str)
def test_elastic_ranks_that_fail_before_their_run_has_begun_end_the_launch(
    configs: Path, tmp_path: Path, failed: dict[int, int]
) -> None:
    """Where one was killed, this is so only of process 0, which alone begins the run, and if too few are left."""
    write_json(tmp_path / "config.json", {})  # of an earlier start
    bounds = ElasticLaunch.parse("2:4", restarts=0)
    planned = launch([str(configs / "ddp.conf.json")], None, elastic=bounds, run_dir=tmp_path)
    assert planned.goes_on_without({3: -9})
    assert not planned.goes_on_without(failed)
    write_json(tmp_path / "config.json", {})
    assert not planned.goes_on_without(failed)  # the others are being ended


def test_an_elastic_launch_has_ended_when_its_run_has_a_new_summary_that_says_done(
    configs: Path, tmp_path: Path
) -> None:
    def write(outcome: str, finished: str) -> None:
        write_json(tmp_path / "summary.json", {"outcome": outcome, "finished": finished})

    write("done", "at one")  # of an earlier start, with fewer epochs
    bounds = ElasticLaunch.parse("1:2", restarts=0)
    planned = launch([str(configs / "ddp.conf.json")], None, elastic=bounds, run_dir=tmp_path)
    assert "--run-dir" not in planned.command(0, False)  # it is among the arguments of the user
    assert not planned.has_ended()
    write("left", "at two")
    assert not planned.has_ended()
    write("done", "at three")
    assert planned.has_ended()


@pytest.mark.parametrize("text", ["2", "4:2", "0:3", "a:b", "2:"])
def test_bounds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MIN:MAX"):
        ElasticLaunch.parse(text, restarts=0)


def test_a_number_of_ranks_out_of_the_bounds_is_refused(configs: Path) -> None:
    with pytest.raises(ConfigError, match="-n must be 2 to 4"):
        launch([str(configs / "ddp.conf.json")], 5, elastic=ElasticLaunch.parse("2:4", restarts=0))


def test_a_process_that_joins_needs_a_number_alone() -> None:
    assert find_number(rank=7) == 7
    assert find_number(environment={"RANK": "3", "WORLD_SIZE": "2"}) == 3
    with pytest.raises(ConfigError, match="rank must be 0 to 1023"):
        find_number(rank=1024)


@pytest.mark.parametrize("how", ["file", "option", "environment"])
def test_a_job_with_a_name_keeps_it(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"bus": {"job": "mine"}} if how == "file" else {}))
    if how == "environment":
        monkeypatch.setenv("GRADBUS_BUS__JOB", "mine")
    planned = launch(["mine.json"], overrides=["bus.job=mine"] if how == "option" else None)
    assert "GRADBUS_BUS__JOB" not in planned.environment(0)


def test_every_rank_is_told_its_place_in_all_the_usual_ways(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    planned = launch(["x.json", "--set", "parallel.optimizer.lr=1"], ranks=3)
    variables = planned.environment(2)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["GRADBUS_RANK"]) == ("2", "3", None)
    words = list(planned.command(2, False))
    assert words[words.index("worker") :] == [
        "worker",
        "--rank",
        "2",
        "--world",
        "3",
        "--log-style",
        "console",
        "--log-level",
        "warning",
        "x.json",
        "--set",
        "parallel.optimizer.lr=1",
    ]


def test_the_number_of_ranks_may_be_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"world": 3}')
    assert launch(["x.json"], ranks=None).world == 3
    assert launch(["x.json"], ranks=2).world == 2


@pytest.mark.parametrize(
    ("name", "local_rank", "wanted"),
    [
        ("cuda", "1", "cuda:1"),
        ("cuda", "2", "cuda:0"),
        ("cuda:1", "0", "cuda:1"),
        ("cpu", "1", "cpu"),
        ("cuda", "", "cuda"),
    ],
)
def test_ranks_of_a_machine_take_its_devices_in_turn(
    monkeypatch: pytest.MonkeyPatch, name: str, local_rank: str, wanted: str
) -> None:
    monkeypatch.setattr(configured_task, "available_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert local_device(name, local_rank) == wanted


def test_without_an_accelerator_a_device_stays_as_it_is_named() -> None:
    assert torch.cuda.is_available() or local_device("cuda", "1") == "cuda"
