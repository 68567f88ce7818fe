"""``gradbus export``: the trained model of a run as named tensors, from its newest checkpoint.

A checkpoint of a federated run holds one vector, in an order of its own; one of data-parallel ranks holds tensors under
names of its own. What is written here has the names and shapes that ``model.state_dict()`` has, frozen parameters and
buffers among them, so that ``model.load_state_dict(...)`` takes it as it is.

Where some tensors are personal (``federated.share``), a run has no values of them: the file has those of
``build_model``, and says in its metadata which these are. With the directory of a client's state it has the client's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradbus.actors.data_parallel.state import SavedRank, restore_model
from gradbus.actors.federated.best_model import SavedBest, place_of
from gradbus.actors.federated.client_state import SavedClient, own_tensors
from gradbus.actors.federated.sharing import divide, specs_of
from gradbus.actors.federated.state import SavedRun, restore_weights
from gradbus.actors.parameter_server.state import newest_version
from gradbus.actors.parameter_server.state import restore_model as restore_from_servers
from gradbus.experiments.amounts import size
from gradbus.experiments.files import ControllerFile, TaskSettings, WorkerFile
from gradbus.experiments.run.configured_task import ConfiguredShardTask, ConfiguredTask
from gradbus.experiments.rundir.directory import replaced
from gradbus.experiments.rundir.reading import Kind, kind_of
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore, copy_state
from gradbus.runtime.config.settings import load_settings
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.torch_compat import uncompiled_names

Format = Literal["safetensors", "torch"]

_SUFFIXES: dict[str, Format] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_UNITS: dict[Kind, str] = {"federated": "round", "parallel": "step"}


@dataclass(frozen=True, slots=True)
class Exported:
    """The file that was written, after round or step ``number``; ``tensors``: their number. ``why``: that one.
    ``personal``: how many of them are not those of the run, and ``client``: whose they are; empty: as ``build_model``
    gives them."""

    path: Path
    format: Format
    unit: str
    number: int
    tensors: int
    num_bytes: int
    why: str = ""
    personal: int = 0
    client: str = ""

    @property
    def text(self) -> str:
        """For the user: what it is, and how to load it."""
        how = (
            f"safetensors.torch.load_file({str(self.path)!r})"
            if self.format == "safetensors"
            else f"torch.load({str(self.path)!r}, weights_only=True)"
        )
        about = ""
        if self.client:
            about = f", {self.personal} of them of {self.client}"
        elif self.personal:
            about = (
                f"; {self.personal} of them are personal, and as the model was built: each client has its own "
                f"(--client DIRECTORY)"
            )
        return (
            f"written to {self.path} ({size(self.num_bytes)}): {self.tensors} tensors, after {self.unit} "
            f"{self.number}{self.why}{about}\nto use it: model.load_state_dict({how})"
        )


def export(
    run: Path, to: Path | None = None, form: Format | None = None, number: int | None = None, *, best: bool = False,
    client: Path | None = None,
) -> Exported:  # fmt: skip
    """Write the model of a run, from the checkpoint of round or step ``number``, by default the newest one.

    Args:
        run: its directory; the run may be going on.
        best: the best model of a run with ``federated.checkpoint.keep_best``, in place of the newest.
        to: the file; by default ``model.safetensors`` or ``model.pt`` there. form: of it; by default by its suffix.
        client: the directory of a client's state, such as ``state/client-3``: write the model of that client.

    Raises:
        ConfigError: it is no run directory, the model cannot be made, or the file cannot be written.
        CheckpointError: there is no checkpoint, or it does not fit the model.
    """
    form = form or _SUFFIXES.get("" if to is None else to.suffix.lower(), "safetensors")
    name = "model" if client is None else f"model-{client.name}"
    target = to or run / (f"{name}.safetensors" if form == "safetensors" else f"{name}.pt")
    if best and number is not None:
        raise ConfigError("give --best or --round, not both")
    kind, model, checkpoint = _load_best(run) if best else _load(run, number)
    about = {_UNITS[kind]: str(checkpoint.round_id), "format": "pt"}
    personal = _personal_names(model, SavedRun.of(checkpoint)) if kind == "federated" else []
    if client is not None:
        if kind != "federated":
            raise ConfigError("--client: a run of data-parallel ranks has no clients, and one model for all")
        exactly = best or number is not None
        personal = _take_own(model, SavedRun.of(checkpoint).run_id, client, checkpoint.round_id, exactly=exactly)
        about["client"] = client.name
    state = copy_state(model)
    if personal:
        own = set(personal)
        shared = [name for name, one in state.items() if name not in own and one.is_floating_point()]
        about["personal"], about["shared"] = json.dumps(personal), json.dumps(shared)
    _write(state, target, form, about)
    why = ""
    if best:
        found = SavedBest.of(checkpoint).best
        why = f", the {found.mode}imum of {found.metric}: {found.value:.6g}"
    return Exported(
        target, form, _UNITS[kind], checkpoint.round_id, len(state), target.stat().st_size, why, len(personal),
        about.get("client", ""),
    )  # fmt: skip


def _personal_names(model: nn.Module, saved: SavedRun) -> list[str]:
    """Names of the tensors that the run has no values of, in the order of the model."""
    specs = specs_of(model)
    found = divide(specs, saved.sharing).personal
    return [spec.name for spec in specs if spec.name in found and spec.dtype.is_floating_point]


@torch.no_grad()
def _take_own(model: nn.Module, run_id: str, client: Path, round_id: int, *, exactly: bool) -> list[str]:
    """Set a module to what a client has of its own: the model that its rule keeps, or else its personal tensors.

    Args:
        round_id: of the shared part. The client's newest state that is not newer is taken, and, unless ``exactly``,
            else its newest one: in asynchronous runs its numbers are not those of rounds.

    Returns:
        Names of these.

    Raises:
        CheckpointError: it has none, or those of another run or model.
    """
    if not client.is_dir():
        raise ConfigError(f"{client} is no directory. Name that of a client, in its client.state_dir: .../client-3")
    store = CheckpointStore.to_read(client)
    rounds = store.rounds()
    until = max((known for known in rounds if known <= round_id), default=None)
    if until is None and exactly and rounds:
        raise CheckpointError(
            f"{client} has no state as old as the model of round {round_id}, it has those of {rounds}: a client keeps "
            f"its last three. Export one of these rounds, or leave --client out"
        )
    checkpoint = store.load_newest(SavedClient.of) if until is None else store.load(until, SavedClient.of)
    if checkpoint is None or SavedClient.of(checkpoint).run_id != run_id:
        raise CheckpointError(f"{client} has no state of run {run_id}. Name the directory that its clients have used")
    own = own_tensors(checkpoint.tensors)
    if not own:
        raise CheckpointError(
            f"{client} keeps no tensors of the model: nothing of it is personal (federated.share), and its rule trains "
            f"no model of its own. Leave --client out"
        )
    state = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name not in state or state[name].shape != tensor.shape:
            raise CheckpointError(f"{client} keeps {name!r} of shape {tuple(tensor.shape)}, which the model has not")
        state[name].copy_(tensor)
    return list(own)


def _load_best(run: Path) -> tuple[Kind, nn.Module, Checkpoint]:
    """The best model of a federated run. Raises as :func:`export`."""
    kind, config = kind_of(run), run / "config.json"
    if kind != "federated":
        raise ConfigError(f"--best is for federated runs, with federated.checkpoint.keep_best; {run} is of ranks")
    federated = load_settings(ControllerFile, config, environment={})
    own = federated.federated.checkpoint.dir
    states = [run / "state", *([own] if own is not None else [])]
    state = next((place for place in states if any(place_of(place).glob("round-*.json"))), None)
    if state is None:
        hint = "" if federated.federated.checkpoint.keep_best else ": the run has no federated.checkpoint.keep_best"
        raise CheckpointError(f"no best model in {' nor in '.join(str(place_of(place)) for place in states)}{hint}")
    checkpoint = CheckpointStore.to_read(place_of(state)).load_newest(SavedBest.of)
    assert checkpoint is not None
    model = ConfiguredTask(_on_cpu(federated.task)).build_model()
    restore_weights(model, checkpoint, CheckpointStore.to_read(state).load_constant)
    return kind, model, checkpoint


def _load(run: Path, number: int | None) -> tuple[Kind, nn.Module, Checkpoint]:
    kind, config = kind_of(run), run / "config.json"
    if not config.exists():
        raise ConfigError(f"{config} is not there: it names the model. A run writes it when it begins")
    if kind == "federated":
        federated = load_settings(ControllerFile, config, environment={})
        store, checkpoint = _newest(run, federated.federated.checkpoint.dir, "", number, SavedRun.of)
        model = ConfiguredTask(_on_cpu(federated.task)).build_model()
        restore_weights(model, checkpoint, store.load_constant)
    else:
        parallel = load_settings(WorkerFile, config, environment={})
        if parallel.parameter_server.servers:
            saved = newest_version(_state_of(run, parallel.parallel.checkpoint.dir), number)
            model = ConfiguredShardTask(_on_cpu(parallel.task)).build_model()
            restore_from_servers(model, saved)
            return kind, model, saved[0]
        _, checkpoint = _newest(run, parallel.parallel.checkpoint.dir, "rank-0", number, SavedRank.of)
        model = ConfiguredShardTask(_on_cpu(parallel.task)).build_model()
        restore_model(model, checkpoint)
    return kind, model, checkpoint


def _state_of(run: Path, state_dir: Path | None) -> Path:
    """Return where the servers of a run have their checkpoints: ``state`` there, else the directory in the settings."""
    own = run / "state"
    return own if state_dir is None or any(own.glob("server-*/round-*.json")) else state_dir


def _on_cpu(task: TaskSettings) -> TaskSettings:
    """The machine that exports need not have the device that trained."""
    return task.model_copy(update={"device": "cpu"})


def _newest(
    run: Path, state_dir: Path | None, folder: str, number: int | None, check: Any
) -> tuple[CheckpointStore, Checkpoint]:
    """From ``state`` in the run directory, else from the directory in the settings."""
    places = [run / "state" / folder, *([state_dir / folder] if state_dir is not None else [])]
    found = next((place for place in places if any(place.glob("round-*.json"))), None)
    if found is None:
        searched = " nor in ".join(dict.fromkeys(map(str, places)))
        raise CheckpointError(
            f"no checkpoint in {searched}: the run has ended before its first one, or its checkpoints were moved away"
        )
    store = CheckpointStore.to_read(found)
    if number is None:
        checkpoint = store.load_newest(check)
        assert checkpoint is not None
        return store, checkpoint
    if number not in store.rounds():
        raise CheckpointError(f"{found} has no checkpoint of {number}, it has those of {store.rounds()}")
    return store, store.load(number, check)


_LISTS = ("personal", "shared")  # entries of the metadata that are names of tensors


def _write(state: Mapping[str, Any], target: Path, form: Format, about: dict[str, str]) -> None:
    """Whole or not at all. Names are those of the model before ``torch.compile``, as other programs load it."""
    names = uncompiled_names(state)
    state = {names[name]: value for name, value in state.items()}
    about = {
        key: json.dumps([names.get(name, name) for name in parse_json(text)]) if key in _LISTS else text
        for key, text in about.items()
    }
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd and form == "safetensors":
        raise ConfigError(f"{odd[0]!r} of the model's state is no tensor; write it with --format torch")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as temporary:
            if form == "torch":
                torch.save(dict(state), temporary)
            else:
                save_file(dict(state), temporary, metadata=about)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}. Name another (--to)") from None
