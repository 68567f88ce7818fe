"""Figures that others have published, for comparison: published.json, with their source."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gradbus.runtime.json_text import parse_json


class Published(BaseModel):
    """What was published on the subject of one figure.

    Attributes:
        comparable: whether it may be drawn beside ours. values: by series. unit: of the values, as published.
        divide_by: what makes of a published value one that counts the same as ours.
        note: why it is comparable only so far, or not at all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    comparable: bool
    unit: str
    values: Mapping[str, float]
    divide_by: Annotated[float, Field(gt=0)] = 1.0
    note: str

    def marks(self) -> dict[str, float]:
        """What may be drawn, by series, in the published unit but counted as ours; empty if nothing is comparable."""
        return {name: value / self.divide_by for name, value in self.values.items()} if self.comparable else {}

    def sentence(self) -> str:
        """For a caption."""
        if self.comparable:
            return f"Stars: published by the original. {self.note}"
        listed = ", ".join(f"{name} {value:,g}" for name, value in self.values.items())
        return f"Published by the original, in {self.unit}: {listed}. {self.note}."


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    figures: Mapping[str, Published]


def published(figure: str) -> Published | None:
    """On this figure's subject, if anything was."""
    return _load().figures.get(figure)


def source() -> str:
    """Where all of it comes from."""
    return _load().source


def _load() -> _File:
    text = files("gradbus.experiments.gallery").joinpath("published.json").read_text(encoding="utf-8")
    return _File.model_validate(parse_json(text))
