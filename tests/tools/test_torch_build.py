"""A machine without a GPU gets PyTorch without CUDA, where PyTorch's own index answers, and is told what it gets."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch_build
from torch_build import NotThere, Wheel, fetch, find_wheel, has_driver, has_two_builds, read_pins

ROOT = Path(__file__).resolve().parents[2]
PINS = {"torch": "2.15.0", "torchvision": "0.29.2"}
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
LINUX = "manylinux_2_28_x86_64"


def link(name: str, version: str, tag: str = f"{TAG}-{TAG}{sys.abiflags}-{LINUX}") -> str:
    return f'<a href="/whl/cpu/{name}-{version.replace("+", "%2B")}-{tag}.whl#sha256=ab" data-x="1">{name}</a><br/>'


# The decision


@pytest.mark.parametrize("file", ["proc/driver/nvidia/version", "dev/nvidiactl", "bin/nvidia-smi"])
def test_a_driver_is_known_by_its_files_or_its_program(file: str, tmp_path: Path) -> None:
    programs = str(tmp_path / "bin")
    assert not has_driver(tmp_path, programs)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch(mode=0o755)
    assert has_driver(tmp_path, programs)


def test_only_linux_on_x86_64_has_two_builds() -> None:
    assert has_two_builds("Linux", "x86_64")
    assert not has_two_builds("Linux", "aarch64")
    assert not has_two_builds("Darwin", "arm64")


def test_the_versions_are_those_of_constraints_txt() -> None:
    assert read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")).keys() == PINS.keys()
    with pytest.raises(NotThere, match="no version of torchvision"):
        read_pins("torch==2.15.0\nnumpy==2 ; python_version < '3.12'\n")


def test_the_build_of_this_version_and_interpreter_is_found_on_the_page() -> None:
    page = link("torch", "2.14.1+cpu") + link("torch", "2.15.0+cpu", f"cp39-cp39-{LINUX}") + link("torch", "2.15.0+cpu")
    found = find_wheel(page, "http://index/whl/cpu/torch/", "torch", "2.15.0")
    name = f"torch-2.15.0%2Bcpu-{TAG}-{TAG}{sys.abiflags}-{LINUX}.whl"
    assert found == Wheel("torch==2.15.0+cpu", f"http://index/whl/cpu/{name}")


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<a>torch</a>",
        link("torch", "2.15.0"),
        link("torch", "2.15.0+cu130"),
        link("torch", "2.15.1+cpu"),
        link("torch", "2.15.0+cpu", f"cp39-cp39-{LINUX}"),
        link("torch", "2.15.0+cpu", f"{TAG}-{TAG}-macosx_11_0_arm64"),
        link("torch", "2.15.0+cpu", f"{TAG}-{TAG}-manylinux_2_28_aarch64"),
        link("evil-torch", "2.15.0+cpu"),
    ],
)
def test_another_build_is_not_taken_for_it(page: str) -> None:
    with pytest.raises(NotThere, match=r"no torch 2\.15\.0\+cpu for Python 3\.\d+"):
        find_wheel(page, "http://index/torch/", "torch", "2.15.0")


def test_an_index_that_takes_calls_and_does_not_answer_is_given_up_in_time() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(NotThere, match=r"did not answer within 0\.2 s"):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", answer_s=0.2)


# All of `make setup`, with indexes on this machine

BACKEND = """
import base64, hashlib, zipfile
def _make(folder):
    name = "gradbus-0.1-py3-none-any.whl"
    files = {
        "gradbus-0.1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: gradbus\\nVersion: 0.1\\n"
            "Requires-Dist: torch>=2\\nRequires-Dist: torchvision\\nProvides-Extra: dev\\n",
        "gradbus-0.1.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\n"
            "Root-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("gradbus-0.1.dist-info/RECORD", "".join(f"{path},,\\n" for path in files))
    return name
def build_editable(folder, config_settings=None, metadata_directory=None): return _make(folder)
def build_wheel(folder, config_settings=None, metadata_directory=None): return _make(folder)
"""


def make_wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any", needs: tuple[str, ...] = ()) -> None:
    """A package with one empty module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    (folder / name).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name / f"{name}-{version}-{tag}.whl", "w") as wheel:
        record = ""
        for path, text in files.items():
            wheel.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text)}\n"
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address below which a registry and PyTorch's index are, as ``/registry`` and ``/cpu``."""
    folder = tmp_path_factory.mktemp("indexes")
    fits = f"{TAG}-{TAG}{sys.abiflags}-{LINUX}"
    make_wheel(folder / "cpu", "torch", "2.15.0+cpu", fits, ("sympy",))
    make_wheel(folder / "cpu", "torchvision", "0.29.2+cpu", fits, ("torch==2.15.0",))
    make_wheel(folder / "cpu", "sympy", "0.1")  # as PyTorch's index has old versions of what others have newer ones of
    make_wheel(folder / "registry", "torch", "2.15.0", needs=("sympy", "cuda"))
    make_wheel(folder / "registry", "torchvision", "0.29.2", needs=("torch==2.15.0",))
    make_wheel(folder / "registry", "sympy", "1.14")
    make_wheel(folder / "registry", "cuda", "13.0")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


UV = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
INSTALLERS = [
    pytest.param("pip", id="pip"),
    pytest.param("uv", id="uv", marks=pytest.mark.skipif(UV is None, reason="uv is not on PATH")),
]
Setup = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, str]]]


