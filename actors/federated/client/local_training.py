"""What a client does off the event loop: train from the global model, encode the update, keep the residual."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import updates
from gradbus.actors.aggregation.clipping import l2_norm
from gradbus.actors.aggregation.exact_sum import LARGEST, fits
from gradbus.actors.federated.chosen_codecs import codec_of, section_codec_of
from gradbus.actors.federated.client.client_optimizer import (
    optimizer_argument,
    split_options,
    split_terms,
    steps_argument,
    takes_round,
)
from gradbus.actors.federated.client.client_state import RESIDUAL, SECTION_RESIDUAL, ClientStateStore
from gradbus.actors.federated.client.kept_optimizer import KeptOptimizer
from gradbus.actors.federated.client.local_evaluation import sendable
from gradbus.actors.federated.client.pacing import PacedTraining, Pacer
from gradbus.actors.federated.client.packets_out import PacketRoute, RoundPackets
from gradbus.actors.federated.client.rules.base import (
    ClientRule,
    PersonalTraining,
    RoundEnd,
    RoundStart,
    after_steps_of,
    make_rule,
)
from gradbus.actors.federated.client.unsent_residuals import UnsentResiduals
from gradbus.actors.federated.client.updates_out import EncodedUpdate, note_receipt
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.own_tensors import OWN_MODEL, PERSONAL, own_tensors, part_of
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.actors.federated.protocol import NON_FINITE_LOSS, NON_FINITE_MODEL, SAT_OUT, TRAINING_FAILED
from gradbus.actors.federated.task import FederatedTask, TrainOutcome, implementation
from gradbus.actors.federated.task_results import as_floats, described
from gradbus.actors.privacy.client import ClientPrivacy, privacy_of, without_privacy
from gradbus.actors.secure_aggregation import masked_values
from gradbus.codecs import Codec, NonFiniteError
from gradbus.codecs.fp32 import Fp32
from gradbus.runtime.choices import Choice
from gradbus.runtime.compute_limiter import TRAINING
from gradbus.runtime.config.federated import IN_COMMAND, IN_TERMS
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.optimization.deferred_compiler import defer_compiler
from gradbus.runtime.shm.shared_payload import PayloadMemory
from gradbus.runtime.testing.instrumentation import Probe, no_probe
from gradbus.runtime.user_errors import WrongResult
from gradbus.runtime.wire.client_orders import order_of
from gradbus.runtime.wire.control import Receipt, RoundTerms, UploadRequest, Welcome
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity, TrainCmd

MUCH_OVERTIME_S = 1.0
SHARE_OF_OWN_MODEL = 0.5  # of the time of a round, for the model that a rule keeps at this client
_MUCH_UNSENT = 5.0  # times an update
_OF_RULE, _OF_OPTIMIZER, _OF_OWN_OPTIMIZER = "rule.", "optimizer.", "own_optimizer."  # in the names of kept tensors


log = get_logger("client")


class Allowed(NamedTuple):
    """What of the user's own a controller may name: a training rule, and codecs. Nothing else is imported."""

    rule: str = ""
    codecs: tuple[str, ...] = ()


NOTHING_OWN = Allowed()


