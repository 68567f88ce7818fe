"""Configuration files of a controller, a client, a worker and an aggregator: one file each, with sections.

The text below each setting is what ``gradbus config reference`` and ``docs/settings.md`` show.

Weak to strong: the defaults here, the file, the environment (``GRADBUS_FEDERATED__ROUNDS=20``), ``--set
federated.rounds=20``, other options of the command.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from gradbus.commands.rank_environment import MAX_WORLD
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import ClientConfig, FederatedConfig, UpstreamConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.config.settings import NonNegative, Positive, Settings, load_settings, read_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.in_network.encoding import MAX_WORLD as MAX_AGGREGATED_WORLD

Options = dict[str, Any]
"""Keyword arguments of the function that a setting names."""


class TaskSettings(Settings):
    """Model, data and training.

    Controller and clients must agree on ``model``, ``data``, ``partition`` and ``seed``, workers also on
    ``batch_size``.
    """

    model: str = "gradbus.models:mnist_cnn"
    """Function that makes the network, as package.module:attribute. It is called with `model_options`."""
    model_options: Options = Field(default={})
    """Arguments of that function."""
    data: str = "auto"
    """Data set: `mnist`; `glyphs`, digits drawn on the spot; `auto`, MNIST, or glyphs where MNIST cannot be had; or
    package.module:attribute of a function that returns a gradbus.models.DataSplit."""
    data_options: Options = Field(default={})
    """Arguments of that function."""
    data_root: Path | None = None
    """Folder that contains MNIST/raw. null: the one that the environment variable GRADBUS_DATA names, else the user's
    cache."""
    download: bool = True
    """Whether MNIST is fetched if it is missing."""
    partition: str | dict[str, Any] = "iid"
    """How the training set is divided: iid, dirichlet, shards, by_label, quantity, feature, natural, or an object with
    a `kind` and its options, such as {"kind": "dirichlet", "alpha": 0.5}; see docs/partitions.md."""
    num_clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of shares that the training set is cut into, if the controller expects fewer clients or does not know how
    many."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Number of samples of a step of one client or one worker."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the clients' SGD. Workers use `parallel.optimizer.momentum`."""
    weight_decay: NonNegative = 0.0
    """Weight decay of the clients' SGD. Workers use `parallel.optimizer.weight_decay`."""
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples of each client that it does not train on, for `federated.evaluation`: it evaluates models on
    them. Equal for the controller and its clients."""
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Seed of the initial weights and of the partition."""
    train_fn: str | None = None
    """Training function of the clients in place of SGD, as package.module:attribute; see gradbus.models.TrainFn. null:
    SGD."""
    task: str | None = None
    """Function that returns a whole task of your own, as package.module:attribute; see gradbus.models.Task, and
    gradbus.actors.DataParallelTask for workers. The settings above are then without effect. null: none."""
    task_options: Options = Field(default={})
    """Arguments of that function."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of torch's threads in this process. Workers without this setting share the cores of their machine."""
    device: str = "cpu"
    """Device of the model and the data, as torch names it. A worker takes of several the one with its number on this
    machine (`LOCAL_RANK`), unless it is named: `cuda:1`."""

    @classmethod
    def without_effect(cls, given: Mapping[str, Any]) -> Mapping[str, str]:
        """With a task of the user's own, all that describes the one of ours."""
        if given.get("task") is None:
            return {}
        keys = list(cls.model_fields)
        why = "has no effect with task.task: a task of your own sets it, or takes it as one of task.task_options"
        return dict.fromkeys(keys[: keys.index("task")], why)


