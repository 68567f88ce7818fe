"""``gradbus.transformers.FederatedCallback`` within Hugging Face's own Trainer, over real DDS: scenes of a program, as
transformers is in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_programs import Found, played

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def scenes(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the scenes have found, by name."""
    return played(root, "transformers_scenes", tmp_path_factory.mktemp("scenes"))


def test_a_trainer_comes_to_the_bits_of_the_plain_loop(scenes: Found) -> None:
    """With accumulated gradients, an evaluation and a checkpoint after each epoch."""
    found = scenes("equals_the_loop")
    assert found["found"] == found["expected"]
    assert len(set(found["found"])) == 3
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=0.02), "a mean of steps in place of samples"
    assert found["samples"] == [220] * 3
    assert {"loss", "eval_loss"} <= {*found["metrics"]}
    assert found["epochs"] == 3, "the Trainer stops with the run"
    assert found["hooks"] == 0, "the model is left as it was"


def test_the_trainer_evaluates_and_saves_the_global_model(scenes: Found) -> None:
    found = scenes("equals_the_loop")
    assert found["seen"] == ["evaluated", "saved"] * 3
    assert found["last_are_global"] == [True, True]
    assert found["is_global"]


def test_rounds_of_steps_begin_the_optimizer_anew_where_that_is_asked(scenes: Found) -> None:
    """Its logs, each third step, do not coincide with the rounds."""
    found = scenes("rounds_of_steps")
    assert found["found"] == found["expected"]
    assert found["kept"][0] == found["found"][0]
    assert found["kept"][1:] != found["found"][1:], "its momentum goes on"
    assert found["samples"] == [80 + 110, 70 + 110, 70 + 110], "each sixth batch has 10 samples"
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=0.02)


def test_without_an_argument_a_round_is_as_long_as_the_controller_asks(scenes: Found) -> None:
    assert scenes("rounds_of_steps")["steps"] == [12, 8]


def test_a_trainer_that_ends_before_the_run_says_so_and_leaves(scenes: Found) -> None:
    found = scenes("ends_before_the_run")
    assert found["clients"] == [[0, 1], [0, 1], [1], [1]]
    assert found["epochs"] == 2
    (told,) = found["told"]
    assert told["log_level"] == "warning"
    assert told["rounds"] == 2
    assert "raise num_train_epochs" in told["remedy"]


def test_a_trainer_that_ends_with_the_run_has_the_global_model(scenes: Found) -> None:
    found = scenes("ends_before_the_run")
    assert found["told_of_a_whole_run"] == []
    assert found["is_global"]


def test_train_raises_where_the_run_fails(scenes: Found) -> None:
    assert scenes("raises_where_the_run_fails")["raised"].startswith("TrainingFailed: training failed here: ")


def test_an_error_of_the_training_ends_the_client(scenes: Found) -> None:
    """As a context the callback gives it as the reason; else the client goes with the callback."""
    with_reason, without = scenes("leaves_with_the_error")["left"]
    for raised, clients, _ in (with_reason, without):
        assert raised == "a bug"
        assert clients == [[0, 1], [1], [1]]
    assert "a bug" in with_reason[2][0]
    assert without[2] == ["stopped"]


def test_adapters_of_a_compiled_language_model_in_mixed_precision(scenes: Found) -> None:
    found = scenes("adapters_of_peft")
    assert found["epochs"] == 4
    assert found["losses"][-1] < found["losses"][0]
    assert found["samples"] == [64] * 4
    assert found["is_global"]


def test_what_cannot_be_is_refused_with_a_sentence(scenes: Found) -> None:
    texts = scenes("is_refused")["texts"]
    assert texts[0] == "ConfigError: every_n_epochs must be an integer of 1 or more, got 0"
    assert texts[1] == "ConfigError: optimizer_state must be 'keep' or 'reset', got 'forget'"
    assert "did you mean 'domain'" in texts[2]
    assert texts[3] == (
        "WrongKeyword: FederatedCallback() has no keyword 'every_n_epoch': did you mean 'every_n_epochs'?"
    )
    assert texts[4].startswith("WrongArgument: FederatedCallback(...): neither name nor client_id is given")
    assert "Write FederatedCallback('cells', name='site-1')" in texts[4]
    assert "FSDP spreads this one over its ranks" in texts[5]


def test_a_step_that_is_made_where_the_run_is_over_is_undone(scenes: Found) -> None:
    """The Trainer makes a step before it looks whether it is to stop: that is undone."""
    assert scenes("a_run_that_is_over") == {"steps": 1, "is_undone": True, "rounds": 0}


def test_one_that_is_killed_in_a_round_has_left(scenes: Found) -> None:
    assert scenes("one_that_is_killed") == {"clients": [[0, 1], [1], [1]], "lost": [0]}


def test_two_ranks_are_one_client(scenes: Found) -> None:
    found = scenes("two_ranks")
    first, second = found["ranks"]
    assert first == second
    assert first["epochs"] == 3
    assert found["samples"] == [110] * 3, "55 at each"


def test_the_program_of_the_page_trains(scenes: Found) -> None:
    found = scenes("program_of_the_page")
    assert found["ended"] == ["done", "done"]
    assert found["clients"] == [[0, 1]] * 5
    assert found["samples"] == [1024] * 5
    assert found["losses"][-1] < 0.7 * found["losses"][0]
