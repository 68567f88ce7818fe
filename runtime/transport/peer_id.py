"""What a transport calls itself. Apart from :mod:`.api`, which loads messages: a relay knows such names and no more."""

from __future__ import annotations

from typing import TypeAlias

PeerId: TypeAlias = bytes
"""What a transport calls itself among those of its job, in :data:`PEER_ID_BYTES`: no two that are open have the same.
Nothing proves it: whoever knows it can claim it."""

PEER_ID_BYTES = 12
