"""One atomic checkpoint per round: tensors as safetensors, everything else as JSON, a checksum over both.

``round-000007.safetensors`` is written first, then ``round-000007.json``, which holds the SHA-256 of the tensors and of
itself. Each is written to a temporary file, synced, and renamed; the directory is synced after each, as a file system
may keep a later rename and lose an earlier one. The JSON is the commit: without it, or with one that does not match,
the round never happened and the one before it counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.foreign_files import (
    check_not_sparse,
    clear_way,
    names_inside,
    open_inside,
    open_named,
    open_to_append,
    text_inside,
)
from gradbus.runtime.json_text import count_values, parse_json
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.private_folder import make_private
from gradbus.runtime.safetensors_header import check_header, check_header_of

FORMAT = 1
MAX_META_BYTES = 256 << 20  # of the JSON
# Of the JSON. Reports of 10,000 rounds with 32 metrics of the controller, of training and of clients have 4 million at
# most, tables of 100,000 tensors 0.8 million, the 65,536 clients that are known 1.1 million. As objects of Python so
# many values take up to 0.8 GB.
MAX_META_VALUES = 8_000_000
LISTINGS = 5  # a run that goes on may have replaced all that were listed, while they were read
_NAME = re.compile(r"round-(\d{6,10})\.json")

log = get_logger("checkpoint")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that can be continued from.

    Attributes:
        round_id: the last round that is done.
        tensors: weights, server-optimizer state, residuals, by name.
        meta: what is not a tensor; JSON.
    """

    round_id: int
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]


Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Number = Annotated[float, Field(strict=True)]
Hex64 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")]  # a number of 64 bits; JSON readers have but 53
_Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class Meta(BaseModel):
    """Holds what a kind of checkpoint says beside its tensors: a subclass names the entries. Others are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read it. Raises CheckpointError: an entry is missing, or is not what it must be; the text says which."""
        return cls.read(checkpoint.meta, "meta")

    @classmethod
    def read(cls, values: Any, where: str) -> Self:
        """Return the same for any JSON; ``where`` it stands."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first, count = error.errors(include_url=False)[0], error.error_count()
            path = ".".join([where, *map(str, first["loc"])])
            got = "" if first["type"] == "missing" else f", got {repr(first['input'])[:80]}"
            more = f"; {count - 1} more entries are wrong" if count > 1 else ""
            raise CheckpointError(f"{path}: {first['msg']}{got}{more}") from None


class _Document(Meta):
    """The JSON file of a checkpoint, but for its checksum."""

    format: Annotated[int, Field(strict=True)]
    round_id: Count
    tensors_sha256: _Sha256
    meta: dict[str, Any]


def tensor_of(
    checkpoint: Checkpoint, name: str, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A tensor of a checkpoint. Raises CheckpointError: it is missing, or of another shape or type."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None or tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != tuple(shape)):
        kind = str(dtype).removeprefix("torch.")
        wanted = kind if shape is None else f"{kind} of shape {tuple(shape)}"
        found = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
        raise CheckpointError(
            f"checkpoint of round {checkpoint.round_id}: tensor {name!r}: expected {wanted}, found {found}. It is "
            f"damaged or of another model: restore it from a backup, or choose another state directory"
        )
    return tensor


def restore_random_numbers(checkpoint: Checkpoint) -> None:
    """Torch's, on the CPU, from the tensor ``torch_rng``. Raises CheckpointError: it is none of this torch."""
    try:
        torch.set_rng_state(tensor_of(checkpoint, "torch_rng", dtype=torch.uint8))
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint of round {checkpoint.round_id}: tensor 'torch_rng' is no state of torch's random numbers: "
            f"{str(error).splitlines()[0]}. Go on with the version of torch that made it, or restore it from a backup"
        ) from None


class _Place(NamedTuple):
    """A directory of checkpoints: the folder ``below`` of ``root``, which the user has named. ``is_foreign``: somebody
    else may have made the files."""

    root: Path
    below: Path
    is_foreign: bool = False


