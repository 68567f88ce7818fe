"""The state of a run over a restart: all of it, or a refusal that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from settings import nested
from torch import nn

from gradbus import codecs
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.controller import state as state_module
from gradbus.actors.federated.controller.report import ClientTimeline, RoundReport
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.runtime import checkpoint as checkpoint_module
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError, ControllerReplaced
from gradbus.runtime.logs import process_name
from gradbus.runtime.wire.frames import FrameKey, Kind


def config_of(directory: Path | None, **changes: Any) -> FederatedConfig:
    return FederatedConfig(**nested({"checkpoint__dir": directory, "strategy": "fedadam", **changes}))


def open_state(config: FederatedConfig, *, seed: int = 0, width: int = 4) -> tuple[RunState, Strategy]:
    torch.manual_seed(seed)
    model = FlatModel(nn.Linear(3, width))
    strategy = STRATEGIES.make(config.strategy, model.dim)
    return RunState(config, model, strategy), strategy


def one_round(state: RunState, strategy: Strategy, round_id: int) -> RoundReport:
    """Train a little and commit it."""
    dim = state.weights.numel()
    delta = torch.randn(dim, generator=torch.Generator().manual_seed(round_id))
    strategy.begin(round_id, state.weights if state.held is None else state.held)
    strategy.add(
        Update(codecs.parse(codecs.get("fp32").encode(delta), expected_dim=dim)), Facts(client_id=0, num_samples=10)
    )
    strategy.finish(state.weights)
    if state.held is not None:
        state.held.add_(delta, alpha=0.5)
    report = RoundReport(
        round_id=round_id, clients=(0, 3), expected=3, outcome="deadline", loss=0.5 / round_id, dropped={"stale": 2}
    )
    state.commit(report, state.held)
    return report


@pytest.mark.parametrize("downlink_codec", ["fp32", "sq8"])
def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path, downlink_codec: str) -> None:
    rules: dict[str, Any] = {"downlink_codec": downlink_codec}
    unbroken, unbroken_strategy = open_state(config_of(tmp_path / "unbroken", **rules))
    first, first_strategy = open_state(config_of(tmp_path / "broken", **rules))
    for state in (unbroken, first):
        state.save_initial()
    for round_id in (1, 2):
        one_round(unbroken, unbroken_strategy, round_id)
        one_round(first, first_strategy, round_id)
    first.close()
    second, second_strategy = open_state(config_of(tmp_path / "broken", **rules), seed=99)
    assert second.run_id == first.run_id != unbroken.run_id
    assert second.round_id == 2
    assert second.history == first.history == unbroken.history
    assert torch.equal(second.weights, unbroken.weights)
    for name, tensor in unbroken_strategy.state().items():
        assert torch.equal(second_strategy.state()[name], tensor)
    one_round(unbroken, unbroken_strategy, 3)
    one_round(second, second_strategy, 3)
    assert torch.equal(second.weights, unbroken.weights)
    if downlink_codec == "fp32":
        assert second.held is None
    else:
        assert second.held is not None
        assert unbroken.held is not None
        assert torch.equal(second.held, unbroken.held)
        assert not torch.equal(second.held, second.weights)
    for state in (unbroken, second):
        state.close()


def test_the_weights_of_a_run_are_the_live_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 4)
    config = config_of(None)
    state = RunState(config, FlatModel(module), STRATEGIES.make(config.strategy, 16))
    state.weights.fill_(2.0)
    assert module.bias.tolist() == [2.0] * 4


def test_a_fresh_run_that_dies_in_its_first_round_keeps_its_id_and_its_weights(tmp_path: Path) -> None:
    first, _ = open_state(config_of(tmp_path), seed=1)
    first.save_initial()
    first.close()
    second, _ = open_state(config_of(tmp_path), seed=2)
    assert (second.run_id, second.round_id, second.history) == (first.run_id, 0, [])
    assert torch.equal(second.weights, first.weights)
    second.save_initial()  # is there already
    second.close()
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_the_global_random_numbers_go_on(tmp_path: Path) -> None:
    first, strategy = open_state(config_of(tmp_path))
    torch.manual_seed(5)
    one_round(first, strategy, 1)
    expected = torch.rand(3)
    first.close()
    second, _ = open_state(config_of(tmp_path), seed=77)
    assert torch.equal(torch.rand(3), expected)
    second.close()


def test_each_fresh_run_has_an_id_of_its_own() -> None:
    ids = {open_state(config_of(None))[0].run_id for _ in range(20)}
    assert len(ids) == 20
    assert 0 not in ids


def test_without_a_state_directory_nothing_is_kept_and_all_works(tmp_path: Path) -> None:
    state, strategy = open_state(config_of(None))
    state.save_initial()
    report = one_round(state, strategy, 1)
    assert state.history == [report]
    state.close()


def test_a_lossy_downlink_starts_with_clients_that_hold_the_weights() -> None:
    state, _ = open_state(config_of(None, downlink_codec="s4"))
    assert state.held is not None
    assert torch.equal(state.held, state.weights)
    assert state.held.data_ptr() != state.weights.data_ptr()
    assert open_state(config_of(None))[0].held is None


def committed(directory: Path, **changes: Any) -> RunState:
    state, strategy = open_state(config_of(directory, **changes))
    one_round(state, strategy, 1)
    state.close()
    return state


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    committed(tmp_path)
    with pytest.raises(CheckpointError, match="of a model with other names or shapes"):
        open_state(config_of(tmp_path), width=5)


def test_the_state_of_another_strategy_is_refused(tmp_path: Path) -> None:
    committed(tmp_path)
    config = FederatedConfig(checkpoint={"dir": tmp_path}, strategy="fedavgm")
    with pytest.raises(CheckpointError, match="server_momentum"):
        open_state(config)


@pytest.mark.parametrize(("before", "after"), [("fp32", "sq8"), ("sq8", "fp32"), ("sq8", "s4")])
def test_a_run_does_not_change_what_its_clients_hold_in_the_middle(tmp_path: Path, before: str, after: str) -> None:
    committed(tmp_path, downlink_codec=before)
    with pytest.raises(CheckpointError, match=f"downlink_codec={before}"):
        open_state(config_of(tmp_path, downlink_codec=after))


def test_an_existing_run_is_not_overwritten_when_resume_is_off(tmp_path: Path) -> None:
    committed(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a run \(round 1\), resume is off"):
        open_state(config_of(tmp_path, checkpoint__resume=False))
    state, _ = open_state(config_of(tmp_path))  # the directory was let go, and is as it was
    assert state.round_id == 1
    state.close()


def test_an_empty_directory_is_fine_when_resume_is_off(tmp_path: Path) -> None:
    state, _ = open_state(config_of(tmp_path / "new", checkpoint__resume=False))
    assert state.round_id == 0
    state.close()


def test_two_controllers_do_not_share_a_state_directory(tmp_path: Path) -> None:
    state, _ = open_state(config_of(tmp_path))
    with pytest.raises(CheckpointError, match="in use by another running process"):
        open_state(config_of(tmp_path))
    state.close()


def begin(state: RunState, incarnation: int) -> None:
    """Hold the state as a controller of this incarnation does."""
    state.incarnation = incarnation
    state.record_start()


def test_a_start_that_has_committed_nothing_is_known_to_the_next_one(tmp_path: Path) -> None:
    """Its clock may have been set back: a later start has the higher incarnation all the same."""
    first, strategy = open_state(config_of(tmp_path))
    begin(first, 70)
    one_round(first, strategy, 1)
    first.close()
    second, _ = open_state(config_of(tmp_path))
    assert second.incarnation == 70
    begin(second, 90)
    second.close()
    third, _ = open_state(config_of(tmp_path))
    assert third.incarnation == 90
    third.close()


def test_a_controller_that_was_replaced_saves_nothing_over_the_newer_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks: the earlier start was paused, and goes on while the later one trains."""
    monkeypatch.setattr(checkpoint_module.fcntl, "flock", lambda *_: None)
    earlier, earlier_strategy = open_state(config_of(tmp_path))
    begin(earlier, 70)
    one_round(earlier, earlier_strategy, 1)
    later, later_strategy = open_state(config_of(tmp_path))
    begin(later, 90)
    one_round(later, later_strategy, 2)
    saved = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    with pytest.raises(ControllerReplaced, match="a later start of it has taken the place of this controller") as told:
        one_round(earlier, earlier_strategy, 2)
    assert (told.value.run_id, told.value.incarnation, told.value.host) == (later.run_id, 90, process_name())
    assert earlier.round_id == 1
    for save in (lambda: earlier.adopt(2), earlier.record_start):
        with pytest.raises(ControllerReplaced):
            save()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == saved
    one_round(later, later_strategy, 3)
    for state in (earlier, later):
        state.close()


