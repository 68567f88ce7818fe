"""Choose the build of PyTorch that ``make setup`` installs, and install the one for CPUs.

For Linux on x86-64 a package registry has one build, with 4.5 GB of CUDA. PyTorch's own index has one without. It is
installed here, before everything else and by itself: what is installed afterwards, from the registry, finds it there,
as ``torch==2.15.0`` in constraints.txt is met by 2.15.0+cpu. So the index serves these two packages and no others: it
has old versions of numpy, pillow and more, which an installer that is given both indexes at once would choose from.

Run by the interpreter of the environment, with the standard library alone: nothing else is there yet.
"""

from __future__ import annotations

import argparse
import html
import importlib.metadata
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("torch", "torchvision")  # of which the index has builds for CPUs that fit each other
ANSWER_S = 3.0  # within which the index has to answer
PAGE_S = 30.0  # within which a page of it has to arrive after that
_MAX_PAGE_BYTES = 32 << 20
_CUDA = "with CUDA, 4.5 GB more on disk"
_DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl")


class NotThere(Exception):
    """The index does not answer, or lacks what fits this interpreter; the text says which."""


class Wheel(NamedTuple):
    """A file of an index.

    Attributes:
        requirement: the version exactly, as ``torch==2.15.0+cpu``.
    """

    requirement: str
    url: str


def has_driver(root: Path = Path("/"), path: str | None = None) -> bool:
    """Whether this machine has NVIDIA's driver. ``path``: where programs are looked for, by default PATH."""
    return any((root / file).exists() for file in _DRIVER_FILES) or shutil.which("nvidia-smi", path=path) is not None


def has_two_builds(system: str, machine: str) -> bool:
    """Whether the registry's build for such a machine brings CUDA. Elsewhere it is for CPUs."""
    return system == "Linux" and machine == "x86_64"


def read_pins(constraints: str) -> dict[str, str]:
    """The version of each of the packages in the text of constraints.txt. Raises NotThere: one has none."""
    found = dict(re.findall(r"^([\w.-]+)==([^\s;+]+)\s*$", constraints, re.MULTILINE))
    if missing := [name for name in PACKAGES if name not in found]:
        raise NotThere(f"constraints.txt has no version of {missing[0]}")
    return {name: found[name] for name in PACKAGES}


def fetch(url: str, *, method: str = "GET", answer_s: float = ANSWER_S) -> tuple[bytes, int]:
    """Get the body at a URL, and the size that its header says, or 0.

    In a thread of its own, which is left behind at the deadline: a look-up of a name cannot be cut short otherwise.

    Raises:
        NotThere: there was no answer within ``answer_s``, or another one than 200.
    """
    answered, done = threading.Event(), threading.Event()
    body, size, failure = b"", 0, ""

    def get() -> None:
        nonlocal body, size, failure
        try:
            request = urllib.request.Request(url, method=method)
            with urllib.request.urlopen(request, timeout=PAGE_S) as response:
                answered.set()
                size = int(response.headers.get("Content-Length") or 0)
                body = response.read(_MAX_PAGE_BYTES)
        except (OSError, ValueError) as error:  # HTTP errors and those of the resolver are OSErrors
            failure = " ".join(str(getattr(error, "reason", "") or error).split())[:200] or type(error).__name__
        answered.set()
        done.set()

    threading.Thread(target=get, name="fetch", daemon=True).start()
    if not answered.wait(answer_s):
        raise NotThere(f"it did not answer within {answer_s:g} s")
    if not done.wait(PAGE_S):
        raise NotThere(f"its page did not arrive within {PAGE_S:g} s")
    if failure:
        raise NotThere(failure)
    return body, size


def find_wheel(page: str, url: str, name: str, version: str) -> Wheel:
    """The build for CPUs of a version that fits this interpreter, on a page of a package as PEP 503 describes it.

    Raises:
        NotThere: the page has none.
    """
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    fits = re.compile(rf"{name}-{re.escape(version)}\+cpu-{python}-{python}{sys.abiflags}-[\w.]*linux[\w.]*x86_64\.whl")
    for link in re.findall(r"""<a\s[^>]*?href=["']([^"']+)["']""", page, re.IGNORECASE):
        whole = urllib.parse.urljoin(url, html.unescape(link))
        if fits.fullmatch(urllib.parse.unquote(urllib.parse.urlsplit(whole).path.rpartition("/")[2])):
            return Wheel(f"{name}=={version}+cpu", whole.partition("#")[0])
    raise NotThere(f"it has no {name} {version}+cpu for Python {sys.version_info[0]}.{sys.version_info[1]}")


def look_up(index: str, pins: dict[str, str]) -> list[Wheel]:
    """The builds for CPUs of all packages. Raises NotThere."""
    wheels = []
    for name, version in pins.items():
        url = f"{index.rstrip('/')}/{name}/"
        wheels.append(find_wheel(fetch(url)[0].decode(errors="replace"), url, name, version))
    return wheels


def size_of(wheels: Sequence[Wheel]) -> str:
    """What is to be downloaded, for people, as far as the index tells."""
    try:
        size = sum(fetch(wheel.url, method="HEAD")[1] for wheel in wheels)
    except NotThere:
        return ""
    return f"{size / 1e9:.2f} GB to download, " if size >= 1e7 else f"{size / 1e6:.2f} MB to download, "


