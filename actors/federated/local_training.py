"""What a client does off the event loop: train from the global model, encode the update, keep the residual."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.clipping import l2_distance, l2_norm
from gradbus.actors.aggregation.exact_sum import LARGEST, fits
from gradbus.actors.federated.client_optimizer import optimizer_argument, split_options
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.rounds import NON_FINITE_LOSS, NON_FINITE_MODEL
from gradbus.actors.federated.rules.base import make_rule
from gradbus.actors.federated.task import FederatedTask
from gradbus.codecs import Codec, NonFiniteError
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore, Hex64, Meta, tensor_of
from gradbus.runtime.choices import CODECS
from gradbus.runtime.compute_limiter import TRAINING
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.shm.shared_payload import PayloadMemory, SharedPayload
from gradbus.runtime.testing.instrumentation import Probe, no_probe
from gradbus.runtime.wire.control import Receipt, UploadRequest, Welcome
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity, TrainCmd

_KEPT = 3


class SavedResidual(Meta):
    """The run of a saved residual."""

    run_id: Hex64


class ResidualStore:
    """The residuals of one client in one run. Methods may block: for the compute thread."""

    def __init__(self, directory: Path | None, client_id: int) -> None:
        """``directory``: where they are saved; None: in memory only. Raises CheckpointError: it cannot be used."""
        self._shape: tuple[int] | None = None
        self._store = CheckpointStore(directory / f"client-{client_id}", keep=_KEPT) if directory is not None else None
        self._run_id = 0
        self._by_round: dict[int, Tensor] = {}

    def start_run(self, run_id: int, dim: int | None = None) -> None:
        """Start with this run, and drop residuals of others. ``dim``: length of a residual; None: any."""
        if run_id == self._run_id:
            return
        self._run_id, self._shape = run_id, None if dim is None else (dim,)
        self._by_round.clear()
        if self._store is None:
            return
        for round_id in self._store.rounds():
            try:
                checkpoint = self._store.load(round_id, self._check)
            except CheckpointError:
                continue  # damaged, and logged by load: an older one counts
            if SavedResidual.of(checkpoint).run_id == f"{run_id:016x}":
                self._by_round[round_id] = checkpoint.tensors["residual"]
            else:
                self._store.remove(round_id)

    def _check(self, checkpoint: Checkpoint) -> None:
        SavedResidual.of(checkpoint)
        tensor_of(checkpoint, "residual", self._shape)

    def before(self, round_id: int) -> Tensor | None:
        """The residual to start this round with."""
        earlier = [known for known in self._by_round if known < round_id]
        return self._by_round[max(earlier)] if earlier else None

    def accepted(self, round_id: int, residual: Tensor) -> None:
        """The update of this round counts: save its residual."""
        for stale in [known for known in self._by_round if known >= round_id]:
            del self._by_round[stale]
        self._by_round[round_id] = residual
        for old in sorted(self._by_round)[:-_KEPT]:
            del self._by_round[old]
        if self._store is not None:
            for stale in [known for known in self._store.rounds() if known >= round_id]:
                self._store.remove(stale)  # undone, and newer than this one
            self._store.save(Checkpoint(round_id, {"residual": residual}, {"run_id": f"{self._run_id:016x}"}))

    def close(self) -> None:
        """Let another process use the directory."""
        if self._store is not None:
            self._store.close()


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
        residual: float32, shape (D,): after it, if it is accepted; None with a lossless codec.
        sealed: the shared memory with the payload, for a controller of this machine; None: it is in this process alone.
    """

    key: FrameKey
    request: UploadRequest
    payload: bytes | memoryview
    residual: Tensor | None
    sealed: SharedPayload | None = None


