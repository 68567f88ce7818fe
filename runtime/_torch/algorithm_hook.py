"""Any algorithm of data-parallel training in a script of one's own, in one line, on any backend.

An :class:`AlgorithmHook` is the state of a communication hook of DistributedDataParallel and exchanges gradients.
For algorithms that exchange weights it has a :class:`~.weight_exchange.WeightExchange`. Programs run on the thread of
:class:`~.algorithm_programs.AlgorithmPrograms`, and all that the algorithm keeps is changed there alone.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket, bucket_of, make_algorithm
from gradbus.runtime.algorithms.prediction import check_prediction
from gradbus.runtime.algorithms.replicas import check_replicas
from gradbus.runtime.collectives.staging import check_devices, to_host
from gradbus.runtime.errors import CollectiveError, ConfigError
from gradbus.torch.algorithm_programs import AlgorithmPrograms
from gradbus.torch.cpu_copies import (
    EXCHANGED_TYPES,
    CpuCopies,
    ShardHolders,
    local_of,
    needs_copies,
)
from gradbus.torch.gradient_runs import Gradient, GradientRun, GradientRuns, deliver
from gradbus.torch.named_parameters import NamedParameters
from gradbus.torch.observed import observed
from gradbus.torch.predicted_weights import PredictedWeights
from gradbus.torch.script_steps import ScriptProgress, WeightSteps, drop_gradients
from gradbus.torch.unexchanged import UnexchangedParameters
from gradbus.torch.weight_exchange import WeightExchange
from gradbus.torch.whole_gradients import (
    check_shards_of_weights,
    check_whole,
    check_zero,
    inner_optimizer,
    why_not_wrapped,
)

_open: weakref.WeakSet[AlgorithmHook] = weakref.WeakSet()  # their optimizers would keep on calling them


def with_algorithm(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    name: str,
    *,
    process_group: dist.ProcessGroup | None = None,
    delay_steps: int | None = None,
    predicts_weights: bool = False,
    hash_every: int = 0,
    **options: Any,
) -> AlgorithmHook:
    """Have a model trained with an algorithm of data-parallel training.

        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hook = gradbus.torch.with_algorithm(model, [optimizer], "powersgd", rank=4)

    The rest of the script stays as it is. All ranks call this with the same algorithm and options. Where a gradient of
    any rank is not finite all ranks skip the optimizers' next step, and the algorithm forgets it; where weights are
    exchanged that rank skips it alone. There, call ``optimizer.step()`` in every step on every rank, also where the
    loss is not finite: the hook skips it; no GradScaler, which leaves the call out.

    A step may have several backward passes, all but the last one in ``model.no_sync()``. Gradients are not to be scaled
    or clipped between the exchange and the step (GradScaler, ``clip_grad_norm_``) with ``qadam`` and ``onebit-adam``,
    which leave steps in place of gradients, and scaled at all with algorithms that keep residuals.

    Args:
        model: a DistributedDataParallel without a communication hook of its own; parameters are float32, and gradients
            of those on a GPU are exchanged in copies on the CPU. For an algorithm that averages weights
            (``decentralized``) also a plain module, equal on all ranks at the start.
        optimizers: all that change its parameters, or the only one.
        name: of the algorithm, or ``package.module:Name``. options: of the algorithm.
        process_group, delay_steps, hash_every: see :class:`AlgorithmHook`.
        predicts_weights: whether, with late gradients, a rank computes its own at the weights to come, as far as it
            knows them: after the late steps, made with its own gradients in place of their mean. For SGD. The
            parameters have these weights from a forward pass, in which gradients are computed, until the optimizers
            step: evaluate, and call ``state_dict()``, before the forward pass or after the backward pass, and not
            between them, as gradients would be those of other weights. Gradients count as ``backward()`` leaves them:
            neither scaled (``GradScaler``) nor clipped by the script.

    Returns:
        The hook, with ``state_dict()`` and ``load_state_dict()``, to be saved by each rank.

    Raises:
        ConfigError: there is no such algorithm or option; it cannot work with the model or an optimizer; or ranks call
            this with different ones.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    module = model if ddp is None else ddp.module
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    hook = AlgorithmHook(
        module.named_parameters(),
        name,
        options,
        optimizers=listed,
        delay_steps=delay_steps,
        process_group=process_group or (None if ddp is None else ddp.process_group),
        hash_every=hash_every,
    )
    if predicts_weights:
        hook.predict_weights(model)
    fault = _fault_of(module, ddp, hook)
    if fault:
        hook.close()
        raise ConfigError(f"{name}: {fault}")
    if ddp is not None:
        hook.attach(ddp)
    if hook.algorithm.scope == "weights":
        hook.call_before_forward(model)
    return hook


