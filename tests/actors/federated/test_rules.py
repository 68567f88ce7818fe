"""Training rules against their papers' formulas, step by step in NumPy, and what they keep at a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from gradbus import codecs
from gradbus.actors.aggregation import updates
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.rules.scaffold import ControlVariates
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.models.task import TrainResult
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.wire.control import Receipt, RoundTerms, Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

X = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [-1.0, 1.0]])
Y = np.array([1.0, -2.0, 0.5, 3.0])
LR, STEPS = 0.05, 4


class Squares:
    """Least squares, one sample a step. ``local_loss`` is the mean over all."""

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: nn.Module, *, lr: float, epochs: int = 1, **_: Any) -> TrainResult:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for x, y in [*zip(X, Y, strict=True)] * epochs:
            optimizer.zero_grad()
            (0.5 * (model(torch.tensor(x, dtype=torch.float32)) - y) ** 2).sum().backward()
            optimizer.step()
        return TrainResult(len(Y), 0.25)

    @torch.no_grad()
    def local_loss(self, model: nn.Module, *, client_id: int) -> float:
        return float((0.5 * (model(torch.tensor(X, dtype=torch.float32))[:, 0] - torch.tensor(Y)) ** 2).mean())


class Client:
    """One whose updates all count, with a rule."""

    def __init__(
        self,
        rule: str,
        *,
        directory: Path | None = None,
        section_codec: tuple[str, str] = ("fp32", "{}"),
        **options: Any,
    ) -> None:
        self.welcome = Welcome(
            0,
            1,
            7,
            1,
            "fp32",
            "{}",
            1,
            0.5,
            rule=rule,
            options=options,
            has_terms=True,
            section_codec=section_codec[0],
            section_options=section_codec[1],
        )
        self.training = LocalTraining(
            Squares(),
            Identity(0, 1),
            FlatModel(nn.Linear(2, 1, bias=False)),  # type: ignore[arg-type]
            ClientStateStore(directory, 0),
            PayloadMemory(switched_on=False),
        )

    def train(self, round_id: int, base: Tensor, control: Tensor | None = None, **terms: Any) -> EncodedUpdate:
        inputs = RoundInputs(
            welcome=self.welcome,
            command=TrainCmd(round_id, 0, 1, LR, 0),
            base=base,
            broadcast=torch.empty(0) if control is None else control,
            terms=RoundTerms(7, round_id, terms),
        )
        return self.training.train(inputs, round_id, lambda: False)

    def counts(self, round_id: int, update: EncodedUpdate) -> None:
        self.training.on_receipt(update, Receipt(0, 1, 7, round_id, round_id, True, ""))


def steps_of(base: Tensor, correction: Any = lambda w: 0.0) -> Any:
    """The weights after one epoch of SGD whose gradients are corrected."""
    w = base.double().numpy().copy()
    for x, y in zip(X, Y, strict=True):
        w -= LR * ((w @ x - y) * x + correction(w))
    return w


def delta_of(update: EncodedUpdate) -> Any:
    return codecs.decode(update.payload, expected_dim=2).vector.double().numpy()


BASE = torch.tensor([0.3, -0.2])


def test_fedprox_draws_each_step_back_to_the_global_model() -> None:
    mu, base = 0.7, BASE.double().numpy()
    found = delta_of(Client("fedprox", mu=mu).train(1, BASE))
    np.testing.assert_allclose(found, steps_of(BASE, lambda w: mu * (w - base)) - base, atol=1e-6)


def test_an_option_of_the_rule_may_change_with_the_round() -> None:
    client, base = Client("fedprox", mu=0.7), BASE.double().numpy()
    found = delta_of(client.train(1, BASE, mu=0.0))
    np.testing.assert_allclose(found, steps_of(BASE) - base, atol=1e-6)


def scaffold_sections(update: EncodedUpdate) -> tuple[Any, Any]:
    found = updates.parse(update.payload, expected_dim=2, others={"control": 2})
    return tuple(
        np.concatenate([block.values.numpy() for block in part.blocks()])
        for part in (found.model, found.others["control"])
    )


def test_scaffold_corrects_its_steps_and_keeps_its_variate_over_a_restart(tmp_path: Path) -> None:
    client, own, server = Client("scaffold", directory=tmp_path), np.zeros(2), torch.tensor([0.1, -0.4])
    for round_id in (1, 2, 3):
        c, base = server.double().numpy(), BASE.double().numpy()
        update = client.train(round_id, BASE, server)
        local = steps_of(BASE, lambda w: c - own)  # noqa: B023 - called at once
        model, change = scaffold_sections(update)
        np.testing.assert_allclose(model, local - base, atol=1e-6)
        np.testing.assert_allclose(change, (base - local) / (STEPS * LR) - c, atol=1e-5)
        if round_id == 1:  # an update that does not count leaves nothing
            assert delta_equal(client.train(1, BASE, server), update)
        client.counts(round_id, update)
        own = own + change
        if round_id == 2:
            client.training.close()
            client = Client("scaffold", directory=tmp_path)
    client.training.close()


@pytest.mark.parametrize("codec", [{"name": "q8"}, {"name": "s4", "density": 0.5}])
def test_a_section_goes_out_in_its_codec_and_what_that_leaves_out_goes_out_later(
    tmp_path: Path, codec: dict[str, Any]
) -> None:
    named = codec["name"], json.dumps({key: value for key, value in codec.items() if key != "name"})
    client, server = Client("scaffold", directory=tmp_path, section_codec=named), torch.tensor([0.1, -0.4])
    received, state = np.zeros(2), {}
    for round_id in (1, 2, 3):
        update = client.train(round_id, BASE, server)
        parsed = updates.parse(update.payload, expected_dim=2, others={"control": 2})
        assert parsed.others["control"].codec == codec["name"]
        assert parsed.model.codec == "fp32"
        received += values_of(parsed.others["control"])
        client.counts(round_id, update)
        state = update.state
        variate, unsent = state["rule.control"].numpy(), state["section_residual.control"].numpy()
        np.testing.assert_allclose(received + unsent, variate, atol=1e-5)
        client.training.close()
        client = Client("scaffold", directory=tmp_path, section_codec=named)
    assert np.abs(state["section_residual.control"].numpy()).max() > 0
    client.training.close()


def values_of(section: codecs.Parsed) -> Any:
    found = np.zeros(section.dim)
    for block in section.blocks():
        where = block.indices.numpy() if section.is_sparse else slice(block.start, block.start + block.values.numel())
        found[where] = block.values.numpy()
    return found


def test_a_codec_of_sections_that_this_client_does_not_have_is_named() -> None:
    for wrong in (("zstd", "{}"), ("q8", '{"level": 3}'), ("q8", "{"), ("q8", "[1]")):
        client = Client("scaffold", section_codec=wrong)
        with pytest.raises(ConfigError, match=f"the controller chose the codec '{wrong[0]}'"):
            client.train(1, BASE, torch.zeros(2))


def delta_equal(one: EncodedUpdate, other: EncodedUpdate) -> bool:
    return bytes(one.payload) == bytes(other.payload)


class TwoOptimizers(Squares):
    """The same steps, by an optimizer for each of two halves of the model."""

    def train(self, model: nn.Module, *, lr: float, **_: Any) -> TrainResult:
        body, head = [torch.optim.SGD([one], lr=lr) for one in model.parameters()]
        for x, y in zip(X, Y, strict=True):
            for optimizer in (body, head):
                optimizer.zero_grad()
            (0.5 * (model(torch.tensor(x, dtype=torch.float32)) - y) ** 2).sum().backward()
            for optimizer in (body, head):
                optimizer.step()
        return TrainResult(len(Y), 0.25)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = [nn.Parameter(torch.zeros(1)) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.body, self.head])


@pytest.mark.parametrize("rule", ["fedprox", "scaffold", "ditto"])
def test_a_training_with_two_optimizers_has_the_terms_and_the_steps_of_one(rule: str) -> None:
    server, options = torch.tensor([0.1, -0.4]), {"mu": 0.7} if rule == "fedprox" else {}
    two, one = Client(rule, **options), Client(rule, **options)
    for client, task in ((two, TwoOptimizers()), (one, Squares())):
        client.training = LocalTraining(
            task,
            Identity(0, 1),
            FlatModel(Halves()),  # type: ignore[arg-type]
            ClientStateStore(None, 0),
            PayloadMemory(switched_on=False),
        )
    for round_id in (1, 2):  # in the second one SCAFFOLD has a variate of its own, and Ditto a model
        control = server if rule == "scaffold" else None
        found, expected = [client.train(round_id, BASE, control) for client in (two, one)]
        assert found.request.steps == expected.request.steps == STEPS
        assert found.payload == expected.payload
        assert found.state.keys() == expected.state.keys()
        assert all(torch.equal(found.state[name], kept) for name, kept in expected.state.items())
        for client, update in ((two, found), (one, expected)):
            client.counts(round_id, update)


def test_scaffold_without_its_strategy_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"federated\.strategy=scaffold"):
        Client("scaffold").train(1, BASE)


def test_scaffold_warns_once_of_an_optimizer_that_it_does_not_assume() -> None:
    class OfThisTest(torch.optim.SGD):
        pass

    rule, weight = ControlVariates(), [torch.zeros(1, requires_grad=True)]
    with capture_logs() as lines:
        rule.check_optimizer(torch.optim.SGD(weight, lr=0.1))
        assert not lines
        for _ in range(2):
            rule.check_optimizer(OfThisTest(weight, lr=0.1, momentum=0.9))
    assert [line["optimizer"] for line in lines] == ["OfThisTest"]
    assert "task.momentum=0" in lines[0]["remedy"]


def test_steps_and_the_loss_before_training_are_announced() -> None:
    request = Client("loss_before").train(1, BASE).request
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(BASE[None])
    assert request.steps == STEPS
    assert request.metrics == {"loss_before": pytest.approx(Squares().local_loss(model, client_id=0))}
    assert Client("plain").train(1, BASE).request.steps == STEPS


def test_a_task_without_a_local_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Squares, "local_loss")
    with pytest.raises(ConfigError, match=r"Squares a method local_loss"):
        Client("loss_before").train(1, BASE)


def own_model(update: EncodedUpdate) -> Any:
    return update.state["own_model.weight"][0].double().numpy()


def test_ditto_takes_its_own_steps_beside_those_of_fedavg_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    lam, lr = 0.7, 0.03
    client, plain = Client("ditto", directory=tmp_path, lam=lam, own_lr=lr), Client("plain")
    v, base = BASE.double().numpy(), BASE
    for round_id in (1, 2, 3):
        w = base.double().numpy()
        update = client.train(round_id, base)
        for x, y in zip(X, Y, strict=True):
            v = v - lr * ((v @ x - y) * x + lam * (v - w))
        np.testing.assert_allclose(own_model(update), v, atol=1e-6)
        np.testing.assert_allclose(delta_of(update), steps_of(base) - w, atol=1e-6)
        assert update.payload == plain.train(round_id, base).payload, "the global model is that of FedAvg"
        if round_id == 2:  # an update that does not count leaves nothing
            again = client.train(2, base)
            assert (own_model(again) == own_model(update)).all()
        client.counts(round_id, update)
        client.training.close()
        client = Client("ditto", directory=tmp_path, lam=lam, own_lr=lr)
        base = torch.tensor(w + delta_of(update), dtype=torch.float32)


@pytest.mark.parametrize(("epochs", "passes"), [(0, 1), (3, 3)])
def test_ditto_may_take_other_passes_for_its_own_model(epochs: int, passes: int) -> None:
    v, w = BASE.double().numpy(), BASE.double().numpy()
    for x, y in [*zip(X, Y, strict=True)] * passes:
        v = v - LR * ((v @ x - y) * x + 0.1 * (v - w))
    np.testing.assert_allclose(own_model(Client("ditto", own_epochs=epochs).train(1, BASE)), v, atol=1e-6)
