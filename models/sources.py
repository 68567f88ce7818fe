"""Pick a data set by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from .data import DataSplit
from .glyph_set import glyphs
from .mnist_set import DataMissing, mnist

SourceName = Literal["auto", "mnist", "glyphs"]


def load(name: SourceName = "auto", data_root: str | Path | None = None, *, download: bool = True) -> DataSplit:
    """Load a data set; ``.note`` of the result says in one line what was taken and why, for the caller's log.

    Args:
        name: ``"mnist"``, ``"glyphs"``, or ``"auto"``: MNIST where it is found or can be downloaded, otherwise glyphs.
            With ``"auto"`` two machines may come to different answers: compare ``.name`` before training together.
        data_root: where MNIST is looked for, see :func:`gradbus.models.resolve_data_root`.
        download: whether missing MNIST files may be fetched.

    Raises:
        DataMissing: ``"mnist"`` was asked for by name and cannot be had.
        ValueError: no such name.
    """
    match name:
        case "mnist":
            return mnist(data_root, download=download)
        case "glyphs":
            return glyphs()
        case "auto":
            try:
                return mnist(data_root, download=download)
            except DataMissing as missing:
                return replace(glyphs(), note=f"glyphs in place of MNIST: {missing}")
    raise ValueError(f"no data set {name!r}; there are 'auto', 'mnist' and 'glyphs'")
