"""Checkpoints: whatever happens to the newest one, the one before it is still there and is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import save_file

from gradbus.runtime import checkpoint as module
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore, load_weights
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.json_text import count_values
from gradbus.runtime.safetensors_header import check_header_of


def example(round_id: int) -> Checkpoint:
    tensors = {
        "weights": torch.arange(1000, dtype=torch.float32) / (round_id + 1),
        "residual/7": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, -1e38]),
        "steps": torch.tensor([round_id, 2**40], dtype=torch.int64),
        "empty": torch.empty(0),
    }
    return Checkpoint(round_id, tensors, {"round": round_id, "loss": 0.1, "names": ["a", "\u00df"], "none": None})


def same(one: Checkpoint | None, other: Checkpoint) -> bool:
    """Equal, bit for bit."""
    return (
        one is not None
        and one.round_id == other.round_id
        and one.meta == other.meta
        and one.tensors.keys() == other.tensors.keys()
        and all(
            one.tensors[name].dtype == tensor.dtype and one.tensors[name].numpy().tobytes() == tensor.numpy().tobytes()
            for name, tensor in other.tensors.items()
        )
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """A store with the rounds 1 and 2."""
    with CheckpointStore(tmp_path / "state") as opened:
        for round_id in (1, 2):
            opened.save(example(round_id))
        yield opened


def test_what_was_saved_is_loaded_bit_for_bit(store: CheckpointStore) -> None:
    assert same(store.load_newest(), example(2))
    assert same(store.load(1), example(1))
    assert store.rounds() == [1, 2]


def test_tensors_that_are_not_contiguous_are_saved_by_their_values(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    with CheckpointStore(tmp_path) as opened:
        opened.save(Checkpoint(0, {"t": tensor}, {}))
        loaded = opened.load_newest()
    assert loaded is not None
    assert torch.equal(loaded.tensors["t"], tensor)


def test_the_size_that_save_tells_is_that_of_its_files(store: CheckpointStore) -> None:
    size = store.save(example(3))
    assert size == sum(path.stat().st_size for path in store.directory.glob("round-000003.*"))


def test_an_empty_directory_has_no_checkpoint(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "deep" / "er") as opened:
        assert opened.load_newest() is None
        assert opened.rounds() == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=2) as opened:
        for round_id in range(5):
            opened.save(example(round_id))
        assert opened.rounds() == [3, 4]
    assert sorted(path.name for path in tmp_path.glob("round-*")) == [
        "round-000003.json",
        "round-000003.safetensors",
        "round-000004.json",
        "round-000004.safetensors",
    ]


def test_rounds_are_ordered_as_numbers_beyond_six_digits(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as opened:
        for round_id in (1_000_000, 999_999):
            opened.save(example(round_id))
        assert opened.rounds() == [999_999, 1_000_000]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_the_first_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 0x80
    path.write_bytes(data)


def edit_the_round(path: Path) -> None:
    path.write_text(path.read_text().replace('"round": 2', '"round": 3'))


def leave_out_the_checksum(path: Path) -> None:
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document))


def make_it_a_list(path: Path) -> None:
    path.write_text("[]")


def make_it_a_number(path: Path) -> None:
    path.write_text("7")


def nest_it_deeply(path: Path) -> None:
    path.write_text("[" * 100_000)


DAMAGE: list[tuple[str, Callable[[Path], None]]] = [
    ("safetensors", truncate),
    ("safetensors", empty),
    ("safetensors", flip_a_bit),
    ("safetensors", flip_the_first_bit),
    ("safetensors", Path.unlink),
    ("json", truncate),
    ("json", empty),
    ("json", flip_a_bit),
    ("json", flip_the_first_bit),
    ("json", edit_the_round),
    ("json", leave_out_the_checksum),
    ("json", make_it_a_list),
    ("json", make_it_a_number),
    ("json", nest_it_deeply),
]


@pytest.mark.parametrize(("suffix", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_checkpoint_is_named_in_the_log_and_the_one_before_it_is_used(
    store: CheckpointStore, suffix: str, damage: Callable[[Path], None]
) -> None:
    damage(store.directory / f"round-000002.{suffix}")
    with structlog.testing.capture_logs() as entries:
        assert same(store.load_newest(), example(1))
    named = [entry for entry in entries if entry["event"] == "damaged checkpoint"]
    assert [Path(entry["file"]).name for entry in named] == ["round-000002.json"]
    assert named[0]["log_level"] == "warning"
    with pytest.raises(CheckpointError, match=r"round-000002\.json: "):
        store.load(2)


def test_when_all_are_damaged_the_error_names_each_and_nothing_is_started_afresh(store: CheckpointStore) -> None:
    for path in store.directory.glob("*.safetensors"):
        flip_a_bit(path)
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints .*round-000002.*round-000001"):
        store.load_newest()


def test_a_checkpoint_under_another_rounds_name_is_damaged(store: CheckpointStore) -> None:
    for suffix in ("json", "safetensors"):
        (store.directory / f"round-000002.{suffix}").rename(store.directory / f"round-000009.{suffix}")
    assert same(store.load_newest(), example(1))


def test_a_round_can_be_saved_again_over_a_damaged_one(store: CheckpointStore) -> None:
    flip_a_bit(store.directory / "round-000002.safetensors")
    store.save(example(2))
    assert same(store.load_newest(), example(2))


def test_what_a_crash_left_is_not_a_checkpoint(store: CheckpointStore) -> None:
    for name in ("round-000003.safetensors.tmp", "round-000003.json.tmp", "round-000004.safetensors", "notes.txt"):
        (store.directory / name).write_bytes(b"half")
    assert store.rounds() == [1, 2]
    assert same(store.load_newest(), example(2))
    store.save(example(3))
    assert same(store.load_newest(), example(3))


class _Crash(BaseException):
    """The process ends here: nothing may catch it."""


def count_steps(monkeypatch: pytest.MonkeyPatch, stop_at: int, fault: BaseException) -> list[str]:
    """Let the ``stop_at``-th durable step of a save fail. Returns the steps as they are taken."""
    steps: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            steps.append(name)
            if len(steps) == stop_at:
                raise fault
            return real(*arguments, **options)

        return step

    monkeypatch.setattr(module, "save_file", watched("write tensors", save_file))
    monkeypatch.setattr(Path, "write_text", watched("write json", Path.write_text))
    monkeypatch.setattr(os, "fsync", watched("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", watched("rename", Path.replace))
    return steps


STEPS = ["write tensors", "fsync", "rename", "fsync", "write json", "fsync", "rename", "fsync"]
COMMIT_AT = 7  # the renaming of the JSON; only the sync of the directory comes after it


def test_the_steps_of_a_save_are_write_sync_rename_and_the_directory_twice(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_steps(monkeypatch, 0, _Crash())
    store.save(example(3))
    assert steps == STEPS


@pytest.mark.parametrize("stop_at", range(1, len(STEPS) + 1))
def test_a_crash_at_any_step_of_a_save_leaves_the_one_before_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    with monkeypatch.context() as patch:
        count_steps(patch, stop_at, _Crash())
        with pytest.raises(_Crash):
            store.save(example(3))
    store.close()
    with CheckpointStore(store.directory) as again:
        assert same(again.load_newest(), example(3 if stop_at > COMMIT_AT else 2))
        again.save(example(3))
        assert same(again.load_newest(), example(3))


@pytest.mark.parametrize("stop_at", range(1, len(STEPS) + 1))
def test_a_full_disk_at_any_step_is_an_error_that_says_what_to_do_and_spoils_nothing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        count_steps(patch, stop_at, full)
        with pytest.raises(CheckpointError, match=r"round 3 .*No space left.*make room"):
            store.save(example(3))
    assert same(store.load_newest(), example(3 if stop_at > COMMIT_AT else 2))


def test_a_full_disk_speaks_of_the_checkpoint_before_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with CheckpointStore(tmp_path / "new") as store:
        with monkeypatch.context() as patch:
            patch.setattr(module, "save_file", full)
            with pytest.raises(CheckpointError, match="There is none before it: make room and start again"):
                store.save(example(1))
        store.save(example(1))
        monkeypatch.setattr(module, "save_file", full)
        with pytest.raises(CheckpointError, match="The one before it is intact; make room and start again"):
            store.save(example(2))


def test_what_could_not_be_read_again_is_not_written(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (store.directory / "round-000002.json").stat().st_size
    monkeypatch.setattr(module, "MAX_META_BYTES", size)
    assert same(store.load(2), example(2))
    monkeypatch.setattr(module, "MAX_META_BYTES", size - 1)
    before = sorted(path.name for path in store.directory.iterdir())
    with pytest.raises(CheckpointError, match=rf"round 3 cannot be written.*its JSON has {size:,} bytes, at most"):
        store.save(example(3))
    assert sorted(path.name for path in store.directory.iterdir()) == before


@pytest.mark.parametrize("limit", ["checkpoint.MAX_META_VALUES", "safetensors_header.MAX_HEADER_VALUES"])
def test_a_checkpoint_of_too_many_values_is_neither_read_nor_written(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Objects of Python take thirty times the bytes of their JSON."""
    monkeypatch.setattr(f"gradbus.runtime.{limit}", 10)
    with pytest.raises(CheckpointError, match=r"round-000002.json: it has \d\d values, at most 10 are read"):
        store.load(2)
    with pytest.raises(CheckpointError, match=r"round 3 cannot be written.*\d\d values.*, at most 10 are read"):
        store.save(example(3))
    assert store.rounds() == [1, 2]


