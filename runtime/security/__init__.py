"""Encryption of outgoing samples, and authentication of incoming ones before any use.

DDS has no security in the wheel that this project uses, so payloads are protected here, between the bus and whatever
carries its bytes. The limits of this protection are in docs/security.md; every byte is in docs/wire.md. ``identity``
has the level where each node has a key of its own.
"""

from gradbus.runtime.security.settings import Level, Security

__all__ = ["Level", "Security"]
