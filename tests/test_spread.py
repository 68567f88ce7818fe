"""Which worker runs which files of tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from spread import FromBothEnds

TESTS = [f"{name}.py::test" for name in "abcdefgh"]


class Worker:
    """Notes which files it is given, and runs nothing."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.files: list[str] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.files += [TESTS[number].partition(".")[0] for number in numbers]


@pytest.mark.parametrize(("count", "first"), [(2, ["ac", "bd"]), (3, ["ac", "bd", "hg"])])
def test_two_workers_take_files_from_the_front_and_a_third_from_the_end(
    count: int, first: list[str], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "tx", [f"{count}*popen"])
    spread = FromBothEnds(pytestconfig)
    workers = [Worker(number) for number in range(count)]
    for worker in workers:
        spread.add_node(worker)
        spread.add_node_collection(worker, TESTS)
    spread.schedule()
    assert ["".join(worker.files[:2]) for worker in workers] == first


def test_a_worker_in_place_of_one_of_two_that_has_crashed_takes_files_from_the_front(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "tx", ["2*popen"])
    spread = FromBothEnds(pytestconfig)
    workers = [Worker(number) for number in range(2)]
    for worker in workers:
        spread.add_node(worker)
        spread.add_node_collection(worker, TESTS)
    spread.schedule()
    spread.remove_node(workers[0])
    new = Worker(2)
    spread.add_node(new)
    spread.add_node_collection(new, TESTS)
    spread.schedule()
    assert new.files[0] == "f", "the first that waits; those of the crashed worker are at the end"
