"""A wrong name is answered with a near one, or with none: a far-fetched guess misleads."""

from __future__ import annotations

import pytest

from gradbus.runtime.nearest import nearest

SETTINGS = (
    "rounds", "round", "clients", "codec", "batch_size", "bucket_bytes", "staleness_power", "candidates", "own_epochs",
    "rule", "epochs", "sampling", "dampening", "step_size", "lr", "seed", "lease_s", "betas",
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rouds", "rounds"),
        ("ronuds", "rounds"),  # two letters that are swapped
        ("Rounds", "rounds"),
        ("num_rounds", "rounds"),
        ("batchsize", "batch_size"),
        ("batch-size", "batch_size"),
        ("bucket_byte", "bucket_bytes"),
        ("lease", "lease_s"),
        ("beta", "betas"),
        ("sed", "seed"),
        ("l_r", "lr"),
        ("local_epochs", "epochs"),
    ],
)
def test_a_slip_of_the_keyboard_and_a_word_more_or_less_are_near(wrong: str, right: str) -> None:
    assert nearest(wrong, SETTINGS) == right


@pytest.mark.parametrize(
    "wrong",
    [
        "samples_per_round",
        "learning_rate",
        "clients_per_round",
        "samples",
        "training",
        "world_size",
        "zip",
        "x",
        "",
        "q",
        "___",
        "r" * 10_000,
    ],
)
def test_a_name_that_shares_some_letters_with_others_is_near_to_none(wrong: str) -> None:
    assert nearest(wrong, SETTINGS) is None


def test_among_names_of_many_subjects_a_word_more_is_too_much() -> None:
    assert nearest("samples", ["max_samples"]) == "max_samples"
    assert nearest("samples", ["max_samples"], slips_alone=True) is None
    assert nearest("sampels", ["samples"], slips_alone=True) == "samples"


def test_the_same_letters_come_before_a_slip_and_a_slip_before_a_word_more() -> None:
    assert nearest("lr", ["server_lr", "l1", "lr"]) == "lr"
    assert nearest("rounds", ["max_rounds", "round"]) == "round"
    assert nearest("rounds", []) is None
