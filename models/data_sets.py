"""The data sets by name, and the glyphs, drawn here for machines that have no MNIST."""

from __future__ import annotations

from dataclasses import replace
from math import radians
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, pad

from .data import Dataset, DataSplit, normalise
from .mnist_files import DataMissing, mnist
from .seeds import seeded_generator

_SIDE = 28  # pixels, as MNIST
_FINE = 2 * _SIDE  # drawn and moved at twice the size, then averaged: smooth edges
_STROKES = (0, 1, 2, 3)  # extra pixels around the outline, at the fine size: from thin to bold
_BATCH = 2000  # bounds the working memory to some 50 MB


def glyphs(seed: int = 0, train: int = 12000, test: int = 2000) -> DataSplit:
    """Digits of Pillow's built-in font, each turned, scaled, sheared, moved, lit and sprinkled with noise at random.

    Same shapes, types and normalisation as MNIST, and easier to learn. A function of its arguments alone, up to the
    version of the font that Pillow brings. ``test`` = 0: no test set. Raises ValueError: a number is out of range.
    """
    if train < 1 or test < 0:
        raise ValueError(f"glyphs: need train >= 1 and test >= 0, got {train} and {test}")
    templates = _templates()
    return DataSplit(
        _draw(templates, train, seeded_generator("glyphs", seed, "train")),
        _draw(templates, test, seeded_generator("glyphs", seed, "test")) if test else None,
        note=f"glyphs drawn from seed {seed}",
    )


def _templates() -> Tensor:
    """One picture for each digit and stroke: float32 (10, strokes, fine, fine) in 0..1, centred."""
    from PIL import Image, ImageDraw, ImageFont  # here, so that nobody else pays for it

    font = ImageFont.load_default(size=0.75 * _FINE)
    pictures = []
    for digit in range(10):
        for stroke in _STROKES:
            picture = Image.new("L", (_FINE, _FINE))
            pen = ImageDraw.Draw(picture)
            pen.text((_FINE / 2, _FINE / 2), str(digit), fill=255, font=font, anchor="mm", stroke_width=stroke)
            pictures.append(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8))
    return torch.stack(pictures).float().div_(255).view(10, len(_STROKES), _FINE, _FINE)


def _draw(templates: Tensor, count: int, generator: torch.Generator) -> Dataset:
    labels = torch.randint(10, (count,), generator=generator)
    pixels = torch.empty(count, _SIDE, _SIDE, dtype=torch.uint8)
    for part in torch.split(torch.arange(count), _BATCH):
        pixels[part] = _draw_batch(templates, labels[part], generator)
    return Dataset("glyphs", normalise(pixels), labels)


def _draw_batch(templates: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 (B, side, side): one changed picture for each label."""
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(count, *shape).uniform_(low, high, generator=generator)

    # The map from a place in the output to a place in the picture, both on the scale -1..1.
    angle = uniform(-radians(15), radians(15))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).view(count, 2, 2)
    slant = torch.eye(2).repeat(count, 1, 1)
    slant[:, 0, 1] = uniform(-0.3, 0.3)
    stretch = uniform(0.7, 1.2, 2, 1)  # above 1 the digit becomes smaller: more of the picture fits in
    move = uniform(-0.15, 0.15, 2, 1)
    theta = torch.cat([stretch * (turn @ slant), move], dim=2)
    # One product of matrices for all: affine_grid, with one for each picture, takes ten times longer for the same bits.
    places = pad(affine_grid(torch.eye(2, 3)[None], [1, 1, _FINE, _FINE], align_corners=False), (0, 1), value=1.0)
    grid = (theta.view(2 * count, 3) @ places.view(-1, 3).T).view(count, 2, _FINE, _FINE).permute(0, 2, 3, 1)

    strokes = torch.randint(templates.shape[1], (count,), generator=generator)
    moved = grid_sample(templates[labels, strokes].unsqueeze(1), grid, align_corners=False)
    ink = avg_pool2d(moved, 2).squeeze(1) * uniform(0.6, 1.0, 1, 1)
    noise = torch.randn(ink.shape, generator=generator) * uniform(0.0, 0.15, 1, 1)
    return (ink + noise).clamp_(0, 1).mul_(255).round_().to(torch.uint8)


SourceName = Literal["auto", "mnist", "glyphs"]


def load(name: SourceName = "auto", data_root: str | Path | None = None, *, download: bool = True) -> DataSplit:
    """Load a data set.

    Args:
        name: ``"mnist"``, ``"glyphs"``, or ``"auto"``: MNIST where it is found or can be downloaded, otherwise glyphs.
            With ``"auto"`` two machines may have different sets: compare ``.name`` before training together.
        data_root: folder of MNIST, see :func:`gradbus.models.resolve_data_root`.
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
