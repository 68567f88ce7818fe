"""``gradbus export``: what a run has left, as a state that ``load_state_dict`` takes, however odd the model is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import awkward, awkward_compiled
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from gradbus.actors.data_parallel.algorithm import AlgorithmLabel
from gradbus.actors.data_parallel.replicas import model_tensors
from gradbus.actors.data_parallel.state import Position, RunTensors, WorkerState
from gradbus.actors.federated.client.client_state import ClientStateStore, SavedClient
from gradbus.actors.federated.controller.best_model import BestModel
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.commands.files import CLIENT_ONLY_SETTINGS, ControllerFile, TaskSettings, WorkerFile
from gradbus.commands.rundir.directory import write_json
from gradbus.commands.rundir.export import TRUST_WARNING, export
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.torch_compat import uncompiled_names

TASK = TaskSettings(model="own_models:awkward", data="glyphs")
COMPILED = TaskSettings(model="own_models:awkward_compiled", data="glyphs")


def federated(run: Path, *, seed: int = 0, rounds: int = 2, task: TaskSettings = TASK) -> nn.Module:
    """The directory of a federated run, and the model at its end."""
    run.mkdir()
    config = FederatedConfig(checkpoint={"dir": run / "state"})
    write_json(run / "config.json", ControllerFile(task=task, federated=config).model_dump(mode="json"))
    module = (awkward_compiled if task is COMPILED else awkward)(seed)
    model = FlatModel(module)
    state = RunState(config, model, STRATEGIES.make(config.strategy, model.dim))
    state.save_initial()
    for round_id in range(1, rounds + 1):
        state.weights.add_(torch.randn(model.dim, generator=torch.Generator().manual_seed(round_id)).abs())
        state.commit(RoundReport(round_id=round_id), None)
    state.close()
    return module


def personal(run: Path, kept: dict[str, torch.Tensor], *, exchange: str = "trained", **share: Any) -> Path:
    """The directory of a run that shares a part of the model, and that of a client with this state."""
    run.mkdir()
    config = FederatedConfig(checkpoint={"dir": run / "state"}, exchange=exchange, share=share)
    write_json(run / "config.json", ControllerFile(task=TASK, federated=config).model_dump(mode="json"))
    model = FlatModel(awkward(), Sharing.of(config))
    state = RunState(config, model, STRATEGIES.make(config.strategy, model.dim))
    state.weights.fill_(2.0)
    state.commit(RoundReport(round_id=1), None)
    state.close()
    client = ClientStateStore(run.parent / "clients", 3)
    client.start_run(state.run_id)
    client.keep(1, kept)
    client.close()
    return run.parent / "clients" / "client-3"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_a_model_with_personal_tensors_says_which_they_are_and_a_client_brings_its_own(tmp_path: Path) -> None:
    own = {f"norm.{name}": torch.full((4,), 5.0) for name in ("weight", "bias", "running_mean", "running_var")}
    kept = {f"personal.{name}": tensor for name, tensor in own.items()}
    client = personal(tmp_path / "run", kept, exclude=["norm.*"])
    alone = export(tmp_path / "run")
    assert alone.absent == list(own)
    assert "left out, as each client has its own: 'norm.weight', 'norm.bias', 'norm.running_mean'" in alone.text
    assert "; --client DIRECTORY gives those of one\n" in alone.text
    assert TRUST_WARNING in alone.text
    assert load_file(alone.path).keys() == awkward().state_dict().keys() - own.keys()
    done = export(tmp_path / "run", trust=True)
    assert "4 of them are personal, and as the model was built" in done.text
    about, found = metadata(done.path), load_file(done.path)
    assert metadata(alone.path) == about
    assert json.loads(about["personal"]) == list(own)
    assert set(json.loads(about["shared"])) == {n for n, t in found.items() if t.is_floating_point() and n not in own}
    assert bool((found["first.weight"] == 2.0).all())
    assert torch.equal(found["norm.weight"], awkward().norm.weight.detach())
    for trust in (True, False):
        of_client = export(tmp_path / "run", client=client, trust=trust)
        assert of_client.path.name == "model-client-3.safetensors"
        assert "4 of them of client-3\n" in of_client.text
        loaded = load_file(of_client.path)
        assert loaded.keys() == awkward().state_dict().keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in own.items())
        assert bool((loaded["first.weight"] == 2.0).all())


def test_a_frozen_tensor_is_personal_where_a_run_exchanges_all_of_the_model_but_that(tmp_path: Path) -> None:
    own = {
        f"personal.{name}": torch.full_like(one, 5.0) for name, one in awkward().named_parameters() if "frozen" in name
    }
    client = personal(tmp_path / "run", own, exchange="all", exclude=["frozen*"])
    names = [name.removeprefix("personal.") for name in own]
    assert json.loads(metadata(export(tmp_path / "run").path)["personal"]) == names
    loaded = load_file(export(tmp_path / "run", client=client).path)
    assert all(bool((loaded[name] == 5.0).all()) for name in names)
    meta = CheckpointStore.to_read(tmp_path / "run" / "state").load(1).meta
    assert SavedRun.read(meta, "meta").sharing == Sharing("all", exclude=("frozen*",))
    older = {key: value for key, value in meta.items() if key != "exchange"}
    assert SavedRun.read(older, "meta").sharing == Sharing("trained", exclude=("frozen*",))


def test_a_round_that_is_named_gets_the_state_of_a_client_that_is_not_newer(tmp_path: Path) -> None:
    kept = {
        f"personal.norm.{name}": torch.full((4,), 5.0) for name in ("weight", "bias", "running_mean", "running_var")
    }
    client = personal(tmp_path / "run", kept, exclude=["norm.*"])
    (number,) = CheckpointStore.to_read(client).rounds()
    of_round = export(tmp_path / "run", number=number, client=client)
    store = CheckpointStore.to_read(client)
    run_id = SavedClient.of(store.load(number, SavedClient.of)).run_id
    with contextlib.closing(ClientStateStore(client.parent, 3)) as state:
        state.start_run(int(run_id, 16))
        state.keep(number + 5, {name: torch.full((4,), 9.0) for name in kept})
    again = export(tmp_path / "run", number=number, client=client)
    assert again.number == of_round.number == number
    assert bool((load_file(again.path)["norm.weight"] == 5.0).all()), "and not that of five rounds later"
    for path in client.glob(f"round-{number:06d}.*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"no state as old as the model of round {number}, it has those of"):
        export(tmp_path / "run", number=number, client=client)


def test_the_model_that_a_rule_keeps_at_a_client_is_that_of_the_client(tmp_path: Path) -> None:
    model = FlatModel(awkward())
    own = {name: torch.full_like(tensor, 7) for name, tensor in model.read_own().items()}
    client = personal(tmp_path / "run", {f"own_model.{name}": tensor for name, tensor in own.items()})
    loaded = load_file(export(tmp_path / "run", client=client).path)
    for name, tensor in awkward().state_dict().items():
        expected = tensor if name.startswith("frozen") else torch.full_like(tensor, 7)
        assert torch.equal(loaded[name], expected)


def test_a_client_that_has_nothing_of_its_own_or_of_this_run_is_refused(tmp_path: Path) -> None:
    client = personal(tmp_path / "run", {"residual": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="keeps no tensors of the model"):
        export(tmp_path / "run", client=client)
    federated(tmp_path / "other")
    with pytest.raises(CheckpointError, match="has no state of run"):
        export(tmp_path / "other", client=client)
    with pytest.raises(ConfigError, match="is no directory"):
        export(tmp_path / "run", client=tmp_path / "client-9")
    parallel(tmp_path / "ranks")
    with pytest.raises(ConfigError, match="has no clients"):
        export(tmp_path / "ranks", client=client)


def parallel(run: Path) -> nn.Module:
    """The same of data-parallel ranks."""
    run.mkdir()
    config = DataParallelConfig(checkpoint={"dir": run / "state"})
    file = WorkerFile(task=TASK, parallel=config).model_dump(mode="json", exclude={"task": {*CLIENT_ONLY_SETTINGS}})
    write_json(run / "config.json", file)
    module = awkward()
    torch.manual_seed(3)
    for tensor in module.state_dict().values():
        tensor.add_(torch.randint(1, 9, tensor.shape).to(tensor.dtype))
    state = WorkerState(config, 0, 1, label=AlgorithmLabel("dense"))
    tensors = RunTensors({}, {}, model_tensors(module))
    state.save(9, Position(step=4, epoch=2), module, tensors, num_batches=0, report=None)
    state.close()
    return module


def loads(state: dict[str, Any], like: nn.Module) -> None:
    """A fresh model takes it, strictly, and is then that one; the counter of batch norm stays on each node."""
    fresh = awkward()
    fresh.load_state_dict(state, strict=True)
    for name, tensor in like.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert fresh.last.weight is fresh.first.weight


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("make", [federated, parallel])
def test_the_state_of_a_run_is_written_under_the_names_of_the_model(tmp_path: Path, make: Any, trust: bool) -> None:
    model = make(tmp_path / "run")
    done = export(tmp_path / "run", trust=trust)
    assert done.path == tmp_path / "run" / "model.safetensors"
    assert (done.unit, done.number) == (("round", 2) if make is federated else ("step", 4))
    loads(load_file(done.path), model)
    assert f"model.load_state_dict(safetensors.torch.load_file('{done.path}'))" in done.text
    assert done.is_whole
    torch_file = export(tmp_path / "run", tmp_path / "other" / "net.pt", trust=trust)
    assert torch_file.format == "torch"
    loads(torch.load(torch_file.path, weights_only=True), model)
    assert export(tmp_path / "run", form="torch", trust=trust).path == tmp_path / "run" / "model.pt"


def test_the_best_model_is_exported_in_place_of_the_newest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = FederatedConfig(checkpoint={"dir": run / "state", "keep_best": "eval_loss"})
    write_json(run / "config.json", ControllerFile(task=TASK, federated=config).model_dump(mode="json"))
    module = awkward()
    model = FlatModel(module)
    state = RunState(config, model, STRATEGIES.make(config.strategy, model.dim))
    best = BestModel(config.checkpoint, state)
    states = []
    for round_id, loss in enumerate((2.0, 1.0, 3.0), start=1):
        state.weights.add_(0.5)
        state.commit(RoundReport(round_id=round_id), None)
        best.note(RoundReport(round_id=round_id, eval_loss=loss))
        model.hold(state.weights, state.buffers)
        states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    best.close()
    state.close()
    done = export(run, best=True)
    assert done.number == 2
    assert "after round 2, the minimum of eval_loss: 1\n" in done.text
    exported = load_file(done.path)
    assert all(torch.equal(exported[name], states[1][name]) for name in exported if exported[name].is_floating_point())
    assert export(run).number == 3


def test_without_a_best_model_it_is_said_which_setting_keeps_one(tmp_path: Path) -> None:
    federated(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"the run has no federated\.checkpoint\.keep_best"):
        export(tmp_path / "run", best=True)
    with pytest.raises(ConfigError, match="--best or --round"):
        export(tmp_path / "run", number=1, best=True)
    parallel(tmp_path / "ranks")
    with pytest.raises(ConfigError, match="--best is for federated runs"):
        export(tmp_path / "ranks", best=True)


def test_a_run_that_goes_on_or_was_moved_can_be_exported_and_an_older_round_too(tmp_path: Path) -> None:
    model = federated(tmp_path / "run")
    before = export(tmp_path / "run", number=1)
    assert before.number == 1
    config = FederatedConfig(checkpoint={"dir": tmp_path / "run" / "state"})
    holding = RunState(config, FlatModel(awkward()), STRATEGIES.make(config.strategy, FlatModel(awkward()).dim))
    loads(load_file(export(tmp_path / "run").path), model)
    holding.close()
    (tmp_path / "run").rename(tmp_path / "moved")
    loads(load_file(export(tmp_path / "moved").path), model)
    with pytest.raises(CheckpointError, match=r"no checkpoint of 7, it has those of \[0, 1, 2\]"):
        export(tmp_path / "moved", number=7)


def test_what_was_exported_is_a_model_to_begin_another_run_with(tmp_path: Path) -> None:
    model = federated(tmp_path / "run")
    config = FederatedConfig(checkpoint={"init_path": export(tmp_path / "run").path})
    flat = FlatModel(awkward())
    RunState(config, flat, STRATEGIES.make(config.strategy, flat.dim))
    assert torch.equal(flat.read(), FlatModel(model).read())


def test_what_cannot_be_exported_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist\. Name one that a run has left"):
        export(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is no run directory"):
        export(tmp_path / "empty")
    federated(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"task": values["task"] | {"model": "own_models:narrow"}}))
    with pytest.raises(CheckpointError, match=r"holds 'scale' as float32 of shape \(\), the model .* has none"):
        export(tmp_path / "run", trust=True)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="cannot be written"):
        export(tmp_path / "run", tmp_path)
    for file in (tmp_path / "run" / "state").glob("round-*.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*run/state.*: the run has ended before"):
        export(tmp_path / "run")


def test_a_compiled_model_is_exported_with_the_names_of_the_model_and_begins_another_run(tmp_path: Path) -> None:
    module = federated(tmp_path / "run", task=COMPILED)
    assert all(name.startswith("_orig_mod.") for name in module.state_dict())
    exported = export(tmp_path / "run")
    loaded = load_file(exported.path)
    plain = awkward(5)
    plain.load_state_dict(loaded)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[f"_orig_mod.{name}"])
    for later in (awkward(5), awkward_compiled(5)):
        assert torch.equal(FlatModel(later).vector_of(loaded)[: FlatModel(module).dim], FlatModel(module).read())
    export(tmp_path / "run", to=tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == loaded.keys()


def test_names_that_would_be_one_without_those_of_compile_are_left_as_they_are() -> None:
    assert uncompiled_names(["a._orig_mod.w", "b"]) == {"a._orig_mod.w": "a.w", "b": "b"}
    assert uncompiled_names(["a._orig_mod.w", "a.w"]) == {"a._orig_mod.w": "a._orig_mod.w", "a.w": "a.w"}
