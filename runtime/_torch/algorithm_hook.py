"""Any algorithm of data-parallel training in a script of one's own, in one line, on any backend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program
from gradbus.runtime.errors import CollectiveError, ConfigError
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

    A step may have several backward passes, all but the last one in ``model.no_sync()``. Gradients are not to be scaled
    or clipped between the exchange and the step (GradScaler, ``clip_grad_norm_``) with ``qadam`` and ``onebit-adam``,
    which leave steps in place of gradients, and scaled at all with algorithms that keep residuals.

    Args:
        model: a DistributedDataParallel without a communication hook of its own; parameters are float32 on the CPU. For
            an algorithm that averages weights (``decentralized``) also a plain module, equal on all ranks at the start.
        optimizers: all that change its parameters.
        name: of the algorithm, or ``package.module:Name``. options: of the algorithm.
        process_group: the ranks; None: that of the model, or the default one. The exchange has a group of its own of
            these ranks, as DDP has calls in the midst of a backward pass.

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
        given = process_group or (model.process_group if isinstance(model, DistributedDataParallel) else None)
        ranks = dist.get_process_group_ranks(given or dist.group.WORLD)
        self._group: Any = dist.new_group(ranks, backend=dist.get_backend(given), use_local_synchronization=True)
        place = Place(ranks.index(dist.get_rank()), len(ranks))
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = {key: p for key, p in module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): key for key, parameter in self._parameters.items()}
        try:
            self.algorithm: Algorithm = make_algorithm(name, place, options)
            self._check(name, is_ddp, optimizers)
            own = {"algorithm": name, "options": json.dumps(self.algorithm.options.model_dump(mode="json"))}
        except ConfigError as error:
            self._compare({"refused": str(error)})
            raise
        self._compare(own)
        self.skipped_steps = 0
        self._number, self._epoch = 0, 0
        self._ready: list[tuple[TensorBucket, torch.futures.Future[Tensor]]] = []  # buckets that wait for the others
        self._finite: list[bool] = []  # of the buckets of the step, so far
        self._has_failed = False  # an exchange of this step
        self._is_exchanged = True  # the weights, since the last forward pass
        threads = torch.get_num_threads()
        self._queue = ThreadPoolExecutor(1, "gradbus-algorithm", partial(torch.set_num_threads, threads))
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self, _pass if self.algorithm.scope == "weights" else _exchange)
        self._registered: list[Any] = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        if self.algorithm.scope == "weights":
            self._registered.append(module.register_forward_pre_hook(self._before_forward))
            if not self.algorithm.overlaps:
                self._registered.append(optimizers[-1].register_step_post_hook(self._after_step))

    def _check(self, name: str, is_ddp: bool, optimizers: list[torch.optim.Optimizer]) -> None:
        if not optimizers:
            raise ConfigError(f"{name}: expected the optimizers of the model, got none")
        if not self._parameters:
            raise ConfigError(f"{name}: the model has no parameter that requires a gradient")
        for key, parameter in self._parameters.items():
            if not parameter.is_cpu:
                raise ConfigError(f"{name}: parameter {key} is on {parameter.device}, expected on the CPU")
        if self.algorithm.scope != "weights" and not is_ddp:
            raise ConfigError(f"{name} exchanges gradients: wrap the model in DistributedDataParallel first")
        for optimizer in optimizers:
            self.algorithm.check(self._parameters, optimizer)

    def _compare(self, own: Mapping[str, Any]) -> None:
        shapes = {name: list(parameter.shape) for name, parameter in self._parameters.items()}
        text = json.dumps({**own, "parameters": json.dumps(shapes)}).encode()

        def gather() -> Any:
            return (yield AllGather("settings", torch.frombuffer(bytearray(text), dtype=torch.uint8)))

        found: Any = [parse_json(bytes(message.numpy()).decode()) for message in run_program(gather(), self._group)]
        for rank, other in enumerate(found):
            if "refused" in other and "refused" not in own:
                raise ConfigError(f"with_algorithm: rank {rank} refuses: {other['refused']}")
        for rank, other in enumerate(found if "refused" not in own else []):
            for key in found[0]:
                if other.get(key) != found[0][key]:
                    raise ConfigError(
                        f"with_algorithm: all ranks need the same {key}: rank 0 has {found[0][key]:.300}, "
                        f"rank {rank} {other.get(key)!s:.300}"
                    )

    # The step

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Of one bucket, on the thread of the programs: backends such as gloo need one order on all ranks."""
        if bucket.index() == 0:
            self._settle()
            self._has_failed = False
        flat = bucket.buffer()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        tensors = TensorBucket(bucket.index(), flat, dict(zip(names, bucket.gradients(), strict=True)))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self._ready.append((tensors, done))
        if self.algorithm.scope == "bucket" or bucket.is_last():
            self._queue.submit(self._run, self._ready)
            self._ready = []
        return done.then(lambda future: future.value())  # an error keeps its type and traceback so

    def _run(self, ready: Sequence[tuple[TensorBucket, torch.futures.Future[Tensor]]]) -> None:
        """Exchange a bucket; of scope ``step`` all of them as one, in the order of the parameters, which does not
        depend on how DDP forms buckets."""
        try:
            if self._has_failed:
                raise CollectiveError("an exchange of this step has failed before")
            whole, step = ready[0][0], Step(self._number, self._epoch, active=self.algorithm.place.world)
            if self.algorithm.scope == "step":
                gradients = {name: gradient for bucket, _ in ready for name, gradient in bucket.tensors.items()}
                whole = bucket_of({name: gradients[name] for name in self._parameters})
            run_program(self.algorithm.exchange(whole, step), self._group)
            self._finite.append(are_finite([whole.flat]))
            if self.algorithm.scope == "step":
                for name, mean in whole.tensors.items():
                    gradients[name].copy_(mean)
            for bucket, done in ready:
                done.set_result(bucket.flat)
        except Exception as error:
            self._has_failed = True
            self._finite.append(False)
            for _, done in ready:
                done.set_exception(error)  # type: ignore[arg-type]  # raised by backward()

    def start_epoch(self, epoch: int) -> None:
        """An epoch begins, counted from 0. Call it on all ranks, between two steps, for algorithms whose options change
        from epoch to epoch, such as the warm-up of ``dgc``."""
        self._epoch = epoch

    def _settle(self) -> bool:
        """The buckets of a step have been exchanged: it counts, or all ranks take it back. Returns which."""
        is_finite, self._finite = all(self._finite), []
        (self.algorithm.commit if is_finite else self.algorithm.roll_back)()
        return is_finite

    def _before_forward(self, *_: Any) -> None:
        self._is_exchanged = False

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        if any(one is not None for one in (*arguments[1:], *keywords.values())):
            raise RuntimeError(
                "with_algorithm: optimizer.step(closure) computes gradients within the step, where ranks can no longer "
                "skip it. Call backward() before step()"
            )
        if self.algorithm.scope == "weights":
            if self.algorithm.overlaps:
                self._exchange_weights()
            return
        if not self._finite:
            return  # of several optimizers another one was first
        if not self._settle():
            self.skipped_steps += 1
            log.warning("step skipped: a gradient is not finite", step=self._number)
            self._drop_gradients()
            return
        self._number += 1

    def _drop_gradients(self) -> None:
        """So that all optimizers pass over the parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._exchange_weights()

    @torch.no_grad()
    def _exchange_weights(self) -> None:
        """Once a step, whatever the number of optimizers. All ranks agree first that all weights and gradients are
        finite: an average cannot be taken back where only some have got it."""
        if self._is_exchanged:
            return
        self._is_exchanged = True
        bucket = bucket_of(self._parameters)
        own = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

        def agree() -> Program[Tensor]:
            agreed: Tensor = yield AllReduce("finite", torch.tensor([float(are_finite([bucket.flat, *own]))]), "min")
            return agreed

        if not run_program(agree(), self._group):
            self.skipped_steps += 1
            log.warning("step skipped: a gradient or a weight is not finite", step=self._number)
            self._drop_gradients()
            return
        step = Step(self._number, active=self.algorithm.place.world)
        run_program(self.algorithm.exchange(bucket, step), self._group)
        self._number += 1
        self.algorithm.commit()
        for name, parameter in self._parameters.items():
            parameter.copy_(bucket.tensors[name])

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, between two steps: tensors by name, not copied, and the number of steps.

        Raises:
            RuntimeError: between backward() and step().
        """
        if self._finite:
            raise RuntimeError("AlgorithmHook.state_dict: a step is under way; call it after optimizer.step()")
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
        """End the thread of the programs, and leave the optimizers alone. The model cannot be trained after this."""
        for handle in self._registered:
            handle.remove()
        self._queue.shutdown()


def _exchange(hook, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    return hook.exchange(bucket)


def _pass(hook, bucket):  # type: ignore[no-untyped-def]
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
