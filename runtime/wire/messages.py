"""What actors send each other: typed messages, all frozen dataclasses.

``TrainCmd``, ``ClientUpdate`` and ``ModelBlob`` are DDS types of their own (gradbus.idl). Everything else is control:
small msgpack bodies with a schema (:mod:`gradbus.runtime.wire.control`), one frame each.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from gradbus.runtime.wire.control import Body
from gradbus.runtime.wire.frames import Frame


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends: a client id, a rank or ``CONTROLLER``, and which start of it.

    Attributes:
        sender: 32 bits.
        incarnation: 64 bits; a later start has a higher one.
    """

    sender: int
    incarnation: int


def new_incarnation() -> int:
    """Number of this start: microseconds since 1970 in the upper bits, 11 random bits below.

    It is compared only among starts of one sender, so clocks of different machines need not agree.
    """
    return (time.time_ns() // 1000 << 11 | int.from_bytes(os.urandom(2), "little") & 0x7FF) & 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class TrainCmd:
    """Train round ``round_id`` from the model of the round before. State, not event: the newest one is kept by DDS.

    Attributes:
        round_id: from 1; model 0 is the initial one.
        subset_size: samples to train on this round, 0 for all.
        epochs: passes over them.
        lr: learning rate.
        seed: of the run.
    """

    round_id: int
    subset_size: int
    epochs: int
    lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """One frame of a client's update."""

    client_id: int
    round_id: int
    num_samples: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class ModelBlob:
    """One frame of a global model: in full, or (flag DELTA) as the difference to the model of the round before."""

    round_id: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Control:
    """A control message and who sent it.

    Attributes:
        number: 32 bits: among those of its bus, and so of its sender. One that had to wait for DDS is overtaken by the
            next: who keeps only the newest of a kind asks :func:`.frames.is_later`.
        process: that its sender is in, as :mod:`~gradbus.runtime.transport.peer_processes` names it; empty: it does not
            say.
    """

    sender: int
    incarnation: int
    body: Body
    number: int = field(default=0, compare=False, repr=False)
    process: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Local event: the process that this peer sent from has ended or has left the bus (how that is known:
    :mod:`~gradbus.runtime.bus.liveness`), or, with ``why``, it is shut out.

    Attributes:
        certain: the kernel or the sender itself said so; else it has been silent, and may come back.
    """

    sender: int
    incarnation: int
    why: str = ""
    certain: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """Local event: the host of this peer has closed its connection, as it does when a process ends, and it has not
    dialled again. As a rule the peer is gone. It may be back, too: then it sends again. Else comes :class:`PeerGone`,
    when nothing has come for the lease.
    """

    sender: int
    incarnation: int


Message = TrainCmd | ClientUpdate | ModelBlob | Control | PeerGone | PeerDisconnected