class NonFiniteResult(ValueError):
    """Training returned a loss or a model that is not finite.

    ``reason``: one of :data:`~gradbus.actors.federated.protocol.FAILURES`.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class NothingToTrain(Exception):
    """A task has nothing to train in a round, and says so by ``TrainResult.nothing()``: its client sits it out."""

    reason = SAT_OUT


def reason_of(error: Exception) -> str:
    """Return the reason by which a client reports what it ends a training with."""
    return error.reason if isinstance(error, NonFiniteResult | NothingToTrain) else TRAINING_FAILED


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundInputs:
    """Holds what the update of a round is made from.

    Attributes:
        welcome: how to train. command: what the controller asks for; terms: what that has no field for.
        base: float32, shape (D,): the global model. broadcast: float32, what came behind it. buffers: the block of its
            merged buffers.
        commanded_s: when the command came, by ``time.perf_counter``.
        spent: with secure aggregation: rounds whose sum may be known, with this client's update in it, and the terms on
            which it was masked.
        route: opens the way by which packets of the update leave while it is trained; None: they are added here.
        pacer: holds the training to the budget of this client; None: there is none.
    """

    welcome: Welcome
    command: TrainCmd
    base: Tensor
    broadcast: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    buffers: bytes = b""
    terms: RoundTerms | None = None
    commanded_s: float = 0.0
    spent: Mapping[int, Hashable] = field(default_factory=dict)
    route: Callable[[], PacketRoute] | None = None
    pacer: Pacer | None = None

    def options(self) -> dict[str, object]:
        """Options of the rule and of the optimizer in this round."""
        return {**self.welcome.options, **({} if self.terms is None else self.terms.options)}

    def for_client(self, client_id: int) -> RoundInputs:
        """Return the same with what this client is ordered to do differently."""
        order = None if self.terms is None else order_of(self.terms.each, client_id)
        if self.terms is None or order is None:
            return self
        changes = order.changes()
        command = replace(self.command, **{key: changes[key] for key in IN_COMMAND if key in changes})
        options = {f"training.{key}": value for key, value in changes.items() if key in IN_TERMS}
        terms = replace(self.terms, options={**self.terms.options, **options})
        return replace(self, command=command, terms=terms)


@dataclass(frozen=True, slots=True, eq=False)
class _Training:
    """One training of a round. ``chosen``: the optimizer; None: the task's. ``terms``: how the round is counted.
    ``paced``: says when to stop."""

    inputs: RoundInputs
    rule: ClientRule
    chosen: Choice | None
    terms: Mapping[str, Any]
    paced: PacedTraining

    @property
    def steps(self) -> int:
        """Optimizer steps that are asked for; 0: as many as the epochs have."""
        return int(self.terms.get("steps", 0))


class LocalTraining:
    """One client's model, task and residuals. All methods are for the compute thread.

    Attributes:
        keeps_local_model: whether the model that training has made stays in memory, for :meth:`local_model`.
    """

    def __init__(
        self,
        task: FederatedTask,
        identity: Identity,
        model: FlatModel,
        kept: ClientStateStore,
        memory: PayloadMemory,
        probe: Probe | None = None,
        allowed: Allowed = NOTHING_OWN,
    ) -> None:
        defer_compiler()
        self._probe = probe or no_probe()
        self._probe.note("started", incarnation=identity.incarnation)
        self._task = task
        self._allowed = allowed
        self._identity = identity
        self._model = model
        self._kept = kept
        self._memory = memory
        self._number = 0  # of the newest training: that of its round, or, where many are of one round, counted on
        self._counted = 0  # the newest one that counts
        self._has_warned = self._has_warned_of_unsent = False
        self._warned_of_budget: set[str] = set()
        self._buffers_before: dict[str, Tensor] = {}
        self._local_model: tuple[int, Tensor] | None = None  # by its run, float32, shape (D,)
        self.keeps_local_model = False
        self._shared_memory = False  # the controller of the newest command reads this process's memory
        self._feeds_back = False  # what masking takes from the newest update is its residual
        self._unsent = UnsentResiduals()
        self._update_norm = 0.0  # of the newest training
        self.train_s = 0.0

    def prepare(self, num_clients: int) -> None:
        """Load data. ``num_clients``: of the run; 0: unknown."""
        self._task.prepare(self._identity.sender, num_clients)

    def arrange(self, welcome: Welcome) -> None:
        """Exchange what the controller does: all of the model, the trained part, or what its patterns name. A module
        that an earlier training has changed is built again."""
        self._model.repair()
        self._model.arrange(Sharing.of_welcome(welcome))

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
            NonFiniteResult: its loss, or the model, is not finite. NothingToTrain: this client sits the round out.
            ValueError: training made the model too large: the controller would refuse the update. WrongResult: it has
                returned what cannot be used, such as no samples. And whatever the task raises.
        """
        with TRAINING.take(should_stop):
            try:
                return self._train(inputs, transfer, should_stop)
            except BaseException:
                self._model.note_failure()
                raise

    def _train(self, inputs: RoundInputs, transfer: int, should_stop: Callable[[], bool]) -> EncodedUpdate:
        inputs = inputs.for_client(self._identity.sender)
        identity, welcome, command, base = self._identity, inputs.welcome, inputs.command, inputs.base
        self._probe.reached("before_training", command.round_id)
        self._arrange_to_train(welcome)
        self._kept.start_run(welcome.run_id, self._model.dim)
        privacy = privacy_of(welcome.options)  # what comes with a round does not change it
        sent, terms = split_terms(without_privacy(inputs.options()))
        self._number = command.round_id
        if "repeats" in terms:
            self._number = max(self._number, self._counted + 1, self._kept.newest + 1)
        kept = self._kept.before(self._number)
        started_s = time.perf_counter()
        options, chosen = split_options(sent)
        rule = make_rule(welcome.rule, options, allowed=self._allowed.rule)
        paced = PacedTraining(None, should_stop) if inputs.pacer is None else inputs.pacer.begin(should_stop)
        training = _Training(inputs, rule, chosen, terms, paced)
        key = FrameKey(Kind.UPDATE, welcome.run_id, command.round_id, identity.sender, identity.incarnation, transfer)
        in_one_piece = welcome.masked or privacy is not None or bool(rule.sections or self._model.buffers)
        own = self._train_own(training, rule.personal(), kept)
        self._begin(inputs, kept)
        paced.use(1.0)
        outcome, packets, optimizer_state = self._run(
            training, kept, partial(self._open_packets, inputs, key, in_one_piece)
        )
        trained_s = time.perf_counter()
        self.train_s += trained_s - started_s
        self._check_trained(outcome, training)
        end = rule.finish(self._keep_local_model(welcome.run_id))
        codec = codec_of(welcome, terms, allowed=self._allowed.codecs)
        self._feeds_back = welcome.masked and not codec.lossless
        residual_before = self._residual_before(inputs, kept)
        change, facts = None if packets is None else _change_of(packets), _finite(end.metrics)
        num_samples, loss, num_steps = int(outcome.num_samples), outcome.loss, rule.steps
        if privacy is not None:
            change, noted = self._protected(privacy, inputs, end, change)
            facts |= noted
        facts = _announced(self._task, outcome, others=len(facts)) | facts
        encoded, residual, change = self._encode(codec, base, residual_before, change, packets)
        update_norm = self._update_norm = l2_norm(change)
        self._check(encoded, codec, base, num_samples, update_norm, residual_before)
        if privacy is not None and privacy.is_local:  # none of these has noise
            num_samples, loss, num_steps, facts = 1, None, 0, {}
        section_codec = section_codec_of(welcome, allowed=self._allowed.codecs)
        sections, residuals = self._encode_sections(end.sections, section_codec, kept)
        payload, buffers = updates.join([(updates.MODEL, encoded), *sections]), self._changed_buffers()
        encoded_s = time.perf_counter()
        request = UploadRequest(
            run_id=welcome.run_id,
            round_id=command.round_id,
            transfer=transfer,
            total_bytes=len(payload) + len(buffers),
            num_samples=num_samples,
            train_s=trained_s - started_s,
            loss=math.nan if loss is None else float(loss),
            encode_s=encoded_s - trained_s,
            wait_s=max(0.0, started_s - inputs.commanded_s),
            update_norm=-1.0 if welcome.masked else update_norm,  # it says something of a single update
            residual_norm=-1.0 if self._feeds_back else 0.0 if residual is None else l2_norm(residual),
            steps=num_steps,
            metrics=facts,
        )
        state = {**_to_keep(end, residual, optimizer_state), **residuals, **own, **self._personal()}
        update = EncodedUpdate(key, request, payload, state, buffers=buffers)
        # One that is to be masked stays in this process alone until it is.
        self._shared_memory = bool(self._memory.here) and self._memory.here == welcome.memory
        if packets is not None and packets.leaves:
            return self._last_packet(packets, update)
        return update if welcome.masked else self._offered(update)

    def _last_packet(self, packets: RoundPackets, whole: EncodedUpdate) -> EncodedUpdate:
        """The packet that completes an update, which counts as ``whole``."""
        last = packets.last(whole)
        self._note_offered(replace(last.request, total_bytes=len(whole.payload)), whole.payload)
        return last

    def _arrange_to_train(self, welcome: Welcome) -> None:
        """Arrange the module. Raises RuntimeError: its frozen parameters have to come first."""
        self.arrange(welcome)
        if welcome.frozen and self._model.frozen != welcome.frozen:
            raise RuntimeError(
                "the frozen parameters are not those of the controller: an earlier training has changed the module, "
                "which was built again. They come with the next round"
            )

    def _open_packets(self, inputs: RoundInputs, key: FrameKey, in_one_piece: bool) -> RoundPackets:
        """No packet yet. They leave by themselves, unless something has to be done with the whole update before."""
        route = None if in_one_piece or inputs.route is None else inputs.route()
        own = (type(codec_of(inputs.welcome, allowed=self._allowed.codecs)),)
        return RoundPackets(inputs.base, self._model.layers, self._model.read, key, route, own)

    def _note_offered(self, request: UploadRequest, payload: bytes | memoryview) -> None:
        """Note in the journal what the controller is to count, just before it is offered."""
        self._probe.note(
            "offered",
            run=f"{request.run_id:016x}",
            round=request.round_id,
            transfer=request.transfer,
            bytes=request.total_bytes,
            num_samples=request.num_samples,
            crc32=self._probe.history.checksum(payload),
        )
        self._probe.reached("after_training_before_offer", request.round_id)

    def _offered(self, update: EncodedUpdate) -> EncodedUpdate:
        """The update as it is offered to the controller: where that reads this process's memory, from there."""
        request = update.request
        sealed = self._memory.put(update.payload, update.buffers) if self._shared_memory else None
        payload = sealed.payload if sealed is not None else update.whole
        self._note_offered(request, payload)
        if sealed is not None:  # from now on it is in one place only, also for frames
            request = replace(request, memory=sealed.place)
        return replace(update, request=request, payload=payload, buffers=b"", sealed=sealed)

    def mask(
        self, update: EncodedUpdate, base: Tensor, masks: masked_values.UpdateMasks, transfer: int
    ) -> EncodedUpdate:
        """The update with these masks, which are used up, as this transfer. With a codec that compresses, it is rounded
        to the grid of the attempt only now, and what that takes away is its residual, kept if it counts.

        Args:
            base: float32, shape (D,): the model that it was trained from.

        Raises:
            TooLarge: it has no room in the sum of so many clients.
        """
        started_s, request = time.perf_counter(), update.request
        payload, residual, clamped = masked_values.encode(
            codecs.parse(update.payload, expected_dim=base.numel()), base, masks, request.num_samples
        )
        state = update.state
        assert self._feeds_back or residual is None, "a roster with a grid is refused where the codec has none"
        if self._feeds_back:  # none: the residual before has gone out, and no older one may come back
            residual = torch.zeros_like(base) if residual is None else residual
            state = {**state, RESIDUAL: residual}
            self._unsent.note((request.run_id, request.round_id), masks.roster.terms, residual)
            self._warn_of_unsent(request.round_id, residual, clamped)
        request = replace(
            request,
            transfer=transfer,
            total_bytes=len(payload) + len(update.buffers),
            attempt=masks.roster.attempt.number,
            encode_s=request.encode_s + time.perf_counter() - started_s,
        )
        key = update.key._replace(transfer=transfer)
        return self._offered(replace(update, key=key, request=request, payload=payload, state=state))

    def _residual_before(self, inputs: RoundInputs, kept: Mapping[str, Tensor]) -> Tensor | None:
        """Return the residual of earlier updates, float32, shape (D,); None: there is none."""
        residual = kept.get(RESIDUAL)
        if not self._feeds_back:
            return residual
        name, after = (inputs.welcome.run_id, inputs.command.round_id), self._kept.last_before(self._number)
        return self._unsent.before(name, after, residual, inputs.spent)

    def _warn_of_unsent(self, round_id: int, residual: Tensor, clamped: int) -> None:
        """Log, once, that little of what is trained goes out."""
        if not self._has_warned_of_unsent and (norm := l2_norm(residual)) > _MUCH_UNSENT * self._update_norm > 0.0:
            self._has_warned_of_unsent = True
            log.warning(
                "most of what was trained has not gone out",
                client=self._identity.sender,
                round=round_id,
                updates=round(norm / self._update_norm, 1),
                values_at_the_limit=clamped,
                effect="it comes in later rounds, where the controller's steps let it",
                remedy="if that goes on, look at docs/secure-aggregation.md, or use the codec fp32",
            )

    def _begin(self, inputs: RoundInputs, kept: Mapping[str, Tensor]) -> None:
        """Set the module to the global model, with what this client keeps of its own."""
        self._model.write(inputs.base)
        self._model.write_personal(part_of(kept, PERSONAL))
        self._model.write_buffers(self._model.buffers.unpack(inputs.buffers))
        self._buffers_before = self._model.read_buffers()
        self._model.unexchanged.begin(self._model.module, self._model.sharing)

    def _check_trained(self, outcome: TrainOutcome, training: _Training) -> None:
        """Log, once, what training has changed and is not exchanged.

        Raises:
            NonFiniteResult: the loss is not finite. ValueError: it made another number of steps than was asked for, or
                has changed a frozen parameter.
        """
        self._check_loss(outcome.loss)
        if (made := training.rule.steps) != training.steps and training.steps:
            self._check_time(training, made)
            raise ValueError(f"training made {made} optimizer steps, the controller asked for {training.steps}")
        self._model.check_frozen()
        self._model.unexchanged.warn(self._identity.sender, training.inputs.welcome)

    @contextlib.contextmanager
    def _paced_steps(self, training: _Training) -> Iterator[None]:
        """Keep the budget after each step of an optimizer, too, as training need not ask whether to stop."""
        if training.inputs.pacer is None:
            yield
            return
        with after_steps_of(self._model.module, training.paced.pause):
            yield
        if (over_s := training.paced.overtime_s) > MUCH_OVERTIME_S and not training.paced.is_out_of_time:
            self._warn_of_budget(
                "training took longer than its budget",
                seconds_over=round(over_s, 1),
                remedy="let train ask should_stop() between two batches",
            )

    def _outcome_so_far(self, error: Exception) -> TrainOutcome:
        """What training has done that has ended with this error, as its time is over. Raises NothingToTrain: it has
        kept nothing."""
        outcome: TrainOutcome | None = getattr(error, "result", None)
        if outcome is None:
            self._warn_of_budget(
                "nothing was trained within the budget",
                error=f"{type(error).__name__}: {error}",
                effect="this client sits the round out",
                remedy="raise client.budget.seconds_per_round; let train return what it has done once should_stop() is "
                "true",
            )
            raise NothingToTrain from error
        return outcome

    def _check_time(self, training: _Training, made: int) -> None:
        """Raises NothingToTrain: there was no time for the steps of a round that counts them."""
        if training.paced.is_out_of_time:
            self._warn_of_budget(
                "too few steps within the budget",
                steps=made,
                asked=training.steps,
                effect="this client sits the round out",
                remedy="raise client.budget.seconds_per_round, or set federated.training.epochs in place of steps",
            )
            raise NothingToTrain

    def _warn_of_budget(self, event: str, **facts: Any) -> None:
        """Log, once each, that a training does not fit its budget."""
        if event not in self._warned_of_budget:
            self._warned_of_budget.add(event)
            log.warning(event, client=self._identity.sender, round=self._number, **facts)

    def _changed_buffers(self) -> bytes:
        """Return the block of the merged buffers that training has changed; b"": the model has none."""
        layout = self._model.buffers
        return layout.pack(layout.changes(self._buffers_before, self._model.read_buffers())) if layout else b""

    def _run(
        self,
        training: _Training,
        kept: Mapping[str, Tensor],
        open_packets: Callable[[], RoundPackets],
        optimizer_part: str = _OF_OPTIMIZER,
    ) -> tuple[TrainOutcome, RoundPackets | None, dict[str, Tensor]]:
        """Train the module as it is, by the task and with the rule. Returns what the task does, its packets, None: it
        has made none, and the state of an optimizer that is kept, by its names there, which begin with
        ``optimizer_part``."""
        command, rule, inputs = training.inputs.command, training.rule, training.inputs
        made, optimizer = optimizer_argument(self._task, training.chosen, command.lr), None
        if training.terms.get("keep_optimizer") and made:
            optimizer = made["make_optimizer"] = KeptOptimizer(made["make_optimizer"], part_of(kept, optimizer_part))
        own: dict[str, Any] = {**made, **steps_argument(self._task, training.steps)}
        packets: RoundPackets | None = None
        if takes_round(self._task):
            packets = own["round"] = open_packets()
        begin = RoundStart(
            round_id=command.round_id,
            lr=command.lr,
            model=self._model.module,
            base=inputs.base,
            parameters=self._model.parameters(),
            broadcast=inputs.broadcast,
            local_loss=self._local_loss,
            state=part_of(kept, _OF_RULE),
        )
        with rule.attached(begin), self._paced_steps(training):
            try:
                outcome: TrainOutcome = self._task.train(
                    self._model.module,
                    client_id=self._identity.sender,
                    round_id=self._number,
                    epochs=command.epochs,
                    lr=command.lr,
                    seed=command.seed,
                    subset_size=command.subset_size,
                    should_stop=training.paced.should_stop,
                    **own,
                )
            except Exception as error:
                if not training.paced.is_out_of_time:
                    raise
                outcome = self._outcome_so_far(error)
            if packets is None and getattr(outcome, "parts", None) is not None:
                packets = open_packets()
            if packets is not None:
                outcome = packets.take(outcome, training.paced.should_stop)
            self._check_result(outcome)  # before the rule misses the steps of a training that there was not
        packets = packets if packets is not None and packets.count else None
        return outcome, packets, {} if optimizer is None else _named(optimizer_part, optimizer.state())

    def _check_result(self, outcome: TrainOutcome) -> None:
        """Raises WrongResult: the task has returned no result of a training, or a module whose tensors cannot be
        exchanged. NothingToTrain: it says so."""
        train = implementation(self._task, "train")
        try:
            _ = int(outcome.num_samples), None if outcome.loss is None else float(outcome.loss)
        except Exception as error:
            raise WrongResult(
                f"train has returned {described(outcome)}: expected an object with num_samples, an integer, and loss, "
                f"a number or None, such as gradbus.models.TrainResult(num_samples=..., loss=...) ({error})",
                train,
            ) from None
        if int(outcome.num_samples) == 0 and outcome.loss is None:
            raise NothingToTrain
        if int(outcome.num_samples) < 1:
            raise WrongResult(
                f"train has returned num_samples={outcome.num_samples} and loss={outcome.loss}: expected at least one "
                f"sample. If there was nothing to train, return gradbus.models.TrainResult.nothing()",
                train,
            )
        if difference := self._model.misfit:
            raise WrongResult(
                f"training has changed the tensors of the model: {difference}. They are exchanged by name and shape. "
                f"Undo the change before train returns (prune.remove, remove_parametrizations), or make it in "
                f"build_model, on all nodes",
                train,
            )

    def _train_own(
        self, training: _Training, how: PersonalTraining | None, kept: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Train the model that the rule keeps at this client. Returns what is kept of it. The module has any values
        then."""
        if how is None:
            return {}
        command = training.inputs.command
        command = replace(command, epochs=how.epochs or command.epochs, lr=how.lr or command.lr)
        self._begin(training.inputs, kept)
        training.paced.use(SHARE_OF_OWN_MODEL)
        if before := part_of(kept, OWN_MODEL):
            self._model.write_own(before)
        # As a plain round, with nothing behind the model and no state: these are of the rule that keeps this one.
        inputs = replace(training.inputs, command=command, broadcast=torch.empty(0, dtype=torch.float32))
        key = FrameKey(Kind.UPDATE, 0, command.round_id, 0, 0)
        outcome, _, optimizer_state = self._run(
            replace(training, inputs=inputs, rule=how.rule),
            _without(kept, _OF_RULE),
            partial(self._open_packets, inputs, key, True),
            _OF_OWN_OPTIMIZER,
        )
        self._model.check_frozen()
        try:
            self._check_loss(outcome.loss)
            return {**_named(OWN_MODEL, _checked_finite(self._model.read_own())), **optimizer_state}
        except NonFiniteResult as error:  # it concerns this client alone, and no update of the global model
            log.warning(
                "the client's own model has diverged",
                client=self._identity.sender,
                round=command.round_id,
                reason=str(error),
                effect="it stays as it was before this round",
                remedy="lower own_lr",
            )
            before_it = {name: one for name, one in kept.items() if name.startswith(_OF_OWN_OPTIMIZER)}
            return {**_named(OWN_MODEL, before), **before_it}

    def _personal(self) -> dict[str, Tensor]:
        """Return the personal tensors of the model after training, by the names under which they are kept."""
        return _named(PERSONAL, _checked_finite(self._model.read_personal()))

    def _keep_local_model(self, run_id: int) -> Tensor:
        """The vector of the model after training, of which a copy is kept where others may see it."""
        vector = self._model.read()
        if self.keeps_local_model:
            self._local_model = run_id, vector.clone()
        return vector

    def local_model(self, welcome: Welcome, round_id: int, transfer: int) -> EncodedUpdate | None:
        """The model that the newest training has made, float32 in full, to be uploaded under this round; None: there
        is none of this run."""
        if self._local_model is None or self._local_model[0] != welcome.run_id:
            return None
        payload = self._local_model[1].numpy().astype("<f4", copy=False).tobytes()
        here = self._memory.here
        sealed = self._memory.put(payload) if here and here == welcome.memory else None
        request = UploadRequest(
            run_id=welcome.run_id,
            round_id=round_id,
            transfer=transfer,
            total_bytes=len(payload),
            num_samples=1,
            loss=math.nan,
            train_s=0.0,
            encode_s=0.0,
            memory="" if sealed is None else sealed.place,
        )
        me = self._identity
        key = FrameKey(Kind.UPDATE, welcome.run_id, round_id, me.sender, me.incarnation, transfer)
        return EncodedUpdate(key, request, payload if sealed is None else sealed.payload, sealed=sealed)

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
    def _encode_sections(
        sections: Mapping[str, Tensor], codec: Codec, kept: Mapping[str, Tensor]
    ) -> tuple[list[tuple[str, bytes]], dict[str, Tensor]]:
        """The sections beside the model's by name, and what to keep: with a lossy codec their residuals."""
        encoded, residuals = [], {}
        try:
            for name, vector in sections.items():
                if codec.lossless:
                    payload = codec.encode(vector, is_delta=True)
                else:
                    key = SECTION_RESIDUAL + name
                    payload, residuals[key] = codecs.residual_step(vector, kept.get(key), codec, is_delta=True)
                encoded.append((name, payload))
            return encoded, residuals
        except NonFiniteError as error:
            raise NonFiniteResult(
                NON_FINITE_MODEL, f"training made {', '.join(sections)} non-finite: {error}"
            ) from None

    @torch.no_grad()
    def _protected(
        self, privacy: ClientPrivacy, inputs: RoundInputs, end: RoundEnd, change: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """What training has changed, clipped and with noise, and the metrics to announce. A round that is done again
        gives what it has given before, which tells no more than once. ``change``: in place of the trained model.
        Raises ConfigError: the rule sends more than the model, which would have no noise."""
        if privacy.is_local and end.sections:
            raise ConfigError(
                f"the training rule {inputs.welcome.rule} sends {', '.join(end.sections)} without noise: with local "
                f"privacy this client sends the model alone. Choose another rule on the controller"
            )
        round_id = inputs.command.round_id
        if privacy.is_local and (released := self._kept.released(round_id)) is not None:
            return released, {}
        change = self._model.read() - inputs.base if change is None else change
        change, facts = privacy.protected(change, inputs.broadcast)
        if privacy.is_local and bool(torch.isfinite(change).all()):  # else nothing leaves
            self._kept.release(round_id, change)
        return change, facts

    @torch.no_grad()
    def _encode(
        self,
        codec: Codec,
        base: Tensor,
        residual: Tensor | None,
        change: Tensor | None,
        packets: RoundPackets | None,
    ) -> tuple[bytes | memoryview, Tensor | None, Tensor]:
        """The update's bytes, with a lossy codec the residual, and what training has changed. ``change``: in place of
        that. Of an update that leaves in ``packets``: their sum, and the residual as it was, as their codecs are the
        task's."""
        if change is not None and packets is not None and packets.leaves:
            return packets.sum(), residual, change
        try:
            if change is None and isinstance(codec, Fp32) and codec.version > 1 and not self._feeds_back:
                message, change = codec.difference(self._model.read(), base)
                return message, None, change
            local = self._model.read() if change is None else base + change
            change = local - base if change is None else change
            if self._feeds_back:  # in full: what the codec does is done on the grid of the attempt, when it is masked
                return codecs.get("fp32").encode(change if residual is None else change + residual), None, change
            # Version 1 of fp32 and q8 means weights; all else is the difference to the model of the round before.
            vector = local if codec.version == 1 and not codec.v1_is_delta else change
            if codec.lossless:
                return codec.encode(vector), None, change
            return *codecs.residual_step(vector, residual, codec), change
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
        self,
        payload: bytes | memoryview,
        codec: Codec,
        base: Tensor,
        num_samples: int,
        update_norm: float,
        residual: Tensor | None,
    ) -> None:
        """Raises TooLarge: the update would be refused, as it has no room in the sum."""
        norm = update_norm + (0.0 if residual is None else l2_norm(residual))
        # No value is larger than the norm, which is known; half, as a lossy codec may round up.
        if num_samples * norm < LARGEST / 2 or fits(
            codecs.parse(payload, expected_dim=base.numel(), own=(type(codec),)), base, num_samples
        ):
            return
        raise masked_values.TooLarge(
            f"training changed the model by {update_norm:.3g}, which with {num_samples} samples is more than the sum "
            f"of all clients has room for. Lower the learning rate"
        )

    def on_receipt(self, update: EncodedUpdate, receipt: Receipt) -> None:
        """Keep the state after an update that counts."""
        note_receipt(self._probe, receipt)
        if not receipt.accepted:
            return
        self._counted = self._number
        self._probe.reached("after_receipt_before_residual", update.key.round_id)
        if update.state:
            self._kept.accepted(self._number, update.state)
            self._warn_of_loss(update.state)
        self._probe.reached("after_residual", update.key.round_id)

    def _warn_of_loss(self, state: Mapping[str, Tensor]) -> None:
        """Log, once, that a part of the model is in this process alone."""
        own = [name for name, tensor in own_tensors(state).items() if tensor.is_floating_point()]
        if own and not self._kept.is_durable and not self._has_warned:
            self._has_warned = True
            log.warning(
                "tensors of the model are kept in memory alone",
                client=self._identity.sender,
                tensors=len(own),
                first=own[:5],
                effect="a restart loses them",
                remedy="set client.state_dir",
            )

    def kept_personal(self, welcome: Welcome) -> dict[str, Tensor]:
        """Return the personal tensors of this client after its newest update that counts, by name."""
        self.arrange(welcome)
        if not self._model.sharing.keeps_some:
            return {}
        self._kept.start_run(welcome.run_id, self._model.dim)
        return part_of(self._kept.state_after_newest(), PERSONAL)

    def close(self) -> None:
        """Let another process use the directory of the state."""
        self._kept.close()


def _change_of(packets: RoundPackets) -> Tensor | None:
    """What the packets come to; None: there are none. Raises NonFiniteResult: their sum is not finite."""
    try:
        return packets.change()
    except NonFiniteError as error:
        raise NonFiniteResult(NON_FINITE_MODEL, f"the sum of the packets is not finite: {error}") from None


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _without(kept: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in kept.items() if not name.startswith(prefix)}


def _checked_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, which would be kept for good. Raises NonFiniteResult: one is not finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteResult(
                NON_FINITE_MODEL,
                f"training made {name!r}, which stays at this client, non-finite. Lower the learning rate",
            )
    return tensors


def _to_keep(end: RoundEnd, residual: Tensor | None, optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a client keeps if its update counts."""
    kept = _named(_OF_RULE, end.state)
    if residual is not None:
        kept[RESIDUAL] = residual
    return {**kept, **optimizer}


def _announced(task: object, outcome: Any, others: int) -> dict[str, float]:
    """The metrics of a training that go out beside ``others`` of its rule. Raises WrongResult: they cannot be read."""
    try:
        return sendable(as_floats(getattr(outcome, "metrics", None)), others)
    except Exception as error:
        raise WrongResult(
            f"train has returned metrics that cannot be read ({error}): expected a mapping of names to single numbers",
            implementation(task, "train"),
        ) from error


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as they are announced: numbers that are finite."""
    return {str(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
