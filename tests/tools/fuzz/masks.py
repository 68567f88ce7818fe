"""Target: what secure aggregation reads of others: a roster with its grid, sealed shares, and masked updates."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray

from fuzz.target import Target, must
from gradbus import codecs
from gradbus.actors.aggregation.common_grid import MAX_ADDENDS, CommonGrid, GridIntegers, limit_for
from gradbus.actors.secure_aggregation.keys import Attempt, NotInProtocol, Roster
from gradbus.actors.secure_aggregation.masked_values import (
    SMALL_BYTES,
    VALUE_BYTES,
    MaskedValues,
    UpdateMasks,
    encode,
    size_of,
)
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
    """The first byte is the threshold; then comes a roster, or a masked update, or the steps of a grid."""
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
        raw = data[1 + size_of(0, SMALL_BYTES) :]  # after the header
        read = [int.from_bytes(raw[VALUE_BYTES * at :][:VALUE_BYTES], "little") for at in range(_DIM)]
        must((total % 2**56).tolist() == read, "values are not those of the message")
    with contextlib.suppress(codecs.CodecError):
        small = MaskedValues.parse(data[1:], expected_dim=_DIM, value_bytes=SMALL_BYTES)
        small.add_to(np.zeros(_DIM, np.uint16))
    with contextlib.suppress(ValueError):
        grid = CommonGrid(data[0] // 2, 1 + data[0] % 8, data[1 : 1 + _DIM])
        grid.check(_DIM)
        positions = grid.positions(_DIM, b"round")
        members = 2 + data[0] % (MAX_ADDENDS - 1)
        most: NDArray[np.int16] = np.full(grid.count(_DIM), limit_for(members) * members, np.int16)
        must(int(most[0]) == limit_for(members) * members, "no room in 16 bits")
        integers = GridIntegers(most, grid, positions, members)
        largest = max(int(values.max()) for _, values in integers.blocks())
        must(0 < largest <= integers.largest() < 2**62, "more than the exact sum has room for")


def _mask_seeds() -> list[bytes]:
    rosters = [_roster(clients)[0] for clients in (2, 3, 9)]
    zeros = torch.zeros(_DIM)
    update = codecs.parse(codecs.get("fp32").encode(torch.ones(_DIM)), expected_dim=_DIM)
    masked = encode(update, zeros, UpdateMasks(rosters[0], 0, 2, np.arange(_DIM, dtype=np.uint64)), 5).data
    small = bytes(masked[:5]) + b"\2" + bytes(masked[6 : 32 + 2 * _DIM])
    steps = [bytes([chosen, 233, 250, 0, 23, 240]) for chosen in (7, 39)]
    updates = (b"\0" + one for one in (bytes(masked), small))
    return [*(bytes([one.threshold]) + one.to_bytes() for one in rosters), *updates, *steps]


TARGETS = {"masks": Target(_read_masks, 1 << 20, _mask_seeds, max_len=1 << 15)}
