"""Settings: where they come from, which one wins, and errors that a person understands."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from settings import nested

from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.federated import ClientConfig, FederatedConfig
from gradbus.runtime.config.settings import MAX_FILE_BYTES, Settings, check_settings, load_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire import control


class Program(Settings):
    """A program's settings, with sections."""

    bus: BusSettings = Field(default_factory=BusSettings)
    federated: FederatedConfig = Field(default_factory=FederatedConfig)
    name: str = "none"


def loaded(**arguments: Any) -> Program:
    return load_settings(Program, **{"environment": {}, **arguments})


def refused(kind: type[Any] = Program, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(kind, **{"environment": {}, **arguments})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"name": "file", "federated": {"rounds": 20, "training": {"epochs": 2}}}), encoding="utf-8"
    )
    return path


def test_without_anything_the_defaults_are_in_force() -> None:
    assert loaded() == Program()


def test_each_source_overrides_the_weaker_ones_key_by_key(config_file: Path) -> None:
    values = {"name": "program", "federated": {"rounds": 10, "training": {"epochs": 1, "lr": 0.5}, "seed": 1}}
    environment = {"GRADBUS_FEDERATED__ROUNDS": "30", "GRADBUS_BUS__JOB": "from-environment"}
    overrides = ["federated.rounds=40", "federated.round.quorum=0.5"]
    sources: list[dict[str, Any]] = [
        {"values": values},
        {"path": config_file},
        {"environment": environment},
        {"overrides": overrides},
    ]
    together: dict[str, Any] = {}
    seen = []
    for source in sources:
        together |= source
        program = loaded(**together)
        seen.append((program.federated.rounds, program.federated.training.epochs, program.name))
    assert seen == [(10, 1, "program"), (20, 2, "file"), (30, 2, "file"), (40, 2, "file")]
    assert (program.federated.training.lr, program.federated.seed) == (0.5, 1)
    assert (program.federated.round.quorum, program.bus.job) == (0.5, "from-environment")


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"training": {"steps": 5}},
        {"training": {"optimizer": {"name": "adamw", "lr": 0.001}}},
        {"mode": "asynchronous", "asynchronous": {"buffer": 3}, "history": {"dir": "journal"}},
    ],
    ids=["epochs", "steps", "optimizer", "asynchronous"],
)
def test_rules_that_a_run_has_written_down_can_be_read_again(rules: dict[str, Any]) -> None:
    config = FederatedConfig.model_validate(rules)
    assert FederatedConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_values_that_a_program_gives_are_left_as_they_were() -> None:
    values = {"federated": {"rounds": 10}}
    loaded(values=values, overrides=["federated.rounds=40", "bus.job=x"])
    assert values == {"federated": {"rounds": 10}}


def test_a_program_may_give_paths(tmp_path: Path) -> None:
    assert loaded(values={"federated": {"checkpoint": {"dir": tmp_path}}}).federated.checkpoint.dir == tmp_path