def close_all() -> None:
    """Have all hooks of this process leave their optimizers and models alone: their process group is no more."""
    for hook in list(_open):
        hook.close()


def _fault_of(module: nn.Module, ddp: DistributedDataParallel | None, hook: AlgorithmHook) -> str:
    """What in a model does not go together with a hook; empty: nothing."""
    exchanges_gradients = hook.algorithm.scope != "weights"
    if ddp is None:
        return why_not_wrapped(module) if exchanges_gradients else ""
    hooks = ddp._comm_hooks  # noqa: SLF001 - torch has no public way to ask for them
    if hooks:
        called = getattr(hooks[0][0], "__name__", "of its own")
        return (
            f"the model has a communication hook, {called}, and can have one alone: wrap the module in "
            f"DistributedDataParallel anew, without mixed_precision, which has one, too"
        )
    if ddp.find_unused_parameters and hook.delay_steps:
        return (
            "with delay_steps a gradient comes a step later, when DDP may not take it: find_unused_parameters must be "
            "False"
        )
    sparse = [
        key
        for key, one in module.named_modules()
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and one.weight.requires_grad
    ]
    if sparse and exchanges_gradients:
        return f"gradients of {sparse[0]!r} are sparse, and are exchanged as dense ones: give it sparse=False"
    return ""


def exchange(hook, bucket, *more):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    """The communication hook of an :class:`AlgorithmHook`: ``ddp.register_comm_hook(hook, exchange)``."""
    if more or not isinstance(bucket, GradBucket):
        raise ConfigError(
            f"this is a communication hook of DistributedDataParallel, which gives it whole gradients; got "
            f"{type(bucket).__name__}, as from FullyShardedDataParallel: there no rank has a whole gradient"
        )
    return hook.exchange(bucket)