def test_a_commit_that_is_under_way_when_a_controller_learns_that_it_was_replaced_is_not_saved(tmp_path: Path) -> None:
    state, strategy = open_state(config_of(tmp_path))
    begin(state, 70)
    state.replaced = ControllerReplaced("a later start", state.run_id, 90, "there:17")
    with pytest.raises(ControllerReplaced, match="a later start"):
        one_round(state, strategy, 1)
    assert state.round_id == 0
    assert not list(tmp_path.glob("round-*"))
    state.close()


def test_a_damaged_record_of_the_newest_start_is_named_with_what_to_do(tmp_path: Path) -> None:
    state, _ = open_state(config_of(tmp_path))
    begin(state, 70)
    state.close()
    (tmp_path / "start.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"start.json is damaged: .*Remove it, unless another controller"):
        open_state(config_of(tmp_path))


def test_of_a_damaged_checkpoint_the_one_before_counts(tmp_path: Path) -> None:
    state, strategy = open_state(config_of(tmp_path))
    one_round(state, strategy, 1)
    weights = state.weights.clone()
    one_round(state, strategy, 2)
    state.close()
    (tmp_path / "round-000002.safetensors").write_bytes(b"")
    again, _ = open_state(config_of(tmp_path))
    assert (again.round_id, len(again.history)) == (1, 1)
    assert torch.equal(again.weights, weights)
    again.close()


def test_a_run_may_start_from_given_weights(tmp_path: Path) -> None:
    given = torch.arange(16, dtype=torch.float32)
    save_file({"weights": given}, tmp_path / "given.safetensors")
    state, _ = open_state(config_of(None, checkpoint__init_path=tmp_path / "given.safetensors"))
    assert torch.equal(state.weights, given)
    assert state.round_id == 0


def test_a_checkpoint_of_another_run_may_be_the_start(tmp_path: Path) -> None:
    other = committed(tmp_path / "other")
    path = tmp_path / "other" / "round-000001.safetensors"
    state, _ = open_state(config_of(tmp_path / "new", checkpoint__init_path=path), seed=9)
    assert torch.equal(state.weights, other.weights)
    assert state.run_id != other.run_id
    state.close()


def test_a_resumed_run_does_not_go_back_to_its_given_weights(tmp_path: Path) -> None:
    save_file({"weights": torch.zeros(16)}, tmp_path / "given.safetensors")
    rules: dict[str, Any] = {"checkpoint__init_path": tmp_path / "given.safetensors"}
    first = committed(tmp_path / "state", **rules)
    second, _ = open_state(config_of(tmp_path / "state", **rules))
    assert torch.equal(second.weights, first.weights)
    second.close()


def test_given_weights_of_the_wrong_size_are_refused(tmp_path: Path) -> None:
    save_file({"weights": torch.zeros(17)}, tmp_path / "given.safetensors")
    with pytest.raises(CheckpointError, match=r"given\.safetensors: 17 values, the model has 16"):
        open_state(config_of(None, checkpoint__init_path=tmp_path / "given.safetensors"))


def test_given_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_state(config_of(None, checkpoint__init_path=tmp_path / "nothing.safetensors"))


def test_what_is_known_after_the_commit_completes_the_report(tmp_path: Path) -> None:
    state, strategy = open_state(config_of(tmp_path))
    report = one_round(state, strategy, 1)
    amended = state.amend(report, accuracy=0.9)
    assert state.history == [amended]
    assert amended.accuracy == 0.9
    one_round(state, strategy, 2)  # and is kept with the next one
    state.close()
    again, _ = open_state(config_of(tmp_path))
    assert again.history[0] == amended
    again.close()


def test_a_checkpoint_keeps_reports_without_their_timelines_and_takes_those_of_an_older_program(tmp_path: Path) -> None:
    """A checkpoint holds the history of the whole run: what it keeps of a round must not grow with the clients."""
    state, strategy = open_state(config_of(tmp_path))
    timeline = tuple(ClientTimeline(client_id=client_id) for client_id in range(64))
    report = RoundReport(round_id=1, clients=(0,), timeline=timeline)
    strategy.begin(1, state.weights)
    state.commit(report, None)
    assert state.amend(report, accuracy=0.5).timeline == timeline
    assert state.history == [RoundReport(round_id=1, clients=(0,), accuracy=0.5)]
    one_round(state, strategy, 2)
    state.close()
    with CheckpointStore(tmp_path, keep=3) as store:
        checkpoint = store.load(2)
        assert all("timeline" not in entry for entry in checkpoint.meta["history"])
        for entry in checkpoint.meta["history"]:  # as they were before there were timelines
            for key in ("step_s", "command_s", "downlink_residual_norm"):
                del entry[key]
        store.save(checkpoint)
    again, _ = open_state(config_of(tmp_path))
    assert [report.round_id for report in again.history] == [1, 2]
    assert again.history[0].timeline == ()
    again.close()


def test_a_checkpoint_names_the_clients_of_the_newest_rounds_and_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "KEPT_IN_CHECKPOINT", 30)
    state, _ = open_state(config_of(tmp_path, checkpoint__keep=100))
    everybody = tuple(range(1000))
    strike = Strike(7, 1, "non-finite", "nan", 1)
    for round_id in range(1, 41):
        marks = {"clipped": everybody}
        state.commit(RoundReport(round_id=round_id, clients=everybody, marks=marks, strikes=(strike,)), None)
    state.close()
    sizes = {n: (tmp_path / f"round-{n:06d}.json").stat().st_size for n in (15, 16, 30, 31, 40)}
    assert sizes[16] - sizes[15] > 8000
    assert sizes[30] - sizes[16] < 14 * 1000
    assert abs(sizes[40] - sizes[31]) < 100
    again, _ = open_state(config_of(tmp_path))
    assert [report.round_id for report in again.history] == list(range(11, 41))
    assert [report.updates for report in again.history] == [1000] * 30
    assert [len(report.clients) for report in again.history] == [0] * 14 + [1000] * 16
    assert [len(report.marks) for report in again.history] == [len(report.strikes) for report in again.history]
    assert again.history == state.history
    again.close()


