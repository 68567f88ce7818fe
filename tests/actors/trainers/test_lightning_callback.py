"""``gradbus.lightning.FederatedCallback`` within Lightning's own Trainer, over real DDS: scenes of a program, as
Lightning is in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_programs import Found, played

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def scenes(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the scenes have found, by name."""
    return played(root, "lightning_scenes", tmp_path_factory.mktemp("scenes"))


def test_a_trainer_comes_to_the_bits_of_the_plain_loop(scenes: Found) -> None:
    """With accumulated gradients, a validation loop and its check before training."""
    found = scenes("equals_the_loop")
    assert found["found"] == found["expected"]
    assert len(set(found["found"])) == 3
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    assert found["samples"] == [220] * 3
    assert {"train_loss", "val_loss"} <= {*found["metrics"]}
    assert found["epochs"] == 3, "the Trainer stops with the run"


def test_after_the_run_module_and_checkpoint_are_the_global_model(scenes: Found) -> None:
    found = scenes("equals_the_loop")
    assert found["is_global"]
    assert found["checkpoint_is_global"]
    assert found["resumed"] == {"epochs": 4, "stopped": True}


@pytest.mark.parametrize("rule", ["fedprox", "scaffold"])
def test_training_rules_change_the_gradients_of_lightning(scenes: Found, rule: str) -> None:
    expected, found = scenes("training_rules")[rule]
    assert found == expected
    assert found != scenes("training_rules")["plain"][0], "the rule has an effect"


def test_rounds_of_steps_begin_the_optimizer_anew_where_that_is_asked(scenes: Found) -> None:
    found = scenes("rounds_of_steps")
    assert found["found"] == found["expected"]
    assert found["kept"][0] == found["found"][0]
    assert found["kept"][1:] != found["found"][1:], "its momentum goes on"
    assert found["samples"] == [80 + 110, 70 + 110, 70 + 110], "each sixth batch has 10 samples"


def test_without_an_argument_a_round_is_as_long_as_the_controller_asks(scenes: Found) -> None:
    assert scenes("rounds_of_steps")["steps"] == [12, 8]


def test_a_trainer_that_ends_before_the_run_says_so_and_leaves(scenes: Found) -> None:
    found = scenes("ends_before_the_run")
    assert found["clients"] == [[0, 1], [0, 1], [1], [1]]
    assert found["epochs"] == 2
    (told,) = found["told"]
    assert told["log_level"] == "warning"
    assert told["rounds"] == 2
    assert "max_epochs=-1" in told["remedy"]


def test_a_trainer_that_ends_with_the_run_has_the_global_model(scenes: Found) -> None:
    found = scenes("ends_before_the_run")
    assert found["told_of_a_whole_run"] == []
    assert found["is_global"]


def test_fit_raises_where_the_run_fails(scenes: Found) -> None:
    assert scenes("raises_where_the_run_fails")["raised"].startswith("TrainingFailed: training failed here: ")


def test_an_error_within_fit_is_why_the_client_leaves(scenes: Found) -> None:
    found = scenes("leaves_with_the_error")
    assert found["raised"] == "a bug"
    assert found["clients"] == [[0, 1], [1], [1]]
    assert "a bug" in found["left"][0]


def test_frozen_layers_stay_and_weights_keep_their_precision(scenes: Found) -> None:
    found = scenes("frozen_and_mixed")
    assert found["kept"]
    assert found["clients"] == [[0, 1]] * 3
    assert len({*found["crc"]}) == 3


def test_the_trainer_of_pytorch_lightning_works_as_well(scenes: Found) -> None:
    found = scenes("with_the_older_name")
    assert found["found"] == found["expected"]


def test_what_cannot_be_is_refused_with_a_sentence(scenes: Found) -> None:
    texts = scenes("is_refused")["texts"]
    assert texts[:3] == [
        "ConfigError: every_n_epochs and every_n_steps are both given: a round ends by one of them",
        "ConfigError: every_n_steps must be an integer of 1 or more, got 0",
        "ConfigError: optimizer_state must be 'keep' or 'reset', got 'forget'",
    ]
    assert "did you mean 'domain'" in texts[3]
    assert texts[4] == (
        "WrongKeyword: FederatedCallback() has no keyword 'every_n_epoch': did you mean 'every_n_epochs'?"
    )
    assert texts[5].startswith("WrongArgument: FederatedCallback(...): neither name nor client_id is given")
    assert "Write FederatedCallback('cells', name='site-1')" in texts[5]
    assert "works on one device and with DDPStrategy, got FSDPStrategy" in texts[6]


def test_fast_dev_run_does_not_join(scenes: Found) -> None:
    assert [one["log_level"] for one in scenes("is_refused")["fast_dev_run"]] == ["warning"]


def test_nothing_is_trained_where_the_run_is_over(scenes: Found) -> None:
    assert scenes("a_run_that_is_over") == {"steps": 0, "rounds": 0}


def test_one_that_is_killed_in_a_round_has_left(scenes: Found) -> None:
    assert scenes("one_that_is_killed") == {"clients": [[0, 1], [1], [1]], "lost": [0]}


def test_two_ranks_are_one_client(scenes: Found) -> None:
    found = scenes("two_ranks")
    first, second = found["well"]
    assert first == second
    assert first["epochs"] == 3
    assert found["well_samples"] == [110] * 3, "55 at each"


def test_both_ranks_raise_where_the_run_fails(scenes: Found) -> None:
    first, second = scenes("two_ranks")["failing"]
    assert first["raised"].startswith("TrainingFailed: ")
    assert second["raised"].startswith("RunAborted: rank 0, which talks to the controller for this rank, has failed")


def test_the_program_of_the_page_trains(scenes: Found) -> None:
    found = scenes("program_of_the_page")
    assert found["ended"] == ["done", "done"]
    assert found["clients"] == [[0, 1]] * 5
    assert found["samples"] == [1024] * 5
    assert found["losses"][-1] < 0.7 * found["losses"][0]
