"""The table of planted faults is of the code as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mutations import MUTATIONS, Mutation, Outdated, find

from gradbus.actors.federated.rounds import REPEATED, Round, RoundRules


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_changes_the_lines_that_it_names_and_can_be_undone(
    mutation: Mutation, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        planted.append((owner, name, vars(owner)[name]))
        monkeypatch.setattr(owner, name, value)

    mutation.apply(patch)
    ((owner, name, shipped),) = planted
    assert vars(owner)[name] is not shipped
    monkeypatch.undo()
    assert vars(owner)[name] is shipped
    assert (root / mutation.file).is_file()


def test_a_planted_fault_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = RoundRules(minimum=1, quorum=1.0, deadline_s=10.0, grace_s=0.0)
    round_ = Round(1, [0], rules, now_s=0.0, accepted=[0])
    assert round_.may_send(0) == REPEATED
    find("an update counts twice").apply(monkeypatch.setattr)
    assert round_.may_send(0) is None


def test_lines_that_are_not_there_are_named() -> None:
    with pytest.raises(Outdated, match="no such line"):
        Mutation("x", "admission", MUTATIONS[0].place, "no such line", "", "").apply(setattr)
    with pytest.raises(LookupError, match="an update counts twice"):
        find("nothing")


def test_there_are_mutations_of_each_subject() -> None:
    subjects = Counter(mutation.subject for mutation in MUTATIONS)
    assert subjects.keys() == {"admission", "commit", "resume", "receipts", "commands", "masks", "agreement"}
    assert min(subjects.values()) >= 4
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
