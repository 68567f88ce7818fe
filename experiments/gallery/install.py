"""Copies for the documents: in few colours, which takes a third of the bytes and looks the same."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from gradbus.experiments.gallery.catalogue import CATALOGUE
from gradbus.runtime.errors import ConfigError

MAX_BYTES = 120_000  # of a picture in the repository
_COLORS = 128


def install(out: Path, images: Path) -> list[Path]:
    """Copy what the documents show, and return the copies.

    Raises:
        ConfigError: there is no folder of images here, or a picture is too large for the repository.
    """
    if not images.is_dir():
        raise ConfigError(f"no folder {images} here: run this from the root of the repository")
    copies = []
    for name, entry in CATALOGUE.items():
        if not entry.in_docs:
            continue
        copy = images / f"{name.replace('_', '-')}.png"
        with Image.open(out / f"{name}.png") as picture:
            picture.convert("RGB").quantize(_COLORS).save(copy, optimize=True)
        if copy.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{copy}: {copy.stat().st_size:,} bytes, at most {MAX_BYTES:,} are meant to be kept here")
        copies.append(copy)
    return copies