class AlgorithmHook:
    """An algorithm that is attached to the gradients of a model, and to its optimizers.

    Without optimizers an exchange counts when the next one starts; then it is for the script, or for a loss scaler, to
    skip a step whose gradients are not finite on all ranks.

    Attributes:
        algorithm: its state of this rank. delay_steps: as given, or as the algorithm has it.
        dense_bytes: what the gradients that were exchanged take in float32.
        leaves_out_unused: whether parameters whose gradients are zero on all ranks, as those of layers that the step
            did not use, are left out, and what is kept for them stays as it is. DDP does not write their gradients.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        name: str,
        options: Mapping[str, Any],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        process_group: dist.ProcessGroup | None = None,
        delay_steps: int | None = None,
        hash_every: int = 0,
    ) -> None:
        """All ranks of the group make one, at the same time.

        Args:
            named_parameters: ``model.named_parameters()`` of what DDP wraps. Those that are frozen now are left out; if
                they are trained later, the next exchange is an error of all ranks.
            name: of the algorithm, or ``package.module:Name``. options: of the algorithm.
            optimizers: that change the parameters. They skip steps that are not finite on some rank; where weights are
                exchanged, on their own.
            process_group: the ranks, as DDP has them; None: the default group.
            delay_steps: after how many steps the result of an exchange is applied, so that the exchange of a step goes
                on while the next ones are computed; None: as the algorithm has it.
            hash_every: the number of steps between two comparisons of the parameters of all ranks; 0: never. For
                algorithms with equal replicas.

        Raises:
            ConfigError: see :func:`with_algorithm`.
        """
        of_model = list(named_parameters)
        named = [(key, parameter) for key, parameter in of_model if parameter.requires_grad]
        self._name = name
        self._parameters = NamedParameters(named)
        self._copies: CpuCopies | None = None
        self._progress = ScriptProgress()
        self.dense_bytes = 0
        self._programs = AlgorithmPrograms(process_group)
        self._optimizers = list(optimizers)
        self._unexchanged = UnexchangedParameters(of_model, self._optimizers)
        self._prediction: PredictedWeights | None = None
        try:
            self.algorithm: Final[Algorithm] = make_algorithm(name, self._programs.place, options)
            if delay_steps is not None and (not isinstance(delay_steps, int) or delay_steps < 0):
                raise ConfigError(f"{name}: delay_steps must be a whole number >= 0, got {delay_steps!r}")
            if not isinstance(hash_every, int) or hash_every < 0:
                raise ConfigError(f"{name}: hash_every must be a whole number >= 0, got {hash_every!r}")
            self.delay_steps = self.algorithm.check_delay(delay_steps)
            self._hash_every = hash_every if self.algorithm.equal_replicas else 0
            self._check_shards(process_group)
            self._check(name, {id(parameter) for _, parameter in of_model})
        except ConfigError as error:
            self._programs.compare({"refused": str(error)})
            raise
        self._programs.compare(
            {
                "algorithm": name,
                "options": json.dumps(self.algorithm.options.model_dump(mode="json")),
                "delay_steps": str(self.delay_steps),
                "hash_every": str(hash_every),
                "parameters": json.dumps(self._parameters.shapes()),
            }
        )
        self.leaves_out_unused = True
        self._runs = GradientRuns(self.delay_steps)
        # Buckets that wait for the others, with what gives them to DDP.
        self._ready: list[tuple[TensorBucket, Callable[[Future[None]], None]]] = []
        self._registered: list[Any] = []
        # Before the optimizers know of this hook: what fails here leaves them as they were.
        self._weights = self._weight_steps(process_group) if self.algorithm.scope == "weights" else None
        self._registered += [one.register_step_pre_hook(self._before_step) for one in self._optimizers]
        _open.add(self)

    def _weight_steps(self, group: dist.ProcessGroup | None) -> WeightSteps:
        exchange = WeightExchange(
            self.algorithm,
            self._programs,
            self._copies or self._parameters,
            self.delay_steps,
            self._progress.skip,
            ShardHolders(self._parameters.values(), group),
            self._unexchanged.find,
        )
        steps = WeightSteps(
            exchange,
            self._optimizers,
            self._parameters,
            self._progress,
            self._programs,
            knows_loss=not self.delay_steps,
        )
        self._registered += [
            one.register_step_post_hook(lambda optimizer, *_: steps.after(optimizer)) for one in self._optimizers
        ]
        return steps

    def _check_shards(self, group: dist.ProcessGroup | None) -> None:
        """Raises ConfigError: what is exchanged is not whole on this rank, or the optimizer makes it so."""
        if self.algorithm.scope == "weights":
            check_shards_of_weights(self._parameters.items(), group, self._name)
        else:
            check_whole(self._parameters.items(), self._name)
        check_zero(self._optimizers, self._name, exchanges_weights=self.algorithm.scope == "weights")

    def _check(self, name: str, of_model: Collection[int]) -> None:
        """``of_model``: the ids of its parameters, also of those that are not trained. Raises ConfigError."""
        scope = self.algorithm.scope
        if not self._parameters:
            raise ConfigError(f"{name}: the model has no parameter that requires a gradient")
        if not self._parameters.named_once:
            raise ConfigError(f"{name}: a parameter is given twice; a shared one is to be named once")
        exchanged = self._exchanged(name)
        if scope == "weights" and not self._optimizers:
            raise ConfigError(f"{name} averages weights: it needs the optimizers of the model")
        if self.algorithm.in_network is not None:
            raise ConfigError(
                f"{name}: sums by an aggregator are for gradbus workers (docs/aggregation.md); in a script the ranks "
                f"add: set route='direct'"
            )
        if (self.delay_steps or self._hash_every) and not self._optimizers:
            raise ConfigError(f"{name}: delay_steps and hash_every need the optimizers of the model")
        for number, optimizer in enumerate(self._optimizers):
            changed = (one for group in optimizer.param_groups for one in group["params"])
            if not any(id(one) in of_model for one in changed):
                raise ConfigError(
                    f"{name}: optimizer {number} ({type(optimizer).__name__}) changes no parameter of this model: give "
                    f"those of the model, all of them"
                )
        for optimizer in self._optimizers or [torch.optim.SGD(self._parameters.values())]:
            self.algorithm.check(exchanged, inner_optimizer(optimizer))

    def _exchanged(self, name: str) -> Mapping[str, Tensor]:
        """What the algorithm exchanges, or gradients of it: float32. Weights of another kind, or elsewhere than on
        the CPU, have copies. Raises ConfigError."""
        check_devices(name, self._parameters)
        if self.algorithm.scope == "weights" and needs_copies(self._parameters.values()):
            for key, parameter in self._parameters.items():
                if parameter.dtype not in EXCHANGED_TYPES:
                    known = ", ".join(map(str, EXCHANGED_TYPES))
                    raise ConfigError(f"{name}: parameter {key} is {parameter.dtype}, expected one of {known}")
            self._copies = CpuCopies(self._parameters)
            return self._copies.read()
        for key, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(f"{name}: parameter {key} is {parameter.dtype}, expected torch.float32")
        return self._parameters

    @property
    def bytes_out(self) -> int:
        """Payload that this rank has sent, as the shortest way of each request needs."""
        return self._programs.bytes_out

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps that all ranks skipped; where weights are exchanged, of those that this rank
        skipped alone, and of exchanges that all took back: that is known when the next one begins."""
        return self._progress.skipped

    # What the script says

    def start_epoch(self, epoch: int) -> None:
        """An epoch begins, counted from 0. Call it on all ranks, between two steps, for algorithms whose options change
        from epoch to epoch, such as the warm-up of ``dgc``."""
        self._progress.epoch = epoch

    def report_loss(self, loss: Tensor | float) -> None:
        """The loss of this rank's batch: call it after ``backward()``, in each step, for algorithms that need it."""
        self._progress.reported = float(loss.detach()) if isinstance(loss, Tensor) else loss

    def undo_step(self) -> None:
        """The gradients of the last exchange were not used, as when a loss scaler has left the step out. Call it on all
        ranks, before the next one. Without effect with a delay, or after the optimizers' step."""
        self._programs.call(self._conclude, self._runs.newest, True)

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Have a model exchange its gradients by this hook. What its steps may leave unused is left out, if it looks
        for that."""
        self.leaves_out_unused = ddp.find_unused_parameters or ddp.static_graph
        ddp.register_comm_hook(self, exchange)

    def call_before_forward(self, model: nn.Module) -> None:
        """Have :meth:`start_forward` called before each forward pass of a model."""
        self._registered.append(model.register_forward_pre_hook(self.start_forward))

    def start_forward(self, *_: Any) -> None:
        """A forward pass begins: weights are exchanged before it, also if only some of the optimizers have stepped."""
        if self._weights is not None:
            self._weights.start_forward()

    def start_pass(self, *_: Any) -> None:
        """A forward or backward pass begins: what the optimizers do next is another step."""
        if self._weights is not None:
            self._weights.start_pass()

    def predict_weights(self, model: nn.Module) -> None:
        """From now on have weights that are predicted, see :func:`with_algorithm`, in the forward passes of a model.

        Raises:
            ConfigError: gradients do not come late, or an optimizer is not SGD.
        """
        try:
            for optimizer in self._optimizers:
                check_prediction(optimizer, self.algorithm, self.delay_steps)
        except ConfigError:
            self.close()
            raise
        self._prediction = PredictedWeights(self._optimizers, self._late_steps, lambda: self._runs.newest)
        self._registered.append(model.register_forward_pre_hook(self._prediction.go_ahead))

    def _late_steps(self) -> list[dict[Tensor, Tensor]]:
        """The gradients of this rank, by parameter, that are still to be applied, oldest first; without those that are
        not finite."""
        late = [run.own for run in self._runs.waiting if run.own and are_finite(list(run.own.values()))]
        return [{self._parameters[name]: one for name, one in own.items()} for own in late]

    def _go_back(self) -> None:
        """Have the weights that all ranks have, as they do without a prediction, and after each step."""
        if self._prediction is not None:
            self._prediction.go_back()

    def drain(self) -> bool:
        """Apply what still waits, where there is a delay; where weights are exchanged take back what does not count.

        Call it before an evaluation, before weights are read elsewhere, and at the end.

        Weights are changed at once. Of gradients the oldest that wait become those of the parameters: step the
        optimizers as long as this returns True.
        """
        if self._weights is not None:
            self._weights.exchange.drain()
            return False
        self._go_back()
        if not self._runs.waiting:
            return False
        run = self._runs.waiting.popleft()
        run.ended.result()
        for key, parameter in self._parameters.items():
            parameter.grad = _beside(parameter, run.tensors[key]) if run.counts else None
        return True

    def close(self) -> None:
        """Leave the optimizers alone. DDP goes on to call the hook of a model."""
        self._go_back()
        _open.discard(self)
        for handle in self._registered:
            handle.remove()

    # The exchange of gradients

    def exchange(self, bucket: GradBucket) -> Gradient:
        """Of one bucket. What DDP gets is the mean; with a delay that of an earlier step, and zeros before the first.

        Raises:
            ValueError: not a dense bucket in float32, or one with a parameter that was not given at the start.
            ConfigError, on all ranks: some rank trains a parameter that is not exchanged. If the optimizers are known,
                their next step raises it, else ``backward()`` does, as a RuntimeError of torch with its text.
        """
        flat = bucket.buffer()
        given = Gradient() if flat.is_cpu else Gradient(devices=[flat.device])
        if self._weights is not None:
            self._weights.start_pass()
            given.set_result(flat)
            return given
        if flat.layout != torch.strided or flat.dtype != torch.float32:
            raise ValueError(
                f"with_algorithm: bucket {bucket.index()} is {flat.dtype}, {flat.layout}; expected float32, strided "
                f"(no sparse=True of embeddings, no mixed_precision of DDP)"
            )
        if (observer := observed.observer) is not None:
            observer.submitted()
        if bucket.index() == 0:
            self._start_run()
        self.dense_bytes += flat.nbytes
        own = (flat.clone() if self.delay_steps else flat) if flat.is_cpu else to_host(flat)
        if self._prediction is not None:
            self._runs.newest.own.update(self._parameters.views(bucket, flat.clone()))
        exchanged = TensorBucket(bucket.index(), own, self._parameters.views(bucket, own))
        into = {} if own is flat else self._parameters.views(bucket, flat)
        self._ready.append((exchanged, partial(deliver, given, flat, into, exchanged.tensors)))
        if self.algorithm.scope == "bucket" or bucket.is_last():
            job = self._programs.submit(
                self._exchange, self._runs.newest, [one for one, _ in self._ready], bucket.is_last()
            )
            for _, give in self._ready if not self.delay_steps else ():
                job.add_done_callback(give)
            self._ready = []
        due = self._runs.due
        if self.delay_steps and due is None:
            given.set_result(flat.zero_())
        elif self.delay_steps and due is not None:
            due.ended.add_done_callback(
                partial(deliver, given, flat, self._parameters.views(bucket, flat), due.tensors)
            )
        return given.then(lambda future: future.value())  # an error keeps its type and traceback so

    def _start_run(self) -> None:
        applied = self._runs.applied
        if applied is not None and applied.refusal is not None:  # a loss scaler has left the step out
            raise applied.refusal
        if self.algorithm.needs_epoch and self._progress.epoch < 0:
            raise RuntimeError(
                "with_algorithm: the options of the algorithm change from epoch to epoch: call hook.start_epoch(epoch) "
                "at the start of each"
            )
        self._programs.submit(self._conclude, self._runs.newest)
        self._ready = []
        epoch, loss = max(0, self._progress.epoch), self._progress.reported
        self._runs.begin(GradientRun(epoch=epoch, loss=loss, unexchanged=self._unexchanged.find()))

    @torch.no_grad()
    def _exchange(self, run: GradientRun, buckets: Sequence[TensorBucket], is_last: bool) -> None:
        """On the thread of the programs: one bucket, or all of a step."""
        try:
            if run.error is not None:
                raise CollectiveError("an exchange of this step has failed before")
            run.step = run.step or self._next_step(run)
            if run.unexchanged:  # what all ranks get is not finite then, so that all look for the reason
                buckets[0].flat[:1].fill_(math.nan)
            tensors = {name: tensor for bucket in buckets for name, tensor in bucket.tensors.items()}
            self._exchange_tensors(run, buckets[0], tensors)
            if self.delay_steps:
                run.tensors.update(tensors)
            if is_last and not run.is_finite:
                run.refusal = self._programs.refusal(run.unexchanged)
                if run.refusal is not None and not self._optimizers:
                    raise run.refusal
        except BaseException as error:
            run.error = run.error or error
            raise
        finally:
            run.is_whole = is_last
            if is_last and self.delay_steps:
                self._conclude(run)

    def _exchange_tensors(self, run: GradientRun, bucket: TensorBucket, tensors: Mapping[str, Tensor]) -> None:
        """``bucket``: that of the tensors, if they are of one."""
        used = self._used(tensors) if self.leaves_out_unused else list(tensors)
        if not used:
            return
        assert run.step is not None
        if self.algorithm.scope == "step":  # in the order of the parameters, however DDP forms buckets
            bucket = bucket_of({name: tensors[name] for name in self._parameters if name in used})
        elif len(used) < len(tensors):
            bucket = bucket_of({name: tensors[name] for name in used}, bucket.index)
        self._programs.run(self.algorithm.exchange(bucket, run.step))
        run.is_finite = are_finite([bucket.flat]) and run.is_finite
        for name, mean in bucket.tensors.items():
            if mean is not tensors[name]:
                tensors[name].copy_(mean)

    def _used(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The names of those that are not zero on all ranks."""
        own = torch.tensor([float(tensor.any()) for tensor in tensors.values()])
        agreed = self._programs.all_reduce("used", own, "max").tolist()
        return [name for name, is_used in zip(tensors, agreed, strict=True) if is_used]

    def _next_step(self, run: GradientRun) -> Step:
        if self.algorithm.needs_loss and self._progress.has_newer_loss:
            self._programs.agree_on_loss(run.loss)
            self._progress.has_newer_loss = False
        return Step(self._progress.number, run.epoch, self._programs.place.world, self._programs.loss)

    def _conclude(self, run: GradientRun, is_unused: bool = False) -> None:
        """The exchange of a step counts, or all ranks take it back."""
        if run.is_concluded:
            return
        run.is_concluded = True
        run.counts = run.is_whole and run.is_finite and run.error is None and not is_unused
        if run.counts:
            self.algorithm.commit()
            self._progress.count()
        else:
            self.algorithm.roll_back()
            if run.refusal is not None:
                reason = "a parameter is trained that is not exchanged"
            else:
                reason = "its gradients were not used" if run.is_finite else "a gradient is not finite"
            self._progress.skip(reason)
        if run.error is None:
            run.ended.set_result(None)
        else:
            run.ended.set_exception(run.error)

    # The optimizers' step

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        if any(one is not None for one in (*arguments[1:], *keywords.values())):
            raise RuntimeError(
                "with_algorithm: optimizer.step(closure) computes gradients within the step, where ranks can no longer "
                "skip it. Call backward() before step()"
            )
        if self._weights is not None:
            self._weights.before(optimizer)
            return
        self._go_back()
        run = self._runs.newest
        if run.is_applied:
            return
        run.is_applied = True
        if not self.delay_steps:
            self._programs.call(self._conclude, run)
        applied = self._runs.applied
        if applied is None or not applied.counts:
            drop_gradients(self._parameters)
        if applied is not None and applied.refusal is not None:
            raise applied.refusal
        number = self._runs.begun - 1
        if self._hash_every and number % self._hash_every == 0:
            self._programs.call(self._programs.run, check_replicas(number, self._parameters.values()))

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on: tensors, as they are and not copied; numbers and text. Call it between
        two steps. ``torch.load(..., weights_only=True)`` reads it. With the weights where ranks have others."""
        self._go_back()
        self._programs.call(self._conclude, self._runs.newest)  # after which no program runs, either
        waiting = self._late_gradients() if self._weights is None else self._weights.exchange.state()
        place, progress = self._programs.place, self._progress
        return {
            "algorithm": self._name,
            "rank": place.rank,
            "world": place.world,
            "steps": progress.number,
            "delay_steps": self.delay_steps,
            "parameters": self._parameters.shapes(),
            "options": self.algorithm.options.model_dump(mode="json"),
            "own": self.algorithm.own_state(),
            "shared": self.algorithm.shared_state(),
            "loss": [self._programs.loss, progress.has_newer_loss, progress.reported],
            "waiting": waiting,
            **{kind: {name: one.detach() for name, one in live.items()} for kind, live in self._of_rank().items()},
        }

    def _late_gradients(self) -> list[dict[str, Any]]:
        for run in self._runs.waiting:
            run.ended.result()
        # Versions that wrote weights here, too, read a number.
        return [
            {"number": 0, "counts": run.counts, "tensors": run.tensors, "own": run.own} for run in self._runs.waiting
        ]

    def _of_rank(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of the model that are this rank's own, by name and by where a saved state has them."""
        if self.algorithm.equal_replicas:
            return {}
        weights = {"weights": {name: local_of(one) for name, one in self._parameters.items()}}
        return weights if self._copies is None else {**weights, "residuals": self._copies.residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, on all ranks at the same time. Buckets of DDP may differ from those it was saved with. Weights
        are put back on the rank that saved them; states of older versions have none.

        Raises:
            ValueError: it is of another algorithm, model or rank, or damaged, here or on another rank; more waits in it
                than the delay here has room for; or the states of the ranks are of different steps.
        """
        self._go_back()
        try:
            self._load(state)
        except ValueError as error:
            self._programs.compare({"refused": str(error)})
            raise
        self._programs.compare({"steps": str(self._progress.number)})

    def _load(self, state: Mapping[str, Any]) -> None:
        expected: dict[str, Any] = {
            "algorithm": self._name,
            "parameters": self._parameters.shapes(),
        }
        if state.get("own") or state.get("waiting"):  # what waits on a rank is its own
            expected |= {"rank": self._programs.place.rank, "world": self._programs.place.world}
        for key, here in expected.items():
            if state.get(key) != here:
                raise ValueError(f"saved state of with_algorithm: {key} is {state.get(key)!r:.300}, here {here!r:.300}")
        options, saved = self.algorithm.options.model_dump(mode="json"), state.get("options", {})  # not of old versions
        for key in (options.keys() & saved.keys()) - self.algorithm.may_change:
            if saved[key] != options[key]:
                raise ValueError(
                    f"saved state of with_algorithm: option {key} is {saved[key]!r:.300}, here {options[key]!r:.300}"
                )
        missing = {"own", "shared", "steps", "loss", "waiting"} - state.keys()
        if missing or not isinstance(state["steps"], int):
            raise ValueError(
                f"saved state of with_algorithm: {sorted(missing) or 'a whole number of steps'} is missing"
            )
        self._check_waiting(state)
        is_own = state.get("rank") == self._programs.place.rank  # what all ranks share may be that of another one
        of_rank = {kind: live for kind, live in self._of_rank().items() if is_own and kind in state}
        for kind, live in of_rank.items():
            _check_fit(kind, state[kind], live)
        self._programs.call(self.algorithm.load_state, state["own"], state["shared"])
        with torch.no_grad():
            for kind, live in of_rank.items():
                for name, tensor in live.items():
                    tensor.copy_(state[kind][name])
        loss, has_newer_loss, reported = state["loss"]
        self._programs.set_loss(loss)
        progress = self._progress
        progress.number, progress.has_newer_loss, progress.reported = state["steps"], has_newer_loss, reported
        if self._weights is not None:
            self._weights.exchange.load(state["waiting"], progress.number)
            return
        self._runs.restore(map(self._saved_run, state["waiting"]))

    def _saved_run(self, saved: Mapping[str, Any]) -> GradientRun:
        tensors = {name: tensor.clone() for name, tensor in saved["tensors"].items()}
        own = {  # older states have none
            name: _beside(self._parameters[name], tensor.clone()) for name, tensor in saved.get("own", {}).items()
        }
        run = GradientRun(counts=saved["counts"], is_concluded=True, is_applied=True, tensors=tensors, own=own)
        run.ended.set_result(None)
        return run

    def _check_waiting(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError: with the delay of here what waits in this state would never be applied in time, or it is
        of other tensors."""
        waiting = state["waiting"]
        if len(waiting) > self.delay_steps:
            raise ValueError(
                f"saved state of with_algorithm: {len(waiting)} exchanges wait to be applied, here delay_steps is "
                f"{self.delay_steps}: drain() before saving, or load with "
                f"delay_steps={state.get('delay_steps', len(waiting))}"
            )
        if self._weights is not None:
            self._weights.exchange.check(waiting)
            return
        for saved in waiting:
            if saved["counts"]:
                _check_fit("late gradients", saved["tensors"], self._parameters)
            if saved.get("own"):
                _check_fit("late gradients of this rank", saved["own"], self._parameters)


def _beside(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A gradient on the device of its parameter; itself where that is the CPU."""
    return tensor if parameter.is_cpu else torch.empty_like(parameter, requires_grad=False).copy_(tensor)


def _check_fit(kind: str, saved: Any, live: Mapping[str, Tensor]) -> None:
    """Raises ValueError: these are not the tensors of this model."""
    if not isinstance(saved, Mapping) or saved.keys() != live.keys():
        found = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"saved state of with_algorithm: {kind} are {found!s:.300}, here {sorted(live)!s:.300}")
    for name, tensor in live.items():
        one = saved[name]
        if not isinstance(one, Tensor):
            raise ValueError(f"saved state of with_algorithm: {kind} of {name} are no tensor")
        if (one.shape, one.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"saved state of with_algorithm: {kind} of {name} are {list(one.shape)}, here {list(tensor.shape)}, of "
                f"{one.dtype} and {tensor.dtype}"
            )
