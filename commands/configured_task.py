"""From settings to a task: model, data and training as a configuration file names them.

A mistake in the settings becomes a ConfigError or NoData, which name the setting. An exception of a user's own function
stays as it is, with its traceback.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradbus import models
from gradbus.actors.data_parallel.metrics import Reported
from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
from gradbus.actors.federated.task import EvalOutcome, FederatedTask, TrainOutcome
from gradbus.commands.exit_codes import NoData
from gradbus.commands.files import TaskSettings
from gradbus.commands.lifecycle import stopping
from gradbus.commands.sample_ids import with_ids
from gradbus.runtime.built_model import build_model
from gradbus.runtime.choices import import_object
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.torch_compat import available_accelerator


class _Configured:
    """Holds what a task of a client and of a rank have in common. ``note``: one line about the data, once they are
    loaded."""

    methods: ClassVar[tuple[str, ...]]
    protocol: ClassVar[str]

    def __init__(self, settings: TaskSettings) -> None:
        """Import what the settings name; nothing is loaded yet. Raises ConfigError."""
        self._settings = settings
        self.note = ""
        torch.set_num_threads(settings.threads)
        with _settings_errors():
            self._task: Any = self._make()
        self.__wrapped__ = self._task  # errors name its methods

    def _make(self) -> Any:
        settings = self._settings
        if settings.task is None:
            return _classification(settings)
        made = _call(settings.task, settings.task_options, key="task.task")
        lacking = [name for name in self.methods if not callable(getattr(made, name, None))]
        if lacking:
            raise ConfigError(
                f"task.task {settings.task!r}: what it returns, {type(made).__name__}, has no {', '.join(lacking)}; "
                f"see {self.protocol}"
            )
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: it imports the task there, and loads the data itself."""
        return type(self), (self._settings,)

    def load(self) -> None:
        """Load the data, before any other process waits for it. Raises NoData, ConfigError."""
        if isinstance(self._task, models.ClassificationTask):
            with _settings_errors():
                self.note = self._task.data.note or self._task.data.name

    def build_model(self) -> nn.Module:
        with _settings_errors():
            return build_model(self._task)


class ConfiguredTask(_Configured):
    """A task of a controller and its clients. Implements :class:`gradbus.actors.federated.task.FederatedTask`."""

    methods = ("build_model", "prepare", "train", "evaluate")
    protocol = "gradbus.models.Task"
    _task: FederatedTask

    def prepare(self, client_id: int, num_clients: int) -> None:
        with _settings_errors():
            self._task.prepare(client_id, max(num_clients, self._settings.num_clients))

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        for name in ("evaluate_local", "local_loss"):  # a task need not have them
            if callable(getattr(self._task, name, None)):
                setattr(self, name, getattr(self._task, name))

    def shares(self) -> tuple[models.Dataset, list[Tensor]] | None:
        """The training set, and the indices of each client's samples in it; None: the task is the user's own, and
        does not tell. Raises NoData, ConfigError."""
        task = self._task
        if not isinstance(task, models.ClassificationTask):
            return None
        with _settings_errors():
            return task.data.train, [task.share(client_id) for client_id in range(task.num_clients)]

    def train(self, model: nn.Module, **command: Any) -> TrainOutcome:
        return self._task.train(model, **command)

    def evaluate(self, model: nn.Module) -> EvalOutcome | None:
        """Evaluate as the task does, but end at Ctrl-C: its result is of no use then."""
        with _stoppable(model):
            return self._task.evaluate(model)


class ConfiguredShardTask(_Configured):
    """A task of a rank. Implements :class:`gradbus.actors.DataParallelTask`."""

    methods = ("build_model", "prepare_shard", "num_batches", "batches", "loss", "evaluate_shard")
    protocol = "gradbus.actors.DataParallelTask"
    _task: DataParallelTask

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        for name in ("make_optimizer", "make_schedule", "data_digest"):  # a task need not have them
            if hasattr(self._task, name):
                setattr(self, name, getattr(self._task, name))
        self._digest = ""

    def load(self) -> None:
        super().load()
        if isinstance(self._task, models.ClassificationTask):
            self._digest = self._task.data_digest()

    def facts(self) -> dict[str, Any]:
        """Facts of the data that must be equal on all ranks, or they would take other samples than agreed."""
        task: object = self._task
        if not isinstance(task, models.ClassificationTask):
            return {}
        data = task.data
        return {
            "task.data": data.name,
            "training samples": len(data.train),
            "test samples": 0 if data.test is None else len(data.test),
            "task.batch_size": task.batch_size,
            "digest of the data": self._digest,
        }

    def prepare_shard(self, rank: int, world: int) -> None:
        with _settings_errors():
            self._task.prepare_shard(rank, world)

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        return self._task.num_batches(rank=rank, world=world, epoch=epoch)

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
        return self._task.batches(rank=rank, world=world, epoch=epoch, seed=seed)

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Reported]:
        return self._task.loss(model, batch)

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> ShardCounts | None:
        """Evaluate as the task does, but end at Ctrl-C."""
        with _stoppable(model):
            return self._task.evaluate_shard(model, rank=rank, world=world)


