"""``gradbus matrix``: which choices of a federated run work together, found by asking for every pair of them.

Nothing is written down here of what goes with what: each cell is a configuration, and the answer is that of
:func:`~gradbus.actors.federated.controller.combinations.check_combination`, which a controller asks before it starts.
The tests run whole configurations, few of them, that have every pair that works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from gradbus.actors.federated.controller.combinations import check_combination, fitting_rules, make_strategy
from gradbus.runtime.choices import CLIENT_RULES, CODECS, PRIVACY, SELECTORS, STRATEGIES, Choices
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

CLIENTS = 20  # of each configuration: enough for the strategies that need several

_PAGE = """\
# What works together

Each cell is a configuration of a federated run with these two choices, {clients} clients of which half make a round,
and everything else as it is by default; the training rule is one that makes what the strategy takes, and the strategy
one that takes what the rule makes. **yes**: it starts. A number: it is refused at the start, before data are loaded,
for the reason below.

{counts} `tests/commands/test_matrix.py` runs them all, in configurations that hold as many of them as they can, and
starts a Controller with each of the others. This page is made by the command that asks for each, in a shell in which
`. .venv/bin/activate` has run:

```sh
gradbus matrix --markdown > docs/matrix.md
gradbus matrix --of codec
```
"""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A choice that a run has to make. ``values``: by the names that are shown, settings in groups."""

    name: str
    values: Mapping[str, Mapping[str, Any]]


