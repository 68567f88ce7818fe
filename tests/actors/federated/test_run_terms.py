"""What a controller has chosen for a run: read once for each Welcome, and checked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from gradbus.actors.federated.client.run_terms import Allowed, RunChoices, check_run
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome

LOCAL = {"privacy.name": "local", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 2.0}


def welcome(**fields: Any) -> Welcome:
    options = json.dumps({"version": 2, "density": 0.5})
    return dataclasses.replace(Welcome(0, 1, 7, 1, "s4", options, 1, 0.5), **fields)


def test_a_welcome_is_read_once_and_another_one_anew() -> None:
    choices = RunChoices()
    first = choices.read(welcome())
    assert choices.read(welcome()) is first, "an equal one, as of the next round in another process"
    other = choices.read(welcome(section_codec="q8", section_options="{}", include=["body.*"]))
    assert other is not first
    assert (other.section_codec.name, other.sharing.include) == ("q8", ("body.*",))
    assert choices.read(welcome()).codec == first.codec


def test_a_round_may_have_another_density_than_the_run() -> None:
    run = RunChoices().read(welcome())
    assert run.codec_in({"steps": 3}) is run.codec
    changed = run.codec_in({"density": 0.25})
    assert type(changed) is type(run.codec)
    assert changed != run.codec


@pytest.mark.parametrize("field", ["codec", "section_codec", "downlink_codec"])
def test_a_codec_that_is_not_allowed_is_refused_each_time_with_the_setting_that_allows_it(field: str) -> None:
    choices = RunChoices(Allowed(codecs=("mine:Codec",)), setting="upstream.codecs")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"not allowed here: upstream.codecs is \['mine:Codec'\]"):
            choices.read(welcome(**{field: "theirs:Codec"}))
    assert choices.read(welcome()).codec.name == "s4"


def test_less_noise_than_this_client_insists_on_is_refused() -> None:
    privacy = RunChoices(least_noise=2.0).read(welcome(options=LOCAL)).privacy
    assert privacy is not None
    assert privacy.is_local
    with pytest.raises(ConfigError, match="least_noise is 3"):
        RunChoices(least_noise=3.0).read(welcome(options=LOCAL))


def test_a_run_without_masks_is_refused_where_the_client_insists_on_them() -> None:
    config = ClientConfig(least_members=3)
    check_run(RunChoices().read(welcome(masked=True)), config, [])
    with pytest.raises(ConfigError, match="least_members is 3: nothing is sent"):
        check_run(RunChoices().read(welcome()), config, [])
