"""How torch finds the backend, and what it says to a torch that cannot have it."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch

from gradbus.torch import register
from gradbus.torch.register import check


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    (found,) = entry_points(group="torch.distributed.backends", name="dds")
    assert found.load() is register


def test_registering_twice_does_no_harm() -> None:
    register()
    register()
    assert torch.distributed.is_backend_available("dds")


@pytest.mark.parametrize("version", ["2.13.0+cpu", "1.9.1", "2.4.0a0"])
def test_an_older_torch_is_told_in_one_line(version: str) -> None:
    with pytest.raises(RuntimeError, match=r"needs torch 2\.14 or newer") as raised:
        check(version, has_distributed=True)
    assert "\n" not in str(raised.value)


def test_a_torch_without_distributed_is_told() -> None:
    with pytest.raises(RuntimeError, match="built without"):
        check("2.15.0", has_distributed=False)


def test_newer_versions_are_taken() -> None:
    for version in ("2.14.0", "2.15.0+cu132", "3.0.0"):
        check(version, has_distributed=True)
