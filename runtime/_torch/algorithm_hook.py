"""Any algorithm of data-parallel training in a script of one's own, in one line, on any backend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket, bucket_of, make_algorithm
from gradbus.runtime.algorithms.requests import AllGather
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.logs import get_logger
from gradbus.torch.programs import run_program

_KINDS = ("own", "shared")

log = get_logger("torch")


def with_algorithm(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], name: str, *,
    process_group: dist.ProcessGroup | None = None, **options: Any,
) -> AlgorithmHook:  # fmt: skip
    """Have a model trained with an algorithm of data-parallel training.

        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hook = gradbus.torch.with_algorithm(model, [optimizer], "powersgd", rank=4)

    The rest of the script stays as it is. All ranks call this with the same algorithm and options. Where a gradient of
    any rank is not finite all ranks skip the optimizers' next step, and the algorithm forgets it.

    Args:
        model: a DistributedDataParallel without a communication hook of its own; parameters are float32 on the CPU. For
            an algorithm that averages weights (``decentralized``) also a plain module, equal on all ranks at the start.
        optimizers: all that change its parameters.
        name: of the algorithm, or ``package.module:Name``. options: of the algorithm.
        process_group: of the exchange; None: that of the model, or the default one.

    Returns:
        The hook, with ``state_dict()`` and ``load_state_dict()``, to be saved by each rank.

    Raises:
        ConfigError: there is no such algorithm or option; it cannot work with the model or an optimizer; or ranks call
            this with different ones.
    """
    return AlgorithmHook(model, list(optimizers), name, options, process_group)


class AlgorithmHook:
    """An algorithm that is attached to a model and its optimizers. Made by :func:`with_algorithm`.

    Attributes:
        algorithm: its state of this rank. skipped_steps: that all ranks skipped.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], name: str, options: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        """See :func:`with_algorithm`."""
        is_ddp = isinstance(model, DistributedDataParallel)
        self._group = process_group or (model.process_group if isinstance(model, DistributedDataParallel) else None)
        place = Place(dist.get_rank(self._group), dist.get_world_size(self._group))
        self.algorithm: Algorithm = make_algorithm(name, place, options)
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = {key: p for key, p in module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): key for key, parameter in self._parameters.items()}
        self._check(name, is_ddp, optimizers)
        self._compare({"algorithm": name, "options": self.algorithm.options.model_dump(mode="json")})
        self.skipped_steps = 0
        self._number = 0
        self._finite: list[bool] = []  # of the buckets of the step, so far
        threads = torch.get_num_threads()
        self._queue = ThreadPoolExecutor(1, "gradbus-algorithm", partial(torch.set_num_threads, threads))
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self, _pass if self.algorithm.scope == "weights" else _exchange)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        if self.algorithm.scope == "weights" and not self.algorithm.overlaps:
            optimizers[-1].register_step_post_hook(self._after_step)

    def _check(self, name: str, is_ddp: bool, optimizers: list[torch.optim.Optimizer]) -> None:
        if not optimizers:
            raise ConfigError(f"{name}: expected the optimizers of the model, got none")
        if not self._parameters:
            raise ConfigError(f"{name}: the model has no parameter that requires a gradient")
        for key, parameter in self._parameters.items():
            if parameter.dtype != torch.float32 or not parameter.is_cpu:
                raise ConfigError(
                    f"{name}: parameter {key} is {parameter.dtype} on {parameter.device}, expected float32 on the CPU"
                )
        if self.algorithm.scope == "bucket" and not is_ddp:
            raise ConfigError(f"{name} exchanges gradients: wrap the model in DistributedDataParallel first")
        for optimizer in optimizers if self.algorithm.makes_steps else ():
            is_sgd = isinstance(optimizer, torch.optim.SGD)
            if not is_sgd or any(group["momentum"] for group in optimizer.param_groups):
                raise ConfigError(
                    f"{name} computes the steps itself: it needs torch.optim.SGD without momentum, got "
                    f"{type(optimizer).__name__}"
                )

    def _compare(self, own: Mapping[str, Any]) -> None:
        text = json.dumps({**own, "parameters": [*self._parameters]}, sort_keys=True).encode()

        def gather() -> Any:
            return (yield AllGather("settings", torch.frombuffer(bytearray(text), dtype=torch.uint8)))

        found: Any = [parse_json(bytes(message.numpy()).decode()) for message in run_program(gather(), self._group)]
        for rank, other in enumerate(found):
            for key in found[0]:
                if other[key] != found[0][key]:
                    raise ConfigError(
                        f"with_algorithm: all ranks need the same {key}: rank 0 has {found[0][key]!r:.300}, "
                        f"rank {rank} {other[key]!r:.300}"
                    )

    # The step

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Of one bucket, on the thread of the programs: backends such as gloo need one order on all ranks."""
        if bucket.index() == 0:
            self._settle()
        flat = bucket.buffer()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        tensors = TensorBucket(bucket.index(), flat, dict(zip(names, bucket.gradients(), strict=True)))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self._queue.submit(self._run, tensors, done)
        return done

    def _run(self, bucket: TensorBucket, done: torch.futures.Future[Tensor]) -> None:
        try:
            step = Step(self._number, active=self.algorithm.place.world)
            run_program(self.algorithm.exchange(bucket, step), self._group)
            self._finite.append(are_finite([bucket.flat]))
            done.set_result(bucket.flat)
        except BaseException as error:
            done.set_exception(error)  # type: ignore[arg-type]  # raised by backward()

    def _settle(self) -> bool:
        """The buckets of a step have been exchanged: it counts, or all ranks take it back. Returns which."""
        is_finite, self._finite = all(self._finite), []
        (self.algorithm.commit if is_finite else self.algorithm.roll_back)()
        return is_finite

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.algorithm.scope == "weights":
            if self.algorithm.overlaps:
                self._exchange_weights()
            return
        if not self._finite:
            return  # of several optimizers another one was first
        if not self._settle():
            self.skipped_steps += 1
            log.warning("step skipped: a gradient is not finite", step=self._number)
            for parameter in self._parameters.values():
                parameter.grad = None  # all optimizers pass over it
        self._number += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._exchange_weights()

    @torch.no_grad()
    def _exchange_weights(self) -> None:
        bucket = bucket_of(self._parameters)
        step = Step(self._number, active=self.algorithm.place.world)
        run_program(self.algorithm.exchange(bucket, step), self._group)
        self._number += 1
        self.algorithm.commit()
        for name, parameter in self._parameters.items():
            parameter.copy_(bucket.tensors[name])

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, between two steps: tensors by name, not copied, and the number of steps."""
        self._settle()
        return {
            "own": self.algorithm.own_state(), "shared": self.algorithm.shared_state(), "steps": self._number,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse. Raises ValueError: it does not fit."""
        if not {*_KINDS, "steps"} <= state.keys() or not isinstance(state["steps"], int):
            raise ValueError(f"expected a state with own, shared and steps, got {sorted(state)}")
        self.algorithm.load_state(state["own"], state["shared"])
        self._number = state["steps"]

    def close(self) -> None:
        """End the thread of the programs. The model cannot be trained after this."""
        self._queue.shutdown()


def _exchange(hook, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    return hook.exchange(bucket)


def _pass(hook, bucket):  # type: ignore[no-untyped-def]
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
