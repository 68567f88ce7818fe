"""torch.compile over models of DistributedDataParallel, and over calls of torch.distributed: as on gloo."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch_node import play

pytestmark = pytest.mark.slow

no_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler, and there is none"
)


def check(compilers: list[str]) -> None:
    for found in play("compile_scenes", "on_both_backends", compilers=compilers, timeout_s=100.0):
        for compiler in compilers:
            mine, expected = found[f"{compiler} dds"], found[f"{compiler} gloo"]
            unequal = [name for name in mine if not all(map(torch.equal, mine[name], expected[name]))]
            assert unequal == [], compiler


def test_compiled_models_train_bit_equal_to_gloo() -> None:
    check(["eager", "aot_eager"])


@no_compiler
def test_so_do_those_that_inductor_compiles() -> None:
    check(["inductor"])
