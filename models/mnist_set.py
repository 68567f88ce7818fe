"""MNIST, from the files torchvision keeps or would fetch."""

from __future__ import annotations

import os
from pathlib import Path

from .data import Dataset, DataSplit, normalise
from .idx import read_idx
from .mnist_download import DownloadFailed, download_mnist

DATA_ROOT_VARIABLE = "GRADBUS_DATA"


class DataMissing(FileNotFoundError):
    """A data set is neither on disk nor to be had from the network.

    Attributes:
        root: the data root that was searched.
    """

    def __init__(self, message: str, root: Path) -> None:
        super().__init__(message)
        self.root = root


def resolve_data_root(data_root: str | Path | None = None) -> Path:
    """The argument, else the environment variable ``GRADBUS_DATA``, else ``gradbus/data`` in the user's cache.

    An empty argument or variable counts as none.
    """
    named = data_root or os.environ.get(DATA_ROOT_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradbus" / "data"


def mnist(
    data_root: str | Path | None = None, *, download: bool = True, download_timeout_s: float = 120.0
) -> DataSplit:
    """The 60,000 training and 10,000 test digits, normalised.

    Reads ``MNIST/raw/`` below the root, the layout of torchvision, unpacked or still as ``.gz``. Files that are there
    are only read; the root is written to by nothing but a download, and that happens only if files are missing.

    Args:
        data_root: see :func:`resolve_data_root`.
        download: fetch missing files. Where no mirror answers this ends after a few seconds.
        download_timeout_s: limit on the whole download.

    Raises:
        DataMissing: files are missing and were not, or could not be, downloaded.
        ValueError: a file is there but damaged; the message names it.
    """
    root = resolve_data_root(data_root)
    raw = root / "MNIST" / "raw"
    try:
        return _read(raw)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(error.filename).name
    cure = f"put the four MNIST files there or name another folder with {DATA_ROOT_VARIABLE}"
    if not download:
        raise DataMissing(f"no {missing} in {raw} and downloads are off; {cure}", root)
    try:
        download_mnist(root, timeout_s=download_timeout_s)
    except DownloadFailed as error:
        raise DataMissing(f"no {missing} in {raw} and {error}; {cure}", root) from None
    return _read(raw)


def _read(raw: Path) -> DataSplit:
    """Both sets; ``FileNotFoundError`` with the file's name if one is missing."""
    test = _read_part(raw, "t10k")  # the small one first: a missing file is found before the large one is unpacked
    return DataSplit(_read_part(raw, "train"), test, note=f"MNIST from {raw}")


def _read_part(raw: Path, part: str) -> Dataset:
    images = read_idx(_plain_or_gz(raw / f"{part}-images-idx3-ubyte"))
    labels = read_idx(_plain_or_gz(raw / f"{part}-labels-idx1-ubyte"))
    return Dataset("mnist", normalise(images), labels.long())


def _plain_or_gz(plain: Path) -> Path:
    packed = plain.with_name(plain.name + ".gz")
    return packed if packed.exists() and not plain.exists() else plain