def _by_name(choices: Choices[Any], **options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each choice of a table as a setting, with the options that it needs."""
    found: dict[str, Any] = {}
    for name in choices.table:
        setting: Any = {"name": name, **options.get(name, {})}
        for key in reversed(choices.key.split(".")[1:]):
            setting = {key: setting}
        found[name] = setting
    return found


def dimensions() -> list[Dimension]:
    """All of them, with all of their choices."""
    enough: dict[str, Any] = {"epsilon": 100.0}
    part = {name: {"fraction": 0.5} for name in SELECTORS.table}
    codecs = _by_name(CODECS)
    return [
        Dimension("strategy", _by_name(STRATEGIES)),
        Dimension("rule", _by_name(CLIENT_RULES)),
        Dimension("mode", {name: {"mode": name} for name in ("synchronous", "asynchronous")}),
        Dimension("clients", {name: {"clients": {"kind": name}} for name in ("clients", "sites")}),
        Dimension("trust", {name: {"limits": {"trust": name}} for name in ("cooperative", "adversarial")}),
        Dimension("privacy", _by_name(PRIVACY, central=enough, local=enough)),
        Dimension("share", {"everything": {}, "a part": {"share": {"exclude": ["*.bias"]}}}),
        Dimension(
            "evaluation",
            {
                "controller": {},
                "clients": {"evaluation": {"every": 1}},
                "cross-site": {"evaluation": {"cross_site": True}},
            },
        ),
        Dimension("secure_aggregation", {"off": {}, "on": {"secure_aggregation": {"enabled": True}}}),
        Dimension("selection", {"all": {}, **_by_name(SELECTORS, **part)}),
        Dimension("codec", codecs),
        Dimension("downlink_codec", {name: {"downlink_codec": {"name": name}} for name in codecs}),
    ]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def configured(*settings: Mapping[str, Any]) -> FederatedConfig:
    """A configuration with these settings.

    Raises:
        ConfigError, ValidationError: there is none.
    """
    merged: Mapping[str, Any] = {"clients": {"num": CLIENTS, "min": CLIENTS // 2}, "rounds": 2}
    for setting in settings:
        merged = _merged(merged, setting)
    rule = merged.get("training", {}).get("rule", {}).get("name")
    strategy = merged.get("strategy", STRATEGIES.default.model_dump())["name"]
    if rule is not None and "strategy" not in merged and rule not in _rules_for(strategy):
        strategy = next((name for name in STRATEGIES.table if rule in _rules_for(name)), strategy)
        merged = _merged(merged, {"strategy": {"name": strategy}})
    elif rule is None and _rules_for(strategy):
        merged = _merged(merged, {"training": {"rule": _rules_for(strategy)[0]}})
    return FederatedConfig.model_validate(merged)


@cache
def _rules_for(strategy: str) -> list[str]:
    """Names of the training rules that make what a strategy takes."""
    return fitting_rules(make_strategy(FederatedConfig.model_validate({"strategy": strategy}), 1))


def refusal(*settings: Mapping[str, Any]) -> str:
    """Why choices do not work together; empty: they do."""
    try:
        check_combination(configured(*settings))
    except ValidationError as error:
        return str(error.errors(include_url=False, include_context=False)[0]["msg"]).removeprefix("Value error, ")
    except ConfigError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Table:
    """Two dimensions against each other. ``cells``: by row, then column; a reason, or empty where it works."""

    rows: str
    columns: str
    cells: Mapping[str, Mapping[str, str]]


def tables(of: str | None = None) -> Iterator[Table]:
    """One dimension against each of the others; without ``of`` every pair of dimensions once.

    Raises:
        ConfigError: there is no dimension ``of``.
    """
    known = {one.name: one for one in dimensions()}
    if of is not None and of not in known:
        raise ConfigError(f"there is no choice {of[:100]!r} to compare with others. There are: {', '.join(known)}")
    for own in [*known] if of is None else [of]:
        rows = known.pop(own)
        for other in known.values():
            cells = {
                name: {column: refusal(setting, chosen) for column, chosen in other.values.items()}
                for name, setting in rows.values.items()
            }
            yield Table(own, other.name, cells)


Chosen = tuple[str, str]  # a dimension and one of its values, by their names


def pairs(of: Iterable[Table]) -> dict[tuple[Chosen, Chosen], str]:
    """The cells of tables: two choices, and why they are refused; empty: they work."""
    return {
        ((table.rows, name), (table.columns, column)): reason
        for table in of
        for name, row in table.cells.items()
        for column, reason in row.items()
    }


def as_markdown(of: str | None = None) -> str:
    """The tables with their reasons, as a page. Raises ConfigError as :func:`tables` does."""
    reasons, found = _Reasons(), list(tables(of))
    refused = [bool(reason) for reason in pairs(found).values()]
    counts = f"Of {len(refused)} pairs {refused.count(False)} work."
    parts, above = [_PAGE.format(clients=CLIENTS, counts=counts)], ""
    for table in found:
        columns = list(next(iter(table.cells.values())))
        lines = [f"| {table.rows} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for name, row in table.cells.items():
            lines.append(f"| {name} | " + " | ".join(reasons.cell(reason) for reason in row.values()) + " |")
        if table.rows != above:
            parts.append(f"## {table.rows}\n")
            above = table.rows
        parts.append(f"### {table.rows} by {table.columns}\n\n" + "\n".join(lines) + "\n")
    if reasons.shown:
        parts.append("## Reasons\n\nEach as it is said of the first cell with its number.\n\n" + reasons.listed(". "))
    return "\n".join(parts).rstrip("\n")


def as_text(of: str | None = None) -> str:
    """Return the same for a terminal. Raises ConfigError as :func:`tables` does."""
    reasons, lines = _Reasons(), list[str]()
    for table in tables(of):
        columns = list(next(iter(table.cells.values())))
        rows = [[f"{table.rows} by {table.columns}", *columns]]
        rows += [[name, *map(reasons.cell, row.values())] for name, row in table.cells.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines.append("")
    return "\n".join([*lines, reasons.listed("  ")]).rstrip("\n")


class _Reasons:
    """Numbers for reasons, equal where these differ in names of choices and in numbers alone."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}  # by kind, in the order of their numbers; as said of the first cell

    def cell(self, reason: str) -> str:
        """Return what a cell shows."""
        if not reason:
            return "yes"
        kind = _kind(reason)
        self.shown.setdefault(kind, reason)
        return str(list(self.shown).index(kind) + 1)

    def listed(self, between: str) -> str:
        return "".join(f"{number}{between}{reason}\n" for number, reason in enumerate(self.shown.values(), 1))


def _kind(reason: str) -> str:
    """Reasons that differ in the names of choices and in numbers alone are one."""
    names = {name.replace("_", "") for choices in (STRATEGIES, CODECS, SELECTORS) for name in choices.table}
    names |= {kind.__name__.lower() for kind in STRATEGIES.table.values()}
    words = [word if word.lower().replace("_", "") not in names else "*" for word in re.findall(r"\w+|\W+", reason)]
    return re.sub(r"\d+", "#", "".join(words))
