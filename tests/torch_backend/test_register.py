"""How torch finds the backend, and what it says to a torch that cannot have it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from gradbus.torch import register
from gradbus.torch.register import check_version


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    (found,) = entry_points(group="torch.distributed.backends", name="dds")
    assert found.load() is register


DAMAGED = """
import sys
import torch, torch.distributed as dist

assert not any(name.partition(".")[0] == "gradbus" for name in sys.modules)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
try:
    dist.init_process_group("dds", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print(error, "<-", error.__cause__)
"""


def test_a_damaged_package_breaks_nothing_but_what_asks_for_it(tmp_path: Path) -> None:
    """With the entry points that the package has, and code that cannot be imported: `import torch` works, and so do
    other backends. Without site, so that the package of this environment is not in the way."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (tmp_path / "gradbus").mkdir()
    (tmp_path / "gradbus" / "__init__.py").write_text("raise ImportError('it is damaged')\n")
    facts = tmp_path / "gradbus-9.dist-info"  # comes first, so that of the environment is not looked at
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: gradbus\nVersion: 9\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (facts / "entry_points.txt").write_text("\n".join(groups))
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry.endswith("-packages"))])
    done = subprocess.run(
        [sys.executable, "-S", "-c", DAMAGED],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Failed to load the c10d backend entry point: dds <- it is damaged\n"


def test_registering_twice_does_no_harm() -> None:
    register()
    register()
    assert torch.distributed.is_backend_available("dds")


@pytest.mark.parametrize("version", ["2.13.0+cpu", "1.9.1", "2.6.0+cu124", "2.4.0a0"])
def test_with_an_older_torch_the_import_fails_and_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delitem(sys.modules, "gradbus.torch")
    monkeypatch.setattr(sys.modules["gradbus.torch.register"], "register_scheme", pytest.fail)
    with pytest.raises(ImportError, match=r"needs torch 2\.14 or newer, this is " + re.escape(version)) as raised:
        importlib.import_module("gradbus.torch")
    assert "\n" not in str(raised.value)
    with pytest.raises(ImportError, match=r"needs torch 2\.14"):
        register()


def test_a_torch_without_distributed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="built without"):
        register()


def test_newer_versions_are_taken() -> None:
    for version in ("2.14.0", "2.15.0+cu132", "3.0.0"):
        check_version(version)