@contextlib.contextmanager
def _stoppable(model: nn.Module) -> Iterator[None]:
    hook = model.register_forward_pre_hook(_stop_if_asked)
    try:
        yield
    finally:
        hook.remove()


def _stop_if_asked(*_: Any) -> None:
    if stopping.is_set():
        raise models.TrainingStopped(0)


def local_device(name: str, local_rank: str) -> str:
    """The device of a rank: its own of several of a machine, in turn, where ``name`` is that of torch's accelerator and
    has no number. ``local_rank``: the variable LOCAL_RANK, or ""."""
    accelerator = available_accelerator()
    if accelerator is None or name != accelerator.type or not local_rank.isdecimal():
        return name
    return f"{name}:{int(local_rank) % torch.accelerator.device_count()}"


def _classification(settings: TaskSettings) -> models.ClassificationTask:
    model = _model(settings.model, settings.model_options)
    train_fn = None if settings.train_fn is None else _train_fn(settings.train_fn)
    return models.ClassificationTask(
        model,
        _source(settings),
        with_ids(settings.partition),
        settings.num_clients,
        train_fn=train_fn,
        batch_size=settings.batch_size,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        device=local_device(settings.device, os.environ.get("LOCAL_RANK", "")),
        validation_share=settings.validation_share,
    )


def _model(spec: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function that makes the model, with its options. Raises ConfigError: it cannot be called with them."""
    function = _function(spec, key="task.model")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin nothing is known
        return partial(function, **options)
    try:
        signature.bind(**{**({"seed": 0} if "seed" in signature.parameters else {}), **options})
    except TypeError as error:
        raise ConfigError(
            f"task.model {spec!r}: it takes {signature}, and with task.model_options {options}: {error}. Give in "
            f"task.model_options what it needs, by name"
        ) from None
    return partial(function, **options)


def _train_fn(spec: str) -> Callable[..., Any]:
    """The training function. Raises ConfigError: it does not take what it will be called with."""
    function = _function(spec, key="task.train_fn")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin nothing is known
        return function
    try:
        signature.bind(None, None, epochs=1, lr=0.1, seed=0, should_stop=None)
    except TypeError as error:
        raise ConfigError(
            f"task.train_fn {spec!r}: it is called with (model, samples, epochs=, lr=, seed=, should_stop=), and takes "
            f"{signature}: {error}"
        ) from None
    return function


def _source(settings: TaskSettings) -> Callable[[], models.DataSplit]:
    match settings.data:
        case "glyphs":
            return partial(_call, "gradbus.models:glyphs", settings.data_options, key="task.data")
        case "mnist" | "auto" as name:
            if settings.data_options:
                raise ConfigError(f"task.data_options: data {name!r} takes none")
            return partial(models.load, name, settings.data_root, download=settings.download)
        case spec if ":" in spec:
            _function(spec, key="task.data")
            return partial(_own_data, spec, settings.data_options)
    raise ConfigError(f"task.data {settings.data!r}: expected auto, mnist, glyphs or package.module:attribute")


def _own_data(spec: str, options: dict[str, Any]) -> models.DataSplit:
    data = _call(spec, options, key="task.data")
    if not isinstance(data, models.DataSplit):
        raise ConfigError(
            f"task.data {spec!r}: expected it to return gradbus.models.DataSplit, got {type(data).__name__}"
        )
    return data


def _function(spec: str, *, key: str) -> Callable[..., Any]:
    found: Callable[..., Any] = import_object(spec, key=key)
    if not callable(found):
        raise ConfigError(f"{key} {spec!r}: expected a function or a class, got {type(found).__name__}")
    return found


def _call(spec: str, options: dict[str, Any], *, key: str) -> Any:
    function = _function(spec, key=key)
    try:
        return function(**options)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call, not inside
            raise ConfigError(f"{key} {spec!r}, its options: {error}") from None
        raise


@contextlib.contextmanager
def _settings_errors() -> Iterator[None]:
    """Turn errors that gradbus itself raises in the block into errors of the settings."""
    try:
        yield
    except models.DataMissing as error:
        raise NoData(str(error)) from None
    except ConfigError:
        raise
    except ValueError as error:
        if not _is_our_own(error):
            raise
        raise ConfigError(f"task: {error}") from None


def _is_our_own(error: ValueError) -> bool:
    """Whether only functions of gradbus were on the stack where it was raised."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(str(frame.f_globals.get("__name__", "")).partition(".")[0] == "gradbus" for frame in frames)
