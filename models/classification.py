"""The default task: a network, a labelled data set, SGD with momentum; ``parallel.py`` has its data-parallel half."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from . import partition as partitions
from .data import Dataset, DataSplit
from .local_sgd import MakeOptimizer, run_steps
from .networks import reseed_dropout
from .parallel import ShardedTraining, count_correct
from .seeds import derive_seed, seeded_generator, seeded_global_generator
from .task import EvalResult, TrainResult

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), labels (B,)) -> mean loss over the batch, a scalar."""


class TrainFn(Protocol):
    """A training function of the user's own, in place of SGD."""

    def __call__(
        self,
        model: nn.Module,
        dataset: Dataset,
        *,
        epochs: int,
        lr: float,
        seed: int,
        should_stop: Callable[[], bool],
    ) -> TrainResult:
        """Train ``model`` in place on ``dataset``, the samples of this client and round.

        ``seed`` already differs between clients and rounds. Ask ``should_stop()`` between batches and raise
        :class:`TrainingStopped` when it is true. Where the controller names an optimizer, ``make_optimizer`` comes as
        one more keyword: a function from parameters to that optimizer. One that has an argument ``round`` gets the
        packets of the round, to send its update in several ones.
        """


class TaskOptions(TypedDict, total=False):
    """Keyword arguments of :class:`ClassificationTask`, with the defaults of :data:`TASK_DEFAULTS`.

    Attributes:
        batch_size: samples per step.
        momentum, weight_decay: of SGD. The momentum starts at zero in every round.
        seed: of the initial parameters and the partition. Order and subsets take the seed given to ``train``.
        device: of model and data, as torch names it.
        validation_share: of the samples of each client that are held out from training, for :meth:`evaluate_local`.
    """

    batch_size: int
    momentum: float
    weight_decay: float
    seed: int
    device: str
    validation_share: float


TASK_DEFAULTS: TaskOptions = {
    "batch_size": 64,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "seed": 0,
    "device": "cpu",
    "validation_share": 0.0,
}


def _takes_seed(make_model: Callable[..., object]) -> bool:
    try:
        return "seed" in inspect.signature(make_model).parameters
    except (TypeError, ValueError):  # of a builtin nothing is known
        return False


