"""Without the library of the transport a process group ends with one sentence that says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradbus.runtime.needs import install_line

SCRIPT = """
import sys
sys.modules["cyclonedds"] = None  # as if it were not installed
from datetime import timedelta
import torch.distributed as dist
import gradbus.torch
dist.init_process_group("dds", rank=0, world_size=2, timeout=timedelta(seconds=20), {arguments})
dist.barrier()
"""


@pytest.mark.parametrize(
    "arguments", ["init_method='dds://7/missing-packages'", "store=dist.HashStore()"], ids=["address", "store"]
)
def test_a_process_group_without_the_library_of_its_bus_says_how_to_install_it(arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT.format(arguments=arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    expected = "ImportError: gradbus: the package cyclonedds is not installed here. Install it: "
    assert done.stderr.splitlines()[-1].startswith(expected + install_line("cyclonedds"))
    assert not any(chained in done.stderr for chained in ("direct cause", "During handling"))
