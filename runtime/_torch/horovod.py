"""The names of Horovod's torch module beside its collectives: what they are here, and what replaces those that are not.

``import gradbus.torch as hvd`` gives a script of Horovod what it needs to train. Names that this package does not have
raise AttributeError, with what to use in their place.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from gradbus.torch.functions import current, local_rank, place

# The operations of an allreduce. They are the texts that `op` takes.
Average = "mean"
Sum = "sum"
Min = "min"
Max = "max"
Product = "product"


def is_initialized() -> bool:
    """Return whether there is a default process group of this backend."""
    if not dist.is_initialized():
        return False
    try:
        current()
    except RuntimeError:
        return False
    return True


# Places. As what has started this process says: torchrun, or `gradbus run`.


def local_size() -> int:
    """Return the number of processes of this job on this machine.

    Raises:
        RuntimeError: LOCAL_WORLD_SIZE does not say so.
    """
    return place("local_size", "LOCAL_WORLD_SIZE", 1, "the number of processes of this job on this machine")


def cross_rank() -> int:
    """Return the number of this machine, among those that have a process with this :func:`local_rank`.

    Raises:
        RuntimeError: neither GROUP_RANK nor LOCAL_WORLD_SIZE says so, or there is no process group of this backend.
    """
    text = os.environ.get("GROUP_RANK", "")
    if text.isdecimal():
        return int(text)
    return current().group.rank // _equal_local_size("cross_rank")


def cross_size() -> int:
    """Return the number of machines that have a process with this :func:`local_rank`.

    Raises:
        RuntimeError: neither GROUP_WORLD_SIZE nor LOCAL_WORLD_SIZE says so, or there is no process group of this
            backend.
    """
    text = os.environ.get("GROUP_WORLD_SIZE", "")
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    return current().group.world // _equal_local_size("cross_size")


def _equal_local_size(what: str) -> int:
    """Return local_size(). Raises RuntimeError: ranks are not numbered machine by machine, as many on each."""
    here, group = local_size(), current().group
    if group.world % here or group.rank % here != local_rank():
        raise RuntimeError(
            f"{what}: rank {group.rank} of {group.world} has LOCAL_RANK {local_rank()} and LOCAL_WORLD_SIZE {here}, so "
            f"ranks are not numbered machine by machine: start with torchrun, which sets GROUP_RANK and "
            f"GROUP_WORLD_SIZE, or set them for each process"
        )
    return here


# What Horovod was built with. None of these is in the backend: tensors of a GPU are copied, and go over DDS.


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI in this backend."""
    return False


def mpi_enabled() -> bool:
    """Return False: there is no MPI in this backend."""
    return False


def mpi_built() -> bool:
    """Return False: there is no MPI in this backend."""
    return False


def gloo_enabled() -> bool:
    """Return False: there is no Gloo in this backend."""
    return False


def gloo_built() -> bool:
    """Return False: there is no Gloo in this backend."""
    return False


def nccl_built() -> bool:
    """Return False: there is no NCCL in this backend."""
    return False


def ddl_built() -> bool:
    """Return False: there is no DDL in this backend."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL in this backend."""
    return False


def cuda_built() -> bool:
    """Return False: this backend has no operations for CUDA of its own."""
    return False


def rocm_built() -> bool:
    """Return False: this backend has no operations for ROCm of its own."""
    return False


_GROUPED = "one call for each tensor: nothing is fused"
_SETS = "torch.distributed.new_group(ranks, backend='dds'), whose collectives torch.distributed has"
_TIMELINE = "profile(folder), which writes a trace, or torch.profiler"

REPLACEMENTS = {
    "Adasum": "Average, or an algorithm of gradbus.torch.with_algorithm(ddp, [optimizer], 'dgc')",
    "HorovodInternalError": "torch.distributed.DistBackendError",
    "ProcessSet": _SETS,
    "SyncBatchNorm": "torch.nn.SyncBatchNorm, which takes tensors of a GPU",
    "add_process_set": _SETS,
    "alltoall": "torch.distributed.all_to_all_single",
    "alltoall_async": "torch.distributed.all_to_all_single(..., async_op=True)",
    "barrier": "torch.distributed.barrier",
    "broadcast_async": "broadcast_async_ with a clone of the tensor",
    "global_process_set": "torch.distributed.group.WORLD",
    "grouped_allgather": f"allgather, {_GROUPED}",
    "grouped_allgather_async": f"allgather_async, {_GROUPED}",
    "grouped_allreduce": f"allreduce, {_GROUPED}",
    "grouped_allreduce_": f"allreduce_, {_GROUPED}",
    "grouped_allreduce_async": f"allreduce_async, {_GROUPED}",
    "grouped_allreduce_async_": f"allreduce_async_, {_GROUPED}",
    "grouped_reducescatter": f"torch.distributed.reduce_scatter_tensor, {_GROUPED}",
    "grouped_reducescatter_async": f"torch.distributed.reduce_scatter_tensor(..., async_op=True), {_GROUPED}",
    "join": "torch.distributed.algorithms.join.Join, around a DistributedDataParallel",
    "mpi_ops": "the same functions of gradbus.torch itself",
    "reducescatter": "torch.distributed.reduce_scatter_tensor",
    "reducescatter_async": "torch.distributed.reduce_scatter_tensor(..., async_op=True)",
    "remove_process_set": "torch.distributed.destroy_process_group(group)",
    "run": "torchrun --nproc-per-node N script.py",
    "sparse_allreduce_async": "allreduce_async, which takes sparse tensors",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
}
"""By the names of Horovod's torch module that this package does not have: what to use in their place."""