class ClassificationTask(ShardedTraining):
    """Implements :class:`gradbus.models.Task` for images (or anything else) with one label each.

    It also has what data-parallel workers need of a task; their optimizer and learning rate are not the task's.
    Results are bit-identical from call to call with equal arguments and an equal number of torch threads, unless the
    network has ``nn.Dropout``, which draws from the global generator: use :class:`gradbus.models.SeededDropout`.

    Args:
        model: makes the network; called with ``seed=`` if it takes that argument, otherwise with nothing, while the
            global generator is seeded.
        data: the sets, or a function that loads them, called once, at first need.
        partition: of the training set among the clients, see :func:`gradbus.models.partition.parse`.
        num_clients: number of shares; :meth:`prepare` may change it.
        train_fn: replaces the built-in SGD. loss: also used by :meth:`evaluate`. options: see :class:`TaskOptions`.

    Raises:
        ValueError: an argument is out of range. TypeError: there is no such option.
    """

    def __init__(
        self,
        model: Callable[..., nn.Module],
        data: DataSplit | Callable[[], DataSplit],
        partition: partitions.PartitionSpec = "iid",
        num_clients: int = 1,
        *,
        train_fn: TrainFn | None = None,
        loss: Loss = cross_entropy,
        **options: Unpack[TaskOptions],
    ) -> None:
        if unknown := sorted(options.keys() - TASK_DEFAULTS.keys()):
            raise TypeError(f"ClassificationTask has no options {unknown}; there are {list(TASK_DEFAULTS)}")
        chosen: TaskOptions = {**TASK_DEFAULTS, **options}
        self.num_clients = num_clients
        self.batch_size = chosen["batch_size"]
        self.momentum = chosen["momentum"]
        self.weight_decay = chosen["weight_decay"]
        self.seed = chosen["seed"]
        self.device = torch.device(chosen["device"])
        self.validation_share = chosen["validation_share"]
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"need 0 <= validation_share < 1, got {self.validation_share}")
        if num_clients < 1 or self.batch_size < 1:
            raise ValueError(f"num_clients and batch_size must be >= 1, got {num_clients} and {self.batch_size}")
        if not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"need 0 <= momentum < 1 and weight_decay >= 0, got {self.momentum} and {self.weight_decay}"
            )
        partitions.parse(partition)  # a wrong spec should fail here, not in the first round
        self._make_model = model
        self._data_source = data
        self._partition = partition
        self.train_fn = train_fn
        self._loss = loss
        self._lock = threading.Lock()  # clients in threads of one process share the task: load and partition once
        self._split: DataSplit | None = None
        self._shares: list[Tensor] | None = None
        self._num_params: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which loads the data itself: without them, unless they were given as they are."""
        state = self.__dict__ | {"_shares": None}
        del state["_lock"]
        return state if isinstance(self._data_source, DataSplit) else state | {"_split": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = threading.Lock()

    def build_model(self) -> nn.Module:
        """A new model on ``device``, with the same initial parameters at every call and on every node.

        Raises:
            ValueError: the function that makes it returns something else.
        """
        make = self._make_model
        with seeded_global_generator(self.seed):
            model: object = make(seed=self.seed) if _takes_seed(make) else make()
        if isinstance(model, nn.Module):
            return model.to(self.device)
        while isinstance(make, partial):
            make = make.func
        name = f"{getattr(make, '__module__', '')}.{getattr(make, '__qualname__', type(make).__name__)}"
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ValueError(
            f"the model function {name} has returned {what}: expected a torch.nn.Module. Return the module "
            f"itself, neither its class nor its state_dict"
        )

    @property
    def num_params(self) -> int:
        """Number of values in the model's parameters."""
        if self._num_params is None:
            self._num_params = sum(parameter.numel() for parameter in self.build_model().parameters())
        return self._num_params

    @property
    def data(self) -> DataSplit:
        """Both sets, loaded at the first use."""
        with self._lock:
            if self._split is None:
                split = self._data_source if isinstance(self._data_source, DataSplit) else self._data_source()
                self._split = split.to(self.device)
            return self._split

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Load the data and find this client's share.

        With another ``num_clients`` than before the training set is partitioned anew; 0: as before.

        Raises:
            ValueError: no such client, or no such partition of this data set.
        """
        if num_clients < 0:
            raise ValueError(f"num_clients must be >= 0, got {num_clients}")
        with self._lock:
            if num_clients not in (0, self.num_clients):
                self.num_clients, self._shares = num_clients, None
        self.share(client_id)

    def share(self, client_id: int) -> Tensor:
        """Indices of the samples in ``data.train`` that this client trains on: int64 (K,), sorted."""
        return self._parts(client_id)[0]

    def held_out(self, client_id: int) -> Tensor:
        """Indices of the samples in ``data.train`` that this client holds out: int64, sorted. They are drawn by the
        seed of the task, and at least one is left for training."""
        return self._parts(client_id)[1]

    def _parts(self, client_id: int) -> tuple[Tensor, Tensor]:
        whole = self._whole_share(client_id)
        count = min(round(self.validation_share * len(whole)), len(whole) - 1)
        if count < 1:
            return whole, whole[:0]
        order = torch.randperm(len(whole), generator=seeded_generator("held out", self.seed, client_id))
        return whole[order[count:].sort().values], whole[order[:count].sort().values]

    def _whole_share(self, client_id: int) -> Tensor:
        train = self.data.train
        labels = train.labels.cpu()
        with self._lock:
            if not 0 <= client_id < self.num_clients:
                raise ValueError(
                    f"client_id must be in 0..{self.num_clients - 1}, got {client_id}: the data is split for "
                    f"{self.num_clients}. Set federated.clients.num at the controller, or task.num_clients here"
                )
            if self._shares is None:
                self._shares = partitions.make(
                    self._partition, labels, self.num_clients, self.seed, samples=train.images
                )
            return self._shares[client_id]

    def train(  # noqa: PLR0913 (the public signature)
        self,
        model: nn.Module,
        *,
        client_id: int,
        round_id: int,
        epochs: int,
        lr: float,
        seed: int,
        subset_size: int,
        should_stop: Callable[[], bool],
        make_optimizer: MakeOptimizer | None = None,
        steps: int = 0,
        **of_train_fn: Any,
    ) -> TrainResult:
        """Train in place, see :meth:`gradbus.models.Task.train`; ``subset_size`` is at most the size of the share.

        ``make_optimizer`` takes the parameters, in place of SGD; a ``train_fn`` must take it as a keyword then.
        So must it take ``steps``: of the optimizer, in place of ``epochs``; 0: ``epochs`` holds. ``of_train_fn``: what
        else it has asked for: ``round``.

        Raises:
            ValueError: an argument is out of range. TypeError: there is no such argument.
            TrainingStopped: ``should_stop`` was true.
        """
        if epochs < 1 or not lr > 0 or subset_size < 0:
            raise ValueError(f"need epochs >= 1, lr > 0, subset_size >= 0, got {epochs}, {lr}, {subset_size}")
        share = self.share(client_id)
        generator = seeded_generator("train", seed, client_id, round_id)
        if 0 < subset_size < len(share):
            share = share[torch.randperm(len(share), generator=generator)[:subset_size]]
        if self.train_fn is not None:
            own_seed = derive_seed("train_fn", seed, client_id, round_id)
            samples = self.data.train.subset(share)
            own: Callable[..., TrainResult] = partial(self.train_fn, **of_train_fn)
            if make_optimizer is not None:
                own = partial(own, make_optimizer=make_optimizer)
            if steps:
                own = partial(own, steps=steps)
            return own(model, samples, epochs=epochs, lr=lr, seed=own_seed, should_stop=should_stop)
        if of_train_fn:
            raise TypeError(f"train takes no {', '.join(sorted(of_train_fn))}: a train_fn may")
        reseed_dropout(model, generator)
        if make_optimizer is None:
            make_optimizer = partial(torch.optim.SGD, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)
        optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        most = steps or epochs * math.ceil(len(share) / self.batch_size)
        train = self.data.train

        def loss_of(batch: Tensor) -> Tensor:
            picked = batch.to(train.labels.device)
            return self._loss(model(train.images[picked]), train.labels[picked])

        return run_steps(model, share, loss_of, optimizer, (most, self.batch_size), generator, should_stop)

    def local_loss(self, model: nn.Module, *, client_id: int) -> float:
        """Mean loss of the model on the share of this client, which is not trained on."""
        share, train = self.share(client_id), self.data.train
        _, loss_sum = count_correct(model, train.images[share], train.labels[share], self._loss)
        return float(loss_sum / len(share))

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult | None:
        """Accuracy and loss on the samples that this client holds out; None: there are none."""
        held_out, train = self.held_out(client_id), self.data.train
        if not len(held_out):
            return None
        correct, loss_sum = count_correct(model, train.images[held_out], train.labels[held_out], self._loss)
        return EvalResult(correct / len(held_out), loss_sum / len(held_out), len(held_out))

    def evaluate(self, model: nn.Module) -> EvalResult | None:
        """Accuracy and loss on the whole test set; the model's training mode is put back. None without a test set."""
        test = self.data.test
        if test is None or not len(test):
            return None
        correct, loss_sum = count_correct(model, test.images, test.labels, self._loss)
        return EvalResult(correct / len(test), loss_sum / len(test), len(test))
