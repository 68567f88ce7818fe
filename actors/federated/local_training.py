"""What a client does off the event loop: train from the global model, encode the update, keep the residual."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import updates
from gradbus.actors.aggregation.clipping import l2_distance, l2_norm
from gradbus.actors.aggregation.exact_sum import LARGEST, fits
from gradbus.actors.federated.client_optimizer import optimizer_argument, split_options, split_terms, steps_argument
from gradbus.actors.federated.client_state import RESIDUAL, ClientStateStore
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.kept_optimizer import KeptOptimizer
from gradbus.actors.federated.rounds import NON_FINITE_LOSS, NON_FINITE_MODEL
from gradbus.actors.federated.rules.base import RoundEnd, RoundStart, make_rule
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.privacy.client import ClientPrivacy, privacy_of, without_privacy
from gradbus.actors.secure_aggregation import masked_values
from gradbus.codecs import Codec, NonFiniteError
from gradbus.runtime.choices import CODECS
from gradbus.runtime.compute_limiter import TRAINING
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.shm.shared_payload import PayloadMemory, SharedPayload
from gradbus.runtime.testing.instrumentation import Probe, no_probe
from gradbus.runtime.wire.control import Receipt, RoundTerms, UploadRequest, Welcome
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity, TrainCmd

_OF_RULE, _OF_OPTIMIZER = "rule.", "optimizer."  # in the names of kept tensors


def codec_of(welcome: Welcome) -> Codec:
    """The codec of the updates, with those of the announced options that it takes."""
    options = {"version": welcome.codec_version, "density": welcome.density, "chunk_elems": welcome.chunk_elems}
    return codecs.get(welcome.codec, **{key: options[key] for key in CODECS.options_of(welcome.codec).model_fields})


class NonFiniteResult(ValueError):
    """Training returned a loss or a model that is not finite. ``reason``: one of :data:`.rounds.FAILURES`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class EncodedUpdate:
    """An encoded update.

    Attributes:
        key: of its frames. request: to upload it. payload: its bytes.
        state: tensors that the client keeps if it is accepted, the codec's residual among them.
        sealed: the shared memory with the payload, for a controller of this machine; None: it is in this process alone.
    """

    key: FrameKey
    request: UploadRequest
    payload: bytes | memoryview
    state: Mapping[str, Tensor] = field(default_factory=dict)
    sealed: SharedPayload | None = None

    @property
    def residual(self) -> Tensor | None:
        """Float32, shape (D,): of the codec after it; None with a lossless one."""
        return self.state.get(RESIDUAL)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundInputs:
    """What the update of a round is made from.

    Attributes:
        welcome: how to train. command: what the controller asks for; terms: what that has no field for.
        base: float32, shape (D,): the global model. broadcast: float32, what came behind it.
        commanded_s: when the command came, by ``time.perf_counter``.
    """

    welcome: Welcome
    command: TrainCmd
    base: Tensor
    broadcast: Tensor = field(default_factory=lambda: torch.empty(0))
    terms: RoundTerms | None = None
    commanded_s: float = 0.0

    def options(self) -> dict[str, object]:
        """Options of the rule and of the optimizer in this round."""
        return {**self.welcome.options, **({} if self.terms is None else self.terms.options)}


