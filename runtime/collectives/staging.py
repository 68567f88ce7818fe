"""Tensors of an accelerator, which the bus cannot reach: copied through pinned memory, on a stream of their own.

The thread that copies waits for it. So the result is good for every thread and every stream, and what the device has
been given to do meanwhile goes on beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket, views_of
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.torch_compat import available_accelerator, copy_stream


def can_be_staged(tensor: Tensor) -> bool:
    """Whether its device is the CPU, or what torch calls the current accelerator: that has streams, and pins memory."""
    accelerator = None if tensor.is_cpu else available_accelerator()
    return tensor.is_cpu or (accelerator is not None and tensor.device.type == accelerator.type)


def check_devices(algorithm: str, parameters: Mapping[str, Tensor]) -> None:
    """Raises ConfigError: one of the parameters of a model is where the bus cannot reach it."""
    for name, parameter in parameters.items():
        if not can_be_staged(parameter):
            raise ConfigError(
                f"{algorithm}: parameter {name} is on {parameter.device}, expected on the CPU, or on the accelerator "
                f"that torch uses ({available_accelerator() or 'here is none'})"
            )


def exchange_of(algorithm: Algorithm, bucket: TensorBucket, step: Step) -> Program[None]:
    """The exchange of a bucket wherever its memory is: in a copy on the CPU, where the algorithm computes there."""
    if bucket.flat.is_cpu or algorithm.any_device:
        return algorithm.exchange(bucket, step)
    return _exchange_in_a_copy(algorithm, bucket, step)


def _exchange_in_a_copy(algorithm: Algorithm, bucket: TensorBucket, step: Step) -> Program[None]:
    host = to_host(bucket.flat)
    yield from algorithm.exchange(TensorBucket(bucket.index, host, views_of(host, bucket.tensors)), step)
    copier(bucket.flat, host)()


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory of the CPU for what comes from a device or goes there: pinned, unless that is the CPU itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def to_host(tensor: Tensor) -> Tensor:
    """The values of a device's tensor in contiguous memory of the CPU, when all has been computed that this thread's
    stream was given before."""
    host = host_tensor(tensor.shape, tensor.dtype, tensor.device)
    _copy(host, tensor, tensor.device, torch.accelerator.current_stream(tensor.device).record_event())
    return host


def copier(into: Tensor, host: Tensor) -> Callable[[], object]:
    """A function, for any thread, that copies from memory of the CPU, or of the same device, into a tensor of whatever
    device, of as many elements. There it waits for what this thread's stream has been given before this call: that may
    still read it."""
    into, host = into.detach(), host.view(into.shape)
    if into.is_cpu:
        return partial(into.copy_, host)
    free = torch.accelerator.current_stream(into.device).record_event()
    return partial(_copy, into, host, into.device, free)


def _copy(into: Tensor, source: Tensor, device: torch.device, ready: torch.Event) -> None:
    with copy_stream(device) as stream:
        stream.wait_event(ready)
        into.copy_(source, non_blocking=True)
    stream.synchronize()
