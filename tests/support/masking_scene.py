"""Both sides of an attempt with secure aggregation, without a network."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gradbus.actors.secure_aggregation.keys import Attempt, Roster, share_digests
from gradbus.actors.secure_aggregation.masking_client import MaskingClient
from gradbus.actors.secure_aggregation.masking_server import MaskingServer

ATTEMPT = Attempt("job", 7, 5, 3, 1)
DIM = 50


def reseal(client: MaskingClient, roster: Roster, receiver: int, shares: tuple[bytes, bytes]) -> bytes:
    """Seal other shares than a client has, as it would."""
    own = next(one for one in roster.ids if roster.entry_of(one).sealing == client.advertise()[:32])
    key = client._sealing_key(roster, roster.entry_of(receiver), own, receiver)  # noqa: SLF001 - no honest client does
    return AESGCM(key).encrypt(bytes(12), b"".join(shares), roster.digest) + share_digests(
        roster, own, receiver, shares
    )


class Scene:
    """A server and clients that have agreed on a roster."""

    def __init__(self, ids: list[int], threshold: int | float = 0.6, attempt: Attempt = ATTEMPT) -> None:
        self.server = MaskingServer(attempt, threshold)
        self.clients = {one: MaskingClient(attempt, one) for one in ids}
        self.values = {
            one: np.random.default_rng(one).integers(0, 2**64, DIM, np.uint64, endpoint=False) for one in ids
        }

    def share(self, advertise: set[int], share: set[int]) -> None:
        for one in advertise:
            self.server.add_keys(one, self.clients[one].advertise())
        roster = self.server.close_keys()
        parsed = Roster.parse(roster.attempt, roster.threshold, roster.to_bytes())
        assert parsed == roster
        for one in share:
            self.server.add_shares(one, self.clients[one].share(parsed))
        for one in self.server.close_shares():
            self.clients[one].receive(self.server.senders, self.server.sealed_for(one))

    def masked(self, one: int) -> np.ndarray:
        values = self.values[one].copy()
        self.clients[one].mask(values)
        return values

    def finish(self, send: set[int], answer: set[int]) -> np.ndarray:
        total = np.zeros(DIM, np.uint64)
        for one in send:
            total += self.masked(one)
        survivors = self.server.close_inputs(send)
        for one in answer:
            self.server.add_unmasking(one, self.clients[one].unmask(survivors))
        self.server.unmask(total)
        return total
