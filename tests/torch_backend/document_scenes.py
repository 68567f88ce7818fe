"""Runs examples of the documentation as torchrun would."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys

from torch_node import RankLocation


def examples(place: RankLocation) -> list[str]:
    """What each of them prints."""
    printed = []
    for path, port in zip(place.options["paths"], place.options["ports"], strict=True):
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.rank),
            "WORLD_SIZE": str(place.world),
        }
        sys.path.insert(0, os.path.dirname(path))  # as Python itself does for a script
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(path, run_name="__main__")
        printed.append(out.getvalue())
    return printed
