"""The state of a federated run between two rounds, and its checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller.participation import MAX_KNOWN, Participation
from gradbus.actors.federated.controller.replaced_controller import replaced
from gradbus.actors.federated.controller.report import KEPT_IN_CHECKPOINT, NAMED_IN_CHECKPOINT, RoundReport
from gradbus.actors.federated.controller.saved_run import (
    NOTHING,
    SavedOrder,
    SavedRun,
    SavedStart,
    restore_frozen,
    restore_integers,
)
from gradbus.actors.federated.controller.update_admission import Quarantine
from gradbus.actors.federated.model.flat_model import FlatModel, hash_of_named
from gradbus.actors.privacy.mechanisms import LEDGER
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.checkpoint import (
    Checkpoint,
    CheckpointStore,
    load_weights,
    restore_random_numbers,
    tensor_of,
)
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError, ControllerReplaced
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.saved_state import BUFFER, own_copies
from gradbus.runtime.testing.journal import History, Probe, no_probe, weights_name
from gradbus.runtime.torch_compat import uncompiled_names
from gradbus.runtime.wire.control import Body
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

_ORDERS_BEFORE = 1000  # rounds before that of a resume whose orders are removed: there may be some if keep was higher
_ORDER = "order-"
MAX_ORDER_BYTES = 64 << 20  # of a file: a million clients with orders of their own
_START = "start"
_MAX_START_BYTES = 64 << 10
_START_REMEDY = "Remove it, unless another controller of this run may still be running: that one would not be noticed"

log = get_logger("controller")


@dataclass(frozen=True, slots=True, eq=False)
class RunContext:
    """The objects that all parts of a running controller share.

    Attributes:
        compute: its thread for tensors and files. history: the event journal.
        dropped: what did not count since the last report, by reason.
        probe: what tests see and do: the places at which one has this process die.
    """

    bus: Bus
    identity: Identity
    compute: ComputeThread
    config: FederatedConfig
    state: RunState
    history: History
    dropped: Counter[str] = field(default_factory=Counter)
    probe: Probe = field(default_factory=no_probe)

    @property
    def run_id(self) -> int:
        return self.state.run_id

    def client_facts(self, client_id: int) -> dict[str, Any]:
        """Return id and name of a client for a log event."""
        return self.state.names.facts(client_id)

    async def publish(self, body: Body) -> None:
        """Send a control message as the controller. Raises BusError: it could not be sent."""
        await self.bus.publish(self.identity, body)


def _order_name(round_id: int) -> str:
    return f"{_ORDER}{round_id:06d}"


class RunState:
    """The state of a run, fresh or continued from the newest checkpoint. Its methods may block.

    Attributes:
        run_id: 64 bits, new at a fresh start.
        round_id: the last committed round.
        weights: float32, shape (D,), on the CPU; the live vector of the model where that is possible.
        buffers: the merged buffers after that round, as all nodes hold them; the module has them only while it is held.
        names: of clients, with their ids.
        counted: the last update of each client that counts; once its round is committed, a start of the controller
            after this one knows it, too: its client may still wait for the receipt.
        held: the clients' model after that round, where a lossy downlink makes it differ; else None.
        history: reports of the committed rounds, without timelines, as a checkpoint has them. As that is written in
            every round it is bounded: of all but the newest rounds it has the figures, of those long past nothing.
        incarnation: of the newest controller that has held the state before; later of the one that holds it. 0: there
            was none.
        replaced: why nothing more is saved: a later start has taken the place of this one. None: none has.
        adopts: the level above commits the rounds, some of which this site may miss.
    """

    def __init__(self, config: FederatedConfig, model: FlatModel, strategy: Strategy) -> None:
        """Raises CheckpointError: the state directory cannot be used, or has the state of another run."""
        self._layout, self._layouts, self._table = model.layout, model.layouts, model.table
        self.model = model
        self._strategy = strategy
        self._downlink_codec = config.downlink_codec.name
        self._store: CheckpointStore | None = None
        self._config = config
        self.weights: Tensor = model.read()
        self.buffers: dict[str, Tensor] = model.read_buffers()
        self._has_saved_integers = False
        self._integers = NOTHING  # hash of the parameters of integers
        self.held: Tensor | None = None
        self.run_id = int.from_bytes(os.urandom(8), "little") or 1
        self.round_id = 0
        self.incarnation = 0
        self.replaced: ControllerReplaced | None = None
        self.adopts = False
        self.history: list[RoundReport] = []
        self._orders_from = 1  # orders of earlier rounds are removed
        self.quarantine = Quarantine(config.limits.max_strikes, config.limits.quarantine_rounds)
        self.participation = Participation()
        self.names = ClientNames()
        self.counted: dict[int, FrameKey] = {}
        if config.checkpoint.init_path is not None:
            self._set_initial(config.checkpoint.init_path)
        if config.checkpoint.dir is not None:
            self._store = CheckpointStore(config.checkpoint.dir, keep=config.checkpoint.keep)
            try:
                self._open_store(config)
            except BaseException:
                self._store.close()
                raise
        if self.held is None and self._kind() == "lossy":
            self.held = self.weights.clone()
        if model.integers:
            self._integers = f"{hash_of_named(model.read_integers()):016x}"

    def _open_store(self, config: FederatedConfig) -> None:
        assert self._store is not None
        if config.checkpoint.resume:
            checkpoint = self._store.load_newest(SavedRun.of)
            if checkpoint is not None:
                self._restore(checkpoint)
                # Damaged ones were committed as well, and their models published.
                self._strategy.undone(sum(known > checkpoint.round_id for known in self._store.rounds()))
        elif self._store.rounds():
            raise CheckpointError(
                f"state directory {config.checkpoint.dir} holds a run (round {self._store.rounds()[-1]}), resume is "
                f"off. Choose another directory, or set federated.checkpoint.resume=true"
            )
        if (newest := self._newest_start()) is not None:  # it need not have saved a checkpoint
            self.incarnation = max(self.incarnation, int(newest.incarnation, 16))

    def _set_initial(self, path: Path) -> None:
        """Weights from a file: named tensors, frozen ones included, or a checkpoint with these beside it."""
        named = False

        def assemble(tensors: Mapping[str, Tensor]) -> Tensor:
            nonlocal named
            named = True
            plain = uncompiled_names(tensors)
            self._take_buffers({plain[name]: one for name, one in tensors.items()}, f"initial weights {path}")
            return self.model.vector_of(tensors)

        given, where = load_weights(path, assemble=assemble), f"initial weights {path}"
        self._set_weights(given[: self.model.dim] if named else given, where)
        if not named:
            self._fit_to(path, where)
        elif self.model.frozen_dim:
            self.model.write_frozen(given[self.model.dim :])

    def _fit_to(self, path: Path, where: str) -> None:
        """Check that a vector is of this model, by its checkpoint, and take the frozen parameters from there."""
        place = re.fullmatch(r"round-(\d+)\.safetensors", path.name)
        if place is None or not path.with_suffix(".json").exists():
            if self.model.frozen_dim:
                log.warning("frozen parameters are those of build_model", file=str(path), reason="no checkpoint beside")
            return
        store = CheckpointStore.to_read(path.parent)
        checkpoint = store.load(int(place[1]), SavedRun.of)
        saved = SavedRun.of(checkpoint)
        if saved.layout not in self._layouts:
            raise CheckpointError(
                f"{where} are of a model with other names, shapes or frozen parts. Use the model of that run, or named "
                f"tensors (gradbus export)"
            )
        restore_frozen(self.model, saved.frozen, store.load_constant, where)
        restore_integers(self.model, saved.integers, store.load_constant)
        self._take_buffers(own_copies(checkpoint.tensors, BUFFER), where)

    def _take_buffers(self, found: Mapping[str, Tensor], where: str) -> None:
        """Take the merged buffers among these tensors. Those that are not there stay as they are: version 0.1 has saved
        none in its first checkpoints. Raises CheckpointError: one is of another model."""
        for name, buffer in self.buffers.items():
            taken = found.get(name, buffer)
            if (taken.dtype, taken.shape) != (buffer.dtype, buffer.shape):
                raise CheckpointError(
                    f"{where}: buffer {name!r} is {taken.dtype} of shape {tuple(taken.shape)}, the model has "
                    f"{buffer.dtype} of shape {tuple(buffer.shape)}. Use the model of that run".replace("torch.", "")
                )
            self.buffers[name] = taken.clone()

    def _set_weights(self, vector: Tensor, where: str) -> None:
        if vector.shape != self.weights.shape:
            raise CheckpointError(f"{where}: {vector.numel():,} values, the model has {self.weights.numel():,}")
        self.weights.copy_(vector)

    def _restore(self, checkpoint: Checkpoint) -> None:
        saved, where = SavedRun.of(checkpoint), f"checkpoint of round {checkpoint.round_id}"
        if saved.layout not in self._layouts:
            raise CheckpointError(
                f"{where} is of a model with other names or shapes, or other tensors of it were shared. Use the same "
                f"model and the same federated.share, or another state directory"
            )
        if saved.downlink_codec != self._downlink_codec and "lossy" in (saved.downlink, self._kind()):
            raise CheckpointError(
                f"{where} was made with downlink_codec={saved.downlink_codec}; go on with the same, or start afresh"
            )
        dim = tuple(self.weights.shape)
        weights = tensor_of(checkpoint, "weights", dim)
        held = tensor_of(checkpoint, "held", dim) if saved.downlink == "lossy" else None
        if LEDGER in checkpoint.tensors and LEDGER not in self._strategy.state():
            raise CheckpointError(
                f"{where} was made with federated.privacy, and rounds without it would undo what it has protected. Go "
                f"on with it, or start afresh in another state directory"
            )
        self._strategy.load_state(checkpoint.tensors)
        restore_random_numbers(checkpoint)
        assert self._store is not None
        restore_frozen(self.model, saved.frozen, self._store.load_constant, where)
        restore_integers(self.model, saved.integers, self._store.load_constant)
        self._set_weights(weights, where)
        self._take_buffers(own_copies(checkpoint.tensors, BUFFER), where)
        self.held = held
        self.run_id = int(saved.run_id, 16)
        self.incarnation = saved.incarnation
        self.round_id = checkpoint.round_id
        self._orders_from = max(1, checkpoint.round_id - _ORDERS_BEFORE)
        self.quarantine.load_state(saved.conduct)
        self.participation.load_state(saved.participation)
        self.names.load_state(saved.client_names)
        for client_id, round_id, incarnation, transfer in saved.counted:
            self.counted[client_id] = FrameKey(
                Kind.UPDATE, self.run_id, round_id, client_id, int(incarnation, 16), transfer
            )
        self.history = [report.without_timeline() for report in saved.history]
        log.info("resumed", round=self.round_id, run=f"{self.run_id:016x}")

    def hold_as(self, incarnation: int) -> None:
        """Let this start of the controller hold the state."""
        self.incarnation = incarnation

    def give_way(self, reason: ControllerReplaced) -> None:
        """Save nothing more: a later start has taken the place of this one."""
        self.replaced = reason

    def replace_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Take the merged buffers of the next model."""
        self.buffers = buffers

    def follow_run(self, run_id: int) -> None:
        """Go on as a part of this run, whose rounds the level above commits."""
        self.run_id, self.adopts = run_id, True

    def record_start(self) -> None:
        """Write down this start, before it sends anything: the next start is later whatever its clock says, and an
        earlier one that still runs saves nothing more here. Raises CheckpointError: it could not be written."""
        if self._store is not None:
            self._check_holder()
            start = {"run_id": f"{self.run_id:016x}", "incarnation": f"{self.incarnation:016x}", "host": process_name()}
            self._store.save_document(_START, start)

    def _newest_start(self) -> SavedStart | None:
        """Return the newest start with this state directory; None: there was none. Raises CheckpointError: its file is
        damaged."""
        assert self._store is not None
        found = self._store.load_document(_START, _MAX_START_BYTES, _START_REMEDY)
        return None if found is None else SavedStart.read(found, _START)

    def _check_holder(self) -> None:
        """Raise ControllerReplaced: a later start has taken the place of this one. It is known from the bus, or has
        written itself down in the state directory: not each file system has the lock that keeps it out."""
        if self.replaced is not None:
            raise self.replaced
        newest = None if self._store is None else self._newest_start()
        if newest is not None and int(newest.incarnation, 16) > self.incarnation:
            raise replaced(self.run_id, int(newest.run_id, 16), int(newest.incarnation, 16), newest.host)

    def note_start(self, history: History) -> None:
        """Note the state that this start of the controller begins with."""
        if not history.on:
            return
        weights = self.weights.numpy().data
        crc32 = zlib.crc32(weights)
        held_crc32 = crc32 if self.held is None else zlib.crc32(self.held.numpy().data)
        history.keep(weights_name(self.run_id, self.round_id), weights)
        history.note(
            "started",
            run=f"{self.run_id:016x}",
            incarnation=self.incarnation,
            round=self.round_id,
            crc32=crc32,
            held_crc32=held_crc32,
            dim=self.weights.numel(),
            has_buffers=bool(self.buffers),
            federated=self._config.model_dump(mode="json"),
            **({"adopts": True} if self.adopts else {}),
        )

    def buffer_block(self) -> bytes:
        """Return the merged buffers that are not as they were built, as they follow a model; b"": none ever do."""
        layout = self.model.buffers
        built = self.model.built_buffers if layout else {}
        return layout.pack({name: one for name, one in self.buffers.items() if not torch.equal(one, built[name])})

    def broadcast(self) -> Tensor | None:
        """Return what the strategy sends behind the model, as of :meth:`.Strategy.broadcast`."""
        return self._strategy.broadcast()

    def terms(self) -> Mapping[str, Any]:
        """Return what the strategy sends its clients beside the options of their rule, as of
        :meth:`.Strategy.terms`."""
        return self._strategy.terms()

    def _kind(self) -> str:
        return "full" if self._downlink_codec == "fp32" else "lossy"

    def save_initial(self) -> None:
        """Save a fresh run before the first command, so that a crash in round 1 keeps its id."""
        if self._store is not None and self.round_id == 0 and not self._store.rounds():
            self._save(self.held)

    def save_order(self, round_id: int, order: Mapping[str, Any]) -> None:
        """Write how a round is ordered, before its command is sent. Raises CheckpointError: it could not be written."""
        if self._store is not None:
            entry = {"run_id": f"{self.run_id:016x}", "round_id": round_id, "order": dict(order)}
            self._store.save_document(_order_name(round_id), entry)

    def order_file(self, round_id: int) -> str:
        """Return the name of the file of an order."""
        return f"{_order_name(round_id)}.json"

    @staticmethod
    def order_remedy(round_id: int) -> str:
        """Return what to do with a damaged order, and what that costs."""
        return (
            f"Restore it from a backup, or remove it: round {round_id} is then done by the order that it gets next, "
            f"and not as it was ordered before the crash"
        )

    @property
    def has_orders(self) -> bool:
        """Return whether there are orders on the disk, which may be of rounds that are to be repeated."""
        return self._store is not None and self._store.has_documents(_ORDER)

    def load_order(self, round_id: int) -> dict[str, Any] | None:
        """Return what :meth:`save_order` has written in this run; None: nothing. Raises CheckpointError: it is
        damaged."""
        if self._store is None:
            return None
        remedy = self.order_remedy(round_id)
        found = self._store.load_document(_order_name(round_id), MAX_ORDER_BYTES, remedy)
        if found is None:
            return None
        try:
            saved = SavedOrder.read(found, _order_name(round_id))
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {remedy}") from None
        return saved.order if (saved.run_id, saved.round_id) == (f"{self.run_id:016x}", round_id) else None

    @property
    def is_durable(self) -> bool:
        """Whether a commit writes a checkpoint."""
        return self._store is not None

    def commit(self, report: RoundReport, held: Tensor | None) -> None:
        """Save a round. Raises CheckpointError: it could not be written. ControllerReplaced: a later start has taken
        the place of this one; nothing has changed."""
        self._check_holder()
        self.round_id = report.round_id
        self.held = held
        self.history.append(report.without_timeline())
        self._thin_history()
        self._save(held)

    def adopt(self, round_id: int) -> None:
        """Save the weights as the model of a round that was committed elsewhere, and forget what is newer here. Raises
        CheckpointError: it could not be written. ControllerReplaced: as :meth:`commit`."""
        self._check_holder()
        self.round_id = round_id
        self.history = [report for report in self.history if report.round_id <= round_id]
        if self._store is not None:
            for newer in [known for known in self._store.rounds() if known > round_id]:
                self._store.remove(newer)
        self._save(self.held)

    def _thin_history(self) -> None:
        del self.history[:-KEPT_IN_CHECKPOINT]
        for place in range(len(self.history) - NAMED_IN_CHECKPOINT - 1, -1, -1):
            if not self.history[place].clients:
                return  # and so are all before it
            self.history[place] = self.history[place].without_clients()

    def amend(self, report: RoundReport, **values: Any) -> RoundReport:
        """Complete the newest report with figures from after the commit."""
        report = replace(report, **values)
        self.history[-1] = report.without_timeline()
        return report

    def _save(self, held: Tensor | None) -> None:
        if self._store is None:
            return
        tensors = {**self._model_tensors(), "torch_rng": torch.get_rng_state(), **self._strategy.state()}
        if held is not None:
            tensors["held"] = held
        if self.model.frozen_dim:
            self._store.save_constant(f"frozen-{self.model.frozen:016x}", {"frozen": self.model.read_frozen()})
        if self._integers != NOTHING and not self._has_saved_integers:
            self._store.save_constant(f"integers-{self._integers}", self.model.read_integers())
            self._has_saved_integers = True
        self._store.save(Checkpoint(self.round_id, tensors, self._meta(self.history)))
        with contextlib.suppress(OSError, CheckpointError):  # with the next round it is tried again
            for past in range(self._orders_from, self._store.rounds()[0] + 1):  # of rounds that cannot be open again
                self._store.remove_document(_order_name(past))
                self._orders_from = past + 1

    def checkpoint_of_weights(self, **more: Any) -> Checkpoint:
        """Return the model alone, as a checkpoint for :func:`.saved_run.restore_weights`; ``more``: of its metadata."""
        meta = {
            **self._meta([]),
            "downlink": "full",
            "conduct": [],
            "participation": [],
            "client_names": [],
            "counted": [],
        }
        return Checkpoint(self.round_id, self._model_tensors(), {**meta, **more})

    def _model_tensors(self) -> dict[str, Tensor]:
        """The weights, the merged buffers and those that are kept, for whoever reads them without the model."""
        fixed = {**self.model.read_fixed_buffers(), **self.buffers}
        return {"weights": self.weights, **{f"{BUFFER}{name}": buffer for name, buffer in fixed.items()}}

    def _meta(self, history: Iterable[RoundReport]) -> dict[str, Any]:
        return {
            "run_id": f"{self.run_id:016x}",
            "incarnation": self.incarnation,
            "layout": self._layout,
            "tensors": self._table,
            "downlink_codec": self._downlink_codec,
            "downlink": self._kind(),
            "strategy": self._strategy.name,
            "conduct": self.quarantine.state(),
            "participation": self.participation.state(),
            "client_names": self.names.state(),
            "counted": [
                (client_id, key.round_id, f"{key.incarnation:016x}", key.transfer)
                for client_id, key in list(self.counted.items())[-MAX_KNOWN:]
            ],
            "frozen": f"{self.model.frozen:016x}",
            "frozen_tensors": self.model.frozen_table,
            "integers": self._integers,
            "personal": self.model.personal_table,
            "names": self.model.names,
            "share": self._config.share.model_dump(mode="json"),
            "exchange": self._config.exchange,
            "history": [{k: v for k, v in report.to_json().items() if k != "timeline"} for report in history],
        }

    def close(self) -> None:
        """Let another process use the state directory."""
        if self._store is not None:
            self._store.close()
