"""The model of a run as its task builds it. This imports and runs the code that ``config.json`` of the run names."""

from __future__ import annotations

import torch
from torch import nn

from gradbus.actors.data_parallel.state import restore_model
from gradbus.actors.federated.controller.saved_run import SavedRun, restore_weights
from gradbus.actors.federated.model.own_tensors import own_tensors
from gradbus.actors.federated.model.sharing import divide, specs_of
from gradbus.actors.parameter_server.state import restore_model as restore_from_servers
from gradbus.commands.configured_task import ConfiguredShardTask, ConfiguredTask
from gradbus.commands.files import ControllerFile, TaskSettings, WorkerFile
from gradbus.commands.rundir.saved_models import FoundModel
from gradbus.runtime.checkpoint import Checkpoint, copy_state
from gradbus.runtime.complex_pairs import restored
from gradbus.runtime.config.settings import load_settings
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.saved_state import SavedState


def built_state(found: FoundModel, client: Checkpoint | None) -> SavedState:
    """Return the state of the model that the task of a run builds, set to a checkpoint.

    Personal tensors are those of ``client``, else as ``build_model`` gives them.

    Raises:
        ConfigError: the model cannot be made. CheckpointError: it is another one than that of the checkpoint.
    """
    config = found.run / "config.json"
    if not config.exists():
        raise ConfigError(f"{config} is not there: it names the model. A run writes it when it begins")
    personal: list[str] = []
    if found.kind == "federated":
        model = ConfiguredTask(_on_cpu(load_settings(ControllerFile, config, environment={}).task)).build_model()
        restore_weights(model, found.checkpoints[0], found.beside.load_constant)
        personal = _personal_names(model, SavedRun.of(found.checkpoints[0])) if client is None else []
    else:
        model = ConfiguredShardTask(_on_cpu(load_settings(WorkerFile, config, environment={}).task)).build_model()
        if found.of_servers:
            restore_from_servers(model, found.checkpoints)
        else:
            restore_model(model, found.checkpoints[0])
    if client is not None:
        personal = _take_own(model, client)
    return SavedState(copy_state(model), personal)


def _on_cpu(task: TaskSettings) -> TaskSettings:
    """Move the model to the CPU: the machine that exports need not have the device that trained."""
    return task.model_copy(update={"device": "cpu"})


def _personal_names(model: nn.Module, saved: SavedRun) -> list[str]:
    """Return the names of the tensors that the run has no values of, in the order of the model."""
    specs = specs_of(model)
    found = divide(specs, saved.sharing).personal
    return [spec.name for spec in specs if spec.name in found and spec.is_inexact]


@torch.no_grad()
def _take_own(model: nn.Module, client: Checkpoint) -> list[str]:
    """Set a module to what a client has of its own: the model that its rule keeps, or else its personal tensors.

    Returns:
        Names of these.

    Raises:
        CheckpointError: it is of another model.
    """
    own = own_tensors(client.tensors)
    state = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name in state and state[name].is_complex() and tuple(tensor.shape) == (*state[name].shape, 2):
            tensor = restored(tensor, state[name].dtype)
        if name not in state or state[name].shape != tensor.shape:
            raise CheckpointError(f"a client keeps {name!r} of shape {tuple(tensor.shape)}, which the model has not")
        state[name].copy_(tensor)
    return list(own)
