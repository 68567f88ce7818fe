"""The optimizer of a run, and the schedule of its learning rate: from the configuration, the task, or the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradbus.runtime.algorithms.base import Algorithm
from gradbus.runtime.choices import OPTIMIZERS, SCHEDULES
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.optimization.deferred_compiler import defer_compiler
from gradbus.runtime.optimization.optimizers import check_optimizer, make_optimizer
from gradbus.runtime.optimization.schedules import SET_BY_SCHEDULES, Schedule, check_schedule
from gradbus.runtime.optimization.state import check_parameters, group_settings, load_state, state_tensors


class RunOptimizer:
    """Changes the model. Every method is for the compute thread.

    Attributes:
        optimizer: of torch. clip_norm: largest norm of the gradient of a step; None: any.
        source: what it is from: a choice of the configuration, ``task``, or the name of the algorithm.
        schedule_steps: steps of the run that its schedule is for; 0: none has begun.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        task: Any,
        model: nn.Module,
        trained: Mapping[str, Tensor],
        algorithm: Algorithm,
        *,
        clips: bool = True,
    ) -> None:
        """Make the optimizer: the algorithm's, where it brings one; the task's, where it has ``make_optimizer`` and the
        configuration names none; else the configuration's.

        Args:
            clips: False: whoever computes the gradients has clipped them, and ``clip_norm`` is None.

        Raises:
            ConfigError: they do not fit together, with the reason.
        """
        defer_compiler()
        self._config = config
        self._trained = trained
        self._algorithm = algorithm
        options: Any = OPTIMIZERS.checked(config.optimizer)
        self.source = ""
        self.schedule_steps = 0
        self._makes_schedule = getattr(task, "make_schedule", None)
        self._schedule: Schedule | None = None
        self._own_schedule: LRScheduler | None = None
        self.clip_norm: float | None = options.clip_norm if clips else None
        if algorithm.makes_steps and self.clip_norm is not None:
            raise ConfigError(
                f"{algorithm.called} makes steps, not gradients: optimizer.clip_norm has nothing to limit"
            )
        self.optimizer = self._make(task, model, algorithm, options)
        algorithm.check(trained, self.optimizer)
        self._made = group_settings(self.optimizer)

    def _make(self, task: Any, model: nn.Module, algorithm: Algorithm, options: Any) -> Optimizer:
        choice, own = self._config.optimizer, getattr(task, "make_optimizer", None)
        is_named = _is_named(self._config)
        if _brings_optimizer(algorithm):
            if choice.name != "sgd" or (own is not None and not is_named):
                raise ConfigError(
                    f"{algorithm.called} brings an optimizer of its own, a kind of sgd, "
                    f"{'and so does the task' if choice.name == 'sgd' else f'not {choice.name}'}: set "
                    f"parallel.optimizer=sgd, or choose another algorithm"
                )
            if (brought := algorithm.make_optimizer(self._trained, options)) is not None:
                self.source = algorithm.called
                return brought
        if own is None and choice.name == "task":
            raise ConfigError(
                f"parallel.optimizer is 'task', but {type(task).__name__} has no make_optimizer(model): name one, such "
                f"as sgd"
            )
        if own is None or is_named:
            self.source = choice.name
            return make_optimizer(OPTIMIZERS, choice, self._trained.values(), checked=options)
        self.source = "task"
        made = own(model)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"make_optimizer of the task returned a {type(made).__name__}, no torch.optim.Optimizer")
        check_optimizer(type(made), "make_optimizer of the task")
        try:
            check_parameters(made, self._trained)
        except ValueError as error:
            raise ConfigError(f"make_optimizer of the task: {error}") from None
        return made

    @property
    def lr(self) -> float:
        """Learning rate of the first group, as it is now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def start_schedule(self, steps: int) -> None:
        """Begin the schedule of a run of so many steps.

        Raises:
            ConfigError: it does not take these options, or fit the optimizer or the algorithm.
        """
        self.schedule_steps = steps
        config, before = self._config, _momenta(self.optimizer)
        if self._makes_schedule is not None and "schedule" not in config.model_fields_set:
            self._own_schedule = self._makes_schedule(self.optimizer)
            check_schedule(type(self._own_schedule), "make_schedule of the task")
        elif config.schedule != SCHEDULES.default:
            self._schedule = Schedule(SCHEDULES, config.schedule, self.optimizer, steps=steps, epochs=config.epochs)
        cycles = self._schedule is not None and self._schedule.cycles_momentum
        cycles = cycles or bool(getattr(self._own_schedule, "cycle_momentum", False))
        algorithm = self._algorithm
        if not cycles and _momenta(self.optimizer) == before:
            return
        if algorithm.makes_steps or _brings_optimizer(algorithm):
            raise ConfigError(
                f"{algorithm.called} has a momentum of its own, the schedule would change the optimizer's alone: "
                f"give the schedule cycle_momentum=false"
            )
        try:
            algorithm.check(self._trained, self.optimizer)
        except ConfigError as error:
            raise ConfigError(f"{error}. The schedule gives it momentum: set cycle_momentum=false") from None

    def step(self, number: int, epoch: int) -> None:
        """Change the parameters by their gradients. ``number``: of the step in the run, from 0."""
        if self._schedule is not None:
            self._schedule.go_to(number, epoch)
        self.optimizer.step()

    @property
    def has_own_schedule(self) -> bool:
        """Whether the task has a learning-rate schedule of its own, which is told of every step."""
        return self._own_schedule is not None

    def step_has_ended(self) -> None:
        """A step was made, or skipped: a schedule of the task's goes on."""
        if self._own_schedule is not None:
            self._own_schedule.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, not copied. Raises CheckpointError: there is something in it that cannot be saved."""
        return state_tensors(
            self.optimizer,
            self._trained,
            self._own_schedule,
            made=self._made,
            skipped=() if self._schedule is None else SET_BY_SCHEDULES,
            origin=self._origin,
        )

    @property
    def _origin(self) -> tuple[str, str]:
        return self.source, type(self.optimizer).__name__

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse. Raises CheckpointError: it does not fit; ConfigError: it is of another optimizer."""
        load_state(self.optimizer, self._trained, tensors, self._own_schedule, origin=self._origin)


def is_made_by_task(config: DataParallelConfig, task: Any) -> bool:
    """Return whether the task makes the optimizer, unless the algorithm brings one."""
    return getattr(task, "make_optimizer", None) is not None and not _is_named(config)


def _is_named(config: DataParallelConfig) -> bool:
    """Whether the configuration names an optimizer, which is then made rather than the task's."""
    return "optimizer" in config.model_fields_set and config.optimizer.name != "task"


def _brings_optimizer(algorithm: Algorithm) -> bool:
    return type(algorithm).make_optimizer is not Algorithm.make_optimizer


def _momenta(optimizer: Optimizer) -> list[Any]:
    return [(group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]
