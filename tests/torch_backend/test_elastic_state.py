"""The state of an elastic script and its sampler, without other processes."""

from __future__ import annotations

import os
import resource
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doc_pages import rows, section
from structlog.testing import capture_logs
from torch import nn

import gradbus.torch as hvd
from gradbus.runtime.collectives.generations import NoGeneration
from gradbus.runtime.errors import CheckpointError, ConfigError, PeerLost
from gradbus.torch import elastic
from gradbus.torch.broadcast_state import broadcast_tree
from gradbus.torch.elastic import training
from gradbus.torch.elastic.launched import ScriptElasticSettings, member_place
from gradbus.torch.elastic.membership import FixedRanks
from gradbus.torch.functions import current


def make(**values: Any) -> elastic.TorchState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return elastic.TorchState(model, torch.optim.Adam(model.parameters(), lr=0.1), **values)


def step(state: elastic.TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(4, 3)).square().sum().backward()
    state.optimizer.step()


def bits(state: elastic.TorchState) -> list[torch.Tensor]:
    held = state.optimizer.state_dict()["state"].values()
    return [one.detach().clone() for one in [*state.model.parameters(), *(t for s in held for t in s.values())]]


def test_a_restored_state_has_the_bits_of_the_last_commit_each_time() -> None:
    state = make(epoch=0, seen=[1, 2])
    step(state)
    state.epoch, state.seen = 1, [3]
    state.commit()
    before = bits(state)
    for _ in range(2):  # the second time finds what the first one has not changed
        step(state)
        state.epoch = 7
        state.seen.append(4)
        state.restore()
        assert all(map(torch.equal, bits(state), before))
        assert (state.epoch, state.seen, state.commits) == (1, [3], 1)
        assert all(one.grad is None for one in state.model.parameters())


def test_what_a_reset_callback_changes_belongs_to_the_state_that_is_shared() -> None:
    state = make()
    state.commit()
    (group,) = state.optimizer.param_groups
    state.register_reset_callbacks([lambda: group.update(lr=0.3)])
    state.reset()
    state.restore()  # as after a rank that was lost while the state was shared
    assert [one["lr"] for one in state.optimizer.param_groups] == [0.3]


def test_what_the_function_changes_after_its_last_commit_is_dropped_when_members_change() -> None:
    state, begun = make(epoch=0), list[tuple[int, int, bool]]()

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        begun.append((state.epoch, state.commits, all(one.grad is None for one in state.model.parameters())))
        if len(begun) == 2:
            return
        try:
            step(state)
            state.commit()
            raise elastic.MembersChanged
        finally:
            state.epoch = 7

    train(state)
    assert begun == [(0, 0, True), (0, 1, True)]


def test_a_sampler_with_another_order_is_another_layout() -> None:
    def layout(*arguments: Any, **options: Any) -> int:
        return make(sampler=elastic.ElasticSampler(*arguments, **options)).layout

    assert layout(range(9), seed=1) == layout(list(range(9)), seed=1)
    others = {layout(range(9), seed=2), layout(range(8), seed=1), layout(range(9), shuffle=False, seed=1)}
    assert layout(range(9), seed=1) not in others
    assert len(others) == 3