def test_the_values_of_a_header_are_counted_before_it_is_written_as_when_it_is_read(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = example(2).tensors
    data = (store.directory / "round-000002.safetensors").read_bytes()
    in_file = count_values(data[8 : 8 + int.from_bytes(data[:8], "little")].decode())
    monkeypatch.setattr("gradbus.runtime.safetensors_header.MAX_HEADER_VALUES", in_file)
    check_header_of(tensors)
    monkeypatch.setattr("gradbus.runtime.safetensors_header.MAX_HEADER_VALUES", in_file - 1)
    with pytest.raises(OSError, match="at most"):
        check_header_of(tensors)


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_disk_that_becomes_read_only_is_an_error(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", read_only)
        patch.setattr(Path, "unlink", read_only)
        with pytest.raises(CheckpointError, match=r"round 3 .*Read-only file system"):
            store.save(example(3))
    assert same(store.load_newest(), example(2))


@pytest.mark.parametrize(("where", "call"), [(Path, "unlink"), (module, "names_inside")])
def test_old_checkpoints_that_cannot_be_removed_do_not_make_the_new_one_fail(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, where: object, call: str
) -> None:
    store.save(example(3))
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as entries:
        patch.setattr(where, call, read_only)
        assert store.save(example(4)) > 0
    assert [entry["event"] for entry in entries] == ["old checkpoints stay"]
    assert same(store.load_newest(), example(4))
    store.save(example(5))
    assert store.rounds() == [3, 4, 5]


def test_checkpoints_that_are_removed_durably_are_gone_before_their_folder_is_synced(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (3, 4, 5):
        store.save(example(number))
    seen: list[list[int]] = []

    def synced(path: Path) -> None:
        assert path == store.directory
        seen.append(store.rounds())

    monkeypatch.setattr(module, "_sync", synced)
    store.remove_durably([4, 5])
    assert seen == [[3]]
    store.remove_durably([])
    assert seen == [[3], [3]], "a start that died may have removed some before it could sync"


def test_a_removal_that_cannot_be_made_durable_is_an_error(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(example(3))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(CheckpointError, match="Make room and start again"):
        store.remove_durably([3])


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.json_text import count_values
from gradbus.runtime.safetensors_header import check_header_of

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with CheckpointStore(Path(sys.argv[1])) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.save(Checkpoint(3, {"weights": torch.zeros(1_000_000)}, {}))
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_file_that_the_system_does_not_let_grow_is_an_error_and_spoils_nothing(store: CheckpointStore) -> None:
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, store.directory], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint of round 3 cannot be written" in done.stdout
    with CheckpointStore(store.directory) as again:
        assert same(again.load_newest(), example(2))


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore

store = CheckpointStore(Path(sys.argv[1]))
real, renames = Path.replace, []

def replace(path, target):
    renames.append(path)
    if len(renames) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, target)

Path.replace = replace
store.save(Checkpoint(3, {"weights": torch.zeros(10)}, {}))
"""


@pytest.mark.slow
def test_a_process_killed_between_tensors_and_commit_leaves_the_one_before_it(store: CheckpointStore) -> None:
    store.close()
    done = subprocess.run([sys.executable, "-c", KILLED, store.directory], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (store.directory / "round-000003.safetensors").exists()
    with CheckpointStore(store.directory) as again:
        assert same(again.load_newest(), example(2))


def test_a_directory_that_is_in_use_is_refused_until_it_is_let_go(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="in use by another running process"):
        CheckpointStore(store.directory)
    store.close()
    store.close()  # again: nothing happens
    CheckpointStore(store.directory).close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/state cannot be written"):
        CheckpointStore(tmp_path / "file" / "state")


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be >= 1"):
        CheckpointStore(tmp_path, keep=0)


def test_initial_weights_come_from_a_checkpoint_or_any_file_with_that_tensor(
    store: CheckpointStore, tmp_path: Path
) -> None:
    weights = load_weights(store.directory / "round-000002.safetensors")
    assert torch.equal(weights, example(2).tensors["weights"])
    save_file({"weights": torch.ones(2, 3, dtype=torch.float64)}, tmp_path / "own.safetensors")
    assert torch.equal(load_weights(tmp_path / "own.safetensors"), torch.ones(6))


def test_initial_weights_that_are_no_use_are_named(tmp_path: Path) -> None:
    save_file({"fc.bias": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    for name, why in (("other", "'weights'"), ("text", "cannot be read"), ("missing", "cannot be read")):
        with pytest.raises(CheckpointError, match=rf"{name}\.safetensors.*{why}"):
            load_weights(tmp_path / f"{name}.safetensors")


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    """Write a safetensors file by hand: its library writes none that is wrong."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(shape: Any, dtype: str = "F32", end: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


ODD_ENTRIES = {
    "a dimension of 2^63": entry([0, 1 << 63]),
    "two of 2^62": entry([0, 1 << 62, 1 << 62]),
    "65 dimensions": entry([0] * 65),
    "a negative one": entry([-1]),
    "one that is no number": entry(["0"]),
    "one that is true": entry([True, 0]),
    "no list": entry(0),
    "no shape": {"dtype": "F32", "data_offsets": [0, 0]},
    "a dtype that torch has not": entry([4], "F6_E2M3", 3),
}


@pytest.mark.parametrize("odd", ODD_ENTRIES)
def test_a_tensor_that_torch_cannot_have_is_damage_and_no_traceback(tmp_path: Path, odd: str) -> None:
    found = ODD_ENTRIES[odd]
    path = tmp_path / "frozen.safetensors"
    write_header(path, {"weights": found}, bytes(found["data_offsets"][1]))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(path)
    with pytest.raises(CheckpointError, match="Restore it from a backup"):
        CheckpointStore.to_read(tmp_path).load_constant("frozen")


def test_a_checkpoint_with_such_a_tensor_is_damaged_and_the_one_before_it_is_used(store: CheckpointStore) -> None:
    data, commit = (store.directory / f"round-000002.{suffix}" for suffix in ("safetensors", "json"))
    write_header(data, {"x": entry([0, 1 << 63])})
    document = json.loads(commit.read_text())
    document.pop("sha256")
    document["tensors_sha256"] = hashlib.sha256(data.read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    commit.write_text(json.dumps({**document, "sha256": digest}))
    assert same(store.load_newest(), example(1))


@pytest.mark.parametrize("shape", [[], [0], [0, 1 << 62], [1] * 64, [1, 0, 3]])
def test_tensors_without_elements_or_with_many_dimensions_are_read(tmp_path: Path, shape: list[int]) -> None:
    size = 0 if 0 in shape else 4
    write_header(tmp_path / "own.safetensors", {"weights": entry(shape, end=size)}, bytes(size))
    assert load_weights(tmp_path / "own.safetensors").numel() == size // 4
