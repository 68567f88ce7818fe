"""Shamir's secret sharing (How to share a secret, CACM 22, 1979) of 32 bytes over a prime field.

A secret is the value at 0 of a random polynomial of degree ``threshold - 1``, a share its value at another point: any
``threshold`` shares give the secret, and fewer say nothing of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**257 - 93  # the largest prime of 257 bits: every secret of 32 bytes is below it
SECRET_BYTES = 32
SHARE_BYTES = 33
MAX_POINTS = 255


class BadShares(ValueError):
    """These shares are of no secret."""


def is_share(share: bytes) -> bool:
    """Whether this is an element of the field."""
    return len(share) == SHARE_BYTES and int.from_bytes(share) < PRIME


def split(secret: bytes, threshold: int, points: Sequence[int]) -> list[bytes]:
    """Shares of a secret of 32 bytes, one of 33 bytes for each point, all of which differ and are not 0.

    Raises:
        ValueError: another length, points that repeat or are out of range, or a threshold that they cannot reach.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes: expected {SECRET_BYTES}")
    if len(set(points)) != len(points) or not all(1 <= point <= MAX_POINTS for point in points):
        raise ValueError(f"points {list(points)}: expected different ones of 1 .. {MAX_POINTS}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"a threshold of {threshold} with {len(points)} shares")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value_at(coefficients, point).to_bytes(SHARE_BYTES) for point in points]


def _value_at(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


class Interpolation:
    """Reconstructs secrets from shares at the same points: the Lagrange coefficients are computed once."""

    def __init__(self, points: Sequence[int]) -> None:
        """``points``: as many different ones as the threshold."""
        self._points = tuple(points)
        self._coefficients = []
        for point in points:
            numerator = denominator = 1
            for other in points:
                if other != point:
                    numerator = numerator * other % PRIME
                    denominator = denominator * (other - point) % PRIME
            self._coefficients.append(numerator * pow(denominator, -1, PRIME) % PRIME)

    def secret(self, shares: Mapping[int, bytes]) -> bytes:
        """The secret of 32 bytes. ``shares``: by point, those of all points of this object.

        Raises:
            BadShares: they are of no secret of 32 bytes.
        """
        pairs = zip(self._points, self._coefficients, strict=True)
        value = sum(factor * int.from_bytes(shares[point]) for point, factor in pairs) % PRIME
        if value >> (8 * SECRET_BYTES):
            raise BadShares(f"shares at the points {list(self._points)} are of no secret of {SECRET_BYTES} bytes")
        return value.to_bytes(SECRET_BYTES)
