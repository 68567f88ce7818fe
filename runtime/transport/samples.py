"""Samples of a transport that has no types of its own: the records of ``gradbus.idl``, field by field."""

from __future__ import annotations

from typing import Any, NamedTuple


class TrainCmdSample(NamedTuple):
    """See TrainCmd in gradbus.idl."""

    round_id: int
    subset_size: int
    epochs: int
    lr: float
    seed: int


class ClientUpdateSample(NamedTuple):
    """See ClientUpdate in gradbus.idl."""

    client_id: int
    round_id: int
    num_samples: int
    data: bytes


class ModelBlobSample(NamedTuple):
    """See ModelBlob in gradbus.idl."""

    round_id: int
    data: bytes


class FrameSample(NamedTuple):
    """See Frame in gradbus.idl."""

    data: bytes


SAMPLES: dict[str, type[Any]] = {
    "TrainCmd": TrainCmdSample, "ClientUpdate": ClientUpdateSample, "ModelBlob": ModelBlobSample, "Frame": FrameSample,
}  # fmt: skip
"""By :attr:`.channels.Channel.sample_type`."""
