"""Steps that the other ranks have made while this one waits for the state of the run."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradbus.actors.data_parallel.step import TrainingStep


class RecordedStep(NamedTuple):
    """A step of the other ranks. ``flats``: gradients that all have applied, of each bucket; None: it was skipped."""

    number: int
    epoch: int
    flats: list[Tensor] | None


class RecordedSteps:
    """The results of steps, kept in their order until they can be applied."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def add(self, step: TrainingStep) -> None:
        """Keep a copy of the result of a step."""
        flats = None if step.skipped_by is not None else [bucket.flat.clone() for bucket in step.gradients]
        self.steps.append(RecordedStep(step.number, step.epoch, flats))

    @property
    def nbytes(self) -> int:
        """Return the bytes of these gradients, and those of two steps more: so many are made before all ranks rest
        where this rank asks for it."""
        sizes = [sum(flat.numel() * flat.element_size() for flat in step.flats or ()) for step in self.steps]
        return sum(sizes) + 2 * max(sizes, default=0)
