"""Reading the pages of docs/: sections, tables and blocks of Python."""

from __future__ import annotations

import re


def section(page: str, title: str) -> str:
    """The text below a heading, down to the next one of any level."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    assert match, f"no section {title!r}"
    return match[1]


def tables(text: str, first: str) -> list[list[list[str]]]:
    """Cells of all tables whose first column has this heading."""
    found = re.findall(rf"^\| *{re.escape(first)} *\|.*\n\|[-|]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in body.strip().split("\n")] for body in found
    ]


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the first table whose first column has this heading."""
    found = tables(text, first)
    assert found, f"no table that starts with {first!r}"
    return found[0]


def fenced_blocks(text: str, language: str) -> list[str]:
    """The blocks of a language; ``""``: those that name none."""
    return [block for found, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if found == language]


def python_blocks(page: str) -> list[str]:
    """The blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
