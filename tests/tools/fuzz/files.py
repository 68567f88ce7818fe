"""Targets: files that a user, another program or a damaged disk may have written."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.target import Target, folder, must
from gradbus.actors.data_parallel.replicas import describe_layout, model_tensors
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.saved_state import saved_state as state_of_ranks
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.saved_state import saved_state as state_of_rounds
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.parameter_server.assignment import assign
from gradbus.actors.parameter_server.saved_state import saved_state as state_of_servers
from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile, load
from gradbus.commands.history.reader import read_history
from gradbus.commands.rundir.reading import read_run
from gradbus.models import mnist_files as idx
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore, load_weights
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config import settings
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.settings import Settings
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.json_text import json_text, parse_json
from gradbus.runtime.profiling.chrome_trace import Clock, chrome_trace
from gradbus.runtime.profiling.summary import ProfileSummary, read_summary
from gradbus.runtime.saved_state import SavedState, StateNames


def _load(number: int, path: Path | None, overrides: Iterable[str] = ()) -> Settings:
    match number % 3:
        case 0:
            return load(ControllerFile, path, overrides=overrides)
        case 1:
            return load(ClientFile, path, overrides=overrides)
        case _:
            return load(WorkerFile, path, overrides=overrides)


def _read_configuration(data: bytes) -> None:
    """The first byte says: which command's, JSON or TOML, in a file or from ``--set``, a line each."""
    if not data:
        return
    try:
        if data[0] & 0x80:
            lines = data[1:].decode("utf-8", "replace").splitlines()
            _load(data[0], None, lines)
            return
        path = folder() / ("config.toml" if data[0] & 0x40 else "config.json")
        path.write_bytes(data[1:])
        read = _load(data[0], path)
    except ConfigError as error:
        must(len(str(error)) < 20_000, "an error that nobody can read")
        return
    again = folder() / "again.json"
    again.write_text(read.model_dump_json(exclude_unset=True), encoding="utf-8")
    must(_load(data[0], again) == read, "settings come back as others")


