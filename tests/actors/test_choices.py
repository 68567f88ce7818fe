"""One place for a choice: tables that are found by looking, and classes of the user's, by configuration alone."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, Field

from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.federated.client.rules.base import ClientRule, RoundStart, make_rule
from gradbus.runtime.choices import ALGORITHMS, CLIENT_RULES, CODECS, SELECTORS, STRATEGIES, Choices
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome, decode, encode


class Scaled(FedAvg):
    """A strategy of the user's."""

    class Options(BaseModel, extra="forbid"):
        factor: float = Field(default=1.0, gt=0)

    def __init__(self, dim: int, *, factor: float) -> None:
        super().__init__(dim)
        self.factor = factor


class Proximal(ClientRule):
    """Adds ``mu (w - w0)`` to the gradients: Li et al., Federated Optimization in Heterogeneous Networks, 2020."""

    class Options(BaseModel, extra="forbid"):
        mu: float = Field(default=0.1, ge=0)

    def __init__(self, *, mu: float) -> None:
        self._mu = mu

    def start(self, begin: RoundStart) -> None:
        self._base = [parameter.detach().clone() for parameter in begin.model.parameters()]

    @torch.no_grad()
    def before_step(self, model: torch.nn.Module) -> None:
        for parameter, base in zip(model.parameters(), self._base, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(parameter - base, alpha=self._mu)


def begin(model: torch.nn.Module) -> RoundStart:
    return RoundStart(round_id=1, lr=1.0, model=model, base=torch.empty(0), parameters=[], local_loss=lambda: 0.0)


SCALED, PROXIMAL = f"{__name__}:Scaled", f"{__name__}:Proximal"


def test_the_tables_have_all_built_in_choices_each_with_a_sentence_of_help() -> None:
    known = {
        STRATEGIES: {"fedadam", "fedavg", "fedavgm", "krum", "median", "multi_krum", "trimmed_mean"},
        ALGORITHMS: {"dense", "dgc", "powersgd"},
        CLIENT_RULES: {"plain"},
    }
    for choices, names in known.items():  # there may be more: a new one is a file of its own
        assert names <= choices.table.keys()
    for choices in (STRATEGIES, ALGORITHMS, CLIENT_RULES):
        assert all(len(text) > 10 for text in choices.help().values())


def test_the_documents_table_is_that_of_the_choices() -> None:
    page = (Path(__file__).parents[2] / "docs/tuning.md").read_text(encoding="utf-8")
    for choices in (STRATEGIES, ALGORITHMS, CLIENT_RULES):
        rows = [line for line in page.splitlines() if line.startswith(f"| `{choices.key}=")]
        assert rows == [f"| `{choices.key}={name}` | {text} |" for name, text in choices.help().items()]


@pytest.mark.parametrize("choices", [STRATEGIES, CLIENT_RULES, SELECTORS, CODECS], ids=lambda one: one.key)
def test_what_a_program_makes_by_hand_has_the_defaults_of_the_settings(choices: Choices[Any]) -> None:
    """Constructors have defaults of their own, for programs without a configuration."""
    compared = 0
    for name, kind in choices.table.items():
        constructors = [inspect.signature(one.__init__) for one in reversed(kind.__mro__)]  # of which one calls another
        by_hand = {key: one.default for signature in constructors for key, one in signature.parameters.items()}
        for key, field in choices.options_of(name).model_fields.items():
            if by_hand.get(key, inspect.Parameter.empty) is not inspect.Parameter.empty:
                assert by_hand[key] == field.get_default(call_default_factory=True), (name, key)
                compared += 1
    assert compared > 0


@pytest.mark.parametrize(
    ("choices", "name", "advice"),
    [
        (STRATEGIES, "FedProx", "set federated.training.rule to 'fedprox'"),
        (STRATEGIES, "FedAvg", "did you mean 'fedavg'"),
        (CLIENT_RULES, "fednova", "set federated.strategy to 'fednova'"),
        (ALGORITHMS, "adamw", "set parallel.optimizer to 'adamw'"),
    ],
)
def test_a_name_that_another_setting_has_is_answered_with_that_setting(
    choices: Choices[Any], name: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        choices.find(name)


def test_a_strategy_of_the_users_is_made_from_the_configuration_with_its_options() -> None:
    config = FederatedConfig(strategy={"name": SCALED, "factor": 2.0})
    strategy = STRATEGIES.make(config.strategy, 3)
    assert isinstance(strategy, Scaled)
    assert strategy.factor == 2.0


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fedagv", {}, "did you mean 'fedavg'"),
        ("fedavg", {"factor": 1}, r"strategy\.factor: there is no such option; 'fedavg' has none"),
        (
            "fedavg",
            {"byzantine": 1},
            r"strategy\.byzantine: this is an option of bulyan, geometric_median, krum, median, multi_krum, trim",
        ),
        (SCALED, {"facto": 1}, "did you mean 'factor'"),
        (SCALED, {"factor": -1}, "greater than 0"),
        ("no.such.module:X", {}, "there is no module 'no'"),
        (f"{__name__}:Missing", {}, "has no 'Missing'"),
        (f"{__name__}:SCALED", {}, "expected a class"),
    ],
)
def test_a_choice_that_is_wrong_is_refused_with_what_to_do(name: str, options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        STRATEGIES.make(FederatedConfig(strategy={"name": name, **options}).strategy, 3)


def test_before_a_run_starts_only_classes_of_the_users_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the settings has checked what is built in, and imports nothing of the user's."""
    looked_up: list[str] = []
    find = Choices.find

    def noted(table: Choices[Any], name: str) -> type[Any]:
        looked_up.append(name)
        return find(table, name)

    monkeypatch.setattr(Choices, "find", noted)
    built_in, named = (FederatedConfig.model_validate({"strategy": name}).strategy for name in ("fedadam", SCALED))
    wrong = FederatedConfig.model_validate({"strategy": {"name": SCALED, "factor": -1.0}}).strategy
    assert set(looked_up) == {"fedadam"}
    looked_up.clear()
    STRATEGIES.check_own(built_in)
    assert looked_up == []
    STRATEGIES.check_own(named)
    assert set(looked_up) == {SCALED}
    with pytest.raises(ConfigError, match=r"federated\.strategy\.factor: Input should be greater than 0"):
        STRATEGIES.check_own(wrong)


def test_an_algorithm_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.algorithm: there is no .* 'sparse'; .*, dgc, .*or your own"):
        ALGORITHMS.find("sparse")


def test_a_client_imports_no_rule_but_the_one_that_its_own_configuration_names(tmp_path: Path) -> None:
    for allowed in ("", "other:Rule"):
        with pytest.raises(ConfigError, match=r"does not allow.*client\.rule"):
            make_rule("antigravity:Rule", {}, allowed=allowed)
    assert "antigravity" not in sys.modules
    assert isinstance(make_rule(PROXIMAL, {"mu": 0.5}, allowed=PROXIMAL), Proximal)


def test_a_rule_changes_the_steps_of_its_own_model_alone_and_is_gone_afterwards() -> None:
    model, other = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
    with torch.no_grad():
        model.weight.fill_(1.0)
        other.weight.fill_(1.0)

    def step(module: torch.nn.Linear) -> list[float]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        optimizer.zero_grad()
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        return [float(value) for value in module.weight.detach().flatten()]

    with make_rule(PROXIMAL, {"mu": 0.5}, allowed=PROXIMAL).attached(begin(model)):
        assert (step(model), step(other)) == ([0.0, 0.0], [0.0, 0.0])
        assert (step(model), step(other)) == ([-0.5, -0.5], [-1.0, -1.0])  # drawn back by half of the way from 1 to 0
    assert step(model) == [-1.5, -1.5]


def test_a_rule_that_no_optimizer_ever_asked_is_an_error() -> None:
    with pytest.raises(ValueError, match="had no effect"), Proximal(mu=0.1).attached(begin(torch.nn.Linear(1, 1))):
        pass


def test_rule_and_options_travel_in_the_welcome_and_may_be_left_out() -> None:
    fields: dict[str, Any] = {
        "to": 0, "incarnation": 1, "run_id": 2, "next_round": 1, "codec": "fp32", "codec_options": "{}",
        "num_clients": 1, "heartbeat_s": 0.5,
    }  # fmt: skip
    welcome = Welcome(**fields, rule=PROXIMAL, options={"mu": 0.5, "steps": 3, "on": True})
    assert decode(encode(welcome)) == welcome
    assert Welcome(**fields).rule == "plain"
    with pytest.raises(ValueError, match="options"):
        Welcome(**fields, options={str(number): number for number in range(33)})
