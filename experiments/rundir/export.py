"""``gradbus export``: the trained model of a run as named tensors, from its newest checkpoint.

A checkpoint of a federated run holds one vector, in an order of its own; one of data-parallel ranks holds tensors under
names of its own. What is written here has the names and shapes that ``model.state_dict()`` has, frozen parameters and
buffers among them, so that ``model.load_state_dict(...)`` takes it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradbus.actors.data_parallel.state import SavedRank, restore_model
from gradbus.actors.federated.best_model import SavedBest, place_of
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

Format = Literal["safetensors", "torch"]

_SUFFIXES: dict[str, Format] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_UNITS: dict[Kind, str] = {"federated": "round", "parallel": "step"}


@dataclass(frozen=True, slots=True)
class Exported:
    """The file that was written, after round or step ``number``; ``tensors``: their number. ``why``: that one."""

    path: Path
    format: Format
    unit: str
    number: int
    tensors: int
    num_bytes: int
    why: str = ""

    @property
    def text(self) -> str:
        """For the user: what it is, and how to load it."""
        how = (
            f"safetensors.torch.load_file({str(self.path)!r})"
            if self.format == "safetensors"
            else f"torch.load({str(self.path)!r}, weights_only=True)"
        )
        return (
            f"written to {self.path} ({size(self.num_bytes)}): {self.tensors} tensors, after {self.unit} "
            f"{self.number}{self.why}\nto use it: model.load_state_dict({how})"
        )


def export(
    run: Path, to: Path | None = None, form: Format | None = None, number: int | None = None, *, best: bool = False
) -> Exported:  # fmt: skip
    """Write the model of a run, from the checkpoint of round or step ``number``, by default the newest one.

    Args:
        run: its directory; the run may be going on.
        best: the best model of a run with ``federated.checkpoint.keep_best``, in place of the newest.
        to: the file; by default ``model.safetensors`` or ``model.pt`` there. form: of it; by default by its suffix.

    Raises:
        ConfigError: it is no run directory, the model cannot be made, or the file cannot be written.
        CheckpointError: there is no checkpoint, or it does not fit the model.
    """
    form = form or _SUFFIXES.get("" if to is None else to.suffix.lower(), "safetensors")
    target = to or run / ("model.safetensors" if form == "safetensors" else "model.pt")
    if best and number is not None:
        raise ConfigError("give --best or --round, not both")
    kind, model, checkpoint = _load_best(run) if best else _load(run, number)
    state = copy_state(model)
    _write(state, target, form, {_UNITS[kind]: str(checkpoint.round_id), "format": "pt"})
    why = ""
    if best:
        found = SavedBest.of(checkpoint).best
        why = f", the {found.mode}imum of {found.metric}: {found.value:.6g}"
    return Exported(target, form, _UNITS[kind], checkpoint.round_id, len(state), target.stat().st_size, why)


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
    """Where the servers of a run have their checkpoints: ``state`` there, else the directory in the settings."""
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


def _write(state: Mapping[str, Any], target: Path, form: Format, about: dict[str, str]) -> None:
    """Whole or not at all."""
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
