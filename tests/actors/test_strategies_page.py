"""The page of strategies and training rules, beside what can be chosen."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doc_pages import section

from gradbus.runtime.choices import CLIENT_RULES, STRATEGIES, Choices

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
HEADINGS = {"Strategies": STRATEGIES, "Training rules": CLIENT_RULES}
PARTS = ["What", "Equation", "Paper", "Options", "Differs from the paper"]
AT_THE_CLIENT = " (at the client)"  # of a rule whose strategy has the same name
EACH = [(table, name) for table in HEADINGS.values() for name in table.table]


def headings(title: str) -> list[str]:
    """The headings of the next level below a heading."""
    part = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert part
    return re.findall(r"^### (.+)$", part[1], re.MULTILINE)


def parts_of(table: Choices[Any], name: str) -> Mapping[str, str]:
    """The parts of a section, by the words in bold in front."""
    suffix = AT_THE_CLIENT if table is CLIENT_RULES and name in STRATEGIES.table else ""
    found = re.findall(
        r"^- \*\*(.+?):\*\* (.*?)(?=^- \*\*|\Z)", section(PAGE.read_text("utf-8"), name + suffix), re.M | re.S
    )
    return {part: " ".join(text.split()) for part, text in found}


@pytest.mark.parametrize("title", HEADINGS)
def test_each_choice_has_a_section_and_no_other_has(title: str) -> None:
    assert [name.removesuffix(AT_THE_CLIENT) for name in headings(title)] == list(HEADINGS[title].table)


@pytest.mark.parametrize(("table", "name"), EACH)
def test_a_section_has_the_parts_and_the_options_with_their_defaults(table: Choices[Any], name: str) -> None:
    parts = parts_of(table, name)
    assert list(parts) == PARTS
    found = dict(re.findall(r"`(\w+)` \(([^):]+)", parts["Options"]))
    fields = table.options_of(name).model_fields
    assert found == {key: json.dumps(field.default) for key, field in fields.items()}
    assert fields or parts["Options"] == "none."


@pytest.mark.parametrize(("table", "name"), EACH)
def test_the_code_says_where_it_differs_from_its_paper(table: Choices[Any], name: str) -> None:
    if name != "plain":  # which is what there is without a rule
        assert "iffers from the paper" in " ".join((inspect.getmodule(table.find(name)).__doc__ or "").split())
