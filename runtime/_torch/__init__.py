"""``torch.distributed`` over DDS: ``dist.init_process_group("dds")``, with no import of this package.

Everything that is written against torch.distributed (DistributedDataParallel, FSDP, DTensor, checkpoints ...) then runs
over the collectives of gradbus. Where the others are found is torch's own affair (``env://``, torchrun, any store); how
DDS reaches them is set by the environment: ``GRADBUS_BUS__DOMAIN=3``, ``GRADBUS_BUS__INTERFACE=eth0`` and so on.

torch finds the backend by itself, through the entry point ``torch.distributed.backends``. CPU tensors only.
"""

from gradbus.torch.register import register

__all__ = ["register"]