def installed(name: str) -> str:
    """The version that is installed in this environment; empty: none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_installer(
    uv: str, arguments: Sequence[str], *, for_uv: Sequence[str] = (), for_pip: Sequence[str] = ()
) -> bool:
    """Run an installer on this environment: uv, if there is one, and pip where that fails. Returns whether one did it.

    Args:
        uv: its command, or "". arguments: that both have, the command first.
    """
    command, *rest = arguments
    if uv and not subprocess.call([*shlex.split(uv), "pip", command, "--python", sys.executable, *for_uv, *rest]):
        return True
    pip = [sys.executable, "-m", "pip"]
    if subprocess.call([*pip, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        subprocess.call([sys.executable, "-m", "ensurepip"], stdout=subprocess.DEVNULL)
    return not subprocess.call([*pip, command, "--disable-pip-version-check", *for_pip, *rest])


def install_for_cpus(index: str, pins: dict[str, str], uv: str, why: str) -> None:
    """Find the builds for CPUs, say what is taken and how large it is, and install them. Raises NotThere."""
    wheels = look_up(index, pins)
    print(f"PyTorch: the build for CPUs, {size_of(wheels)}0.7 GB on disk, from {index}{why}", flush=True)
    # Exact versions, with +cpu, of two packages: so uv may look into other indexes, if the environment names some.
    done = run_installer(
        uv,
        ["install", "--no-deps", *(wheel.requirement for wheel in wheels)],
        for_uv=["--default-index", index, "--index-strategy", "unsafe-best-match"],
        for_pip=["--index-url", index],
    )
    if not done:
        raise NotThere("they could not be installed")
    remove_cuda(uv)


def remove_cuda(uv: str) -> None:
    """Remove the packages that the build with CUDA has brought, which that for CPUs does without."""
    names = {str(one.metadata["Name"]).lower() for one in importlib.metadata.distributions()}
    if there := sorted(name for name in names if name == "triton" or name.startswith(("nvidia-", "cuda-"))):
        run_installer(uv, ["uninstall", *there], for_pip=["-y"])


def remove_those_for_cpus(uv: str) -> None:
    """Remove builds for CPUs that are installed: they meet the pins, so the registry's would not take their place."""
    if there := [name for name in PACKAGES if installed(name).endswith("+cpu")]:
        run_installer(uv, ["uninstall", *there], for_pip=["-y"])


def set_up(choice: str, index: str, pins: dict[str, str], uv: str) -> int:
    """Decide, say so, and leave the environment so that what is installed next does not change it. Returns the exit
    code."""
    if not has_two_builds(platform.system(), platform.machine()):
        print("PyTorch: the registry's build, which is for CPUs on this platform, 0.1 to 0.2 GB to download")
        return 0
    if choice in ("cuda", "default"):
        print(f"PyTorch: the registry's build, {_CUDA} than the one for CPUs, as TORCH={choice} says", flush=True)
        remove_those_for_cpus(uv)
        return 0
    there = {name: installed(name) for name in PACKAGES}
    wanted = {name: f"{version}+cpu" for name, version in pins.items()}
    if there == wanted or (choice == "auto" and there == pins):
        print(f"PyTorch: {there['torch']}, which is installed")
        return 0
    if choice == "auto" and has_driver():
        print(
            f"PyTorch: the registry's build, {_CUDA} than the one for CPUs, as there is an NVIDIA driver here. "
            "Without CUDA: make setup TORCH=cpu",
            flush=True,
        )
        return 0
    why = (
        ", as TORCH=cpu says"
        if choice == "cpu"
        else (", as there is no NVIDIA driver here. With CUDA all the same: make setup TORCH=cuda")
    )
    try:
        install_for_cpus(index, pins, uv, why)
    except NotThere as error:
        if choice == "cpu":
            print(
                f"make setup: TORCH=cpu, but PyTorch's builds for CPUs cannot be had from {index}: {error}. Check the "
                f"network, or name a mirror: make setup TORCH=cpu TORCH_INDEX=URL. Or take the registry's build, "
                f"{_CUDA}: make setup TORCH=default",
                file=sys.stderr,
            )
            return 1
        print(
            f"PyTorch: the registry's build, {_CUDA} than the one for CPUs, which cannot be had from {index}: "
            f"{error}. With a mirror of that: make setup TORCH=cpu TORCH_INDEX=URL",
            flush=True,
        )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="torch_build", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("choice", nargs="?", default="", help="cpu, cuda, default, or auto")
    parser.add_argument("--index", required=True, help="PyTorch's index of builds for CPUs")
    parser.add_argument("--pins", type=Path, default=Path("constraints.txt"), help="file of versions [%(default)s]")
    parser.add_argument("--uv", default="", help="command of uv; without it, pip installs")
    chosen = parser.parse_args(arguments)
    choice = chosen.choice or "auto"
    if choice not in ("auto", "cpu", "cuda", "default"):
        print(f"make setup: TORCH is cpu, cuda, default, or auto, got {choice!r}", file=sys.stderr)
        return 2
    try:
        pins = read_pins(chosen.pins.read_text(encoding="utf-8"))
    except NotThere as error:
        print(f"make setup: {error}", file=sys.stderr)
        return 2
    return set_up(choice, chosen.index, pins, chosen.uv)


if __name__ == "__main__":
    sys.exit(main())
