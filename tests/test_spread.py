"""Which worker runs which files of tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from spread import FromBothEnds

TESTS = [f"{name}.py::test" for name in "abcdefgh"]


class Worker:
    """Notes which files it is given, and runs nothing."""

    shutting_down = False
    done = 0

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.files: list[str] = []

    def shutdown(self) -> None:
        self.shutting_down = True

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.files += [TESTS[number].partition(".")[0] for number in numbers]


def scheduled(count: int, config: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> tuple[FromBothEnds, list[Worker]]:
    """A run with so many workers, all of which have been given their first files."""
    monkeypatch.setattr(config.option, "tx", [f"{count}*popen"])
    spread = FromBothEnds(config)
    workers = [Worker(number) for number in range(count)]
    for worker in workers:
        spread.add_node(worker)
        spread.add_node_collection(worker, TESTS)
    spread.schedule()
    return spread, workers


def replaced(spread: FromBothEnds, number: int) -> Worker:
    """A worker in place of one that has crashed, which has been given its first files."""
    worker = Worker(number)
    spread.add_node(worker)
    spread.add_node_collection(worker, TESTS)
    spread.schedule()
    return worker


@pytest.mark.parametrize(
    ("count", "first"), [(2, ["ac", "bd"]), (3, ["ac", "bd", "hg"]), (4, ["ac", "bd", "hf", "ge"])]
)
def test_two_workers_take_files_from_the_front_and_others_from_the_end(
    count: int, first: list[str], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, workers = scheduled(count, pytestconfig, monkeypatch)
    assert ["".join(worker.files[:2]) for worker in workers] == first


def test_a_worker_in_place_of_one_of_two_that_has_crashed_takes_files_from_the_front(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread, workers = scheduled(2, pytestconfig, monkeypatch)
    spread.remove_node(workers[0])
    assert replaced(spread, 2).files[0] == "f", "the first that waits; those of the crashed worker are at the end"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_a_crashed_worker_has_left_is_run_by_the_others_but_not_the_test_that_it_crashed_in(
    count: int, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread, workers = scheduled(count, pytestconfig, monkeypatch)

    def run_one(worker: Worker) -> bool:
        """As a worker does: its last test waits for another one, or for the end."""
        if len(worker.files) - worker.done < (1 if worker.shutting_down else 2):
            return False
        worker.done += 1
        spread.mark_test_complete(worker, TESTS.index(f"{worker.files[worker.done - 1]}.py::test"))
        return True

    crashes = workers.pop()
    assert run_one(crashes)
    finished, crashed = crashes.files[:2]
    assert spread.remove_node(crashes) == f"{crashed}.py::test"
    workers.append(replaced(spread, count))
    while sum(run_one(worker) for worker in workers):
        if spread.tests_finished:
            for worker in workers:
                worker.shutdown()
    assert spread.tests_finished
    assert not spread.has_pending
    run = [file for worker in workers for file in worker.files]
    assert sorted(run) == sorted(set("abcdefgh") - {finished, crashed})