def test_a_name_that_the_state_does_not_have_is_an_error_at_once() -> None:
    state = make(epoch=0)
    with pytest.raises(AttributeError, match=r"no 'batch': name it .* TorchState\(\.\.\., batch=\.\.\.\)"):
        state.batch = 1
    with pytest.raises(AttributeError, match="'model' is a part of the state"):
        state.model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="'commit' is a method of the state"):
        make(commit=1)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"last": {1, 2}}, r"cannot be sent to other ranks: TorchState has a set at values\.seen\.last\. Tensors"),
        ([{(0, 1): 3}], r"TorchState has a map at values\.seen\.0, with a tuple as a key: numbers of 64 bits"),
        (bytearray(3), r"TorchState has a bytearray at values\.seen\."),
        (2**70, r"TorchState has a int at values\.seen\. Tensors, numbers of 64 bits"),
        (torch.eye(3).to_sparse(), "cannot be sent to other ranks: .*sparse_coo"),
        (nested(31), "TorchState is nested more than 32 deep at values.seen.0.0"),
        (list(range(1 << 18)), "cannot be sent to other ranks: .*more than 262144 lists and maps; send it in parts"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_in_the_commit_that_has_it(value: Any, text: str) -> None:
    state = make(seen=0)
    state.commit()
    state.seen = value
    with pytest.raises(ValueError, match=text):
        state.commit()
    assert state.commits == 1


@pytest.mark.usefixtures("alone")
def test_what_a_commit_takes_can_be_sent() -> None:
    value = {"deep": nested(29), 1: (True, None, b"x"), None: torch.ones(2)}
    state = make(seen=value)
    state.commit()
    tree = broadcast_tree(current(), lambda: state._saved, 0, of="it", call="test", limit_bytes=1 << 20)  # noqa: SLF001 - as sync() does
    assert tree["values"]["seen"].keys() == value.keys()


class Failing:
    """A part whose state cannot be had once it is told so."""

    fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise RuntimeError("out of memory")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_state_that_cannot_be_copied_is_no_commit() -> None:
    part = Failing()
    state = make(part=part)
    state.commit()
    part.fails = True
    state._vote = lambda: True  # noqa: SLF001 - as begin() sets it
    for attempt in (state.commit, state.check_host_updates):
        with pytest.raises(RuntimeError, match="out of memory"):
            attempt()
    assert state.commits == 1


def test_a_full_disk_is_a_warning_and_leaves_the_older_checkpoint_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    model = nn.Linear(1000, 1000)
    state = elastic.TorchState(model, checkpoint=path)
    state.commit()
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))  # of the 4 MB
    try:
        with capture_logs() as logs:
            state.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(one["event"], one["error"]) for one in logs] == [("checkpoint not written", "File too large")]
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]
    assert path.read_bytes() == before
    assert state.commits == 2


def test_a_checkpoint_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = make(checkpoint=path)
    state.commit()
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    path.with_name("packed.pt").replace(path)
    with pytest.raises(CheckpointError, match="it has compressed entries"):
        begin(make(checkpoint=path))
    parts = {"model": {"weight": torch.zeros(1).expand(1 << 30), "bias": torch.zeros(2)}, "optimizer": {}}
    torch.save({"format": 1, "commits": 1, "parts": parts, "values": {}}, path)
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="more than 67,108,864 bytes, too many for this training"):
        begin(make(checkpoint=path))
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="cannot be read: has 1,073,741,824 bytes, at most 67,108,864"):
        begin(make(checkpoint=path))


