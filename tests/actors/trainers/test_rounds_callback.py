"""The options that callbacks of all trainers have, without any trainer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gradbus.actors.trainers.rounds_callback import RoundsCallback
from gradbus.runtime.errors import ConfigError, OutOfTurn
from gradbus.runtime.misuse import WrongKeyword


class Trained(RoundsCallback):
    """As the callback of a trainer is: with a part of its own, and without a constructor."""

    def _prepare(self) -> None:
        self.is_prepared = True


def test_a_callback_has_the_signature_of_all_and_what_it_prepares_itself() -> None:
    callback = Trained("cells", name="site-1", every_n_steps=3)
    assert callback.is_prepared
    assert list(inspect.signature(Trained).parameters) == [
        "job",
        "every_n_epochs",
        "every_n_steps",
        "optimizer_state",
        "metrics",
        "samples_in",
        "settings",
    ]
    with pytest.raises(OutOfTurn, match="the first one begins when the trainer does"):
        _ = callback.round


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_n_epoch": 1}, "no keyword 'every_n_epoch': did you mean 'every_n_epochs'"),
        ({"optimiser_state": "keep"}, "no keyword 'optimiser_state': did you mean 'optimizer_state'"),
        ({"nam": "site-1"}, "no keyword 'nam': did you mean 'name'"),
        ({"domian": 3}, "no keyword 'domian': did you mean 'domain'"),
    ],
)
def test_a_misspelt_option_is_named_with_the_right_one(options: dict[str, Any], text: str) -> None:
    with pytest.raises(WrongKeyword, match=rf"^FederatedCallback\(\) has {text}\?$"):
        Trained("cells", client_id=0, **options)


@pytest.mark.parametrize("job", [None, "cells"])
def test_a_callback_without_a_name_or_an_id_is_refused_with_what_to_write(job: str | None) -> None:
    text = r"neither name nor client_id is given.* Write FederatedCallback\('cells', name='site-1'\)"
    with pytest.raises(ConfigError, match=text):
        Trained(job)
    with pytest.raises(ConfigError, match=text):
        Trained(job, name="")
    Trained(job, client_id=0)
