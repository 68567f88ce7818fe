"""``gradbus export`` reads safetensors and JSON: these hold the whole model, and what they say is not trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_runs
import pytest
import torch
from dds_domains import new_domain
from golden_task import GoldenModel
from safetensors.torch import load_file, save_file
from torch import nn

from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.commands.files import ControllerFile
from gradbus.commands.rundir.directory import write_json
from gradbus.commands.rundir.export import Exported, export
from gradbus.runtime import saved_state
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.saved_state import StateNames

FEDERATED, PARALLEL = golden_runs.FEDERATED, golden_runs.PARALLEL
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of today's code, of each kind; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.set_num_threads(1)
        for name, rules in FEDERATED.items():
            golden_runs.federated(name, new_domain(), **rules)
        for name, servers in PARALLEL.items():
            golden_runs.parallel(name, new_domain(), servers=servers)
    return folder


def both(run: Path, to: Path, **options: Any) -> tuple[Exported, dict[str, Any], dict[str, Any]]:
    """What is exported without code, and what with the model that the task builds."""
    done = export(run, to / "data.safetensors", **options)
    whole = export(run, to / "built.safetensors", trust=True, **options)
    return done, load_file(done.path), load_file(whole.path)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("name", ["federated", *PARALLEL])
def test_a_checkpoint_has_the_whole_model_in_its_own_dtypes(runs: Path, tmp_path: Path, name: str) -> None:
    done, found, built = both(runs / name, tmp_path)
    assert done.is_whole
    assert same(found, built)
    assert found["head.weight"].dtype == torch.bfloat16
    assert torch.equal(found["frozen.weight"], GoldenModel().frozen.weight)
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    GoldenModel().load_state_dict(found, strict=True)


def test_the_best_model_is_whole_too(runs: Path, tmp_path: Path) -> None:
    done, found, built = both(runs / "federated", tmp_path, best=True)
    assert done.is_whole
    assert same(found, built)


def test_personal_tensors_are_left_out_by_name_and_a_client_brings_them(runs: Path, tmp_path: Path) -> None:
    done, found, built = both(runs / "personal", tmp_path)
    assert done.absent == ["head.weight", "head.bias"]
    assert same(found, {key: tensor for key, tensor in built.items() if key not in done.absent})
    assert "left out, as each client has its own: 'head.weight', 'head.bias'; --client" in done.text
    of_client, found, built = both(runs / "personal", tmp_path, client=runs / "personal-clients" / "client-1")
    assert of_client.is_whole
    assert same(found, built)


def test_a_frozen_parameter_that_is_not_sent_is_left_out_by_name(runs: Path, tmp_path: Path) -> None:
    model = FlatModel(GoldenModel(), Sharing(exclude=("frozen.*",)))
    assert model.names == {"tied": {"last.weight": "first.weight"}, "unsaved": ["frozen.weight", "frozen.bias"]}

    def change(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        meta["names"], meta["frozen"], meta["frozen_tensors"] = model.names, "0" * 16, []

    done = export(changed(runs / "federated", tmp_path / "run", change))
    assert done.left_out == ["frozen.weight", "frozen.bias"]
    assert (
        "left out, as the checkpoint has no values of them: 'frozen.weight', 'frozen.bias'\n--trust would" in done.text
    )


def test_the_names_of_a_model_are_those_of_its_state() -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = nn.ModuleDict({"golden": GoldenModel(), "stateful": Stateful(2, 2)})
    assert StateNames.of_model(model) == {
        "tied": {"golden.last.weight": "golden.first.weight"},
        "unsaved": ["stateful._extra_state"],
        "transient": ["golden.scratch"],
    }
    assert FlatModel(model).names == {
        "tied": {"golden.last.weight": "golden.first.weight"},
        "unsaved": ["stateful._extra_state"],
    }


def changed(run: Path, to: Path, change: Change, folder: str = "") -> Path:
    """A run directory whose only checkpoint, below ``folder``, is a changed one, with right checksums."""
    state = to / "state" / folder
    state.mkdir(parents=True)
    write_json(to / "config.json", {"federated" if not folder else "parallel": {}})
    for path in (run / "state").glob("frozen-*"):
        (state / path.name).write_bytes(path.read_bytes())
    others = [] if "server" not in folder else ["server-0", "server-1"]
    for part in others or [folder]:
        newest = CheckpointStore.to_read(run / "state" / part).load_newest()
        assert newest is not None
        meta, tensors = dict(newest.meta), dict(newest.tensors)
        if part == folder:
            change(meta, tensors)
        with CheckpointStore(to / "state" / part) as store:
            store.save(Checkpoint(newest.round_id, tensors, meta))
    return to


def put(key: str, value: Any) -> Change:
    """Set an entry of the metadata, by its path."""

    def change(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        *path, last = key.split("/")
        found: Any = meta
        for step in path:
            found = found[int(step)] if step.isdecimal() else found[step]
        found[int(last) if last.isdecimal() else last] = value

    return change


def tensor(name: str, value: torch.Tensor) -> Change:
    return lambda meta, tensors: tensors.update({name: value})


HUGE = 1 << 62
TIED = {f"tied-{number}": "first.weight" for number in range(300)}
FEDERATED_CHANGES: dict[str, Change] = {
    "more than there is": put("tensors/0/2", [1 << 40]),
    "more than memory": put("tensors/0/2", [HUGE, HUGE]),
    "strides that overflow": put("tensors/0/2", [0, HUGE, HUGE]),
    "many dimensions": put("tensors/0/2", [1] * 1000),
    "negative": put("tensors/0/2", [-1]),
    "a dtype of integers": put("tensors/0/1", "int64"),
    "no dtype": put("tensors/0/1", "load"),
    "no name": put("tensors/0/0", ""),
    "a name that moves the cursor": put("tensors/0/0", "\x1b[2J"),
    "a name that turns the text": put("tensors/0/0", "a\u202eb"),
    "a name of the format": put("tensors/0/0", "__metadata__"),
    "a long name": put("tensors/0/0", "n" * 100_000),
    "two of a name": put("tensors/0/0", "first.bias"),
    "a table of names": put("tensors", {"first.weight": "float32"}),
    "frozen ones that are others": put("frozen_tensors/0/2", [1 << 40]),
    "a frozen one of the same name": put("frozen_tensors/0/0", "first.weight"),
    "another file of frozen ones": put("frozen", "f" * 16),
    "a path to frozen ones": put("frozen", "../../../etc/passwd"),
    "a buffer of the same name": tensor("buffer/first.weight", torch.zeros(2)),
    "tied to one of the same name": put("names/tied", {"first.bias": "first.weight"}),
    "tied in a circle": put("names/tied", {"a": "b", "b": "a"}),
    "tied to what is tied": put("names/tied", {"a": "b", "b": "first.weight"}),
    "names that are none": put("names", [1]),
    "weights of another dtype": tensor("weights", torch.zeros(67, dtype=torch.int64)),
    "no weights": lambda meta, tensors: tensors.pop("weights"),
}  # fmt: skip
RANK_CHANGES: dict[str, Change] = {
    "a tensor is missing": lambda meta, tensors: tensors.pop("parameter/first.weight"),
    "a tensor of another shape": tensor("parameter/first.weight", torch.zeros(3)),
    "a tensor more": tensor("parameter/more", torch.zeros(3)),
    "a buffer of the same name": tensor("buffer/first.weight", torch.zeros(3)),
    "another layout": lambda meta, tensors: meta.update(layout=describe_layout(nn.Linear(2, 2))),
    "no name": tensor("parameter/", torch.zeros(3)),
}
SERVER_CHANGES: dict[str, Change] = {
    "a part is missing": lambda meta, tensors: meta["pieces"].pop(0),
    "a part is there twice": lambda meta, tensors: meta["pieces"].append(meta["pieces"][0]),
    "a part of another length": put("pieces/0/stop", 1 << 40),
    "a part that ends before it begins": put("pieces/0/start", 1 << 40),
    "a huge tensor": put("pieces/0/shape", [HUGE, HUGE]),
    "many dimensions": put("pieces/0/shape", [1] * 1000),
    "many servers": put("servers", HUGE),
    "a worker without a number": put("own", {"__class__": {}}),
    "other layouts": lambda meta, tensors: meta.update(layout=meta["layout"][1:]),
    "a value is missing": lambda meta, tensors: tensors.pop(min(name for name in tensors if "weights/" in name)),
}  # fmt: skip
CASES = [
    *(("federated", "", change) for change in FEDERATED_CHANGES),
    *(("ranks", "rank-0", change) for change in RANK_CHANGES),
    *(("servers", "server-0", change) for change in SERVER_CHANGES),
]


@pytest.mark.parametrize(("name", "folder", "change"), CASES)
def test_a_checkpoint_that_lies_about_its_tensors_is_refused_with_a_sentence(
    runs: Path, tmp_path: Path, name: str, folder: str, change: str
) -> None:
    changes = {"federated": FEDERATED_CHANGES, "ranks": RANK_CHANGES, "servers": SERVER_CHANGES}[name]
    run = changed(runs / name, tmp_path / "run", changes[change], folder)
    with pytest.raises(CheckpointError) as caught:
        export(run)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 2000
    assert not list(run.glob("model*"))


@pytest.mark.parametrize(("name", "folder"), [("federated", ""), ("ranks", "rank-0")])
def test_names_of_tied_weights_do_not_multiply_the_memory(
    runs: Path, tmp_path: Path, name: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = changed(runs / name, tmp_path / "run", put("names/tied", TIED), folder)
    assert export(run).tensors > len(TIED)  # of a small model, which may have one layer under many names
    monkeypatch.setattr(saved_state, "MAX_COPIED_BYTES", 0)
    with pytest.raises(CheckpointError, match=r"300 names of tied weights would take [\d,]+ bytes"):
        export(run)


def test_a_name_is_no_path(runs: Path, tmp_path: Path) -> None:
    run = changed(runs / "federated", tmp_path / "a" / "run", put("tensors/0/0", "../../../escaped"))
    done = export(run)
    assert "../../../escaped" in load_file(done.path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["run"]


ODD_NAME = "evil\x1b[31m\nname"


def with_best(runs: Path, run: Path, **best: Any) -> Path:
    """A run directory whose best model says these things of itself, with right checksums."""
    changed(runs / "federated", run, lambda meta, tensors: None)
    newest = CheckpointStore.to_read(runs / "federated" / "state" / "best").load_newest()
    assert newest is not None
    with CheckpointStore(run / "state" / "best") as store:
        meta = {**newest.meta, "best": {**newest.meta["best"], **best}}
        store.save(Checkpoint(newest.round_id, newest.tensors, meta))
    return run


def test_a_terminal_obeys_nothing_that_a_run_directory_says(runs: Path, tmp_path: Path, invoke: Any) -> None:
    run = with_best(runs, tmp_path / ODD_NAME, metric="\x1b]0;owned\x07\x1b[31mloss\nsaved by you", mode="max")
    (run / "rounds.jsonl").write_bytes((runs / "federated" / "rounds.jsonl").read_bytes())
    for words in (("export", run, "--best"), ("report", run), ("check", run), ("export", run / "none")):
        done = invoke(*words)
        text = done.out + done.err
        assert text
        assert text.replace("\n", "").isprintable()
        assert "\nname" not in text
        assert "\nsaved by you" not in text


@pytest.mark.parametrize("best", [{"mode": "\x1b[2Jmax"}, {"mode": "big"}, {"metric": "m" * 5000}])
def test_a_best_model_of_no_mode_or_of_an_endless_metric_is_damaged(
    runs: Path, tmp_path: Path, best: dict[str, str]
) -> None:
    with pytest.raises(CheckpointError, match=r"best\.(mode|metric)"):
        export(with_best(runs, tmp_path / "run", **best), best=True)


def test_a_link_in_a_run_directory_has_no_other_file_written(runs: Path, tmp_path: Path, invoke: Any) -> None:
    run = changed(runs / "federated", tmp_path / "run", lambda meta, tensors: None)
    (tmp_path / "precious").write_text("kept")
    for name in ("model.safetensors", "model.safetensors.tmp", "report.html", "report.html.tmp"):
        (run / name).symlink_to(tmp_path / "precious")
    (run / "rounds.jsonl").write_bytes((runs / "federated" / "rounds.jsonl").read_bytes())
    assert export(run).is_whole
    assert invoke("report", run).code == 0
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_place_outside_of_the_run_directory_is_read_only_with_trust(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    task, state = {"task": "golden_task:GoldenTask"}, runs / "federated" / "state"
    config = {"task": task, "federated": {"checkpoint": {"dir": state, "keep_best": "eval_loss"}}}
    write_json(run / "config.json", ControllerFile.model_validate(config).model_dump(mode="json"))
    for options in ({}, {"best": True}):
        with pytest.raises(CheckpointError, match=r"names another place, .*/federated/state', outside of the run"):
            export(run, **options)
        assert export(run, trust=True, **options).is_whole
    (run / "state").symlink_to(state)
    with pytest.raises(CheckpointError, match="is a link, and links in a run directory are not followed"):
        export(run)
    for name, folder in (("ranks", "rank-0"), ("servers", "server-0")):
        linked = changed(runs / name, tmp_path / name, lambda meta, tensors: None, folder)
        assert export(linked).is_whole
        (linked / "state" / folder).rename(tmp_path / folder)
        (linked / "state" / folder).symlink_to(tmp_path / folder)
        with pytest.raises(CheckpointError, match="is a link, and links in a run directory are not followed"):
            export(linked)


def test_a_client_of_another_model_is_refused(runs: Path, tmp_path: Path) -> None:
    store = CheckpointStore.to_read(runs / "personal-clients" / "client-1")
    newest = store.load_newest()
    assert newest is not None
    for name, other in (("personal.head.weight", torch.zeros(3)), ("personal.none", torch.zeros(2))):
        with CheckpointStore(tmp_path / name / "client-1") as changed_store:
            changed_store.save(Checkpoint(newest.round_id, {**newest.tensors, name: other}, newest.meta))
        with pytest.raises(CheckpointError, match=r"a client keeps .* of shape .*, which the model has not"):
            export(runs / "personal", tmp_path / "out.safetensors", client=tmp_path / name / "client-1")


def test_a_file_that_is_no_safetensors_is_damaged(runs: Path, tmp_path: Path) -> None:
    run = changed(runs / "federated", tmp_path / "run", lambda meta, tensors: None)
    (frozen,) = (run / "state").glob("frozen-*")
    for data in (b"", b"\xff" * 8 + b"{}", frozen.read_bytes()[:-1], frozen.read_bytes() + b"x"):
        frozen.write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be read"):
            export(run)
    save_file({"frozen": torch.zeros(20, dtype=torch.bfloat16)}, frozen)
    with pytest.raises(CheckpointError, match="other values than its name says"):
        export(run)
