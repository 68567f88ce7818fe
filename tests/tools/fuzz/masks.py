"""Target: what secure aggregation reads of others: a roster, sealed shares, and masked updates."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from fuzz.target import Target, must
from gradbus import codecs
from gradbus.actors.secure_aggregation.keys import Attempt, NotInProtocol, Roster
from gradbus.actors.secure_aggregation.masked_values import MaskedValues, UpdateMasks, encode
from gradbus.actors.secure_aggregation.masking_client import MaskingClient
from gradbus.actors.secure_aggregation.masking_server import MaskingServer

_ATTEMPT = Attempt("job", 1, 2, 3, 4)
_DIM = 40


def _roster(clients: int) -> tuple[Roster, dict[int, MaskingClient]]:
    members = {client_id: MaskingClient(_ATTEMPT, client_id) for client_id in range(clients)}
    server = MaskingServer(_ATTEMPT, 0.6)
    for client_id, member in members.items():
        server.add_keys(client_id, member.advertise())
    return server.close_keys(), members


def _read_masks(data: bytes) -> None:
    """The first byte is the threshold; then comes a roster, or a masked update."""
    if not data:
        return
    with contextlib.suppress(NotInProtocol):
        roster = Roster.parse(_ATTEMPT, data[0], data[1:])
        must(Roster.parse(_ATTEMPT, data[0], roster.to_bytes()) == roster, "a roster is read otherwise again")
        with contextlib.suppress(NotInProtocol):
            MaskingClient(_ATTEMPT, roster.ids[0]).share(roster)
            must(False, "a roster with keys of another was taken")
    with contextlib.suppress(codecs.CodecError):
        values = MaskedValues.parse(data[1:], expected_dim=_DIM)
        values.add_to(total := np.zeros(_DIM, np.uint64))
        must(int(total.max()) < 2**56, "more than 56 bits")


def _mask_seeds() -> list[bytes]:
    rosters = [_roster(clients)[0] for clients in (2, 3, 9)]
    zeros = torch.zeros(_DIM)
    update = codecs.parse(codecs.get("fp32").encode(torch.ones(_DIM)), expected_dim=_DIM)
    masked, _ = encode(update, zeros, UpdateMasks(rosters[0], 2, np.arange(_DIM, dtype=np.uint64)), 5)
    return [*(bytes([one.threshold]) + one.to_bytes() for one in rosters), b"\0" + bytes(masked)]


TARGETS = {"masks": Target(_read_masks, 1 << 20, _mask_seeds, max_len=1 << 15)}