class LocalTraining:
    """One client's model, task and residuals. All methods are for the compute thread."""

    def __init__(
        self, task: FederatedTask, identity: Identity, model: FlatModel, residuals: ResidualStore,
        memory: PayloadMemory, probe: Probe | None = None, allowed_rule: str = "",
    ) -> None:  # fmt: skip
        self._probe = probe or no_probe()
        self._probe.note("started", incarnation=identity.incarnation)
        self._task = task
        self._allowed_rule = allowed_rule
        self._identity = identity
        self._model = model
        self._residuals = residuals
        self._memory = memory
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

    def train(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, transfer: int, should_stop: Callable[[], bool],
        commanded_s: float,
    ) -> EncodedUpdate:  # fmt: skip
        """Train from ``base``, float32, shape (D,), and encode the result. ``commanded_s``: when the command came, by
        ``time.perf_counter``. Clients that share a process take turns (runtime/compute_limiter.py).

        Raises:
            NonFiniteResult: its loss, or the model, is not finite.
            ValueError: training made the model too large, or used no samples: the controller would refuse the update.
                And whatever the task raises.
        """
        with TRAINING.take(should_stop):
            return self._train(welcome, command, base, transfer, should_stop, commanded_s)

    def _train(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, transfer: int, should_stop: Callable[[], bool],
        commanded_s: float,
    ) -> EncodedUpdate:  # fmt: skip
        identity = self._identity
        self._probe.reached("before_training", command.round_id)
        self.arrange(welcome)
        self._residuals.start_run(welcome.run_id, self._model.dim)
        started_s = time.perf_counter()
        self._model.write(base)
        options, chosen = split_options(welcome.options)
        rule = make_rule(welcome.rule, options, allowed=self._allowed_rule)
        own = optimizer_argument(self._task, chosen, command.lr)
        with rule.attached(self._model.module):
            outcome = self._task.train(
                self._model.module, client_id=identity.sender, round_id=command.round_id, epochs=command.epochs,
                lr=command.lr, seed=command.seed, subset_size=command.subset_size, should_stop=should_stop, **own,
            )  # fmt: skip
        trained_s = time.perf_counter()
        self.train_s += trained_s - started_s
        self._check_loss(outcome.loss)
        self._model.check_frozen()
        codec = codec_of(welcome)
        payload, residual = self._encode(codec, base, command.round_id)
        update_norm = l2_distance(self._model.read(), base)
        self._check(payload, base, int(outcome.num_samples), update_norm, command.round_id)
        key = FrameKey(
            Kind.UPDATE, welcome.run_id, command.round_id, identity.sender, identity.incarnation, transfer
        )  # fmt: skip
        encoded_s = time.perf_counter()
        here = self._memory.here
        sealed = self._memory.put(payload) if here and here == welcome.memory else None
        request = UploadRequest(
            run_id=welcome.run_id, round_id=command.round_id, transfer=transfer, total_bytes=len(payload),
            num_samples=int(outcome.num_samples), train_s=trained_s - started_s,
            loss=math.nan if outcome.loss is None else float(outcome.loss),
            encode_s=encoded_s - trained_s, memory="" if sealed is None else sealed.place,
            wait_s=max(0.0, started_s - commanded_s), update_norm=update_norm,
            residual_norm=0.0 if residual is None else l2_norm(residual),
        )  # fmt: skip
        self._probe.note(
            "offered", run=f"{welcome.run_id:016x}", round=request.round_id, transfer=transfer,
            bytes=request.total_bytes, num_samples=request.num_samples, crc32=self._probe.history.checksum(payload),
        )  # fmt: skip
        self._probe.reached("after_training_before_offer", command.round_id)
        # From now on it is in one place only, also for frames.
        return EncodedUpdate(key, request, payload if sealed is None else sealed.payload, residual, sealed)

    @torch.no_grad()
    def _encode(self, codec: Codec, base: Tensor, round_id: int) -> tuple[bytes, Tensor | None]:
        """The update's bytes, and with a lossy codec the residual."""
        local = self._model.read()
        # Version 1 of fp32 and q8 means weights; all else is the difference to the model of the round before.
        vector = local if codec.version == 1 and not codec.v1_is_delta else local - base
        try:
            if codec.lossless:
                return codec.encode(vector), None
            return codecs.residual_step(vector, self._residuals.before(round_id), codec)
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

    def _check(self, payload: bytes, base: Tensor, num_samples: int, update_norm: float, round_id: int) -> None:
        """Raises ValueError: the update would be refused."""
        if num_samples < 1:
            raise ValueError(f"training used {num_samples} samples: expected at least one")
        residual = self._residuals.before(round_id)
        norm = update_norm + (0.0 if residual is None else l2_norm(residual))
        # No value is larger than the norm, which is known; half, as a lossy codec may round up.
        if num_samples * norm < LARGEST / 2 or fits(
            codecs.parse(payload, expected_dim=base.numel()), base, num_samples
        ):
            return
        raise ValueError(
            f"training changed the model by {update_norm:.3g}, which with {num_samples} samples is more than the sum "
            f"of all clients has room for. Lower the learning rate"
        )

    def on_receipt(self, update: EncodedUpdate, receipt: Receipt) -> None:
        """Keep the residual of an update that counts."""
        self._probe.note(
            "receipt", run=f"{receipt.run_id:016x}", round=receipt.round_id, transfer=receipt.transfer,
            accepted=receipt.accepted, reason=receipt.reason,
        )  # fmt: skip
        if not receipt.accepted:
            return
        self._probe.reached("after_receipt_before_residual", update.key.round_id)
        if update.residual is not None:
            self._residuals.accepted(update.key.round_id, update.residual)
        self._probe.reached("after_residual", update.key.round_id)

    def close(self) -> None:
        """Let another process use the directory of the residuals."""
        self._residuals.close()