def test_toml_and_json_say_the_same(config_file: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('name = "file"\n[federated]\nrounds = 20\ntraining.epochs = 2\n', encoding="utf-8")
    assert loaded(path=toml) == loaded(path=config_file)


def test_other_variables_of_the_environment_are_not_ours() -> None:
    environment = {"GRADBUS_DATA": "/data", "GRADBUS_FAIL_AT": "x:1", "HOME": "/", "FEDERATED__ROUNDS": "5"}
    assert loaded(environment=environment) == Program()


def test_the_processes_own_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBUS_FEDERATED__ROUNDS", "7")
    assert load_settings(Program).federated.rounds == 7


@pytest.mark.parametrize("turned", [False, True])
def test_options_may_be_given_before_the_choice_that_they_are_of(turned: bool) -> None:
    overrides = ["federated.training.optimizer=adamw", "federated.training.optimizer.weight_decay=0.5"]
    chosen = loaded(overrides=overrides[::-1] if turned else overrides).federated.training.optimizer
    assert (chosen.name, chosen.options) == ("adamw", {"weight_decay": 0.5})


def test_text_and_json_are_both_taken_as_values_of_an_override() -> None:
    program = loaded(overrides=["bus.job=my job", 'bus.peers=["10.0.0.1"]', "federated.checkpoint.dir=runs/a=b"])
    assert program.bus.job == "my job"
    assert program.bus.peers == ("10.0.0.1",)
    assert program.federated.checkpoint.dir == Path("runs/a=b")
    assert loaded(overrides=["federated.clients.num=null"]).federated.clients.num is None


def test_a_name_that_looks_like_a_number_is_not_changed_silently() -> None:
    assert "bus.job: input should be a valid string, got 1.1" in refused(overrides=["bus.job=1.10"])
    assert loaded(overrides=['bus.job="1.10"']).bus.job == "1.10"


@pytest.mark.parametrize(
    ("overrides", "wrong", "right"),
    [
        (["federated.rouds=3"], "federated.rouds", "rounds"),
        (["federated.roundz=3"], "federated.roundz", "rounds"),  # not the section "round"
        (["federated.roundz.quorum=3"], "federated.roundz", "round"),
        (["roundz=3"], "roundz", "federated.rounds"),
        (["federated.min_client=3"], "federated.min_client", "federated.clients.min"),
        (["federated.lr=3"], "federated.lr", "federated.training.lr"),
        (["federated.quorm=3"], "federated.quorm", "federated.round.quorum"),
        (["federated.codec_version=1"], "federated.codec_version", "federated.codec.version"),
        (["federated.byzantine=1"], "federated.byzantine", "federated.strategy.byzantine"),
        (["federatd.rounds=3"], "federatd", "federated"),
        (["bus.lease=3"], "bus.lease", "lease_s"),
        (["federated.samples_per_round=3"], "federated.samples_per_round", "federated.training.subset_size"),
        (["federated.training.samples_per_round=3"], "federated.training.samples_per_round", "subset_size"),
        (["federated.learning_rate=3"], "federated.learning_rate", "federated.training.lr"),
        (["federated.local_epochs=3"], "federated.local_epochs", "federated.training.epochs"),
        (["federated.clients_per_round=3"], "federated.clients_per_round", "federated.selection.count"),
        (["federated.num_rounds=3"], "federated.num_rounds", "rounds"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(overrides: list[str], wrong: str, right: str) -> None:
    text = refused(overrides=overrides)
    assert f"unknown key {wrong!r}" in text
    assert f"did you mean {right!r}" in text


@pytest.mark.parametrize("key", ["federated.power_of_clients", "federated.stale", "federated.candid", "bus.samples"])
def test_a_far_fetched_guess_is_not_made(key: str) -> None:
    text = refused(overrides=[f"{key}=3"])
    assert "did you mean" not in text
    assert f"unknown key {key!r}; known here: " in text


def test_an_unknown_key_that_is_near_to_nothing_is_answered_with_all_that_are_known() -> None:
    assert (
        "known here: budget, callbacks, codecs, controller_timeout_s, evaluates, full_traceback, history, "
        "keep_personal, least_members, least_noise, report_failures, rule, share_model, state_dir"
        in refused(ClientConfig, values={"zzz": 1})
    )


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("deep.json", '{"bus": {"domain": ' + "[" * 900 + "]" * 900 + "}}", "nested more than 32 deep"),
        ("nested.json", '{"bus": {"domain": ' + "[" * 29 + "]" * 29 + "}}", r"bus.domain: .*, got \[\["),
        ("dotted.toml", ".".join(["a"] * 1000) + " = 1", "nested more than 32 deep"),
        ("deeper.json", "[" * 100_000, "nested too deeply"),
        ("deeper.toml", "a = " + "[" * 5000, "not valid TOML"),
        ("long.json", '{"bus": {"domain": "' + "x" * 100_000 + '"}}', "bus.domain: .*, got 'xxx"),
        ("long.toml", "bus.domain = 0x" + "f" * 50_000, "bus.domain: "),
        ("key.json", '{"' + "k" * 100_000 + '": 1}', "unknown key 'kkk"),
        ("many.json", "{" + ", ".join(f'"key{number}": 1' for number in range(5000)) + "}", "and 4980 more"),
        ("large.json", " " * (MAX_FILE_BYTES + 1), "it has more than 262144 bytes"),
    ],
)
def test_a_file_that_nobody_wrote_by_hand_gets_an_answer_that_can_be_read(
    name: str, text: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    told = refused(path=path)
    assert re.search(found, told)
    assert len(told) < 10_000


def test_every_wrong_key_is_named_at_once(config_file: Path) -> None:
    config_file.write_text('{"federated": {"rounds": 0, "codec": "zip", "sed": 1}}', encoding="utf-8")
    text = refused(path=config_file)
    assert str(config_file) in text
    assert all(part in text for part in ("federated.rounds", "federated.codec", "'zip'", "did you mean 'seed'"))


OUT_OF_RANGE = [
    ("rounds", 0),
    ("rounds", 1_000_001),
    ("clients__num", 0),
    ("clients__min", 0),
    ("clients__min", 100_001),
    ("round__quorum", 0.0),
    ("round__quorum", 1.01),
    ("round__grace_s", -1.0),
    ("round__timeout_s", 0.0),
    ("round__timeout_s", float("inf")),
    ("round__timeout_s", 1.1e9),
    ("evaluation__timeout_s", 1.1e9),
    ("clients__heartbeat_s", 0.009),
    ("clients__heartbeat_s", 3601.0),
    ("round__timeout_s", float("nan")),
    ("round__max_attempts", 0),
    ("training__subset_size", -1),
    ("training__epochs", 0),
    ("training__lr", 0.0),
    ("training__lr", float("nan")),
    ("seed", -1),
    ("codec", "zip"),
    ("codec__density", 0.0),
    ("codec__density", 1.5),
    ("codec__density", float("nan")),
    ("codec__chunk_elems", 0),
    ("codec__version", 3),
    ("strategy__momentum", 1.0),
    ("checkpoint__keep", 0),
    ("eval_every", -1),
    ("limits__receive_budget_bytes", 0),
    ("rounds", "many"),
    ("rounds", 1.5),
]


@pytest.mark.parametrize(("key", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_its_key_and_what_was_found(key: str, value: Any) -> None:
    values = nested({"codec": "sq8", "strategy": "fedavgm", key: value})  # these have the options
    with pytest.raises(ConfigError, match=rf"^test: {key.replace('__', '.')}: (?!this is an).*, got {value!r}$"):
        check_settings(FederatedConfig, values, where="test")


def test_what_a_setting_may_be_the_wire_takes() -> None:
    """A Controller with a value that it cannot send would end at its first client."""
    longest = FederatedConfig(
        clients={"heartbeat_s": 3600.0, "dead_after_s": 1e9},
        round={"timeout_s": 1e9},
        evaluation={"timeout_s": 1e9},
    )
    shortest = FederatedConfig(clients={"heartbeat_s": 0.01})
    for name, values in {
        "heartbeat_s": [longest.clients.heartbeat_s, shortest.clients.heartbeat_s],
        "round_s": [longest.round.timeout_s],
        "remaining_s": [longest.evaluation.timeout_s],
    }.items():
        hints = [get_type_hints(kind, vars(control), include_extras=True) for kind in get_args(control.Body)]
        of_wire = [hint[name] for hint in hints if name in hint]
        assert of_wire, name
        for one, value in itertools.product(of_wire, values):
            TypeAdapter(one).validate_python(value)


@pytest.mark.parametrize(
    ("metric", "set_to", "best"),
    [
        ("eval_loss", None, "min"),
        ("accuracy", None, "max"),
        ("accuracy", "min", "min"),
        ("rmse", "max", "max"),
        ("client.accuracy", None, "max"),
        ("client.accuracy.median", None, "max"),
        ("client.accuracy.std", None, "min"),
        ("client.loss.max", None, "min"),
    ],
)
def test_the_best_of_a_metric_is_what_its_setting_says_or_else_what_is_known_of_it(
    metric: str, set_to: Any, best: str
) -> None:
    assert FederatedConfig().mode_of(metric, set_to) == best


def test_more_clients_cannot_be_needed_than_there_are() -> None:
    text = refused(FederatedConfig, values={"clients": {"num": 2, "min": 3}})
    assert "clients: min (3) is more than num (2)" in text


@pytest.mark.parametrize("value", [[1], {"a": 1}, "x" * 257, None, 1 << 64])
def test_options_of_a_rule_are_refused_where_they_could_not_travel_to_the_clients(value: Any) -> None:
    text = refused(FederatedConfig, values={"training": {"rule": {"name": "mine:Rule", "mu": value}}})
    assert "training.rule: options of a rule travel to the clients" in text
    values = {"training": {"rule": "mine:Rule", "from_round": {2: {"mu": value}}}}
    assert "training.from_round.2" in refused(FederatedConfig, values=values)
    rule = FederatedConfig(training={"rule": {"name": "mine:Rule", "mu": 0.5, "on": True, "n": 1 << 63}}).training.rule
    assert rule.options == {"mu": 0.5, "on": True, "n": 1 << 63}


def test_models_go_to_the_clients_in_the_newer_format() -> None:
    text = refused(FederatedConfig, values={"downlink_codec": {"name": "q8", "version": 1}})
    assert "downlink_codec.version must be 2" in text


def test_one_late_heartbeat_is_not_a_death() -> None:
    text = refused(FederatedConfig, values={"clients": {"heartbeat_s": 1.0, "dead_after_s": 2.0}})
    assert "dead_after_s (2) must be at least 3 x heartbeat_s (1)" in text


def test_a_rule_over_two_keys_of_a_section_does_not_print_the_whole_section() -> None:
    text = refused(values={"federated": {"clients": {"num": 2, "min": 3, "start_grace_s": 0.125}}})
    assert text.startswith("settings: federated.clients: min (3)")
    assert "0.125" not in text


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        FederatedConfig().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("item", ["", "rounds", "=3", "federated.rounds"])
def test_an_override_without_a_value_is_answered_with_an_example(item: str) -> None:
    assert "federated.rounds=20" in refused(overrides=[item])


def test_an_override_below_something_that_is_no_section_is_refused() -> None:
    assert "'name' is not a section" in refused(overrides=["name=x", "name.rounds=3"])


FILES = {
    "broken.json": (b'{"name": ', "not valid JSON"),
    "broken.toml": (b"name = \n", "not valid TOML"),
    "list.json": (b"[1, 2]", "expected an object with sections, got list"),
    "binary.json": (b"\xff\xfe\x00", "not a UTF-8 text file"),
    "deep.json": (b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_understood_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name][0])
    text = refused(path=path)
    assert str(path) in text
    assert FILES[name][1] in text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.json") in refused(path=tmp_path / "none.json")
    assert "cannot be read" in refused(path=tmp_path)