class LocalTraining:
    """One client's model, task and residuals. All methods are for the compute thread."""

    def __init__(
        self, task: FederatedTask, identity: Identity, model: FlatModel, kept: ClientStateStore,
        memory: PayloadMemory, probe: Probe | None = None, allowed_rule: str = "",
    ) -> None:  # fmt: skip
        self._probe = probe or no_probe()
        self._probe.note("started", incarnation=identity.incarnation)
        self._task = task
        self._allowed_rule = allowed_rule
        self._identity = identity
        self._model = model
        self._kept = kept
        self._memory = memory
        self._number = 0  # of the newest training: that of its round, or, where many are of one round, counted on
        self._counted = 0  # the newest one that counts
        self._shared_memory = False  # the controller of the newest command reads this process's memory
        # With local privacy: of the newest round, by run and round, what has left this client.
        self._released: tuple[tuple[int, int], Tensor, dict[str, float]] | None = None
        self.train_s = 0.0

    def prepare(self, num_clients: int) -> None:
        """Load data. ``num_clients``: of the run; 0: unknown."""
        self._task.prepare(self._identity.sender, num_clients)

    def arrange(self, welcome: Welcome) -> None:
        """Exchange what the controller does: all of the model, or the trained part."""
        self._model.arrange("trained" if welcome.frozen else "all")

    def take_frozen(self, welcome: Welcome, vector: Tensor) -> None:
        """Set the frozen parameters to the controller's."""
        self.arrange(welcome)
        self._model.write_frozen(vector)

    def lacks_frozen(self, welcome: Welcome) -> bool:
        """Whether the frozen parameters differ from the controller's."""
        self.arrange(welcome)
        return self._model.frozen != welcome.frozen

    def train(self, inputs: RoundInputs, transfer: int, should_stop: Callable[[], bool]) -> EncodedUpdate:
        """Train from the global model, and encode the result as this transfer. Clients that share a process take turns
        (runtime/compute_limiter.py).

        Raises:
            NonFiniteResult: its loss, or the model, is not finite.
            ValueError: training made the model too large, or used no samples: the controller would refuse the update.
                And whatever the task raises.
        """
        with TRAINING.take(should_stop):
            return self._train(inputs, transfer, should_stop)

    def _train(self, inputs: RoundInputs, transfer: int, should_stop: Callable[[], bool]) -> EncodedUpdate:
        identity, welcome, command, base = self._identity, inputs.welcome, inputs.command, inputs.base
        self._probe.reached("before_training", command.round_id)
        self.arrange(welcome)
        self._kept.start_run(welcome.run_id, self._model.dim)
        privacy = privacy_of(welcome.options)  # what comes with a round does not change it
        sent, terms = split_terms(without_privacy(inputs.options()))
        self._number = command.round_id
        if "repeats" in terms:
            self._number = max(self._number, self._counted + 1, self._kept.newest + 1)
        kept = self._kept.before(self._number)
        started_s = time.perf_counter()
        self._model.write(base)
        options, chosen = split_options(sent)
        rule = make_rule(welcome.rule, options, allowed=self._allowed_rule)
        steps = int(terms.get("steps", 0))
        made, optimizer = optimizer_argument(self._task, chosen, command.lr), None
        if terms.get("keep_optimizer") and made:
            optimizer = made["make_optimizer"] = KeptOptimizer(made["make_optimizer"], _part(kept, _OF_OPTIMIZER))
        own = {**made, **steps_argument(self._task, steps)}
        begin = RoundStart(
            round_id=command.round_id, lr=command.lr, model=self._model.module, base=base,
            parameters=self._model.parameters(), broadcast=inputs.broadcast, local_loss=self._local_loss,
            state=_part(kept, _OF_RULE),
        )  # fmt: skip
        with rule.attached(begin):
            outcome = self._task.train(
                self._model.module, client_id=identity.sender, round_id=self._number, epochs=command.epochs,
                lr=command.lr, seed=command.seed, subset_size=command.subset_size, should_stop=should_stop, **own,
            )  # fmt: skip
        trained_s = time.perf_counter()
        self.train_s += trained_s - started_s
        self._check_loss(outcome.loss)
        if steps and rule.steps != steps:
            raise ValueError(f"training made {rule.steps} optimizer steps, the controller asked for {steps}")
        self._model.check_frozen()
        end = rule.finish(self._model.read())
        codec = codec_of(welcome)
        residual_before = kept.get(RESIDUAL)
        change, facts = None, _finite(getattr(outcome, "metrics", {})) | _finite(end.metrics)
        num_samples, loss, num_steps = int(outcome.num_samples), outcome.loss, rule.steps
        if privacy is not None:
            change, noted = self._protected(privacy, inputs, end)
            facts |= noted
        encoded, residual = self._encode(codec, base, residual_before, change)
        update_norm = l2_distance(self._model.read(), base) if change is None else l2_norm(change)
        self._check(encoded, base, num_samples, update_norm, residual_before)
        if privacy is not None and privacy.is_local:  # none of these has noise
            num_samples, loss, num_steps, facts = 1, None, 0, {}
        payload = updates.join([(updates.MODEL, encoded), *self._encode_sections(end.sections)])
        key = FrameKey(
            Kind.UPDATE, welcome.run_id, command.round_id, identity.sender, identity.incarnation, transfer
        )  # fmt: skip
        encoded_s = time.perf_counter()
        request = UploadRequest(
            run_id=welcome.run_id, round_id=command.round_id, transfer=transfer, total_bytes=len(payload),
            num_samples=num_samples, train_s=trained_s - started_s, loss=math.nan if loss is None else float(loss),
            encode_s=encoded_s - trained_s,
            wait_s=max(0.0, started_s - inputs.commanded_s),
            update_norm=-1.0 if welcome.masked else update_norm,  # it says something of a single update
            residual_norm=0.0 if residual is None else l2_norm(residual), steps=num_steps, metrics=facts,
        )  # fmt: skip
        state = _to_keep(end, residual, {} if optimizer is None else optimizer.state())
        update = EncodedUpdate(key, request, payload, state)
        # One that is to be masked stays in this process alone until it is.
        self._shared_memory = bool(self._memory.here) and self._memory.here == welcome.memory
        return update if welcome.masked else self._offered(update)

    def _offered(self, update: EncodedUpdate) -> EncodedUpdate:
        """The update as it is offered to the controller: where that reads this process's memory, from there."""
        request, payload = update.request, update.payload
        sealed = self._memory.put(payload) if self._shared_memory else None
        self._probe.note(
            "offered", run=f"{request.run_id:016x}", round=request.round_id, transfer=request.transfer,
            bytes=request.total_bytes, num_samples=request.num_samples, crc32=self._probe.history.checksum(payload),
        )  # fmt: skip
        self._probe.reached("after_training_before_offer", request.round_id)
        if sealed is None:
            return update
        # From now on it is in one place only, also for frames.
        return replace(update, request=replace(request, memory=sealed.place), payload=sealed.payload, sealed=sealed)

    def mask(
        self, update: EncodedUpdate, base: Tensor, masks: masked_values.UpdateMasks, transfer: int
    ) -> EncodedUpdate:
        """The update with these masks, which are used up, as this transfer.

        Args:
            base: float32, shape (D,): the model that it was trained from.

        Raises:
            TooLarge: it has no room in the sum of so many clients.
        """
        started_s, request = time.perf_counter(), update.request
        payload = masked_values.encode(
            codecs.parse(update.payload, expected_dim=base.numel()), base, masks, request.num_samples
        )
        request = replace(
            request, transfer=transfer, total_bytes=len(payload), attempt=masks.roster.attempt.number,
            encode_s=request.encode_s + time.perf_counter() - started_s,
        )  # fmt: skip
        key = update.key._replace(transfer=transfer)
        return self._offered(replace(update, key=key, request=request, payload=payload))

    def _local_loss(self) -> float:
        """The loss of the module on this client's data. Raises ConfigError: the task has no such method."""
        found: Callable[..., float] | None = getattr(self._task, "local_loss", None)
        if found is None:
            raise ConfigError(
                f"the training rule needs the loss before training: give {type(self._task).__name__} a method "
                f"local_loss(model, client_id=...) that returns the mean loss on the data of that client"
            )
        with torch.no_grad():
            return float(found(self._model.module, client_id=self._identity.sender))

    @staticmethod
    def _encode_sections(sections: Mapping[str, Tensor]) -> list[tuple[str, bytes]]:
        try:
            return [(name, codecs.get("fp32").encode(vector)) for name, vector in sections.items()]
        except NonFiniteError as error:
            raise NonFiniteResult(
                NON_FINITE_MODEL, f"training made {', '.join(sections)} non-finite: {error}"
            ) from None

    @torch.no_grad()
    def _protected(self, privacy: ClientPrivacy, inputs: RoundInputs, end: RoundEnd) -> tuple[Tensor, dict[str, float]]:
        """What training has changed, clipped and with noise, and the metrics to announce. A round that is done again
        gives what it has given before, which tells no more than once. Raises ConfigError: the rule sends more than the
        model, which would have no noise."""
        if privacy.is_local and end.sections:
            raise ConfigError(
                f"the training rule {inputs.welcome.rule} sends {', '.join(end.sections)} without noise: with local "
                f"privacy this client sends the model alone. Choose another rule on the controller"
            )
        round_ = inputs.welcome.run_id, inputs.command.round_id
        if not privacy.is_local or self._released is None or self._released[0] != round_:
            found = privacy.protected(self._model.read() - inputs.base, inputs.broadcast)
            if not privacy.is_local:
                return found
            self._released = round_, *found
        return self._released[1:]

    @torch.no_grad()
    def _encode(
        self, codec: Codec, base: Tensor, residual: Tensor | None, change: Tensor | None = None
    ) -> tuple[bytes, Tensor | None]:
        """The update's bytes, and with a lossy codec the residual. ``change``: in place of what training changed."""
        local = self._model.read() if change is None else base + change
        # Version 1 of fp32 and q8 means weights; all else is the difference to the model of the round before.
        is_weights = codec.version == 1 and not codec.v1_is_delta
        vector = local if is_weights else local - base if change is None else change
        try:
            if codec.lossless:
                return codec.encode(vector), None
            return codecs.residual_step(vector, residual, codec)
        except NonFiniteError as error:
            raise NonFiniteResult(
                NON_FINITE_MODEL, f"training made the model non-finite: {error}. Lower the learning rate"
            ) from None

    def _check_loss(self, loss: float | None) -> None:
        """Raises NonFiniteResult: it is not finite."""
        if loss is None or math.isfinite(loss):
            return
        is_finite = bool(torch.isfinite(self._model.read()).all())
        also = "the model is finite" if is_finite else "and the model is not finite either"
        raise NonFiniteResult(
            NON_FINITE_LOSS,
            f"training ended with a loss of {float(loss)}; {also}. Its update is not sent. Look at the data, and lower "
            f"the learning rate; a task without a loss returns None",
        )

    def _check(
        self, payload: bytes, base: Tensor, num_samples: int, update_norm: float, residual: Tensor | None
    ) -> None:  # fmt: skip
        """Raises ValueError: the update would be refused; TooLarge: as it has no room in the sum."""
        if num_samples < 1:
            raise ValueError(f"training used {num_samples} samples: expected at least one")
        norm = update_norm + (0.0 if residual is None else l2_norm(residual))
        # No value is larger than the norm, which is known; half, as a lossy codec may round up.
        if num_samples * norm < LARGEST / 2 or fits(
            codecs.parse(payload, expected_dim=base.numel()), base, num_samples
        ):
            return
        raise masked_values.TooLarge(
            f"training changed the model by {update_norm:.3g}, which with {num_samples} samples is more than the sum "
            f"of all clients has room for. Lower the learning rate"
        )

    def on_receipt(self, update: EncodedUpdate, receipt: Receipt) -> None:
        """Keep the state after an update that counts."""
        self._probe.note(
            "receipt", run=f"{receipt.run_id:016x}", round=receipt.round_id, transfer=receipt.transfer,
            accepted=receipt.accepted, reason=receipt.reason,
        )  # fmt: skip
        if not receipt.accepted:
            return
        self._counted = self._number
        self._probe.reached("after_receipt_before_residual", update.key.round_id)
        if update.state:
            self._kept.accepted(self._number, update.state)
        self._probe.reached("after_residual", update.key.round_id)

    def close(self) -> None:
        """Let another process use the directory of the state."""
        self._kept.close()


def _part(kept: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The kept tensors of a part, by their own names."""
    return {name.removeprefix(prefix): kept[name] for name in kept if name.startswith(prefix)}


def _to_keep(end: RoundEnd, residual: Tensor | None, optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a client keeps if its update counts."""
    kept = {_OF_RULE + name: tensor for name, tensor in end.state.items()}
    if residual is not None:
        kept[RESIDUAL] = residual
    return kept | {_OF_OPTIMIZER + name: tensor for name, tensor in optimizer.items()}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as they are announced: numbers that are finite."""
    return {str(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
