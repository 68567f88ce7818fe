"""Parameters that are not trained: they do not travel with the rounds, and are equal on all nodes all the same."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from safetensors.torch import save_file
from settings import nested
from torch import Tensor, nn
from trees import rules, tree

import gradbus
from gradbus import codecs
from gradbus.actors import Client, Controller, Site
from gradbus.actors.federated.client.client_models import ClientModels
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.models import TrainResult
from gradbus.runtime.config.federated import UpstreamConfig
from gradbus.runtime.errors import TrainingFailed
from gradbus.runtime.wire.control import Welcome

pytestmark = pytest.mark.slow
FROZEN, TRAINED = 100_000, 4_000
SITE = 3


class Backbone(nn.Module):
    """A large frozen part between two small ones that are trained, with a running mean."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.zeros(TRAINED // 2))
        self.body = nn.Parameter(torch.randn(FROZEN, generator=generator), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.last = nn.Parameter(torch.zeros(TRAINED // 2))


class Tuning:
    """A task that trains what is not frozen by what is."""

    def __init__(self, seed: int = 0, *, thaws: bool = False, writes: bool = False) -> None:
        self._seed, self._thaws, self._writes = seed, thaws, writes
        self.seen: list[Tensor] = []

    def build_model(self) -> nn.Module:
        return Backbone(self._seed)

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    @torch.no_grad()
    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self.seen.append(model.body.detach().clone())
        if self._thaws:
            model.body.requires_grad_()
        if self._writes:
            model.body.add_(1.0)
        model.first += model.body[: TRAINED // 2]
        model.last += 1.0
        model.mean += 2.0
        return TrainResult(num_samples=10, loss=0.5)

    def evaluate(self, model: Any) -> None:
        self.seen.append(model.body.detach().clone())


def run(server: Tuning, *tasks: Tuning, shared_memory: bool = True, **rules: Any) -> tuple[Controller, list[Any]]:
    async def main() -> tuple[Controller, list[Any]]:
        network = gradbus.NetworkConfig(shared_memory=shared_memory)
        place = {"job": f"frozen-{os.getpid()}", "domain": new_domain(), "network": network}
        all_of_them = {"rounds": 2, "clients__num": len(tasks), "clients__min": len(tasks), "limits__cap_samples": None}
        config = gradbus.FederatedConfig(**nested(all_of_them | rules))
        async with asyncio.timeout(60), gradbus.connect(**place) as bus, gradbus.connect(**place) as others:
            controller = Controller(bus, server, config)  # type: ignore[arg-type]
            async with asyncio.TaskGroup() as group:
                for client_id, task in enumerate(tasks):
                    client = Client(others, task, client_id=client_id)  # type: ignore[arg-type]
                    group.create_task(client.run())
                reports = await controller.run()
            return controller, reports

    return asyncio.run(main())


def test_a_site_begins_anew_if_the_level_above_starts_again_while_it_fetches_the_frozen_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch, interrupted = ClientModels.fetch_frozen, []

    async def fetch_frozen(models: ClientModels, welcome: Welcome) -> None:
        if welcome.to == SITE and not interrupted:
            interrupted.append(welcome)  # as where the session has changed, it returns with nothing
        else:
            await fetch(models, welcome)

    async def main() -> None:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            upstream = UpstreamConfig(site=SITE, alone=False)
            site = Site(above, local, Tuning(seed=5), rules(1), upstream)  # type: ignore[arg-type]
            group.create_task(site.run())
            group.create_task(Client(theirs, task, client_id=0).run())  # type: ignore[arg-type]
            top = rules(1, sites=True, rounds=2, clients={"num": None})
            await Controller(centre, Tuning(), top).run()  # type: ignore[arg-type]

    task = Tuning(seed=9)
    monkeypatch.setattr(ClientModels, "fetch_frozen", fetch_frozen)
    asyncio.run(main())
    assert len(interrupted) == 1
    assert len(task.seen) == 2
    assert all(torch.equal(seen, Backbone(0).body.detach()) for seen in task.seen)


def test_only_what_is_trained_travels_and_the_model_is_the_same_as_if_all_did() -> None:
    small, reports = run(Tuning(), Tuning(), Tuning())
    whole, of_all = run(Tuning(), Tuning(), Tuning(), exchange="all")
    update = codecs.get("fp32").encode(torch.zeros(TRAINED + 3))
    assert [report.bytes_up for report in reports] == [2 * len(update)] * 2
    assert of_all[0].bytes_up - reports[0].bytes_up == 2 * 4 * FROZEN
    assert of_all[0].bytes_down - reports[0].bytes_down == 2 * 4 * FROZEN
    body, half = Backbone(0).body.detach(), TRAINED // 2
    first, last, mean = torch.split(small.weights, [half, half, 3])
    everything = whole.weights
    assert torch.equal(first, everything[:half])
    torch.testing.assert_close(first, 2 * body[:half])
    assert torch.equal(everything[half : half + FROZEN], body)
    assert (float(last[0]), float(mean[0])) == (2.0, 4.0)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_client_with_other_frozen_parameters_gets_those_of_the_controller(shared_memory: bool) -> None:
    same, other = Tuning(), Tuning(seed=9)
    controller, _ = run(Tuning(), same, other, shared_memory=shared_memory)
    body = Backbone(0).body.detach()
    assert all(torch.equal(seen, body) for seen in [*same.seen, *other.seen])
    torch.testing.assert_close(controller.weights[: TRAINED // 2], 2 * body[: TRAINED // 2])


def test_initial_weights_bring_their_frozen_parameters_and_a_resume_has_them_without_the_file(tmp_path: Path) -> None:
    given = Backbone(5)
    save_file({name: tensor.detach() for name, tensor in given.state_dict().items()}, tmp_path / "given.safetensors")
    server, client = Tuning(), Tuning()
    state = {"checkpoint__dir": tmp_path / "state"}
    run(server, client, checkpoint__init_path=tmp_path / "given.safetensors", **state)
    again, later = Tuning(), Tuning()
    run(again, later, rounds=3, **state)
    for task in (server, client, again, later):
        assert task.seen
        assert all(torch.equal(seen, given.body) for seen in task.seen)


def test_a_checkpoint_as_initial_weights_brings_its_frozen_parameters_too(tmp_path: Path) -> None:
    given = Backbone(5)
    save_file({name: tensor.detach() for name, tensor in given.state_dict().items()}, tmp_path / "given.safetensors")
    run(Tuning(), Tuning(), checkpoint__init_path=tmp_path / "given.safetensors", checkpoint__dir=tmp_path / "state")
    server, client = Tuning(), Tuning()
    run(server, client, checkpoint__init_path=tmp_path / "state" / "round-000002.safetensors")
    for task in (server, client):
        assert task.seen
        assert all(torch.equal(seen, given.body) for seen in task.seen)


@pytest.mark.parametrize(("how", "what"), [("thaws", "parameter 'body' was"), ("writes", "parameters were")])
def test_to_train_what_was_frozen_is_an_error_that_says_what_to_do(how: str, what: str) -> None:
    with pytest.raises((TrainingFailed, ExceptionGroup)) as caught:
        run(Tuning(), Tuning(**{how: True}), round__max_attempts=1)
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert what in str(error)
    assert "federated.exchange='all'" in str(error)
    controller, _ = run(Tuning(), Tuning(**{how: True}), exchange="all")
    assert controller.weights.numel() == FROZEN + TRAINED + 3


def test_a_client_that_has_frozen_others_is_refused() -> None:
    class Other(Tuning):
        def build_model(self) -> nn.Module:
            model = Backbone(0)
            model.first.requires_grad_(False)
            model.body.requires_grad_()
            return model

    with pytest.raises(ExceptionGroup) as caught:
        run(Tuning(), Other(), clients__start_timeout_s=5.0)
    assert "set the same model" in str(caught.value.exceptions[0])


# The vector


def test_what_is_frozen_lies_behind_what_travels_in_one_piece_of_memory() -> None:
    module = Backbone(0)
    body = module.body.detach().clone()
    model = FlatModel(module)
    assert (model.dim, model.frozen_dim) == (TRAINED + 3, FROZEN)
    model.write(torch.ones(model.dim))
    assert model.read().data_ptr() == model.read().data_ptr()
    assert all(bool((part == 1.0).all()) for part in (module.first, module.last, module.mean))
    assert torch.equal(module.body.detach(), body)
    assert torch.equal(model.read_frozen(), body)
    assert model.read_frozen().data_ptr() == module.body.data_ptr()


def test_a_model_that_is_laid_out_anew_keeps_its_values() -> None:
    module = Backbone(3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = FlatModel(module)
    trained = (model.dim, model.layout)
    model.arrange(Sharing("all"))
    assert (model.dim, model.layout, model.frozen) == (*model.everything, 0)
    assert torch.equal(model.read()[TRAINED // 2 :][:FROZEN], before["body"])
    model.arrange(Sharing())
    assert (model.dim, model.layout) == trained == model.trained
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_where_nothing_is_frozen_or_nothing_is_trained_by_gradients_everything_travels() -> None:
    plain = nn.Linear(3, 4)
    model, all_of_it = FlatModel(plain), FlatModel(nn.Linear(3, 4), Sharing("all"))
    assert (model.dim, model.layout, model.trained) == (16, all_of_it.layout, (0, 0))
    evolved = nn.Linear(3, 4).requires_grad_(False)
    assert (FlatModel(evolved).dim, FlatModel(evolved).frozen_dim) == (16, 0)


def test_equal_values_have_equal_hashes_and_others_do_not_also_where_they_are_copied() -> None:
    def hash_of(seed: int, dtype: torch.dtype = torch.float32) -> int:
        module = Backbone(seed)
        module.first.data = module.first.data.to(dtype)
        return FlatModel(module).frozen

    assert hash_of(1) == hash_of(1) == hash_of(1, torch.float64) != hash_of(2)