def test_the_reports_of_an_older_program_say_how_many_updates_there_were(tmp_path: Path) -> None:
    entry = RoundReport(round_id=1, clients=(0, 3)).to_json()
    del entry["updates"]
    assert RoundReport.from_json(entry).updates == 2


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    state, strategy = open_state(config_of(tmp_path, checkpoint__keep=2))
    for round_id in range(1, 6):
        one_round(state, strategy, round_id)
    state.close()
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["round-000004.json", "round-000005.json"]


def test_a_run_may_start_from_the_named_tensors_of_a_module(tmp_path: Path) -> None:
    source = torch.nn.Linear(3, 2)
    path = tmp_path / "module.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in source.state_dict().items()}, path)
    config = FederatedConfig(checkpoint={"init_path": path})
    model = FlatModel(torch.nn.Linear(3, 2))
    state = RunState(config, model, STRATEGIES.make(config.strategy, model.dim))
    assert torch.equal(state.weights, FlatModel(source).read())


def test_named_tensors_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "module.safetensors"
    save_file({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, path)
    config = FederatedConfig(checkpoint={"init_path": path})
    model = FlatModel(torch.nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(2, 4\), expected \(2, 3\)"):
        RunState(config, model, STRATEGIES.make(config.strategy, model.dim))


def test_a_start_of_the_controller_knows_the_updates_that_count_by_the_rounds_before(tmp_path: Path) -> None:
    first, strategy = open_state(config_of(tmp_path))
    key = FrameKey(Kind.UPDATE, first.run_id, 1, 3, (1 << 64) - 1, 7)
    first.counted[3] = key
    one_round(first, strategy, 1)
    first.counted[3] = key._replace(round_id=2, transfer=8)  # of a round that is never committed
    first.close()
    second, _ = open_state(config_of(tmp_path))
    assert second.counted == {3: key}
    second.close()


def test_a_checkpoint_of_a_version_that_kept_no_updates_that_count_is_continued(tmp_path: Path) -> None:
    first, strategy = open_state(config_of(tmp_path))
    one_round(first, strategy, 1)
    store, saved = CheckpointStore.to_read(tmp_path), CheckpointStore.to_read(tmp_path).load(1)
    assert store.rounds() == [1]
    meta = {name: value for name, value in saved.meta.items() if name != "counted"}
    assert SavedRun.of(Checkpoint(1, saved.tensors, meta)).counted == []
    first.close()