def test_the_checkpoint_goes_on_and_a_foreign_or_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = make(epoch=0, checkpoint=path)
    step(state)
    state.epoch = 5
    state.commit()
    again = make(epoch=0, checkpoint=path)
    begin(again)
    assert (again.epoch, again.commits) == (5, 1)
    assert all(map(torch.equal, bits(again), bits(state)))
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]
    with pytest.raises(CheckpointError, match=r"expected the values \['step'\], found \['epoch'\]"):
        begin(make(step=0, checkpoint=path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged, or none of TorchState"):
        begin(make(epoch=0, checkpoint=path))
    torch.save({"model": {}}, path)
    with pytest.raises(CheckpointError, match="none of TorchState, format 1"):
        begin(make(epoch=0, checkpoint=path))
    path.write_bytes(b"\x80\x04cposix\nsystem\n(S'false'\ntR.")  # a pickle that would run a command
    with pytest.raises(CheckpointError, match="damaged, or none of TorchState"):
        begin(make(epoch=0, checkpoint=path))


def begin(state: elastic.TorchState) -> None:
    state.begin(lambda: False, lambda: True, joins=False)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("dds", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_belongs_to_one_process_group_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"model is wrapped in DistributedDataParallel.*elastic\.run calls"):
        elastic.TorchState(nn.parallel.DistributedDataParallel(model))
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="optimizer is a ZeroRedundancyOptimizer: each rank has a part"):
        elastic.TorchState(model, zero)
    sharded = fully_shard(nn.Linear(3, 2), mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(ConfigError, match=r"model has parameters in shards \(FSDP2\)"):
        elastic.TorchState(sharded)


def test_no_sample_is_left_out_or_taken_twice_when_the_number_of_ranks_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 203 samples, by 3 ranks, then 2, then 4, each with batches of 4; the last ones fill up from the first."""
    sampler = elastic.ElasticSampler(range(203), seed=5)
    sampler.set_epoch(2)
    taken: list[int] = []
    for world, steps in ((3, 5), (2, 3), (4, 100)):
        by_rank = []
        for rank in range(world):
            monkeypatch.setattr("gradbus.torch.elastic.sampler._place", lambda place=(rank, world): place)
            by_rank.append(list(sampler))
            assert len(by_rank[-1]) == len(sampler)
        for number in range(min(steps, -(-len(by_rank[0]) // 4))):
            batches = [one[4 * number : 4 * number + 4] for one in by_rank]
            taken += [one[place] for place in range(len(batches[0])) for one in batches]
            sampler.record_batch(number, len(batches[0]))
    assert sorted(taken[:203]) == list(range(203))
    assert taken[203:] == taken[: len(taken) - 203]
    assert sampler.processed == 203
    assert list(sampler) == []
    sampler.set_epoch(3)
    assert sorted(sampler) != list(sampler)
    with pytest.raises(CheckpointError, match="0 to 203 processed samples, got 0 and 204"):
        sampler.load_state_dict({"epoch": 0, "processed": 204})


def test_the_environment_says_how_a_process_takes_part() -> None:
    assert member_place({"RANK": "0", "WORLD_SIZE": "2"}) is None
    elastic_of = {"GRADBUS_ELASTIC__MIN_WORLD": "1", "GRADBUS_ELASTIC__MAX_WORLD": "3"}
    place = member_place({**elastic_of, "RANK": "1", "WORLD_SIZE": "2"})
    assert place is not None
    assert (place.number, place.founders, place.limits.max_world) == (1, 2, 3)
    joins = member_place({**elastic_of, "RANK": "1", "WORLD_SIZE": "2", "GRADBUS_ELASTIC__JOIN": "true"})
    assert joins is not None
    assert joins.founders == 0
    with pytest.raises(ConfigError, match="RANK in the environment, a whole number, got ''"):
        member_place(elastic_of)
    with pytest.raises(ConfigError, match="torchrun has started this process"):
        member_place({**elastic_of, "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"})
    with pytest.raises(ConfigError, match="min_wrold"):
        member_place({"GRADBUS_ELASTIC__MIN_WROLD": "1"})


def test_a_script_that_nothing_has_launched_trains_alone() -> None:
    state = make(epoch=0)

    @elastic.run
    def train(state: elastic.TorchState, epochs: int) -> str:
        while state.epoch < epochs:
            step(state)
            state.epoch += 1
            state.commit()
        return "trained"

    assert train(state, epochs=3) == "trained"
    assert (state.commits, dist.is_initialized(), elastic.generation()) == (3, False, 0)
    with pytest.raises(RuntimeError, match=r"remove destroy_process_group\(\) from the function"):
        elastic.run(lambda state: dist.destroy_process_group())(state)
    with pytest.raises(ConfigError, match="the first argument is a TorchState, got int"):
        elastic.run(lambda state: None)(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"no function of elastic\.run is running"):
        elastic.leave()


def test_the_settings_of_the_page_are_those_of_the_code(root: Path) -> None:
    page = (root / "docs" / "elastic.md").read_text(encoding="utf-8")
    told = {row[0]: row[1].strip("`") for row in rows(section(page, "A script of your own"), "variable")}
    expected = {f"`GRADBUS_ELASTIC__{name.upper()}`": one for name, one in ScriptElasticSettings.model_fields.items()}
    assert told.keys() - {"`RANK`, `WORLD_SIZE`"} == expected.keys()
    for name, field in expected.items():
        assert told[name] == ("" if field.default is None else str(field.default).lower().removesuffix(".0")), name


def test_init_of_horovod_in_an_elastic_run_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBUS_ELASTIC__MIN_WORLD", "1")
    with pytest.raises(RuntimeError, match=r"elastic\.run makes the process group.*leave init\(\) out"):
        hvd.init()
    with monkeypatch.context() as fixed:
        fixed.setenv("GRADBUS_ELASTIC__MIN_WORLD", "0")  # ranks are fixed
        hvd.init(store=dist.HashStore(), rank=0, world_size=1)
        hvd.shutdown()
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(RuntimeError, match="there is no process group yet"):
        model(torch.ones(1)).sum().backward()
    elastic.TorchState(model, optimizer).restore()


def small() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_is_no_model_or_no_optimizer_is_refused_with_the_call() -> None:
    model, optimizer = small()
    write = r"Write TorchState\(model=model, optimizer=optimizer, \.\.\.\)$"
    wrong: list[tuple[Any, Any, str]] = [
        (optimizer, model, rf"^TorchState: model: expected a torch\.nn\.Module, got an? SGD\. {write}"),
        (nn.Linear, optimizer, rf"got the class Linear\. {write}"),
        (model, torch.optim.SGD, rf"optimizer: expected a torch\.optim\.Optimizer, got the class SGD\. {write}"),
        (model, {"lr": 0.1}, rf"optimizer: .*, got a dict\. {write}"),
        (nn.ReLU(), None, "model: a ReLU has no parameters, so there is nothing to train"),
    ]
    for given, trains, text in wrong:
        with pytest.raises(ConfigError, match=text):
            elastic.TorchState(given, trains)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, optimizer = small()
    other, theirs = small()
    with pytest.raises(ConfigError, match="optimizer: 2 of its 2 parameters are not those of model: a rank that joins"):
        elastic.TorchState(model, theirs)
    theirs.add_param_group({"params": list(model.parameters())})
    with pytest.raises(ConfigError, match="2 of its 4 parameters are not those of model"):
        elastic.TorchState(model, theirs)
    assert elastic.TorchState(model, theirs, critic=other).critic is other
    with pytest.raises(ConfigError, match="second: 2 of its 2 parameters are not those of model"):
        elastic.TorchState(model, second=small()[1])
    assert elastic.TorchState(optimizer=optimizer).optimizer is optimizer  # the model is in none: it is made again


class Holder:
    """No module, and has a state: an agent that holds networks, a pair of optimizers, or a wrapper of one."""

    def __init__(self, *held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.state_dict() for number, one in enumerate(self.held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, one in enumerate(self.held):
            one.load_state_dict(state[str(number)])


def test_an_optimizer_may_train_what_a_part_that_is_no_module_has() -> None:
    model, _ = small()
    actor, critic = small(), small()
    both = torch.optim.SGD([*model.parameters(), *actor[0].parameters()], lr=0.1)
    agent = Holder(actor[0], critic[0])
    assert elastic.TorchState(model, both, agent=agent).agent is agent
    assert elastic.TorchState(optimizer=actor[1], agent=agent, loss=nn.MSELoss()).agent is agent
    assert elastic.TorchState(optimizer=actor[1], loss=nn.MSELoss()).optimizer is actor[1]


def test_a_model_or_optimizer_may_be_any_object_with_a_state() -> None:
    model, optimizer = small()
    pair, agent = Holder(optimizer, small()[1]), Holder(model)
    assert elastic.TorchState(model, pair).optimizer is pair  # type: ignore[arg-type]
    assert elastic.TorchState(agent, optimizer).model is agent  # type: ignore[arg-type]


def test_a_single_parameter_is_part_of_the_state_in_a_list() -> None:
    model, _ = small()
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ConfigError, match=r"1 of its 3 .* put it into an nn\.ParameterList and name that$"):
        elastic.TorchState(model, optimizer, schedule=schedule, sampler=elastic.ElasticSampler(range(4)))
    elastic.TorchState(model, optimizer, schedule=schedule, scale=nn.ParameterList([scale]))


@pytest.mark.parametrize("name", sorted(elastic.REPLACEMENTS))
def test_a_name_of_horovod_elastic_that_is_not_here_names_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"gradbus.torch.elastic has no '{name}' of Horovod's: use ") as caught:
        getattr(elastic, name)
    assert elastic.REPLACEMENTS[name] in str(caught.value)
    assert not hasattr(elastic, name)
    assert name not in elastic.__all__


def test_what_a_killed_process_has_left_of_the_checkpoint_is_removed_by_the_next_one_that_writes(
    tmp_path: Path,
) -> None:
    ended = 9_999_999  # above all numbers that Linux gives
    running = os.getppid()
    here = socket.gethostname()
    left = [f".state.pt.{here}.{ended}", f".state.pt.{here}.{os.getpid()}"]
    others = [
        f".state.pt.{here}.{running}", f".state.pt.elsewhere-{here}.{ended}", f".state.pt.{here}.0",
        f".state.pt.{here}.9.{ended}", f".other.pt.{here}.{ended}", f".state.pt.{here}.{'9' * 40}",
    ]  # fmt: skip
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"cut short")
    reader, writer = make(checkpoint=tmp_path / "state.pt"), make(checkpoint=tmp_path / "state.pt")
    reader.begin(lambda: False, lambda: False, joins=False)
    reader.commit()
    begin(writer)
    # Numbers may be those of another container that shares the name of the host and this folder, and writes there.
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*left, *others])
    writer.commit()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*others, "state.pt"])
    absent = make(checkpoint=tmp_path / "absent" / "state.pt")
    begin(absent)
    absent.commit()  # a folder that comes later is no error


class Lossy(FixedRanks):
    """A meeting that loses a rank in a vote on the end, until others say in which generation the run has ended, or it
    is alone."""

    goes_on = True

    def __init__(self, ended: int | None) -> None:
        super().__init__(True)
        self.meetings = 0
        self._ended = ended

    def meet(self) -> None:
        self.meetings += 1
        if self.meetings == 2 and self._ended is not None:
            raise NoGeneration("the run has come to its end", ended=self._ended)
        super().meet()


@pytest.mark.parametrize("ended", [1, 2, None])
def test_a_rank_that_is_lost_in_the_last_vote_does_not_take_the_end_from_the_others(
    ended: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Lossy(ended)
    agree = training._agree  # noqa: SLF001 - the vote, which one rank alone cannot lose
    ends = list[int]()

    def vote(*arguments: Any, is_done: bool) -> bool:
        if is_done:
            ends.append(meeting.meetings)
            if meeting.meetings == 1:
                raise PeerLost("script", {1: "its process has ended"})
        return agree(*arguments, is_done=is_done)

    monkeypatch.setattr(training, "_agree", vote)
    monkeypatch.setattr(training, "_make_meeting", lambda state: meeting)
    state, begun = make(epoch=0), list[int]()

    @elastic.run
    def train(state: elastic.TorchState) -> str:
        begun.append(state.epoch)
        state.epoch = 1
        state.commit()
        state.epoch = 2  # after the last commit
        return f"trained {len(begun)}"

    if ended == 2:  # the others have gone on without this rank, whose result is not theirs
        with pytest.raises(SystemExit) as left:
            train(state)
        assert left.value.code == 0
        return
    assert train(state) == ("trained 2" if ended is None else "trained 1")
    assert state.epoch == 2
    assert begun == ([0, 1] if ended is None else [0])  # no other rank had ended: from the last commit on
    assert ends == ([1, 2] if ended is None else [1])