class CheckpointStore:
    """A directory of checkpoints of one run. One process at a time may hold it."""

    # Of one that is open to read.
    _keep = 1
    _lock = -1

    def __init__(self, directory: Path, *, keep: int = 3, inside: Path | None = None) -> None:
        """Open the directory, making it if need be.

        Args:
            keep: how many rounds stay.
            inside: the folder that the user has named; no link may lie between it and the checkpoints. None: the user
                has named ``directory`` itself, or its name was checked before.

        Raises:
            CheckpointError: it cannot be made or written, or another process holds it.
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.directory = directory
        self.place = _Place(directory, Path())
        self._keep = keep
        try:
            make_private(directory, inside=inside)
            self._lock = open_to_append(directory / ".lock", 0o600)
        except OSError as error:
            raise CheckpointError(
                f"state directory {directory} cannot be written: {error.strerror}. Choose another, or change its rights"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise CheckpointError(
                f"state directory {directory} is in use by another running process{holder and f' ({holder})'}. Stop "
                f"that one, or choose another"
            ) from None
        with contextlib.suppress(OSError):  # the disk is full: what matters is the lock
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, process_name().encode(), 0)

    @classmethod
    def to_read(cls, directory: Path, *, inside: Path | None = None) -> Self:
        """The checkpoints of a directory that another process may hold. Nothing is made there, nothing may be saved.

        Args:
            inside: the run directory that the user has named; no link is followed between it and the checkpoints. None:
                the user has named ``directory`` itself.
        """
        store = cls.__new__(cls)
        store.directory = directory
        root = directory if inside is None else inside
        store.place = _Place(root, directory.relative_to(root), is_foreign=True)
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process use the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def save(self, checkpoint: Checkpoint) -> int:
        """Write it, atomically and durably, and remove those beyond the last ``keep``. Returns its bytes.

        Raises:
            CheckpointError: the disk is full or the directory cannot be written. Older checkpoints are as they were.
        """
        data_path = self._path(checkpoint.round_id, "safetensors")
        meta_path = self._path(checkpoint.round_id, "json")
        try:
            check_header_of(checkpoint.tensors)
            with _replacing(data_path) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, temporary)
                body = {
                    "format": FORMAT, "round_id": checkpoint.round_id, "tensors_sha256": _sha256(temporary),
                    "meta": dict(checkpoint.meta),
                }  # fmt: skip
                text = json.dumps({**body, "sha256": _digest_of(body)})  # indented it takes ten times as long
                if len(text) > MAX_META_BYTES:  # all of it is ASCII
                    raise OSError(errno.EFBIG, f"its JSON has {len(text):,} bytes, at most {MAX_META_BYTES:,} are read")
                if (values := count_values(text)) > MAX_META_VALUES:
                    raise OSError(errno.EFBIG, f"its JSON has {values:,} values, at most {MAX_META_VALUES:,} are read")
            _sync(self.directory)  # before there is a JSON that names the tensors
            with _replacing(meta_path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            _sync(self.directory)
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            has_older = False
            with contextlib.suppress(CheckpointError):
                has_older = any(number != checkpoint.round_id for number in self.rounds())
            raise CheckpointError(
                f"checkpoint of round {checkpoint.round_id} cannot be written to {self.directory}: {reason}. "
                + (
                    "The one before it is intact; make room and start again to continue from it"
                    if has_older
                    else "There is none before it: make room and start again"
                )
            ) from None
        size = 0
        try:
            size = data_path.stat().st_size + meta_path.stat().st_size
            for old in self.rounds()[: -self._keep]:
                self.remove(old)
        except (OSError, CheckpointError) as error:  # this round is safe, and with the next one it is tried again
            log.warning("old checkpoints stay", directory=str(self.directory), reason=str(error))
        return size

    def save_constant(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write what belongs to every checkpoint and does not change, once: a second time does nothing.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = self.directory / f"{name}.safetensors"
        if path.exists():
            return
        try:
            with _replacing(path) as temporary:
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary)
            _sync(self.directory)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}. Make room and start again") from None

    def load_constant(self, name: str) -> dict[str, Tensor]:
        """Return what :meth:`save_constant` has written. Raises CheckpointError: it is not there, or damaged."""
        path = self.directory / f"{name}.safetensors"
        try:
            with self._open(f"{name}.safetensors") as file:
                return _tensors_in(file)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Restore it from a backup") from None

    def save_document(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a small JSON object beside the checkpoints, atomically and durably.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = self.directory / f"{name}.json"
        try:
            with _replacing(path) as temporary:
                temporary.write_text(json.dumps({**values, "sha256": _digest_of(values)}), encoding="utf-8")
            _sync(self.directory)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}. Make room and start again") from None

    def load_document(
        self, name: str, max_bytes: int, remedy: str = "Restore it from a backup"
    ) -> dict[str, Any] | None:
        """Return what :meth:`save_document` has written; None: there is nothing of this name.

        Args:
            remedy: what to do where it is damaged, for the text of the error.

        Raises:
            CheckpointError: it is damaged, or cannot be read.
        """
        file = f"{name}.json"
        try:
            document = parse_json(text_inside(self.place.root, self.place.below / file, max_bytes))
            if not isinstance(document, dict) or document.pop("sha256", None) != _digest_of(document):
                raise ValueError("it does not match its checksum")
            return document
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.directory / file} is damaged: {error}. {remedy}") from None

    def has_documents(self, prefix: str) -> bool:
        """Whether there are any whose names begin so."""
        return bool(names_inside(self.place.root, f"{prefix}*.json", below=self.place.below, most=1 << 62))

    def remove_document(self, name: str) -> None:
        """Delete what :meth:`save_document` has written under this name."""
        (self.directory / f"{name}.json").unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, ascending. Raises CheckpointError: the directory cannot be listed."""
        most = None if self.place.is_foreign else 1 << 62
        try:
            names = names_inside(self.place.root, "round-*.json", below=self.place.below, most=most)
        except OSError as error:
            raise CheckpointError(f"state directory {self.directory} cannot be read: {error}") from None
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def load_newest(self, check: Callable[[Checkpoint], object] = lambda checkpoint: None) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there is none at all.

        A damaged one is named in the log and the one before it is taken.

        Args:
            check: raises CheckpointError if something in a checkpoint is not what it must be: it counts as damaged.

        Raises:
            CheckpointError: there are some, but all are damaged.
        """
        for _ in range(LISTINGS):
            faults: list[str] = []
            listed = self.rounds()
            for round_id in reversed(listed):
                try:
                    checkpoint = self.load(round_id, check)
                except CheckpointError as error:
                    faults.append(str(error))
                    continue
                if faults:
                    log.warning("using an older checkpoint", round=round_id, damaged=len(faults))
                return checkpoint
            if self.rounds() == listed:
                break
        if faults:
            raise CheckpointError(
                f"all {len(faults)} checkpoints in {self.directory} are damaged ({'; '.join(faults)}). "
                f"Move the directory away to start afresh, or restore it from a backup"
            )
        return None

    def load(self, round_id: int, check: Callable[[Checkpoint], object] = lambda checkpoint: None) -> Checkpoint:
        """The checkpoint of this round. Raises CheckpointError: it is damaged; the log names it, too.

        Args:
            check: as in :meth:`load_newest`.
        """
        try:
            checkpoint = self._load(round_id)
            check(checkpoint)
            return checkpoint
        except (OSError, ValueError, RecursionError, CheckpointError, SafetensorError) as error:
            path = self._path(round_id, "json")
            log.warning("damaged checkpoint", file=str(path), fault=str(error))
            raise CheckpointError(f"{path.name}: {error}") from None

    def remove(self, round_id: int) -> None:
        """Delete the checkpoint of this round, the commit first: never a JSON without its tensors."""
        self._path(round_id, "json").unlink(missing_ok=True)
        self._path(round_id, "safetensors").unlink(missing_ok=True)

    def remove_durably(self, round_ids: Iterable[int]) -> None:
        """Delete the checkpoints of these rounds, so that they are gone after a power failure, too: another process may
        be about to make others with the same numbers, which do not go with these.

        Raises:
            CheckpointError: that cannot be made durable.
        """
        for round_id in round_ids:
            self.remove(round_id)
        try:  # in any case: a start before may have removed them, and died before its sync
            _sync(self.directory)
        except FileNotFoundError:
            pass  # no checkpoint was ever written here
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be written: {error}. Make room and start again") from None

    def _load(self, round_id: int) -> Checkpoint:
        name, data_name = (f"round-{round_id:06d}.{suffix}" for suffix in ("json", "safetensors"))
        text = text_inside(self.place.root, self.place.below / name, MAX_META_BYTES)
        document = parse_json(text, max_values=MAX_META_VALUES)
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got a {type(document).__name__}")
        if document.pop("sha256", None) != _digest_of(document):
            raise ValueError("its JSON does not match its checksum")
        found = _Document.read(document, "its JSON")
        if found.format != FORMAT or found.round_id != round_id:
            raise ValueError(f"format {found.format} of round {found.round_id}, expected {FORMAT}, {round_id}")
        with self._open(data_name) as file:
            check_header(file)
            if hashlib.file_digest(file, "sha256").hexdigest() != found.tensors_sha256:
                raise ValueError(f"{data_name} does not match its checksum")
            return Checkpoint(round_id, _tensors_in(file), found.meta)

    def _open(self, name: str) -> BufferedReader:
        """Open a file of tensors. Raises OSError."""
        file = open_inside(self.place.root, self.place.below / name)
        try:
            if self.place.is_foreign:  # a file system of our own may keep the zeros of our tensors as holes
                check_not_sparse(file, Path(name))
        except OSError:
            file.close()
            raise
        return file

    def _path(self, round_id: int, suffix: str) -> Path:
        return self.directory / f"round-{round_id:06d}.{suffix}"


def load_weights(path: Path, *, assemble: Callable[[Mapping[str, Tensor]], Tensor] | None = None) -> Tensor:
    """The weights in a safetensors file, as one float32 vector: for starting from given weights.

    Takes one of our own checkpoints, which has one tensor ``weights``, or whatever ``assemble`` makes a vector of: as a
    rule, a module's named tensors.

    Raises:
        CheckpointError: no such file, not safetensors, or nothing in it that can be used.
    """
    try:
        with open_named(path) as file:
            tensors = _tensors_in(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"initial weights {path} cannot be read: {error}. Expected a .safetensors file") from None
    if "weights" in tensors:
        return tensors["weights"].to(torch.float32).reshape(-1)
    if assemble is None:
        raise CheckpointError(f"initial weights {path}: no tensor named 'weights', it holds {sorted(tensors)[:8]}")
    try:
        return assemble(tensors)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"initial weights {path} do not fit the model: {error}") from None


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _tensors_in(file: BufferedReader) -> dict[str, Tensor]:
    """Load an open safetensors file, which is mapped into memory: by its descriptor, as another file may have taken its
    name. Raises ValueError or SafetensorError: it is none."""
    check_header(file)
    try:
        return load_file(f"/dev/fd/{file.fileno()}")
    except (TypeError, KeyError, OverflowError, RuntimeError) as error:  # a dtype or a shape that torch does not have
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"torch cannot have its tensors: {type(error).__name__}: {reason[:200]}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """The file to write in place of ``target``, which it becomes, synced, when the block ends without an error."""
    temporary = target.with_name(f"{target.name}.tmp")
    clear_way(temporary)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may have become read-only
            temporary.unlink(missing_ok=True)  # what is half written only takes the room that is needed
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@torch.no_grad()
def copy_state(model: nn.Module) -> dict[str, Any]:
    """Return what ``model.state_dict()`` has, as tensors of their own on the CPU, for ``load_state_dict`` of another.

    Tied parameters are there under all their names, each with a copy: file formats have no place for ties.
    """
    return {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }
