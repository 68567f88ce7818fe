"""Fetch MNIST through torchvision, within a bounded time.

torchvision knows the mirrors and the checksums, but it sets no timeout on its connections: behind a firewall that drops
packets it would hang. So a short probe goes first, and the download itself is a child process with a deadline.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

# The first mirror of torchvision.datasets.MNIST. Named here because the probe must not pay for importing torchvision.
PROBE_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz"
PROBE_TIMEOUT_S = 3.0

_CHILD = "import sys, torchvision; torchvision.datasets.MNIST(sys.argv[1], download=True)"


class DownloadFailed(OSError):
    """MNIST could not be fetched; the message says at which step."""


def download_mnist(root: Path, *, timeout_s: float) -> None:
    """Put the MNIST files below ``root``, in ``MNIST/raw/``.

    The files arrive in a folder of their own and are renamed into place, so that a process which starts meanwhile sees
    a whole file or none, and two downloads at once do no harm.

    Raises:
        DownloadFailed: no mirror answers, the folder cannot be written, or the download fails or takes too long.
    """
    failure = _probe(PROBE_URL, PROBE_TIMEOUT_S)
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
    command = [sys.executable, "-c", _CHILD, os.fspath(folder)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise DownloadFailed(f"the download took longer than {timeout_s:g} s") from None
    if child.returncode != 0:
        last_line = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise DownloadFailed(f"the download failed ({last_line})")


def _probe(url: str, timeout_s: float) -> str | None:
    """None if ``url`` answers in time, otherwise why not.

    Through urllib, so that proxies from the environment are used, as the download will. In a daemon thread, because the
    timeout of a socket does not cover the lookup of the name, which can hang for much longer.
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
