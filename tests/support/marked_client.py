"""A client whose model comes from its controller alone: ``python marked_client.py JSON``. It ends with the run.

:func:`marked_task` makes the task of that controller, whose weights hold a marker.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this folder is for the import of helpers only
    sys.path.remove(str(Path(__file__).parent))

import torch

import gradbus
from gradbus.models import NoopTask
from gradbus.models.noop import VectorModel
from gradbus.runtime.security import Security

_FLOATS = 8
MARKER = struct.pack(f"<{_FLOATS}f", *(random.Random("marker").uniform(1, 2) for _ in range(_FLOATS)))
"""Bytes that the weights consist of, again and again."""


class MarkedTask(NoopTask):
    """A task that learns nothing, and begins with weights that hold the marker."""

    def build_model(self) -> VectorModel:
        """Return the model."""
        model = super().build_model()
        marked = torch.frombuffer(bytearray(MARKER), dtype=torch.float32).repeat(self.num_params // _FLOATS)
        with torch.no_grad():
            model.vector.copy_(marked)
        return model


def place(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``connect``. ``spec``: job, relay, ca and key file."""
    network = gradbus.NetworkConfig(
        links=gradbus.LinkConfig(connect=(spec["relay"],), ca=Path(spec["ca"])),
        shared_memory=False,  # else the weights would not pass the relay
    )
    security = Security(level="psk", key_file=Path(spec["key_file"]))
    return {"job": spec["job"], "network": network, "security": security}


async def _run(spec: dict[str, Any]) -> None:
    async with gradbus.connect(**place(spec)) as bus:
        await gradbus.Client(bus, NoopTask(spec["dim"]), client_id=0).run()


if __name__ == "__main__":
    asyncio.run(_run(json.loads(sys.argv[1])))
