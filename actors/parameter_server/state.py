"""The checkpoints of one server: its part of the weights with its optimizer, and with server 0 the workers' own state.

Each server has a folder of its own below the state directory. All save the same versions, and a version counts only if
all have it. Workers keep nothing: what a resume needs of them is with server 0, so a worker may come back on another
machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, StringConstraints
from torch import Tensor, nn

from gradbus.actors.data_parallel.joint_checkpoints import JointCheckpoints, separate
from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.data_parallel.state import MAX_LAYOUT, CheckpointMismatch, newest_common, tensors_below
from gradbus.actors.parameter_server.agreement import Roles
from gradbus.actors.parameter_server.assignment import TensorPart, put
from gradbus.actors.parameter_server.shard import WEIGHTS, Shard
from gradbus.runtime.checkpoint import LISTINGS, Checkpoint, CheckpointStore, Count, Hex64, Meta, tensor_of
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.foreign_files import names_inside
from gradbus.runtime.safetensors_header import MAX_DIMENSIONS
from gradbus.runtime.saved_state import StateNames

FROZEN = "frozen/"  # before the names of parameters that are not trained
_KEPT = ("seed", "accumulation_steps")  # with others the place within an epoch would mean other batches
_MAX_WORKERS = 1024
_SERVER = re.compile(r"server-\d{1,10}")
_Rank = Annotated[str, StringConstraints(pattern=r"^\d{1,10}$")]


class SavedPart(Meta):
    """A piece of the model, as :class:`~gradbus.actors.parameter_server.assignment.TensorPart` has it."""

    tensor: str
    start: Count
    stop: Count
    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMENSIONS)]


class SavedServer(Meta):
    """The contents of a server's checkpoint beside its tensors.

    Attributes:
        run_id: of the run. server, servers, workers: numbers. layout: of the model. pieces: of this server.
        names: where those of the model's state differ; None: saved by an earlier version.
        settings: that a resume must have, too. updates: of the weights. refused: gradients that were not finite.
        staleness: gradients by their staleness. bytes_in, bytes_out: payload so far; 0 if saved by an earlier version.
        own: of each worker that was there, by its rank, what it has kept.
    """

    run_id: Hex64
    server: Count
    servers: Count
    workers: Count
    layout: Annotated[list[str], Field(max_length=MAX_LAYOUT)]
    names: StateNames | None = None
    pieces: Annotated[list[SavedPart], Field(max_length=MAX_LAYOUT)]
    settings: dict[str, Any]
    updates: Count
    refused: Count
    staleness: dict[str, Count]
    bytes_in: Count = 0
    bytes_out: Count = 0
    own: Annotated[dict[_Rank, dict[str, Any]], Field(max_length=_MAX_WORKERS)] = Field(default_factory=dict)


class ServerState(JointCheckpoints):
    """The checkpoints of one server."""

    def __init__(
        self,
        config: DataParallelConfig,
        settings: ParameterServerSettings,
        server: int,
        roles: Roles,
        layout: list[str],
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """``names``: of the model, see ``StateNames.of_model``.

        Raises:
            CheckpointError: the directory cannot be used, or holds a run while ``resume`` is off.
        """
        super().__init__(config, f"server-{server}")
        self._cut_bytes = settings.cut_bytes
        self._server = server
        self._roles = roles
        self._layout = layout
        self._names = names

    def save(
        self,
        step: int,
        shard: Shard,
        own: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Tensor]]],
        frozen: Mapping[str, Tensor],
        **counts: Any,
    ) -> int:
        """Save a version; returns its bytes.

        Args:
            own: of each worker what it has sent: plain data, and tensors by name. frozen: of the model, by name.
            counts: run_id, updates, refused, staleness, bytes_in and bytes_out.

        Raises:
            CheckpointError: it could not be written.
        """
        tensors = {**shard.tensors(), **frozen}
        for rank, (_, named) in own.items():
            tensors |= {f"worker-{rank}/{name}": tensor for name, tensor in named.items()}
        pieces = [{"tensor": p.tensor, "start": p.start, "stop": p.stop, "shape": list(p.shape)} for p in shard.pieces]
        meta = {
            "server": self._server, "servers": self._roles.servers, "workers": self._roles.workers,
            "layout": self._layout, "names": self._names, "pieces": pieces, "settings": self._settings(),
            "own": {str(rank): dict(plain) for rank, (plain, _) in own.items()}, **counts,
        }  # fmt: skip
        return self._store.save(Checkpoint(step, separate(tensors), meta))

    def load(self, step: int) -> tuple[Checkpoint, SavedServer]:
        """Read and check it. Raises CheckpointError: damaged, or of another run than the settings describe."""
        checkpoint = self._store.load(step, SavedServer.of)
        saved = SavedServer.of(checkpoint)
        here = {
            "number of this server": (saved.server, self._server), "servers": (saved.servers, self._roles.servers),
            "workers": (saved.workers, self._roles.workers),
            **{key: (saved.settings.get(key), value) for key, value in self._settings().items()},
        }  # fmt: skip
        for key, (before, now) in here.items():
            if before != now:
                raise CheckpointMismatch(
                    f"the checkpoint of step {step} was made with {key} {before!r:.200}, now it is {now!r}. Go on with "
                    f"the same, or choose another checkpoint.dir"
                )
        if saved.layout != self._layout:
            raise CheckpointMismatch(
                f"the checkpoint of step {step} is of a model with other names, shapes or frozen parts. Go on with the "
                f"same, or choose another checkpoint.dir"
            )
        return checkpoint, saved

    def _settings(self) -> dict[str, Any]:
        return {"cut_bytes": self._cut_bytes, **{key: getattr(self._config, key) for key in _KEPT}}


def own_tensors(checkpoint: Checkpoint, rank: int) -> dict[str, Tensor]:
    """The tensors that a worker has kept in a checkpoint of server 0; {} if it has none."""
    return tensors_below(f"worker-{rank}/", checkpoint.tensors)


@torch.no_grad()
def restore_model(model: nn.Module, checkpoints: Sequence[Checkpoint]) -> None:
    """Parameters and buffers of a version, from the checkpoints of all of its servers, server 0's first. The buffers
    are those of the first worker.

    Raises:
        CheckpointError: it is of another model, or a part is missing.
    """
    all_saved = [SavedServer.of(checkpoint) for checkpoint in checkpoints]
    check_servers(all_saved)
    if any(saved.layout != describe_layout(model) for saved in all_saved):
        raise CheckpointError("it is of a model with other names, shapes or frozen parts")
    parameters = dict(model.named_parameters())
    for checkpoint, saved in zip(checkpoints, all_saved, strict=True):
        pieces = [
            TensorPart(part.tensor, part.start, part.stop, part.shape, parameters[part.tensor].dtype)
            for part in saved.pieces
        ]
        put(parameters, ((p, tensor_of(checkpoint, WEIGHTS + p.name, dtype=p.dtype)) for p in pieces))
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            parameter.copy_(tensor_of(checkpoints[0], FROZEN + name, parameter.shape, parameter.dtype))
    first = min(map(int, all_saved[0].own), default=None)
    for name, buffer in model.named_buffers() if first is not None else ():
        buffer.copy_(tensor_of(checkpoints[0], f"worker-{first}/buffer/{name}", buffer.shape, buffer.dtype))


def check_servers(all_saved: Sequence[SavedServer]) -> None:
    """Raises CheckpointError: these are not the checkpoints of all servers of a version, in their order."""
    found, servers = [saved.server for saved in all_saved], all_saved[0].servers
    if len(found) != servers or found != list(range(servers)):
        raise CheckpointError(f"expected the checkpoints of servers 0 to {servers - 1}, got {str(found)[:200]}")


def has_servers(directory: Path, *, inside: Path | None = None) -> bool:
    """Return whether parameter servers have checkpoints below a state directory. ``inside``: as in
    :meth:`.CheckpointStore.to_read`. Raises FileNotFoundError: there is no such directory; CheckpointError."""
    return any(store.rounds() for store in _stores(directory, inside))


def _stores(directory: Path, inside: Path | None) -> list[CheckpointStore]:
    """Return the checkpoints of each server, server 0's first. Raises as :func:`has_servers`."""
    root = directory if inside is None else inside
    try:
        names = names_inside(root, "server-*", below=directory.relative_to(root))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"state directory {directory} cannot be read: {error}") from None
    names = sorted((name for name in names if _SERVER.fullmatch(name)), key=lambda name: (len(name), name))
    return [CheckpointStore.to_read(directory / name, inside=inside) for name in names]