class MetricsSettings(Settings):
    """Metrics of this process for Prometheus; see docs/operations.md. They need the package prometheus-client."""

    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Port that serves them, at `/metrics`. A rank takes this one plus its rank, as all may read the same file. 0: any
    free one, which the log names. null: none."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine alone; what is served is not secret, and not
    protected."""


class UpstreamSettings(UpstreamConfig):
    """The level above, for the Controller of a site, and how it takes part there; see docs/trees.md."""

    bus: BusSettings = BusSettings()
    """How to reach the Controller of the level above: a job of its own, with a key of its own."""


class ControllerFile(Settings):
    """A configuration file of a controller."""

    bus: BusSettings = BusSettings()
    task: TaskSettings = TaskSettings()
    federated: FederatedConfig = FederatedConfig()
    upstream: UpstreamSettings = UpstreamSettings()
    run_dir: Path | None = None
    """Directory of reports, figures and checkpoints. A run that is started again with the same directory is continued.
    null: `runs/JOB-TIME`, a new one at each start."""
    tensorboard: Path | None = None
    """Directory of TensorBoard scalars of each round; it needs the package tensorboard. null: none."""
    mlflow: str | None = None
    """Address of an MLflow tracking server, such as `http://tracking.local:5000`, that gets the numbers of each round;
    it needs the package mlflow-skinny. null: none."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the numbers of each round; it needs the package wandb. null: none."""
    metrics: MetricsSettings = MetricsSettings()

    @property
    def has_trackers(self) -> bool:
        """Return whether TensorBoard, MLflow or Weights & Biases get the numbers of this run."""
        return any(one is not None for one in (self.tensorboard, self.mlflow, self.wandb))

    @classmethod
    def without_effect(cls, given: Mapping[str, Any]) -> Mapping[str, str]:
        """What only clients take, each from its own configuration."""
        task = given.get("task")
        if isinstance(task, Mapping) and task.get("task") is not None:
            return {}  # then it has none at a client either
        why = (
            "is a setting of each client: set it in the configuration of the clients (gradbus demo hands it on to them)"
        )
        return {f"task.{key}": why for key in ("batch_size", "momentum", "weight_decay", "train_fn")}

    @model_validator(mode="after")
    def _two_jobs(self) -> ControllerFile:
        above = self.upstream
        if above.site is not None and (above.bus.job, above.bus.domain) == (self.bus.job, self.bus.domain):
            raise ValueError(
                f"upstream.bus.job is that of bus, {self.bus.job!r}: each level has a job of its own. Set "
                f"upstream.bus.job to that of the level above"
            )
        if above.site is None and not above.bus.job.startswith("default-"):
            raise ValueError("upstream.bus names a level above, but upstream.site is missing: the number of this site")
        return self


class ClientFile(Settings):
    """A configuration file of a client."""

    bus: BusSettings = BusSettings()
    task: TaskSettings = TaskSettings()
    client: ClientConfig = ClientConfig()
    metrics: MetricsSettings = MetricsSettings()


CLIENT_ONLY_SETTINGS = {
    "momentum": "parallel.optimizer.momentum",
    "weight_decay": "parallel.optimizer.weight_decay",
    "train_fn": "task.task",
    "validation_share": "the data set's own test samples",
}


class WorkerFile(Settings):
    """A configuration file of workers, and of their parameter servers, if there are any. All may read the same file."""

    renamed: ClassVar[Mapping[str, str]] = {"worker": "parallel", "world_size": "world"}

    bus: BusSettings = BusSettings()
    task: TaskSettings = TaskSettings()
    parallel: DataParallelConfig = DataParallelConfig()
    parameter_server: ParameterServerSettings = ParameterServerSettings()
    run_dir: Path | None = None
    """Directory of reports, figures and checkpoints, made by rank 0; the other ranks use the same one where they can
    see it, else one of that name. A run that is started again with the same directory is continued. null:
    `runs/JOB-TIME`, a new one at each start."""
    tensorboard: Path | None = None
    """Directory of TensorBoard scalars of each epoch and window, for rank 0; it needs the package tensorboard. null:
    none."""
    mlflow: str | None = None
    """Address of an MLflow tracking server, such as `http://tracking.local:5000`, that gets the numbers of each epoch
    and window from rank 0; it needs the package mlflow-skinny. null: none."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the numbers of each epoch and window from rank 0; it needs the package
    wandb. null: none."""
    metrics: MetricsSettings = MetricsSettings()
    rank: Annotated[int, Field(ge=0, lt=MAX_WORLD)] | None = None
    """Number of this rank, from 0. Usually given on the command line or in the environment."""
    world: Annotated[int, Field(ge=1, le=MAX_WORLD)] | None = None
    """Number of ranks, parameter servers not counted. Usually given on the command line or in the environment."""

    @model_validator(mode="after")
    def _no_client_settings(self) -> WorkerFile:
        for key in sorted(CLIENT_ONLY_SETTINGS.keys() & self.task.model_fields_set):
            raise ValueError(f"task.{key} is a setting of federated clients; workers take {CLIENT_ONLY_SETTINGS[key]}")
        return self


