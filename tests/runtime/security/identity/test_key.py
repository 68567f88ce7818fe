"""Public keys that nobody can have made: signatures for them are free."""

from __future__ import annotations

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.identity.allow_list import parse_allow_list
from gradbus.runtime.security.identity.key import parse_public, public_text, verified

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
ORDER = 2**252 + 27742317777372353535851937790883648493
NOTHING = (0, 1)
Point = tuple[int, int]


def plus(one: Point, other: Point) -> Point:
    """RFC 8032, 5.1.4, in the two coordinates of the curve."""
    (x1, y1), (x2, y2) = one, other
    k = D * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def times(number: int, point: Point) -> Point:
    result = NOTHING
    while number:
        if number & 1:
            result = plus(result, point)
        point, number = plus(point, point), number >> 1
    return result


def point_of(y: int) -> Point | None:
    """With this second coordinate, if there is one: RFC 8032, 5.1.3."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    root = pow(square, (P + 3) // 8, P)
    for x in (root, root * pow(2, (P - 1) // 4, P) % P):
        if x * x % P == square:
            return x, y
    return None


def of_small_order() -> list[bytes]:
    """Every way to write a point that is nothing when it is taken eight times."""
    found = {times(ORDER, point) for point in map(point_of, range(2, 60)) if point is not None}
    assert all(times(8, point) == NOTHING for point in found)
    ys = {point[1] for point in found}
    numbers = [number for y in ys for number in (y, y + P) if number < 2**255]
    return [(number | sign << 255).to_bytes(32, "little") for number in numbers for sign in (0, 1)]


def test_no_signature_is_right_for_a_key_of_small_order_although_libraries_say_so() -> None:
    keys = of_small_order()
    assert len(keys) == 14
    free = 0
    for public in keys:
        for first in {bytes(32), b"\1" + bytes(31), public}:
            for text in range(60):
                signature, data = first + bytes(32), b"%d" % text
                assert not verified(public, signature, data)
                try:
                    Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
                    free += 1
                except (InvalidSignature, ValueError):
                    pass
    assert free > 20  # else there is nothing to be careful of any more


def test_such_a_key_is_refused_where_a_person_names_it() -> None:
    for public in of_small_order():
        with pytest.raises(ConfigError, match=r"bus.controller_key: ed25519:[0-9a-f]{64} is nobody's key"):
            parse_public(public_text(public), "bus.controller_key")
        with pytest.raises(ConfigError, match="is nobody's key"):
            parse_allow_list(f"robot-1 client {public_text(public)} 0", "here")
