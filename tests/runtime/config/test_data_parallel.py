import sys
from typing import Any

import pytest

from gradbus.runtime.algorithms.dgc import Dgc
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.settings import Settings, check_settings, load_settings
from gradbus.runtime.errors import ConfigError


class Program(Settings):
    """A program's settings, with a section."""

    parallel: DataParallelConfig = DataParallelConfig()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("paper", "paper"), ("none", "none"), (0, 0), (3, 3), ([0.25, 1], (0.25, 1.0)), ((0.1,), (0.1,)), ([], ())],
)
def test_a_warmup_is_a_name_a_number_of_epochs_or_a_list(given: Any, kept: Any) -> None:
    assert Dgc.Options(warmup=given).warmup == kept


@pytest.mark.parametrize(
    ("values", "text"),
    [
        *(
            (
                {"algorithm": {"name": "dgc", "warmup": value}},
                "algorithm.warmup: expected 'paper', 'none', a number of epochs, or a list of densities in (0, 1]",
            )
            for value in ("papr", [2.0], [0.0], [True], True, -1, 1.5, {"epochs": 3})
        ),
        ({"optimizer": {"lr": 0}}, "optimizer.lr: input should be greater than 0, got 0"),
        ({"optimizer": {"nesterov": True, "momentum": 0}}, "nesterov=true needs momentum > 0"),
        (
            {"optimizer": 3},
            "optimizer: expected the name of a choice (optimizer), or an object with name and options",
        ),
        (
            {"algorithm": {"wir": "fp16"}},
            "there is no such option, did you mean 'wire'?",
        ),
        ({"algorithm": {"density": 0.1}}, "algorithm.density: this is an option of decentralized, dgc, ef21, "),
        (
            {"algorithm": "dgx"},
            "algorithm: there is no algorithm of data-parallel training 'dgx'; did you mean 'dgc'?",
        ),
        ({"bucket_byte": 5}, "unknown key 'bucket_byte', did you mean 'bucket_bytes'?"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
        ({"max_steps": 0}, "max_steps"),
        ({"algorithm": {"name": "dgc", "density": 0}}, "algorithm.density"),
        # Settings that used to be elsewhere, and are found by their names, or by the new ones
        ({"lr": 0.1}, "unknown key 'lr', did you mean 'optimizer.lr'?"),
        ({"density": 0.1}, "unknown key 'density', did you mean 'algorithm.density'?"),
        ({"exchange": "dgc"}, "unknown key 'exchange', did you mean 'algorithm'?"),
        ({"exchange": {"overlap": False}}, "unknown key 'exchange', did you mean 'algorithm'?"),
        ({"keep_checkpoints": 3}, "unknown key 'keep_checkpoints', did you mean 'checkpoint.keep'?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(DataParallelConfig, values, where="settings")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_do_not_compare_settings_that_may_differ(tmp_path: Any) -> None:
    mine = DataParallelConfig(checkpoint={"dir": tmp_path / "a", "timeout_s": 3}, report_every_steps=5)
    theirs = DataParallelConfig(
        checkpoint={"dir": tmp_path / "b"},
        timeouts={"collective_s": 5},
        profile={"window_steps": 3},
        history={"dir": tmp_path},
    )
    shared = mine.shared({"name": "dense", "wire": "fp32"})
    assert shared == theirs.shared({"name": "dense", "wire": "fp32"})
    assert {"optimizer.lr", "checkpoint.keep", "algorithm.name", "algorithm.wire", "seed"} < shared.keys()
    assert not any(key.startswith(("timeouts", "profile", "history", "report")) for key in shared)
    assert "checkpoint.timeout_s" not in shared
    assert shared != DataParallelConfig().shared({"name": "dense", "wire": "fp32"})  # without a checkpoint directory
    assert shared != mine.shared({"name": "dense", "wire": "fp16"})


DGC = {"parallel": {"algorithm": {"name": "dgc", "density": 0.5}}}


@pytest.mark.parametrize(
    ("values", "environment", "overrides", "algorithm"),
    [
        ({}, {}, ["parallel.algorithm=dgc"], {"name": "dgc"}),
        ({}, {}, ["parallel.algorithm.name=dgc", "parallel.algorithm.density=0.1"], {"name": "dgc", "density": 0.1}),
        ({}, {}, ["parallel.algorithm=dgc", "parallel.algorithm.density=0.1"], {"name": "dgc", "density": 0.1}),
        ({}, {"": "dgc", "__DENSITY": "0.1"}, ["parallel.algorithm.density=0.2"], {"name": "dgc", "density": 0.2}),
        (DGC, {"__MASKING": "false"}, [], {"name": "dgc", "density": 0.5, "masking": False}),
        (DGC, {}, ["parallel.algorithm=dgc"], {"name": "dgc", "density": 0.5}),
        (DGC, {}, ["parallel.algorithm=dense"], {"name": "dense"}),
        (DGC, {"__NAME": "dense", "__WIRE": "bf16"}, [], {"name": "dense", "wire": "bf16"}),
        ({}, {}, ["parallel.algorithm.wire=bf16"], {"name": "dense", "wire": "bf16"}),
        (
            {},
            {},
            ["parallel.algorithm=my.own:Name", "parallel.algorithm.x=[1]"],
            {"name": "my.own:Name", "x": [1]},
        ),
    ],
)
def test_a_choice_is_given_by_its_name_or_with_options_and_another_one_drops_those_of_the_first(
    values: dict[str, Any], environment: dict[str, str], overrides: list[str], algorithm: dict[str, Any]
) -> None:
    named = {f"GRADBUS_PARALLEL__ALGORITHM{key}": text for key, text in environment.items()}
    config = load_settings(Program, values=values, environment=named, overrides=overrides).parallel
    assert config.algorithm.model_dump() == algorithm
    assert config == DataParallelConfig(algorithm=algorithm)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.algorithm=dgc", "parallel.algorithm.density=0.1"],
        ['parallel.algorithm={"name": "dgc"}', "parallel.algorithm.density=0.1"],
        ['parallel={"algorithm": "dgc"}', "parallel.algorithm.density=0.1"],
        ["parallel.timeouts.join_s=3", 'parallel.timeouts={"collective_s": 4}'],
    ],
)
def test_in_which_order_overrides_are_given_makes_no_difference(overrides: list[str]) -> None:
    one, other = (
        load_settings(Program, environment={}, overrides=given).parallel for given in (overrides, overrides[::-1])
    )
    assert one == other != DataParallelConfig()
    assert one.algorithm.options == ({"density": 0.1} if one.algorithm.name == "dgc" else {})


def test_of_two_names_on_one_command_line_the_later_one_counts_without_the_options_of_the_first() -> None:
    overrides = ["parallel.algorithm=dgc", "parallel.algorithm.density=0.1", "parallel.algorithm=dense"]
    assert load_settings(Program, environment={}, overrides=overrides).parallel == DataParallelConfig()


def test_a_name_alone_means_the_same_in_a_program() -> None:
    again = DataParallelConfig(algorithm=DataParallelConfig(algorithm={"name": "dgc", "warmup": [0.5]}).algorithm)
    assert again.algorithm.options == {"warmup": (0.5,)}
    assert DataParallelConfig(algorithm="dense") == DataParallelConfig()
    assert DataParallelConfig(algorithm="dgc") == DataParallelConfig(algorithm={"name": "dgc"})


def test_settings_are_read_without_running_code_that_they_name() -> None:
    assert DataParallelConfig(algorithm="antigravity:Name").algorithm.name == "antigravity:Name"
    assert "antigravity" not in sys.modules