class AggregatorSettings(Settings):
    """The memory of an aggregator, and the jobs that share it."""

    world: Annotated[int, Field(ge=1, le=MAX_AGGREGATED_WORLD)] = 2
    """Number of workers of the job."""
    jobs: dict[str, Annotated[int, Field(ge=1, le=MAX_AGGREGATED_WORLD)]] = Field(default={})
    """Number of workers by the name of their job, for several jobs that share the slots. {}: bus.job alone, of `world`
    workers."""
    node: Annotated[int, Field(ge=0, lt=128)] = 0
    """Number of this aggregator, where the workers' topology has several: leaves of a tree first, then its roots; those
    of a chain in their order."""
    nodes: Annotated[int, Field(ge=1, le=128)] = 1
    """How many aggregators the topology has."""
    slots: Annotated[int, Field(ge=0, le=1 << 24)] = 1024
    """Number of blocks that it holds, of all jobs together. 0: it never adds, and rings go past it."""
    block_elems: Annotated[int, Field(ge=1, le=1 << 22)] = 1 << 16
    """Number of int32 entries of a block; workers need the same."""
    allocation: Literal["scan", "hash"] = "scan"
    """How a group of blocks of route ra-ina finds slots: `scan` takes the first free ones in a row, `hash` looks at one
    place, as a switch does."""
    max_groups_per_job: Annotated[int, Field(ge=1)] = 1 << 20
    """Number of groups of one job that may hold slots at once, by route ra-ina. Never more than two windows
    (`parallel.algorithm.window_groups`), as many as its workers have under way; a worker gets slots for its
    part of these, rounded up."""
    retransmit_s: Positive = 0.5
    """Seconds after which a worker that has not acknowledged a sum gets it again."""
    lease_s: Positive = 60.0
    """Seconds after which a job is given up when one of its slots got nothing new. Its workers go on without
    aggregators, and come back (`parallel.algorithm.aggregator_retry_s`)."""
    report_s: Positive = 60.0
    """Seconds between two lines of the log on a job that goes on. What was dropped is logged within 5 s."""
    join_s: Positive = 60.0
    """Seconds that it waits for the workers of a job, and the other aggregators. With keep_serving they begin when the
    first worker comes, and it waits again after that."""
    keep_serving: bool = True
    """Whether a job is served again when its workers have left, so that it can be continued, until the aggregator is
    stopped. false: once."""

    @model_validator(mode="after")
    def _one_way_to_name_jobs(self) -> AggregatorSettings:
        if self.jobs and "world" in self.model_fields_set:
            raise ValueError("world is for bus.job alone: with jobs, each has its number of workers there")
        if self.node >= self.nodes:
            raise ValueError(f"node: expected 0 to {self.nodes - 1}, as nodes is {self.nodes}, got {self.node}")
        return self


class AggregatorFile(Settings):
    """A configuration file of an aggregator."""

    bus: BusSettings = BusSettings()
    aggregator: AggregatorSettings = AggregatorSettings()


F = TypeVar("F", ControllerFile, ClientFile, WorkerFile, AggregatorFile)
_SECTIONS = {
    *ControllerFile.model_fields,
    *ClientFile.model_fields,
    *WorkerFile.model_fields,
    *AggregatorFile.model_fields,
}


def load(
    kind: type[F],
    path: Path | None,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    data_root: Path | None = None,
) -> F:
    """Read a file of this kind, the environment and the overrides. ``defaults``: those of the program, the weakest.

    Raises:
        ConfigError: with every wrong key, and the nearest right one.
    """
    strongest: list[str] = [] if data_root is None else [f"task.data_root={json.dumps(os.fspath(data_root))}"]
    # One environment may serve a controller and clients: what belongs to the other kind is no mistake.
    others = {f"GRADBUS_{section.upper()}__" for section in _SECTIONS - set(kind.model_fields)}
    environment = {name: text for name, text in os.environ.items() if not name.upper().startswith(tuple(others))}
    try:
        settings = load_settings(
            kind, path, overrides=[*overrides, *strongest], environment=environment, values=defaults
        )
    except ConfigError as error:
        if owner := _owner_of(kind, path):
            raise ConfigError(f"{error}. This is the configuration of a {owner}: gradbus {owner} {path}") from None
        raise
    if owner := _owner_of(kind, path):
        raise ConfigError(
            f"{path}: its section 'task' has settings of clients alone, and there is no section 'federated'. "
            f"This is the configuration of a {owner}: gradbus {owner} {path}"
        )
    return settings


def _owner_of(kind: type[Settings], path: Path | None) -> str:
    """Return the command whose configuration this file is, if it has a section that only another kind has, or settings
    of clients without the section of this kind; else ""."""
    owners = {
        "federated": "controller",
        "client": "client",
        "parallel": "worker",
        "aggregator": "aggregator",
        "relay": "relay",
    }
    sections: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # of which the caller has an error already
        sections = {} if path is None else read_settings(path)
    task = sections.get("task")
    is_without_own = not sections.keys() & kind.model_fields.keys() & owners.keys()
    if kind is not ClientFile and is_without_own and isinstance(task, dict) and CLIENT_ONLY_SETTINGS.keys() & task:
        return "client"
    return next((owners[key] for key in sections if key in owners.keys() - kind.model_fields.keys()), "")
