"""``torch.distributed`` over DDS: ``dist.init_process_group("dds")``, with no import of this package.

Only addresses of the form ``dds://domain/job`` need an ``import gradbus.torch`` first, which makes them known to torch.

Everything that is written against torch.distributed (DistributedDataParallel, FSDP, DTensor, checkpoints ...) then runs
over the collectives of gradbus. Where the others are found is torch's own affair (``env://``, torchrun, any store); how
DDS reaches them is set by the environment: ``GRADBUS_BUS__DOMAIN=3``, ``GRADBUS_BUS__INTERFACE=eth0`` and so on.

torch finds the backend by itself, through the entry point ``torch.distributed.backends``.

The functions here are for those who come from Horovod. Calls are matched by name, in whatever order a rank makes them:

    import gradbus.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

They are loaded when first used.

torch 2.14 or newer is required, and with an older one the import fails; all other packages of gradbus work with 2.6.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from gradbus.torch.register import check_version, register, register_scheme

if TYPE_CHECKING:
    from gradbus.torch.algorithm_hook import AlgorithmHook, with_algorithm
    from gradbus.torch.broadcast_state import broadcast_optimizer_state, broadcast_parameters
    from gradbus.torch.compression import Compression
    from gradbus.torch.diloco import DiLoCo
    from gradbus.torch.functions import (
        Handle,
        allgather,
        allgather_async,
        allgather_object,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        broadcast,
        broadcast_,
        broadcast_async_,
        broadcast_object,
        init,
        local_rank,
        poll,
        rank,
        shutdown,
        size,
        synchronize,
    )
    from gradbus.torch.horovod import (
        Average,
        Max,
        Min,
        Product,
        Sum,
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        is_initialized,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rocm_built,
    )
    from gradbus.torch.optimizer import DistributedOptimizer
    from gradbus.torch.script_profile import profile

_ELSEWHERE = {  # all other names are in functions.py or horovod.py
    "AlgorithmHook": "gradbus.torch.algorithm_hook",
    "Compression": "gradbus.torch.compression",
    "DiLoCo": "gradbus.torch.diloco",
    "DistributedOptimizer": "gradbus.torch.optimizer",
    "broadcast_optimizer_state": "gradbus.torch.broadcast_state",
    "broadcast_parameters": "gradbus.torch.broadcast_state",
    "profile": "gradbus.torch.script_profile",
    "with_algorithm": "gradbus.torch.algorithm_hook",
}

_MODULES = ("elastic",)

__all__ = [
    "AlgorithmHook",
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast",
    "broadcast_",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "profile",
    "rank",
    "register",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
    "with_algorithm",
]


check_version(torch.__version__)
register_scheme()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"gradbus.torch.{name}")
    if name in __all__:
        place = _ELSEWHERE.get(name, "gradbus.torch.functions")
        module = importlib.import_module(place)
        if name not in _ELSEWHERE and not hasattr(module, name):
            module = importlib.import_module("gradbus.torch.horovod")
        value = globals()[name] = getattr(module, name)
        return value
    if not name.startswith("_"):
        from gradbus.torch.horovod import REPLACEMENTS

        if name in REPLACEMENTS:
            raise AttributeError(f"gradbus.torch has no {name!r} of Horovod's: use {REPLACEMENTS[name]}")
    raise AttributeError(f"module 'gradbus.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
