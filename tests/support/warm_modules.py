"""What the server of :mod:`warm` loads before it forks. Nothing here starts a thread or opens DDS."""

from __future__ import annotations

import atexit
import gc
import importlib
import os

from backend_support import HAS_TORCH_BACKEND

_PATH = "PYTHONPATH"
_NAMES = (
    "_pytest.config",  # every child runs the script that the tests were started with, under another name
    "cryptography.hazmat.primitives.ciphers.aead",
    "matplotlib.pyplot",
    "torch._dynamo",  # the first optimizer of a process loads it
    "torch.distributed",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "gradbus.actors.aggregation.adaptive",
    "gradbus.actors.aggregation.robust",
    "gradbus.actors.data_parallel.elastic",
    "gradbus.actors.parameter_server.server",
    "gradbus.actors.parameter_server.worker",
    "gradbus.commands.cli.main",
    "gradbus.commands.history.invariants",
    "gradbus.commands.run.commands",
    "gradbus.models",
    "gradbus.runtime.bus.bus",
    "gradbus.runtime.collectives",
    "gradbus.runtime.security.identity.join_transport",
    "ddp_node",
    "federation_node",
    "group_node",
    "shared_scripts",
    "torch_node",
    *(["gradbus.torch"] if HAS_TORCH_BACKEND else []),
)

for _name in _NAMES:
    importlib.import_module(_name)

# `warm` has put the path there for this module alone: what the children start shall not have it.
_folders = os.environ.get(_PATH, "").split(os.pathsep)
if _folders[1:]:
    os.environ[_PATH] = os.pathsep.join(_folders[1:])
else:
    os.environ.pop(_PATH, None)

# Half a million objects that live as long as the process: a child need neither walk over them nor copy their pages.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # else libraries complain at the end of what was never freed
