"""MNIST: from the files that torchvision keeps or would fetch, read and downloaded within bounds.

IDX, the format of the files, is read here because torchvision reads unpacked files only (it would write next to the
archives, and a shared data folder is often read-only), and takes seconds to import. It fetches the files, as it has the
mirrors and the checksums, but sets no timeout on its connections: so a short probe goes first, and the download is a
child process with a deadline.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .data import Dataset, DataSplit, normalise

MAX_BYTES = 1 << 30  # of an array: twice the largest known set in this format, EMNIST
MAX_DIMS = 8
_UINT8 = 0x08
_STEP_BYTES = 1 << 20


def read_idx(path: Path) -> Tensor:
    """The array of unsigned bytes in ``path``, gunzipped in memory if the name ends in ``.gz``.

    No more memory is taken than the file has bytes for, and no more is unpacked than its header claims.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not an IDX file of unsigned bytes, it is cut short, or beyond the limits.
    """
    if path.suffix != ".gz":
        with path.open("rb") as file:
            return _read(file, path)
    try:
        with gzip.open(path) as file:
            return _read(file, path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged gzip file ({error}); remove it and download it again") from None


def _read(file: BinaryIO | gzip.GzipFile, path: Path) -> Tensor:
    start = file.read(4)
    if len(start) < 4 or start[:3] != bytes([0, 0, _UINT8]):
        raise ValueError(f"{path}: not an IDX file of unsigned bytes, it starts with {start.hex() or 'nothing'}")
    dims = start[3]
    if dims > MAX_DIMS:
        raise ValueError(f"{path}: header says {dims} dimensions, at most {MAX_DIMS}")
    sizes = file.read(4 * dims)
    if len(sizes) < 4 * dims:
        raise ValueError(f"{path}: cut short inside the header, {4 + len(sizes)} of {4 + 4 * dims} bytes")
    shape = struct.unpack(f">{dims}I", sizes)
    size = math.prod(shape)
    if max(size, math.prod(max(1, extent) for extent in shape)) > MAX_BYTES:  # strides of an empty array count, too
        raise ValueError(f"{path}: header says {size} bytes {shape}, at most {MAX_BYTES} bytes are read")
    content = bytearray()
    # In steps, for the size is only a claim; and one byte more, to see whether there is one.
    while len(content) <= size and (some := file.read(min(_STEP_BYTES, size + 1 - len(content)))):
        content += some
    if len(content) != size:
        found = "more" if len(content) > size else len(content)
        raise ValueError(f"{path}: header says {size} bytes {shape}, the file has {found}")
    return torch.frombuffer(content, dtype=torch.uint8).view(shape) if size else torch.empty(shape, dtype=torch.uint8)


# The first mirror of torchvision.datasets.MNIST. Named here because the probe must not pay for importing torchvision.
PROBE_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz"
PROBE_TIMEOUT_S = 3.0

CHILD_PROGRAM = "import sys, torchvision; torchvision.datasets.MNIST(sys.argv[1], download=True)"


class DownloadFailed(OSError):
    """MNIST could not be fetched; the message names the step."""


def download_mnist(root: Path, *, timeout_s: float) -> None:
    """Put the MNIST files below ``root``, in ``MNIST/raw/``.

    The files arrive in a folder of their own and are renamed into place: other processes see a whole file or none.

    Raises:
        DownloadFailed: no mirror answers, the folder cannot be written, or the download fails or takes too long.
    """
    failure = probe(PROBE_URL, PROBE_TIMEOUT_S)
    if failure is not None:
        raise DownloadFailed(f"the mirror does not answer ({failure})")
    raw = root / "MNIST" / "raw"
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
            _run_child(Path(folder), timeout_s)
            for file in sorted((Path(folder) / "MNIST" / "raw").iterdir()):
                os.replace(file, raw / file.name)
    except DownloadFailed:
        raise
    except OSError as error:
        raise DownloadFailed(f"{root} cannot be written ({error.strerror})") from None


def _run_child(folder: Path, timeout_s: float) -> None:
    command = [sys.executable, "-c", CHILD_PROGRAM, os.fspath(folder)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise DownloadFailed(f"the download took longer than {timeout_s:g} s") from None
    if child.returncode != 0:
        last_line = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise DownloadFailed(f"the download failed ({last_line})")


def probe(url: str, timeout_s: float) -> str | None:
    """None if ``url`` answers in time, otherwise why not.

    In a daemon thread, because the timeout of a socket does not cover the lookup of the name, which may hang.
    """
    outcome: list[str | None] = [f"nothing within {timeout_s:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
                outcome[0] = None
        except urllib.error.URLError as error:
            outcome[0] = str(error.reason)
        except OSError as error:
            outcome[0] = str(error) or type(error).__name__

    thread = threading.Thread(target=ask, name="mnist-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0]


DATA_ROOT_VARIABLE = "GRADBUS_DATA"


class DataMissing(FileNotFoundError):
    """A data set is neither on disk, below ``root``, nor to be had from the network."""

    def __init__(self, message: str, root: Path) -> None:
        super().__init__(message)
        self.root = root


def resolve_data_root(data_root: str | Path | None = None) -> Path:
    """The argument, else the environment variable ``GRADBUS_DATA``, else ``gradbus/data`` in the user's cache."""
    named = data_root or os.environ.get(DATA_ROOT_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradbus" / "data"


def mnist(
    data_root: str | Path | None = None, *, download: bool = True, download_timeout_s: float = 120.0
) -> DataSplit:
    """The 60,000 training and 10,000 test digits, normalised.

    Reads ``MNIST/raw/`` below the root, as torchvision keeps it, unpacked or as ``.gz``. Only a download writes there.

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
        return _read_both(raw)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(error.filename).name
    cure = f"put the four MNIST files there or name another folder with {DATA_ROOT_VARIABLE}"
    if not download:
        raise DataMissing(f"no {missing} in {raw} and downloads are off; {cure}", root)
    try:
        download_mnist(root, timeout_s=download_timeout_s)
    except DownloadFailed as error:
        raise DataMissing(f"no {missing} in {raw} and {error}; {cure}", root) from None
    return _read_both(raw)


def _read_both(raw: Path) -> DataSplit:
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
