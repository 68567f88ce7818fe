"""What an elastic training goes on from: the state that all ranks had at their last commit.

A commit copies the state in memory. When the members change, the rank with the newest commit gives it to all others, so
that all have the bits of one. A step after the last commit leaves no trace.

Models, optimizers, schedulers, samplers, and whatever else has ``state_dict`` and ``load_state_dict``, are parts; all
other values are plain data. Nothing is pickled on its way to other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import socket
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from gradbus.runtime.errors import CheckpointError, CollectiveError, ConfigError
from gradbus.runtime.foreign_files import clear_way, open_named
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import described
from gradbus.torch.broadcast_state import broadcast_tree, check_tree, limit_of
from gradbus.torch.elastic.sampler import ElasticSampler
from gradbus.torch.functions import current, gather_objects
from gradbus.torch.optimizer import Distributed
from gradbus.torch.whole_gradients import is_sharded, is_zero

FORMAT = 1
_SPACE = "elastic"
_NUMBER = re.compile("[1-9][0-9]{0,6}")  # of a process
NOTHING = -1
"""The number of commits of a process that joins: it has no state to give."""

log = get_logger("elastic")


class MembersChanged(Exception):
    """All ranks stand after the same commit, and the members change. Raised by :meth:`TorchState.commit` for ``run``,
    which calls the function again: let it pass."""


class TorchState:
    """The state of a training: a model, an optimizer, and whatever else belongs to it.

    Each is an attribute by its name. Values may be set at any time, and count with the next commit.

        state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, batch=0)
        state.epoch += 1
        state.commit()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        **values: Any,
    ) -> None:
        """Name what belongs to the state. All ranks name the same.

        Args:
            model: the module itself. DistributedDataParallel belongs to one process group: wrap it in the function that
                ``run`` calls.
            optimizer: of its parameters.
            checkpoint: a file that each commit replaces, and from which a run goes on that is started again; under
                torchrun, whose agents start all ranks again when one has died, it is needed. None: no file.
            values: further parts, which have ``state_dict`` and ``load_state_dict``, and plain values: numbers, text,
                bytes, None, tensors, and lists, tuples and maps of them.

        Raises:
            ConfigError: the model or the optimizer is another kind of thing; the model has no parameters, or the
                optimizer has some that no module of the state has; or the state of a part is of one process group, or
                in shards.
        """
        given = {"model": model, "optimizer": optimizer, **values}
        here = {name: one for name, one in given.items() if one is not None or name in values}
        parts = {name: one for name, one in here.items() if _is_part(one)}
        for name, part in parts.items():
            if fault := _fault_of(part):
                raise ConfigError(f"TorchState: {name} {fault}")
        _check_kinds(model, optimizer)
        _check_optimizers(parts)
        for name in here:
            if hasattr(type(self), name):
                raise ConfigError(f"TorchState: {name!r} is a method of the state: give the value another name")
        self.__dict__.update(
            _parts=parts,
            _values={name: one for name, one in here.items() if name not in parts},
            _path=None if checkpoint is None else Path(checkpoint),
            _saved=None,
            _commits=0,
            _callbacks=[],
            _vote=lambda: False,
            _writes=lambda: True,
            _has_written=False,
        )
        self._parts: dict[str, Any]
        self._values: dict[str, Any]
        self._path: Path | None
        self._saved: dict[str, Any] | None
        self._commits: int
        self._callbacks: list[Callable[[], object]]
        self._vote: Callable[[], bool]
        self._writes: Callable[[], bool]
        self._has_written: bool

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for held in (self._parts, self._values):
                if name in held:
                    return held[name]
        raise AttributeError(f"the state has no {name!r}: name it when the state is made, TorchState(..., {name}=...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._values:
            self._values[name] = value
        elif name in self.__dict__:
            super().__setattr__(name, value)
        elif name in self._parts:
            raise AttributeError(f"{name!r} is a part of the state, and stays the same object")
        else:
            self.__getattr__(name)

    @property
    def commits(self) -> int:
        """Return the number of commits since the run began."""
        return self._commits

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these in each new process group but the first, before the state is shared: to scale a learning rate by
        the number of ranks, for one."""
        self._callbacks += callbacks

    # Commits

    def commit(self) -> None:
        """Have training go on from here, whatever happens. All ranks call it after the same steps.

        It copies the state in memory, replaces the checkpoint if there is one, and asks whether the members change.

        Raises:
            MembersChanged: they do; for ``run``.
            DistBackendError: a rank is lost.
            RuntimeError, on all ranks: they have made different numbers of commits.
        """
        self.save()  # first: a state that cannot be copied is no commit
        self._commits += 1
        self._write()
        if self._vote():
            raise MembersChanged

    def check_host_updates(self) -> None:
        """Ask whether processes join or leave, without a commit of each step. If they do, this is one. As
        :meth:`commit`."""
        if self._vote():
            self.save()
            self._commits += 1
            raise MembersChanged

    def save(self) -> None:
        """Copy the state in memory, for :meth:`restore`. Raises ValueError: other ranks could not get it."""
        self._saved = self._copied()

    def restore(self) -> None:
        """Go back to the last commit. Gradients are dropped."""
        if self._saved is not None:
            self._load(self._saved)
        for part in self._parts.values():
            if isinstance(part, Distributed):
                part.drop_gradients()
            if isinstance(part, nn.Module):
                part.zero_grad(set_to_none=True)

    def sync(self) -> None:
        """Give all ranks of the process group the newest commit that one of them has. All ranks call it.

        Raises:
            CollectiveError: no rank has one, as all that had are lost.
            DistBackendError: a rank is lost.
        """
        backend = current()
        found = gather_objects(backend, self._commits, (_SPACE, "commits"), "the state of an elastic run")
        commits = [one if isinstance(one, int) else NOTHING for one in found]
        newest = max(commits)
        if newest == NOTHING:
            raise CollectiveError(
                "no process that is left has a state of the run: start all of them again, which goes on from the "
                "checkpoint if TorchState has one"
            )
        root = commits.index(newest)
        limit_bytes = limit_of(_bytes_of(self._saved or self._copied()))
        tree = broadcast_tree(
            backend,
            lambda: self._saved or self._copied(),
            root,
            of="the state of an elastic run",
            call="TorchState.sync",
            limit_bytes=limit_bytes,
        )
        self._commits = newest
        if backend.group.rank != root:
            self._saved = _checked(tree, self._parts, self._values, "the state of another rank")
            self._load(self._saved)
        elif self._saved is None:
            self._saved = tree

    # What run calls

    def begin(self, vote: Callable[[], bool], writes: Callable[[], bool], *, joins: bool) -> None:
        """Take part in a run. ``vote``: whether members change, on all ranks together. ``writes``: whether this rank
        writes the checkpoint. ``joins``: the state is that of others. Raises CheckpointError."""
        self._vote, self._writes = vote, writes
        if joins:
            self._commits = NOTHING
        else:
            self._read()
        self.save()

    def end(self) -> None:
        """Take part no more."""
        self._vote = lambda: False

    def reset(self) -> None:
        """Call what was registered for a new process group. What it changes is part of the last commit, which all ranks
        get: else the rank that gives it would be the only one with the change."""
        for callback in self._callbacks:
            callback()
        self.save()

    @property
    def layout(self) -> int:
        """Return a hash, of 64 bits, of what must be equal on all members: names, shapes and types of tensors of
        modules, and the order of samplers. The state of an optimizer grows with its steps."""
        named = [f"{name} {type(part).__name__}" for name, part in sorted(self._parts.items())]
        named += sorted(self._values)
        for name, part in sorted(self._parts.items()):
            if isinstance(part, nn.Module):
                tensors = part.state_dict().items()
                named += [f"{name}.{key} {one.dtype} {list(one.shape)}" for key, one in tensors if _is_tensor(one)]
            elif isinstance(part, ElasticSampler):
                named.append(f"{name} {part!r}")
        return int.from_bytes(hashlib.blake2b("\n".join(named).encode(), digest_size=8).digest(), "little")

    # Inside

    def _copied(self) -> dict[str, Any]:
        tree = {"parts": {name: part.state_dict() for name, part in self._parts.items()}, "values": self._values}
        check_tree(tree, "TorchState")  # when members change it is too late: then that would end the run
        return {kind: _copy_of(one) for kind, one in tree.items()}

    def _load(self, saved: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(_copy_of(saved["parts"][name]))  # optimizers keep the tensors that they are given
        self._values.update(_copy_of(saved["values"]))

    def _write(self) -> None:
        """A file that cannot be written is a warning: the others have the state in memory."""
        path = self._path
        if path is None or not self._writes():
            return
        if not self._has_written:  # not at the start: another process may be the one that writes, just now
            self._has_written = True
            _remove_unfinished(path)
        part = path.with_name(f"{_unfinished(path)}{os.getpid()}")
        try:
            clear_way(part)
            with part.open("xb") as file:
                torch.save({"format": FORMAT, "commits": self._commits, **(self._saved or {})}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError about a position
            cause = error if isinstance(error, OSError) else error.__context__
            log.warning(
                "checkpoint not written",
                path=str(path),
                error=(isinstance(cause, OSError) and cause.strerror) or f"{error!s:.200}",
                effect="a run that is started again goes on from an older one",
            )
        finally:
            with contextlib.suppress(OSError):  # it is the checkpoint now; or what stopped the writer stops this, too
                part.unlink()

    def _read(self) -> None:
        """Go on from the checkpoint, if there is one. Raises CheckpointError: it is none, or of another training."""
        if self._path is None:
            return
        limit_bytes = limit_of(_bytes_of(self._copied()))
        try:
            with open_named(self._path, max_bytes=limit_bytes) as file:
                _check_archive(file)
                found = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"checkpoint {self._path} cannot be read: {error.strerror or error}") from None
        except Exception as error:  # pickle, zip and torch each have errors of their own
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"checkpoint {self._path} is damaged, or none of TorchState: {text:.200}. Move it away to begin anew"
            ) from None
        where = f"checkpoint {self._path}"
        commits = found.get("commits") if isinstance(found, Mapping) and found.get("format") == FORMAT else None
        if not isinstance(commits, int) or not 0 <= commits < 1 << 62:
            raise CheckpointError(f"{where} is none of TorchState, format {FORMAT}. Move it away to begin anew")
        saved = _checked({key: found.get(key) for key in ("parts", "values")}, self._parts, self._values, where)
        if _bytes_of(saved) > limit_bytes:  # a tensor of a few bytes may claim any shape, and a copy would take it all
            raise CheckpointError(f"{where} has tensors of more than {limit_bytes:,} bytes, too many for this training")
        try:
            self._load(saved)
        except Exception as error:  # of whatever part
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"{where} does not fit this training: {text:.300}. Move it away to begin anew"
            ) from error
        self._commits = commits
        log.info("goes on from checkpoint", path=str(self._path), commits=commits)


def _is_part(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _check_kinds(model: Any, optimizer: Any) -> None:
    """Raises ConfigError: the model or the optimizer is a class, the other one of them, or no part; or the model is a
    module without parameters. Other objects with ``state_dict`` and ``load_state_dict`` are as good."""
    write = "Write TorchState(model=model, optimizer=optimizer, ...)"
    for name, given, expected, other in (
        ("model", model, nn.Module, torch.optim.Optimizer),
        ("optimizer", optimizer, torch.optim.Optimizer, nn.Module),
    ):
        is_wrong = isinstance(given, (type, other)) or not _is_part(given)
        if given is not None and is_wrong:
            raise ConfigError(
                f"TorchState: {name}: expected a torch.{expected.__module__.split('.')[1]}.{expected.__name__}, got "
                f"{described(given)}. {write}"
            )
    if isinstance(model, nn.Module) and next(iter(model.parameters()), None) is None:
        raise ConfigError(
            f"TorchState: model: {described(model)} has no parameters, so there is nothing to train or share. Make the "
            f"state when the model has them"
        )


_HAVE_NO_PARAMETERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, Sampler)
"""Parts other than modules of which it is known that they have no parameters of their own."""


def _check_optimizers(parts: Mapping[str, Any]) -> None:
    """Raises ConfigError: an optimizer trains what no module of the state has, so that ranks that join would not get
    it. Not checked where that cannot be known: without modules, or with a part that may have parameters, too."""
    modules = {name: one for name, one in parts.items() if isinstance(one, nn.Module)}
    held = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    others = [one for name, one in parts.items() if name not in modules]
    if not held or not all(isinstance(one, _HAVE_NO_PARAMETERS) for one in others):
        return
    for name, part in parts.items():
        if not isinstance(part, torch.optim.Optimizer):
            continue
        trained = [one for group in part.param_groups for one in group["params"]]
        if foreign := sum(id(one) not in held for one in trained):
            raise ConfigError(
                f"TorchState: {name}: {foreign} of its {len(trained)} parameters are not those of "
                f"{' or '.join(modules)}: a rank that joins would not get them. Construct it from the parameters of "
                f"this very object, {next(iter(modules))}.parameters(), after the model has come to its device and "
                f"type, or name the other module in TorchState, too. A single parameter: put it into an "
                f"nn.ParameterList and name that"
            )


def _unfinished(path: Path) -> str:
    """Return how the names of files begin that processes of this host write before they replace the checkpoint; the
    rest is the number of the process."""
    return f".{path.name}.{socket.gethostname()}."


def _remove_unfinished(path: Path) -> None:
    """Remove what processes of this host have left that were killed as they wrote the checkpoint. A file that has the
    number of this process is one, too: it has written none yet, and in a container numbers come again."""
    begins = _unfinished(path)
    with contextlib.suppress(OSError):  # such as a folder that may be written to and not listed
        for file in path.parent.iterdir():
            number = file.name.removeprefix(begins)
            if file.name.startswith(begins) and _NUMBER.fullmatch(number) and not _runs_elsewhere(int(number)):
                clear_way(file)
                log.info("unfinished checkpoint removed", path=str(file))


def _runs_elsewhere(number: int) -> bool:
    """Whether there is a process with this number on this host, other than this one."""
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _fault_of(part: Any) -> str:
    """Why a part cannot be in a state; empty: it can."""
    if isinstance(part, nn.parallel.DistributedDataParallel):
        return (
            "is wrapped in DistributedDataParallel, which belongs to one process group: give the module itself, and "
            "wrap it in the function that elastic.run calls"
        )
    if is_zero(part):
        return "is a ZeroRedundancyOptimizer: each rank has a part of its state, which is lost with the rank"
    tensors: list[Any] = list(part.parameters()) if isinstance(part, nn.Module) else []
    if isinstance(part, torch.optim.Optimizer):
        tensors = [one for group in part.param_groups for one in group["params"]]
    if any(map(is_sharded, tensors)):
        return (
            "has parameters in shards (FSDP2): a shard is lost with its rank. Use torch.distributed.checkpoint, and "
            "torchrun --max-restarts"
        )
    return ""


def _copy_of(tree: Any) -> Any:
    """Copy a tree of plain data, tensors included."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: _copy_of(one) for key, one in tree.items()}
    if isinstance(tree, list | tuple):
        copied = [_copy_of(one) for one in tree]
        return copied if isinstance(tree, list) else tuple(copied)
    return copy.copy(tree)


def _tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for one in inner for tensor in _tensors_of(one)]


def _bytes_of(tree: Any) -> int:
    """Return the bytes of all tensors of a tree, as their shapes have it."""
    return sum(one.nbytes for one in _tensors_of(tree))


def _check_archive(file: BinaryIO) -> None:
    """Raise ValueError if a file is no archive as torch.save writes it, or takes more memory than its own size.

    torch reads compressed entries, too, and several that share their bytes: a small file would fill the memory.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
        raise ValueError("it has compressed entries, which torch.save does not write")
    claimed, size = sum(one.file_size for one in entries), file.seek(0, os.SEEK_END)
    if claimed > size:
        raise ValueError(f"its entries claim {claimed:,} bytes, and the file has {size:,}")
    file.seek(0)


def _checked(tree: Any, parts: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Raises CheckpointError: it is of another training."""
    for kind, here in (("parts", parts), ("values", values)):
        found = tree.get(kind) if isinstance(tree, Mapping) else None
        names = sorted(map(str, found)) if isinstance(found, Mapping) else None
        if names != sorted(here):
            raise CheckpointError(
                f"{where}: expected the {kind} {sorted(here)}, found {names!s:.200}. Give TorchState the same names, "
                f"or begin anew without it"
            )
    return dict(tree)
