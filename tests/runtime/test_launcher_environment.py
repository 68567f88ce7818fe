"""The place of a process as Slurm, Open MPI or PMI name it, in torchrun's variables."""

from __future__ import annotations

import pytest

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.launcher_environment import (
    MAX_NODELIST_CHARS,
    adopt_launcher,
    first_host,
    launch_name,
    torchrun_variables,
)

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NODELIST": "gpu[06-09]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_a_task_of_srun_has_its_place_and_the_first_host_of_its_step() -> None:
    assert torchrun_variables(SLURM) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24711",
    }
    last = {**SLURM, "SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert torchrun_variables(last)["LOCAL_WORLD_SIZE"] == "1"


def test_ranks_of_mpirun_on_one_machine_meet_there() -> None:
    assert torchrun_variables(OPEN_MPI) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_below_mpirun_in_a_slurm_job_the_variables_of_its_daemon_do_not_count() -> None:
    found = torchrun_variables({**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_NODELIST": "gpu07"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("2", "4", "2")
    assert found["MASTER_ADDR"] == "gpu06"


def test_pmi_gives_a_place_and_below_a_process_manager_in_a_slurm_step_it_counts_alone() -> None:
    pmi = {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
    place = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    assert torchrun_variables(pmi) == place
    assert place.items() <= torchrun_variables({**SLURM, **pmi}).items()
    assert torchrun_variables({"PMI_RANK": "1", "PMI_SIZE": "2"}) == {"RANK": "1", "WORLD_SIZE": "2"}
    assert torchrun_variables({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5"})["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_JOB_NODELIST": "n[0-1]",
        },  # a batch script
        {**SLURM, "RANK": "0"},
        {**OPEN_MPI, "WORLD_SIZE": "2"},
    ],
)
def test_without_a_launcher_or_with_a_place_of_ones_own_nothing_is_translated(environment: dict[str, str]) -> None:
    assert torchrun_variables(environment) == {}


def test_what_is_set_is_kept_and_a_second_call_changes_nothing() -> None:
    environment = {**SLURM, "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": ""}
    adopt_launcher(environment)
    assert (environment["MASTER_ADDR"], environment["LOCAL_RANK"], environment["RANK"]) == ("10.0.0.1", "1", "3")
    before = dict(environment)
    adopt_launcher(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n0", "n0"),
        ("gpu[07-09,12],login", "gpu07"),
        ("rack[3,5]-node[10-12]", "rack3-node10"),
        ("a.example.org,b", "a.example.org"),
        ("[1-2]", "1"),
    ],
)
def test_the_first_host_of_a_list_keeps_its_zeros(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "gpu[",
        "gpu[01",
        "gpu[]",
        "gpu[a-b]",
        "gpu[[1]]",
        "-x",
        "a b",
        "a;b",
        "n\n",
        "$(id)",
        "n" * 300,
        "n[\u0663]",
    ],
)
def test_what_is_no_list_of_hosts_is_an_error_that_names_the_way_out(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="set MASTER_ADDR to the host of rank 0"):
        first_host(nodelist)


def test_a_list_of_hosts_has_a_limit() -> None:
    assert first_host("n0" + "," * (MAX_NODELIST_CHARS - 2)) == "n0"
    with pytest.raises(ConfigError, match="has 65537 characters, expected at most 65536"):
        first_host("n" * (MAX_NODELIST_CHARS + 1))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_PROCID", "one"),
        ("SLURM_PROCID", "-1"),
        ("SLURM_STEP_NUM_TASKS", "9" * 5000),
        ("SLURM_STEP_NUM_TASKS", "\u0663"),
        ("SLURM_LOCALID", ""),
        ("SLURM_NODEID", "3"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2"),
        ("SLURM_STEP_TASKS_PER_NODE", ""),
        ("SLURM_JOB_ID", "4711;"),
        ("OMPI_COMM_WORLD_RANK", "1"),  # without the world
    ],
)
def test_a_variable_that_is_wrong_is_named_with_what_to_set_in_its_place(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$(SLURM|OMPI)_\w+ .*set RANK, WORLD_SIZE, LOCAL_RANK") as caught:
        torchrun_variables({**SLURM, name: text})
    assert len(str(caught.value)) < 300


def test_a_job_that_was_requeued_does_not_meet_what_is_left_of_its_earlier_start() -> None:
    assert launch_name(SLURM) == "slurm-4711-0-0"
    assert launch_name({**SLURM, "SLURM_RESTART_COUNT": "2"}) == "slurm-4711-0-2"
    assert launch_name({**SLURM, "TORCHELASTIC_RUN_ID": "a b"}) == "torchrun-a-b"
    assert launch_name({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert launch_name(OPEN_MPI) is None
