"""The oracles of parameter servers and elastic ranks find what they are there for, in runs written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_simulation import elastic_oracles, oracles, servers_oracles
from fault_simulation.elastic_world import LR, AppliedStep
from fault_simulation.findings import COUNTED_ONCE, ENDS, MEMBERS, SAME_MODEL, STALENESS, STEPS, VERSIONS
from fault_simulation.kernel import CLOCK, START_S
from fault_simulation.tasks import batch_of
from fault_simulation.world import DIM

from gradbus.runtime.errors import CheckpointError, CollectiveTimeout

SERVERS = ("server-0", "server-1")
Entry = tuple[str, str, dict[str, Any]]


@pytest.fixture(autouse=True)
def virtual_time() -> Any:
    CLOCK.now_s = START_S
    yield
    CLOCK.now_s = None


def world_of(journal: list[Entry], **more: Any) -> Any:
    """A run with these decisions, each of a start of an actor."""
    found: list[str] = []
    entries = [(process(name), event, facts) for name, event, facts in journal]
    values: dict[str, Any] = {
        "roles": [*SERVERS, "worker-0", "worker-1"], "workers": 2, "staleness": 0, "pulls": False, "rounds": 6,
        "ended": {}, "is_over": True, "notes": [], "plan": [], "calm_s": START_S, "jobs": {},
        "applied": [], "finished": [], "batches": 2, "epochs": 1, "found": found,
        "network": SimpleNamespace(lease_s=4.0), "circumstances": SimpleNamespace(train_s=0.1),
        "finding": lambda invariant, text: found.append(invariant),
    }  # fmt: skip
    return SimpleNamespace(journal=entries, **(values | more))


def process(name: str, result: Any = None) -> Any:
    return SimpleNamespace(name=name, role=name.partition(".")[0], result=result)


def push(server: str, worker: int, clock: int, *apply: int, count: int = 2) -> Entry:
    return server, "push", {"worker": worker, "clock": clock, "apply": apply, "count": count}


def save(server: str, step: int, updates: int, weights: torch.Tensor | None = None) -> list[Entry]:
    held = torch.zeros(DIM) if weights is None else weights
    facts = {"step": step, "updates": updates, "pieces": [(0, DIM)], "weights": [held]}
    return [(server, "saving", facts), (server, "save", {"step": step})]


def begin(server: str, step: int) -> Entry:
    return server, "ask", {"worker": 0, "kind": "start", "clock": step}


def first_step(server: str) -> list[Entry]:
    """A step of two workers, and its version with the right weights."""
    weights = -LR * (batch_of(DIM, 0, 0, 0) + batch_of(DIM, 1, 0, 0)) / 2
    return [begin(server, 0), push(server, 0, 0), push(server, 1, 0, 0, 1), *save(server, 1, 1, weights)]


def judged(journal: list[Entry], **more: Any) -> list[str]:
    world = world_of(journal, **more)
    servers_oracles.judge(world)
    return list(world.found)


def test_a_run_of_servers_in_order_has_no_findings() -> None:
    assert judged(first_step("server-0.1") + first_step("server-1.1")) == []


def test_weights_that_the_gradients_do_not_make_are_found() -> None:
    assert judged([*first_step("server-0.1")[:-2], *save("server-0.1", 1, 1)]) == [SAME_MODEL]


def test_a_gradient_that_counts_again_after_a_resume_is_found() -> None:
    again: list[Entry] = [
        ("server-0.2", "load", {"step": 1, "updates": 1}), push("server-0.2", 0, 0), push("server-0.2", 1, 0, 0, 1),
        *save("server-0.2", 2, 2),
    ]  # fmt: skip
    assert COUNTED_ONCE in judged(first_step("server-0.1") + again)


def test_a_version_that_goes_on_with_another_number_is_found() -> None:
    assert judged([*first_step("server-0.1")[:-2], *save("server-0.1", 1, 5)], pulls=True) == [VERSIONS]


def test_a_version_that_was_on_the_disk_when_its_server_died_may_be_loaded() -> None:
    loaded: Entry = ("server-0.2", "load", {"step": 1, "updates": 1})
    assert judged([*first_step("server-0.1")[:-1], loaded, begin("server-0.2", 1)]) == []


def test_a_run_that_begins_before_what_all_servers_have_saved_is_found() -> None:
    journal = first_step("server-0.1") + first_step("server-1.1")
    assert judged([*journal, begin("server-0.2", 1)]) == []
    assert judged([*journal, begin("server-0.2", 0)]) == [VERSIONS]


def test_a_step_that_was_loaded_and_never_saved_is_found() -> None:
    assert judged([("server-0.1", "load", {"step": 4, "updates": 4})]) == [VERSIONS]


def test_servers_that_save_different_gradients_as_one_step_are_found() -> None:
    other = [push("server-1.1", 0, 0), push("server-1.1", 1, 1, 0, 1), *save("server-1.1", 1, 1)]
    assert judged(first_step("server-0.1") + other, pulls=True) == [COUNTED_ONCE]


def test_the_last_gradient_of_a_worker_that_was_lost_may_count_at_one_server_only() -> None:
    lost: Entry = ("server-1.1", "lose", {"worker": 1, "apply": (0,), "count": 1})
    other = [push("server-1.1", 0, 0), lost, *save("server-1.1", 1, 1)]
    assert judged(first_step("server-0.1") + other, pulls=True) == []


def test_a_worker_that_is_too_far_ahead_is_found() -> None:
    journal = [push("server-0.1", 0, 0, 0), push("server-0.1", 1, 0, 1), push("server-0.1", 0, 1, 0)]
    assert judged(journal) == []
    assert judged([*journal, push("server-0.1", 0, 2, 0)]) == [STALENESS]
    assert judged([*journal, push("server-0.1", 0, 2, 0)], staleness=1) == []


def test_an_actor_may_only_miss_the_end_of_a_run() -> None:
    late = process("worker-1.2", CollectiveTimeout("request", (0,), 6.0))
    assert judged([], ended={"worker-1": late}) == []
    assert judged([], ended={"worker-1": late}, is_over=False) == [ENDS]
    assert judged([], ended={"worker-1": process("worker-1.1", CheckpointError("damaged"))}) == [ENDS]
    assert judged([], ended={"worker-1": process("worker-1.1", SimpleNamespace(steps=4))}) == [ENDS]


def applied(name: str, generation: int, step: int, first: int, last: int, weights: torch.Tensor) -> AppliedStep:
    return AppliedStep(process(name), 1, generation, step, 0, first, last, weights)


def elastic(journal: list[Entry], steps: list[AppliedStep], *finished: str) -> list[str]:
    ends = [process(name, SimpleNamespace(steps=max(one.step for one in steps), params_hash=1)) for name in finished]
    names = {name for name, _, _ in journal} | {one.process.name for one in steps}
    world = world_of(journal, applied=steps, finished=ends, jobs=dict.fromkeys(names, 1), roles=["rank-0", "rank-1"])
    elastic_oracles.judge(world)
    return list(world.found)


def started(name: str, generation: int, step: int) -> Entry:
    return name, "started", {"generation": generation, "step": step}


FIRST = torch.zeros(DIM) + LR * batch_of(DIM, 0, 0, 0)  # after the batch 0, with a momentum of zero before
BOTH = torch.zeros(DIM) + LR * (batch_of(DIM, 0, 0, 0) + batch_of(DIM, 0, 0, 1)) / 2


def test_an_elastic_run_in_order_has_no_findings() -> None:
    steps = [applied("rank-0.1", 1, 1, 0, 2, BOTH), applied("rank-1.1", 1, 1, 0, 2, BOTH)]
    assert elastic([started("rank-0.1", 1, 0), started("rank-1.1", 1, 0)], steps, "rank-0.1", "rank-1.1") == []


def test_two_lists_of_members_of_one_generation_are_found() -> None:
    journal: list[Entry] = [
        (name, "generation", {"generation": 2, "members": ((number, 7),)})
        for number, name in enumerate(("rank-0.1", "rank-1.1"))
    ]
    assert elastic(journal, []) == [MEMBERS]


def test_members_that_begin_at_different_steps_or_behind_one_of_them_are_found() -> None:
    step = applied("rank-0.1", 1, 1, 0, 1, FIRST)
    assert elastic([started("rank-0.1", 2, 1), started("rank-1.1", 2, 0)], [step]) == [STEPS]
    assert elastic([started("rank-0.1", 2, 0), started("rank-1.1", 2, 0)], [step]) == [STEPS]
    assert elastic([started("rank-0.1", 2, 1), started("rank-1.1", 2, 1)], [step]) == []


def test_ranks_with_different_batches_or_weights_in_a_step_are_found() -> None:
    step = applied("rank-0.1", 1, 1, 0, 2, BOTH)
    assert elastic([], [step, applied("rank-1.1", 1, 1, 0, 1, BOTH)]) == [STEPS]
    assert elastic([], [step, applied("rank-1.1", 1, 1, 0, 2, FIRST)]) == [SAME_MODEL]


def test_a_batch_that_is_lost_or_taken_twice_is_found() -> None:
    first = applied("rank-0.1", 1, 1, 0, 1, FIRST)
    assert elastic([], [first, applied("rank-0.1", 2, 2, 0, 2, BOTH)], "rank-0.1") == [STEPS]
    assert elastic([], [first], "rank-0.1") == [STEPS]


def test_weights_that_the_batches_do_not_make_are_found() -> None:
    assert elastic([], [applied("rank-0.1", 1, 1, 0, 2, FIRST)], "rank-0.1") == [SAME_MODEL]


def test_a_step_counts_as_the_newest_generation_has_applied_it() -> None:
    steps = [applied("rank-1.1", 1, 1, 0, 1, FIRST), applied("rank-0.1", 2, 1, 0, 2, BOTH)]
    assert elastic([], steps, "rank-0.1") == []


def out_of_reach(*controllers: Any, apart_s: tuple[float, float] = (0.0, 0.0), over_s: float | None = None) -> bool:
    """Return whether the oracle excuses a client that ends at 100 s, after a wait of 2 s, without its last receipt.
    ``over_s``: when its controller has ended well."""
    world = SimpleNamespace(excuses={"client-0": [apart_s], "controller": []}, above=lambda _: "controller")
    world.processes = list(controllers)
    world.ended = {} if over_s is None else {"controller": controller(over_s, killed=False)}
    return oracles.was_out_of_reach_at_the_end(world, SimpleNamespace(role="client-0", ended_s=100.0))  # type: ignore[arg-type]


def controller(ended_s: float, *, killed: bool) -> Any:
    return SimpleNamespace(role="controller", ended_s=ended_s, killed=killed)


def test_a_client_whose_controller_is_killed_while_it_waits_may_miss_its_last_receipt() -> None:
    assert out_of_reach(controller(98.0, killed=True))
    assert not out_of_reach(controller(90.0, killed=True)), "its next start has been found since"
    assert not out_of_reach(controller(99.0, killed=False)), "it waits for its clients before it ends"


def test_a_client_that_was_cut_off_until_its_controller_ended_may_miss_its_last_receipt_however_long_it_waits() -> None:
    assert out_of_reach(apart_s=(70.0, 88.0), over_s=88.0)
    assert not out_of_reach(apart_s=(70.0, 88.0), over_s=98.0), "it was within reach for ten seconds"
    assert not out_of_reach(apart_s=(70.0, 88.0)), "its controller runs"
    assert not out_of_reach(apart_s=(95.0, 99.0), over_s=88.0), "nothing could come any more"


def test_more_rounds_may_take_longer_by_their_trainings_and_messages_alone() -> None:
    def allowed_s(rounds: int, train_s: float) -> float:
        world = SimpleNamespace(rounds=rounds, circumstances=SimpleNamespace(train_s=train_s))
        return oracles.more_rounds_s(world)  # type: ignore[arg-type]

    assert allowed_s(6, 1.0) == 0.0
    assert allowed_s(20, 1.0) == pytest.approx(84.0)
    assert allowed_s(20, 0.005) < 29


def test_a_client_with_an_identity_may_miss_the_end_shortly_after_its_controller_was_paused() -> None:
    client, last = SimpleNamespace(role="client-0"), SimpleNamespace(role="controller", ended_s=100.0, started_s=50.0)

    def may_miss(client_s: float, controller_s: float) -> bool:
        world = SimpleNamespace(excused_s={"client-0": client_s, "controller": controller_s})
        return oracles.has_to_join_again(world, client, last)  # type: ignore[arg-type]

    assert may_miss(0.0, 95.0)
    assert may_miss(95.0, 0.0)
    assert not may_miss(91.0, 91.0)