@pytest.fixture
def make_setup(request: pytest.FixtureRequest, indexes: str, tmp_path: Path) -> Setup:
    """Runs `make setup` of a clone that needs torch alone. Returns how it ended, and the versions installed."""
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests" / "tools").mkdir(parents=True)
    for name in ("set_up.sh", "torch_build.py"):
        shutil.copy(ROOT / "tests" / "tools" / name, tmp_path / "tests" / "tools")
    (tmp_path / "backend.py").write_text(BACKEND, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "gradbus"\ndynamic = ["version", "dependencies", "optional-dependencies"]\n',
        encoding="utf-8",
    )
    (tmp_path / "constraints.txt").write_text("sympy==1.14\ntorch==2.15.0\ntorchvision==0.29.2\n", encoding="utf-8")

    def run(*words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        mine = ("PIP_", "UV_", "TORCH", "LOCKED", "NO_UV", "MAKE", "MFLAGS")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(mine)}
        environment |= {
            "PIP_INDEX_URL": f"{indexes}/registry",
            "UV_DEFAULT_INDEX": f"{indexes}/registry",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "UV_CACHE_DIR": str(tmp_path / "uv"),
            "UV_NO_CONFIG": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        installer = ["NO_UV=1"] if request.param == "pip" else [f"UV={UV}"]
        done = subprocess.run(
            ["make", "-s", "setup", f"PYTHON={sys.executable}", *installer, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        found = {}
        for info in tmp_path.glob(".venv/lib/python*/site-packages/*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            found[name] = version
        return done, {name: found[name] for name in ("torch", "torchvision", "sympy", "cuda") if name in found}

    return run


FOR_CPUS = {"torch": "2.15.0+cpu", "torchvision": "0.29.2+cpu", "sympy": "1.14"}
WITH_CUDA = {"torch": "2.15.0", "torchvision": "0.29.2", "sympy": "1.14", "cuda": "13.0"}
two_builds = pytest.mark.skipif(
    not has_two_builds(platform.system(), platform.machine()), reason="the registry's build is for CPUs here"
)


@two_builds
@pytest.mark.slow
@pytest.mark.parametrize("make_setup", INSTALLERS, indirect=True)
def test_the_build_for_cpus_is_installed_with_the_rest_from_the_registry(make_setup: Setup, indexes: str) -> None:
    done, found = make_setup("TORCH=cpu", f"TORCH_INDEX={indexes}/cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found == FOR_CPUS
    size = "0.00 MB to download, 0.7 GB on disk"
    assert f"PyTorch: the build for CPUs, {size}, from {indexes}/cpu, as TORCH=cpu says\n" in done.stdout
    assert "going on with pip" not in done.stdout

    again, found = make_setup(f"TORCH_INDEX={indexes}/cpu")
    assert (again.returncode, again.stdout, found) == (0, "", FOR_CPUS)  # nothing to do

    changed, found = make_setup("TORCH=cuda", f"TORCH_INDEX={indexes}/cpu")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert found == WITH_CUDA
    assert "PyTorch: the registry's build, with CUDA, 4.5 GB more on disk" in changed.stdout


@two_builds
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("make_setup", INSTALLERS, indirect=True)
def test_without_a_choice_the_driver_and_the_index_decide(make_setup: Setup, indexes: str) -> None:
    done, found = make_setup(f"TORCH_INDEX={indexes}/nothing")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found == WITH_CUDA
    if not has_driver():
        assert f"cannot be had from {indexes}/nothing: " in done.stdout
        assert "404" in done.stdout or "Not Found" in done.stdout or "File not found" in done.stdout
        assert "With a mirror of that: make setup TORCH=cpu TORCH_INDEX=URL\n" in done.stdout


@two_builds
@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver here")
@pytest.mark.slow
@pytest.mark.parametrize("make_setup", INSTALLERS, indirect=True)
def test_without_a_driver_the_build_for_cpus_is_taken(make_setup: Setup, indexes: str) -> None:
    done, found = make_setup(f"TORCH_INDEX={indexes}/cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found == FOR_CPUS
    assert "as there is no NVIDIA driver here. With CUDA all the same: make setup TORCH=cuda\n" in done.stdout


@two_builds
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("make_setup", INSTALLERS, indirect=True)
def test_who_asks_for_cpus_and_cannot_have_that_gets_no_cuda(make_setup: Setup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done, found = make_setup("TORCH=cpu", f"TORCH_INDEX=http://127.0.0.1:{port}")
    assert done.returncode == 2  # make's
    assert found == {}
    assert f"make setup: TORCH=cpu, but PyTorch's builds for CPUs cannot be had from http://127.0.0.1:{port}: " in (
        done.stderr
    )
    assert "Check the network, or name a mirror: make setup TORCH=cpu TORCH_INDEX=URL. Or take the registry's" in (
        done.stderr
    )


@pytest.mark.parametrize("choice", ["gpu", "CPU"])
def test_another_choice_is_refused(choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_build.main([choice, "--index", "http://127.0.0.1:9", "--pins", str(ROOT / "constraints.txt")]) == 2
    assert f"TORCH is cpu, cuda, default, or auto, got {choice!r}" in capsys.readouterr().err
