"""What the server of :mod:`warm` loads before it forks. Nothing here starts a thread or opens DDS."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import sys

import torch
from backend_support import HAS_TORCH_BACKEND

from gradbus import loading
from gradbus.models import data_sets

_PATH = "PYTHONPATH"
_NAMES = (
    "_pytest.config",  # every child runs the script that the tests were started with, under another name
    "cryptography.hazmat.primitives.ciphers.aead",
    "matplotlib.pyplot",
    "torch._dynamo",  # the first optimizer of a process loads it
    "torch.distributed",
    "torch.distributed.optim",
    "torch.distributed.run",
    "torch.nn.parallel",
    "gradbus.actors.aggregation.adaptive",
    "gradbus.actors.aggregation.robust",
    "gradbus.actors.data_parallel.elastic",
    "gradbus.actors.parameter_server.server",
    "gradbus.actors.parameter_server.worker",
    "gradbus.actors.virtual.simulation",
    "gradbus.commands.cli.main",
    "gradbus.commands.history.invariants",
    "gradbus.commands.run.commands",
    "gradbus.commands.run.federated",
    "gradbus.models",
    "cyclonedds.idl._builder",  # the first participant of a process loads it
    "encodings.ascii",
    "encodings.latin_1",
    "gradbus.runtime.bus.bus",
    "gradbus.runtime.collectives",
    "gradbus.runtime.security.identity.join_transport",
    "ddp_node",
    "federation_node",
    "group_node",
    "shared_scripts",
    "torch_node",
    "uvloop",
    *(["gradbus.torch.backend"] if HAS_TORCH_BACKEND else []),
)

# PYTHONDONTWRITEBYTECODE of those who start the tests is handed down as an option, which conftest.py cannot take back:
# each child would compile what it loads.
sys.dont_write_bytecode = False

for _name in _NAMES:
    importlib.import_module(_name)
# What ``connect`` loads else on a thread of each child: the transport, and all modules that settings name.
loading.load_bus()
loading.load_transport()
loading.load_actors()

# Digits that most commands of tests train with. To draw them takes each process 0.8 s of a core, for the same ones.
_drawn = data_sets.glyphs  # a function of its arguments alone
_threads = torch.get_num_threads()
torch.set_num_threads(1)  # more would start, and no fork has them
data_sets.glyphs = functools.cache(_drawn)
data_sets.glyphs()
torch.set_num_threads(_threads)

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