def _configuration_seeds() -> list[bytes]:
    federated: dict[str, Any] = {
        "bus": {"job": "mine", "domain": 7, "peers": ["192.0.2.10"]},
        "task": {"model": "gradbus.models:mnist_mlp", "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "federated": {"rounds": 3, "codec": {"name": "sq8", "density": 0.1}},
        "run_dir": "run",
    }
    parallel = {"bus": {"job": "mine"}, "parallel": {"epochs": 2, "algorithm": "dgc"}, "world": 2, "rank": 1}
    toml = b'run_dir = "run"\n[bus]\njob = "mine"\ndomain = 7\n[federated]\nrounds = 3\ntraining.lr = 1e-2\n'
    deep = b'{"task": {"task_options": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}}"
    return [
        b"\x00" + json.dumps(federated).encode(),
        b"\x01" + json.dumps({"bus": federated["bus"], "client": {"heartbeat_s": 0.5}}).encode(),
        b"\x02" + json.dumps(parallel).encode(),
        b"\x42" + toml,  # 0x42 % 3 == 0
        b"\x00" + deep,
        b'\x81federated.rounds=3\nbus.peers=[1]\ntask.task_options={"a": 1}',  # 0x81 % 3 == 0
    ]


@functools.cache
def _checkpoints() -> CheckpointStore:
    path = folder() / "state"
    store = CheckpointStore(path)
    meta = {"run_id": 1, "history": [0.5]}
    store.save(Checkpoint(1, {"weights": torch.arange(20.0), "momentum": torch.zeros(2, 3)}, meta))
    return store


def _read_checkpoint(data: bytes) -> None:
    """The first byte says what the rest is: the JSON, the JSON with its checksum made right, or the tensors."""
    if not data:
        return
    store = _checkpoints()
    described, tensors = (store.directory / f"round-000001.{suffix}" for suffix in ("json", "safetensors"))
    kept = described.read_bytes(), tensors.read_bytes()
    try:
        content = data[1:]
        match data[0] % 3:
            case 0:
                described.write_bytes(content)
            case 1:
                described.write_bytes(_signed(content, tensors))
            case 2:
                tensors.write_bytes(content)
                document = json.loads(kept[0])
                described.write_bytes(_signed(json.dumps(document).encode(), tensors))
        try:
            found = store.load(1)
        except CheckpointError:
            pass
        else:
            must(found.round_id == 1, "a checkpoint of another round")
        try:
            weights = load_weights(tensors)
        except CheckpointError:
            return
        must(weights.dim() == 1 and weights.dtype == torch.float32, "initial weights that are no vector")
    finally:
        described.write_bytes(kept[0])
        tensors.write_bytes(kept[1])


def _signed(content: bytes, tensors: Path) -> bytes:
    try:
        document = json.loads(content)
        del document["sha256"]
        document["tensors_sha256"] = hashlib.sha256(tensors.read_bytes()).hexdigest()
        text = json.dumps(document, sort_keys=True)
    except (ValueError, TypeError, KeyError, RecursionError):
        return content
    return json.dumps({**document, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def _checkpoint_seeds() -> list[bytes]:
    store = _checkpoints()
    described, tensors = (
        (store.directory / f"round-000001.{suffix}").read_bytes() for suffix in ("json", "safetensors")
    )
    return [b"\0" + described, b"\1" + described, b"\2" + tensors, b"\0" + b"[" * 2000]


class _Model(nn.Module):
    """A small model with all that names differ for: a frozen layer, tied weights, a counter, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.first = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
        self.last, self.norm, self.low = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, dtype=torch.bfloat16)
        self.last.weight = self.first.weight


@functools.cache
def _saved() -> tuple[tuple[Checkpoint, Callable[[Checkpoint, Tensor], SavedState]], ...]:
    """A checkpoint of rounds, of a rank and of a parameter server, each with its reader; and frozen values."""
    flat = FlatModel(_Model())
    config = FederatedConfig()
    rounds = RunState(config, flat, STRATEGIES.make(config.strategy, flat.dim)).checkpoint_of_weights()
    model = _Model()
    about = {"run_id": "0" * 16, "layout": describe_layout(model), "names": StateNames.of_model(model), "settings": {}}
    counts = dict.fromkeys(("epoch", "epoch_step", "batches", "skipped", "skipped_in_row", "num_batches"), 0)
    rank = {**about, **counts, "rank": 0, "world": 1, "loss_sum": 0.5, "report": None}
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    (pieces,) = assign(trained, 1, 8)
    of_server = {f"weights/{piece.name}": piece.of(trained[piece.tensor]).detach() for piece in pieces}
    of_server |= {f"frozen/{name}": one for name, one in model.named_parameters() if name not in trained}
    of_server |= {f"worker-0/buffer/{name}": one for name, one in model.named_buffers()}
    shapes = [{"tensor": p.tensor, "start": p.start, "stop": p.stop, "shape": list(p.shape)} for p in pieces]
    server = {
        **about, "server": 0, "servers": 1, "workers": 1, "pieces": shapes, "updates": 3, "refused": 0,
        "staleness": {}, "own": {"0": {}},
    }  # fmt: skip
    return (
        (rounds, lambda one, frozen: state_of_rounds(one, lambda name: {"frozen": frozen})),
        (Checkpoint(1, model_tensors(model), rank), lambda one, frozen: state_of_ranks(one)),
        (Checkpoint(1, of_server, server), lambda one, frozen: state_of_servers([one])),
    )


def _read_saved_model(data: bytes) -> None:
    """The first byte says whose checkpoint it is; the rest is its metadata, beside tensors that are there."""
    if not data:
        return
    kept, read = _saved()[data[0] % len(_saved())]
    try:
        meta = parse_json(data[1:].decode("utf-8", "replace"))
    except ValueError:
        return
    if not isinstance(meta, dict):
        return
    try:
        state = read(Checkpoint(kept.round_id, kept.tensors, meta), FlatModel(_Model()).read_frozen())
    except CheckpointError as error:
        must(len(str(error)) < 2_000, "an error that nobody can read")
        return
    must(all(name.isprintable() for name in state.tensors), "a name that controls a terminal")


def _saved_model_seeds() -> list[bytes]:
    return [bytes([number]) + json.dumps(dict(kept.meta)).encode() for number, (kept, _) in enumerate(_saved())]


def _read_idx(data: bytes) -> None:
    """The first byte: a plain file, a packed one, or one whose content is packed here."""
    if not data:
        return
    kind, content = data[0] % 3, data[1:]
    path = folder() / ("array" if kind == 0 else "array.gz")
    path.write_bytes(gzip.compress(content, 1) if kind == 2 else content)
    try:
        array = idx.read_idx(path)
    except ValueError:
        return
    must(array.dtype == torch.uint8, "an array of other values")


def _idx_seeds() -> list[bytes]:
    plain = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(6)
    return [b"\0" + plain, b"\1" + gzip.compress(plain), b"\2" + plain, b"\1" + gzip.compress(plain + bytes(100_000))]


_FILES = ("rounds.jsonl", "epochs.jsonl", "profile-rank-0.jsonl", "trace-rank-0.json", "summary.json", "config.json")


def _read_run(data: bytes) -> None:
    """The first byte says which file of a run directory the rest is; those that go with it are empty."""
    if not data:
        return
    path = folder() / "run"
    path.mkdir(exist_ok=True)
    name = _FILES[data[0] % len(_FILES)]
    (path / name).write_bytes(data[1:])
    section = "federated" if name == "rounds.jsonl" else "parallel"
    try:
        if name != "config.json":
            (path / "config.json").write_text(json.dumps({section: {}}), encoding="utf-8")
        try:
            read_run(path)
        except ConfigError:
            return
        if name.startswith("profile"):
            read_summary(path / name)
    finally:
        for left in path.iterdir():
            left.unlink()


def _run_seeds() -> list[bytes]:
    """As they are written."""
    amounts = {"step_s": 0.5, "wait_s": 0.1, "compute_s": None, "bytes_out": 3}
    clock = Clock(5 * 10**18, 0)
    trace = chrome_trace(
        0, [("step", "step 1", 0.0, 1.0, {"bytes_out": 3}), ("compute", "forward", 0.1, 0.4, None)], clock
    )
    window = {"first_step": 1, "last_step": 2, "steps": 2, "mean": amounts, "max": amounts}
    lines: dict[str, list[Any]] = {
        "rounds.jsonl": [RoundReport(round_id=1, clients=(0, 1), loss=0.5, dropped={"late": 1}).to_json()],
        "epochs.jsonl": [EpochReport(epoch=0, step=6, loss=0.1).to_json()],
        "profile-rank-0.jsonl": [
            {"kind": "start", "rank": 0},
            {"kind": "window", "rank": 0, **window},
            {"kind": "summary", **ProfileSummary(rank=0, steps=2, first_step=1, last_step=2).to_json()},
        ],
        "trace-rank-0.json": [trace],
        "summary.json": [{"outcome": "done", "steps": 2}],
        "config.json": [{"parallel": {"epochs": 2}}],
    }
    return [
        bytes([number]) + "".join(json_text(line) + "\n" for line in lines[name]).encode()
        for number, name in enumerate(_FILES)
    ]


def _read_history(data: bytes) -> None:
    """What a process has noted, for the invariants of ``gradbus check``."""
    path = folder() / "noted"
    path.mkdir(exist_ok=True)
    (path / "client-0.jsonl").write_bytes(data)
    try:
        read_history(path)
    except ConfigError:
        return


def _history_seeds() -> list[bytes]:
    events = [{"event": "started", "pid": 7, "client": 0}, {"event": "trained", "pid": 7, "round": 1}]
    return ["".join(json_text(event) + "\n" for event in events).encode(), b'{"event": [], "pid": {}}\n']


TARGETS = {
    "configuration": Target(_read_configuration, settings.MAX_FILE_MEMORY, _configuration_seeds),
    "checkpoint": Target(_read_checkpoint, 4 << 20, _checkpoint_seeds),
    "saved_model": Target(_read_saved_model, 4 << 20, _saved_model_seeds),
    "idx": Target(_read_idx, 4 << 20, _idx_seeds),
    "history": Target(_read_history, 4 << 20, _history_seeds),
    "run": Target(_read_run, 4 << 20, _run_seeds),
}