def _versions(directory: Path, inside: Path | None) -> tuple[list[CheckpointStore], list[int]]:
    """Return the checkpoints of each server, and the steps that all have, newest first."""
    try:
        stores = _stores(directory, inside)
    except FileNotFoundError:
        stores = []
    return stores, newest_common([store.rounds() for store in stores]) if stores else []


def newest_version(directory: Path, number: int | None = None, *, inside: Path | None = None) -> list[Checkpoint]:
    """The newest version, or that of step ``number``, of all servers below a state directory, server 0's first.

    Args:
        inside: as in :meth:`.CheckpointStore.to_read`.

    Raises:
        CheckpointError: no version is there and whole on all servers.
    """
    stores, steps = _versions(directory, inside)
    if number is not None and number not in steps:
        raise CheckpointError(
            f"{directory} has no checkpoint of {number} of all servers, it has those of {steps[::-1]}"
        )
    faults: list[str] = []
    for _ in range(LISTINGS):
        faults = []
        for step in steps if number is None else [number]:
            try:
                return [store.load(step, SavedServer.of) for store in stores]
            except CheckpointError as error:
                faults.append(str(error))
        listed = steps
        stores, steps = _versions(directory, inside)
        if number is not None or steps == listed:
            break
    raise CheckpointError(f"no checkpoint in {directory}/server-*{': ' if faults else ''}{'; '.join(faults)}")
