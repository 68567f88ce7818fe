"""The table of planted faults is of the code as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fault_simulation.mutations import MUTATIONS, Mutation, Outdated, find, select
from fault_simulation.planted_table import HEADER, PAGE, Outcome, write

from gradbus.actors.federated.controller.rounds import REPEATED, Round, RoundRules


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


def test_a_planted_fault_is_gone_afterwards() -> None:
    shipped = Round.may_send
    with find("an update counts twice").planted():
        assert Round.may_send is not shipped
    assert Round.may_send is shipped


def test_a_subject_chooses_its_mutations_and_a_name_one() -> None:
    assert select("all") == list(MUTATIONS)
    assert {mutation.subject for mutation in select("masks")} == {"masks"}
    assert select("an update counts twice") == [find("an update counts twice")]


def test_the_table_keeps_lines_of_faults_that_were_not_looked_for_and_drops_those_that_are_gone(tmp_path: Path) -> None:
    first, second, third = (mutation.name for mutation in MUTATIONS[:3])
    page = tmp_path / "page.md"
    page.write_text(
        "\n".join(["before", "", *HEADER, f"| {second} | `s4` | 3 | I1 |", "| gone | | | |", "", "after\n"])
    )
    write(page, [Outcome(third, "any", 2000), Outcome(first, "tests/a.py::test_b", is_found=True)])
    assert page.read_text().splitlines() == [
        "before",
        "",
        *HEADER,
        f"| {first} | [a.py](../tests/a.py) |  | the test |",
        f"| {second} | `s4` | 3 | I1 |",
        f"| {third} | `any` | 2000 | not found |",
        "",
        "after",
    ]
    page.write_text("\n".join(["before", *HEADER, "", "after", "", "end"]))
    write(page, [])
    assert page.read_text().splitlines() == ["before", *HEADER, "", "after", "", "end"]
    page.write_text("no table")
    with pytest.raises(ValueError, match="has no table that begins with"):
        write(page, [])


def test_the_page_has_a_line_for_each_planted_fault(root: Path) -> None:
    lines = {line.split("|")[1].strip() for line in (root / PAGE).read_text().splitlines() if line.startswith("| ")}
    assert {mutation.name for mutation in MUTATIONS} <= lines


def test_tests_that_find_a_planted_fault_exist(root: Path) -> None:
    for file, _, name in (mutation.found_by.partition("::") for mutation in MUTATIONS if mutation.found_by):
        assert f"def {name.partition('[')[0]}(" in (root / file).read_text(), f"{file} has no test {name!r}"


def test_lines_that_are_not_there_are_named() -> None:
    with pytest.raises(Outdated, match="no such line"):
        Mutation("x", "admission", MUTATIONS[0].place, "no such line", "", "").apply(setattr)
    with pytest.raises(LookupError, match="an update counts twice"):
        find("nothing")


def test_there_are_mutations_of_each_subject() -> None:
    subjects = Counter(mutation.subject for mutation in MUTATIONS)
    assert subjects.keys() == {
        "admission",
        "commit",
        "resume",
        "receipts",
        "commands",
        "trees",
        "masks",
        "servers",
        "agreement",
        "links",
    }
    assert min(subjects.values()) >= 4
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
