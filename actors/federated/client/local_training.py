"""What a client does off the event loop for a round: have its task train, have the result encoded, and offer it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from gradbus.actors.federated.client.client_state import OF_RULE, ClientStateStore
from gradbus.actors.federated.client.packets_out import RoundPackets
from gradbus.actors.federated.client.round_inputs import RoundInputs, RoundPlan
from gradbus.actors.federated.client.rules.base import ClientRule, RoundEnd
from gradbus.actors.federated.client.run_terms import RunChoices
from gradbus.actors.federated.client.task_training import TaskTraining, checked_finite, metrics_of
from gradbus.actors.federated.client.update_encoding import UpdateEncoder
from gradbus.actors.federated.client.updates_out import EncodedUpdate, note_receipt
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.own_tensors import PERSONAL, named, own_tensors, part_of
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.secure_aggregation.masked_values import UpdateMasks
from gradbus.runtime.compute_limiter import TRAINING
from gradbus.runtime.logs import get_logger
from gradbus.runtime.optimization.deferred_compiler import defer_compiler
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.testing.journal import Probe, no_probe
from gradbus.runtime.wire.control import Receipt, UploadRequest, Welcome
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

log = get_logger("client")


class LocalTraining:
    """Makes the updates of one client, and keeps its state after those that count. All methods are for the compute
    thread."""

    def __init__(
        self,
        task: FederatedTask,
        identity: Identity,
        model: FlatModel,
        kept: ClientStateStore,
        memory: PayloadMemory,
        probe: Probe | None = None,
        choices: RunChoices | None = None,
    ) -> None:
        """
        Args:
            kept: the states of this client. memory: where updates lie for a controller of this machine.
            choices: reads what a controller has chosen; None: nothing of the user's own may be.
        """
        defer_compiler()
        self._probe = probe or no_probe()
        self._probe.note("started", incarnation=identity.incarnation)
        self._identity = identity
        self._model = model
        self._kept = kept
        self._memory = memory
        self._choices = choices or RunChoices()
        self._task = task
        self._training = TaskTraining(task, model, identity.sender)
        self._encoder = UpdateEncoder(model, kept, identity.sender)
        self._number = 0  # of the newest training
        self._counted = 0  # the newest one that counts
        self._has_warned = False
        self._local_model: tuple[int, Tensor] | None = None  # by its run, float32, shape (D,)
        self._shared_memory = False  # the controller of the newest command reads this process's memory
        self.train_s = 0.0

    def load_data(self, num_clients: int) -> None:
        """Have the task load the data of this client. ``num_clients``: of the run; 0: unknown."""
        self._training.load_data(num_clients)

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
        identity, welcome, command = self._identity, inputs.welcome, inputs.command
        self._probe.reached("before_training", command.round_id)
        self._arrange_to_train(welcome)
        self._kept.start_run(welcome.run_id, self._model.dim)
        run = self._choices.read(welcome)
        started_s = time.perf_counter()
        plan = RoundPlan.of(inputs, run, should_stop, next_number=1 + max(self._counted, self._kept.newest))
        self._number = plan.number
        kept = self._kept.before(plan.number)
        key = FrameKey(Kind.UPDATE, welcome.run_id, command.round_id, identity.sender, identity.incarnation, transfer)
        own = self._training.train_own(plan, kept)
        outcome, packets, optimizer = self._training.train(plan, kept, key)
        trained_s = time.perf_counter()
        self.train_s += trained_s - started_s
        self._training.check_trained(plan, outcome)
        self._keep_local_model(plan)
        # A plain rule leaves nothing.
        end = RoundEnd() if type(plan.rule) is ClientRule else plan.rule.finish(self._model.read())
        num_samples, loss, num_steps = int(outcome.num_samples), outcome.loss, plan.rule.steps
        encoded = self._encoder.encode(plan, end, packets, kept, num_samples)
        facts = metrics_of(self._task, outcome, others=len(encoded.metrics)) | encoded.metrics
        if run.privacy is not None and run.privacy.is_local:  # none of these has noise
            num_samples, loss, num_steps, facts = 1, None, 0, {}
        buffers = self._training.pack_changed_buffers()
        encoded_s = time.perf_counter()
        request = UploadRequest(
            run_id=welcome.run_id,
            round_id=command.round_id,
            transfer=transfer,
            total_bytes=len(encoded.payload) + len(buffers),
            num_samples=num_samples,
            train_s=trained_s - started_s,
            loss=math.nan if loss is None else float(loss),
            encode_s=encoded_s - trained_s,
            wait_s=max(0.0, started_s - inputs.commanded_s),
            update_norm=-1.0 if welcome.masked else encoded.update_norm,  # it says something of a single update
            residual_norm=encoded.residual_norm,
            steps=num_steps,
            metrics=facts,
        )
        state = {**encoded.residuals, **optimizer, **own}
        if end.state:
            state |= named(OF_RULE, end.state)
        if personal := checked_finite(self._model.read_personal()):
            state |= named(PERSONAL, personal)
        update = EncodedUpdate(key, request, encoded.payload, state, buffers=buffers)
        self._shared_memory = bool(self._memory.here) and self._memory.here == welcome.memory
        if packets is not None and packets.leaves:
            return self._last_packet(packets, update)
        return update if welcome.masked else self._offered(update)  # one that is to be masked stays here until it is

    def _arrange_to_train(self, welcome: Welcome) -> None:
        """Arrange the module. Raises RuntimeError: its frozen parameters have to come first."""
        self.arrange(welcome)
        if welcome.frozen and self._model.frozen != welcome.frozen:
            raise RuntimeError(
                "the frozen parameters are not those of the controller: an earlier training has changed the module, "
                "which was built again. They come with the next round"
            )

    def _keep_local_model(self, plan: RoundPlan) -> None:
        """Keep a copy of the model after training where others may see it."""
        if plan.run.allowed.model:
            self._local_model = plan.inputs.welcome.run_id, self._model.read().clone()

    # Offers

    def _last_packet(self, packets: RoundPackets, whole: EncodedUpdate) -> EncodedUpdate:
        """The packet that completes an update, which counts as ``whole``."""
        last = packets.make_last(whole)
        self._note_offered(replace(last.request, total_bytes=len(whole.payload)), whole.payload)
        return last

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

    def mask(self, update: EncodedUpdate, base: Tensor, masks: UpdateMasks, transfer: int) -> EncodedUpdate:
        """The update with these masks, which are used up, as this transfer; see :meth:`.UpdateEncoder.mask`.

        Raises:
            TooLarge: it has no room in the sum of so many clients.
        """
        started_s, request = time.perf_counter(), update.request
        payload, state = self._encoder.mask(update, base, masks)
        request = replace(
            request,
            transfer=transfer,
            total_bytes=len(payload) + len(update.buffers),
            attempt=masks.roster.attempt.number,
            encode_s=request.encode_s + time.perf_counter() - started_s,
        )
        key = update.key._replace(transfer=transfer)
        return self._offered(replace(update, key=key, request=request, payload=payload, state=state))

    def encode_local_model(self, welcome: Welcome, round_id: int, transfer: int) -> EncodedUpdate | None:
        """Return the model that the newest training has made, float32 in full, to be uploaded under this round; None:
        there is none of this run, or it is not to be shown."""
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

    # State

    def on_receipt(self, update: EncodedUpdate, receipt: Receipt) -> None:
        """Keep the state after an update that counts."""
        note_receipt(self._probe, receipt)
        if not receipt.accepted:
            return
        self._counted = self._number
        self._probe.reached("after_receipt_before_residual", update.key.round_id)
        if update.state:
            self._kept.keep(self._number, update.state)
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

    def prepare_personal(self, welcome: Welcome) -> dict[str, Tensor]:
        """Return the personal tensors of this client after its newest update that counts, by name."""
        self.arrange(welcome)
        if not self._model.sharing.keeps_some:
            return {}
        self._kept.start_run(welcome.run_id, self._model.dim)
        return part_of(self._kept.state_after_newest(), PERSONAL)

    def close(self) -> None:
        """Let another process use the directory of the state."""
        self._kept.close()
