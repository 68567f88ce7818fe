"""Configuration files: what a controller, a client and a worker are told. One file each, with sections.

Weak to strong: the defaults here, the file, the environment (``GRADBUS_FEDERATED__ROUNDS=20``), ``--set
federated.rounds=20``, other options of the command.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from gradbus.experiments.run.rank_environment import MAX_WORLD
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import (
    BusSettings,
    ClientConfig,
    FederatedConfig,
    NonNegative,
    Settings,
    load_settings,
    read_settings,
)
from gradbus.runtime.errors import ConfigError

Options = dict[str, Any]
"""Keyword arguments for what a setting names."""


class TaskSettings(Settings):
    """Model, data and training. Controller and clients must agree on ``model``, ``data``, ``partition`` and ``seed``;
    workers also on ``batch_size``.

    Attributes:
        model: makes the network, ``package.module:attribute``; called with ``model_options``.
        data: ``mnist``, ``glyphs`` (digits drawn on the spot), ``auto`` (MNIST, or glyphs where that is not to be had),
            or ``package.module:attribute`` of a function that returns a ``gradbus.models.DataSplit``; ``data_options``
            are its arguments.
        data_root: folder that holds ``MNIST/raw``; else ``GRADBUS_DATA``, else the user's cache.
        download: fetch MNIST if it is missing.
        partition: how the training set is shared out: iid, dirichlet, shards, by_label, or an object with a ``kind``
            and its options: ``{"kind": "dirichlet", "alpha": 0.5}``.
        num_clients: cut the training set into so many shares, if the controller expects fewer clients or does not know.
        batch_size: samples of a step of one client or one worker.
        momentum, weight_decay: of the clients' SGD; that of workers is set in their own section.
        seed: of the initial weights and the partition.
        train_fn: a training function in place of SGD, ``package.module:attribute``; see ``gradbus.models.TrainFn``.
            For clients only.
        task: a function that returns a whole task of your own, ``package.module:attribute``; see
            ``gradbus.models.Task``, and for workers ``gradbus.actors.DataParallelTask``. It gets ``task_options``, and
            all above is then without effect.
        threads: threads of torch in this process; workers that are not told share the cores of their machine.
        device: where model and data live.
    """

    model: str = "gradbus.models:mnist_cnn"
    model_options: Options = Field(default_factory=dict)
    data: str = "auto"
    data_options: Options = Field(default_factory=dict)
    data_root: Path | None = None
    download: bool = True
    partition: str | dict[str, Any] = "iid"
    num_clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 64
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    train_fn: str | None = None
    task: str | None = None
    task_options: Options = Field(default_factory=dict)
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    device: str = "cpu"


class ControllerFile(Settings):
    """What ``gradbus controller`` reads.

    Attributes:
        run_dir: where reports, figures and checkpoints go; None: ``runs/<job>-<time>``, anew at each start. A run that
            is started again with the same directory is continued.
        tensorboard: folder for scalars of each round; needs the extra ``tensorboard``. None: none.
    """

    bus: BusSettings = BusSettings()
    task: TaskSettings = TaskSettings()
    federated: FederatedConfig = FederatedConfig()
    run_dir: Path | None = None
    tensorboard: Path | None = None


class ClientFile(Settings):
    """What ``gradbus client`` reads."""

    bus: BusSettings = BusSettings()
    task: TaskSettings = TaskSettings()
    client: ClientConfig = ClientConfig()


OF_CLIENTS = {"momentum": "worker.momentum", "weight_decay": "worker.weight_decay", "train_fn": "task.task"}


class WorkerFile(Settings):
    """What ``gradbus worker`` reads. All ranks may read the same file.

    Attributes:
        rank, world: which of how many this is; usually not here but on the command line or in the environment.
        run_dir: rank 0: where reports, figures and checkpoints go; None: ``runs/<job>-<time>``, anew at each start. A
            run that is started again with the same directory is continued. The other ranks use the same directory where
            they can see it, else one of that name.
        tensorboard: rank 0: folder for scalars of each epoch and window; needs the extra ``tensorboard``. None: none.
    """

    bus: BusSettings = BusSettings()
    task: TaskSettings = TaskSettings()
    worker: DataParallelConfig = DataParallelConfig()
    run_dir: Path | None = None
    tensorboard: Path | None = None
    rank: Annotated[int, Field(ge=0, lt=MAX_WORLD)] | None = None
    world: Annotated[int, Field(ge=1, le=MAX_WORLD)] | None = None

    @model_validator(mode="after")
    def _no_rules_of_clients(self) -> WorkerFile:
        for key in sorted(OF_CLIENTS.keys() & self.task.model_fields_set):
            raise ValueError(f"task.{key} is a setting of federated clients; workers take {OF_CLIENTS[key]}")
        return self


F = TypeVar("F", ControllerFile, ClientFile, WorkerFile)
_SECTIONS = {*ControllerFile.model_fields, *ClientFile.model_fields, *WorkerFile.model_fields}


def load(
    kind: type[F],
    path: Path | None,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    data_root: Path | None = None,
) -> F:
    """Read a file of this kind and all that goes before it. ``defaults``: what the program itself says.

    Raises:
        ConfigError: with every wrong key, and the nearest right one.
    """
    strongest: list[str] = [] if data_root is None else [f"task.data_root={json.dumps(os.fspath(data_root))}"]
    # One environment may serve a controller and clients: what belongs to the other kind is no mistake.
    others = {f"GRADBUS_{section.upper()}__" for section in _SECTIONS - set(kind.model_fields)}
    environment = {name: text for name, text in os.environ.items() if not name.upper().startswith(tuple(others))}
    try:
        return load_settings(kind, path, overrides=[*overrides, *strongest], environment=environment, values=defaults)
    except ConfigError as error:
        if owner := _owner_of(kind, path):
            raise ConfigError(f"{error}. This is the configuration of a {owner}: gradbus {owner} {path}") from None
        raise


def _owner_of(kind: type[Settings], path: Path | None) -> str:
    """The command whose configuration this file is, if it has a section that only another kind has; else ""."""
    owners = {"federated": "controller", "client": "client", "worker": "worker"}
    sections: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # of which the caller has an error already
        sections = {} if path is None else read_settings(path)
    return next((owners[key] for key in sections if key in owners.keys() - kind.model_fields.keys()), "")
