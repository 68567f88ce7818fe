"""Exact samples of the discrete Gaussian, many at a time, from a cryptographic generator.

Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020 (arXiv:2004.00010): Algorithm 2
samples a discrete Laplace of scale ``t = floor(sigma) + 1``, and Algorithm 3 accepts a sample ``y`` of it with
probability ``exp(-(|y| - sigma^2 / t)^2 / (2 sigma^2))``, so that ``P(x)`` is in proportion to
``exp(-x^2 / (2 sigma^2))`` at every integer x. Noise made from floating-point numbers has no such exactness, and its
lowest bits tell what it was added to (Mironov, On Significance of the Least Significant Bits for Differential
Privacy, CCS 2012).

Differs from the paper: it decides an event of probability ``exp(-g)`` by a sequence of coins with rational
probabilities. Here a uniform number of 64 bits is compared with a float64 of ``exp(-g)``. Where both are so near that
its rounding could matter, about once in 10^12, more bits are drawn and compared with as many digits of the true value.
So every event has its exact probability here as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

RandomBytes = Callable[[int], bytes]
"""Gives so many random bytes."""

MAX_SIGMA = 1 << 45  # samples stay far below 2^53, exact in float64
_BLOCK = 1 << 16  # samples that are tried at a time: 512 KiB for each array
# Bound on the error of the float64 of exp(-g) below, with a wide margin. For g = (x - 1)^2 / 2 with x = |y| / sigma it
# is below x (x + 1) 2^-51 exp(-g) < 1e-14, and that of a 64-bit uniform number as a float64 is 2^-53.
MARGIN = 1e-12

_Integers = NDArray[np.int64]


def keystream() -> RandomBytes:
    """Random bytes of AES-256 in counter mode, under a new key of the kernel's. Many times as fast as the kernel."""
    encryptor = Cipher(AES256(os.urandom(32)), CTR(os.urandom(16))).encryptor()
    return lambda size: encryptor.update(bytes(size))


def discrete_gaussian(size: int, sigma: int, random_bytes: RandomBytes | None = None) -> _Integers:
    """Independent integers, each x with a probability in proportion to ``exp(-x^2 / (2 sigma^2))``.

    Args:
        size: how many. sigma: a whole number, 1 to 2^45; the standard deviation is that, or less by less than 1e-6.
        random_bytes: in tests, a generator with a seed; by default a new :func:`keystream`.

    Returns:
        int64, shape (size,).

    Raises:
        ValueError: ``sigma`` is out of range.
    """
    if not 1 <= sigma <= MAX_SIGMA:
        raise ValueError(f"discrete Gaussian: sigma is {sigma}, expected a whole number from 1 to {MAX_SIGMA}")
    random_bytes = random_bytes or keystream()
    found = np.empty(size, np.int64)
    done = 0
    while done < size:
        some = _accepted(min(_BLOCK, 2 * (size - done) + 64), sigma, random_bytes)[: size - done]
        found[done : done + len(some)] = some
        done += len(some)
    return found


def _accepted(tries: int, sigma: int, random_bytes: RandomBytes) -> _Integers:
    """The samples that are left of so many tries."""
    t = sigma + 1
    y = _discrete_laplace(tries, t, random_bytes)
    distance = np.abs(y) / sigma - sigma / t

    def exact(at: int) -> Fraction:
        return Fraction((abs(int(y[at])) * t - sigma * sigma) ** 2, 2 * sigma * sigma * t * t)

    accepted: _Integers = y[_happens(distance * distance / 2, exact, random_bytes)]
    return accepted


def _discrete_laplace(tries: int, t: int, random_bytes: RandomBytes) -> _Integers:
    """Return what is left of so many tries: Algorithm 2, each integer with a probability in proportion to
    ``exp(-|y| / t)``."""
    u = _uniform(tries, t, random_bytes)
    u = u[_happens(u / t, lambda at: Fraction(int(u[at]), t), random_bytes)]
    v = np.zeros(len(u), np.int64)
    going = np.arange(len(u))
    while len(going):  # a geometric number: how often an event of probability 1/e comes before it does not
        going = going[_happens(np.ones(len(going)), lambda at: Fraction(1), random_bytes)]
        v[going] += 1
    magnitude = u + t * v
    negative = np.frombuffer(random_bytes(len(u)), np.uint8) & 1 == 1
    once = ~(negative & (magnitude == 0))  # zero is not counted twice
    signed: _Integers = np.where(negative, -magnitude, magnitude)[once]
    return signed


def _words(size: int, random_bytes: RandomBytes) -> NDArray[np.uint64]:
    return np.frombuffer(random_bytes(8 * size), np.dtype("<u8"))


def _uniform(size: int, below: int, random_bytes: RandomBytes) -> _Integers:
    """At most ``size`` integers, each of 0 .. below - 1 with the same probability."""
    words = _words(size, random_bytes)
    limit = (1 << 64) // below * below  # what is beyond would make small numbers more likely
    if limit < 1 << 64:
        words = words[words < np.uint64(limit)]
    return (words % np.uint64(below)).astype(np.int64)


def _happens(g: NDArray[np.float64], exact: Callable[[int], Fraction], random_bytes: RandomBytes) -> NDArray[np.bool_]:
    """Events of probability ``exp(-g)``. ``exact(at)``: the true value of ``g[at]``, which is rounded."""
    words = _words(len(g), random_bytes)
    lead = np.exp(-g) - words * 2.0**-64
    happens: NDArray[np.bool_] = lead > 0
    for at in np.flatnonzero(np.abs(lead) < MARGIN):
        happens[at] = is_below(int(words[at]), exact(int(at)), random_bytes)
    return happens


def is_below(word: int, g: Fraction, random_bytes: RandomBytes) -> bool:
    """Whether the uniform number that begins with these 64 bits is below ``exp(-g)``."""
    bits = 64
    while True:
        # 10^-digits is less than 2^-bits; Decimal.exp is rounded correctly, and g to 10 digits more.
        digits = bits // 3 + 10
        context = Context(prec=digits + 10 + len(str(math.floor(g))), Emin=-(10**9), Emax=10**9)
        # Each step by name: operators would round to the 28 digits of the thread's own context.
        value = context.exp(context.minus(context.divide(Decimal(g.numerator), Decimal(g.denominator))))
        scaled = context.multiply(value, Decimal(1 << bits))
        slack = Decimal("0.00001")
        low, high = context.subtract(scaled, slack), context.add(scaled, slack)
        if word + 1 <= low.to_integral_value(ROUND_FLOOR):
            return True
        if word >= high:
            return False
        word = word << 64 | int.from_bytes(random_bytes(8), "little")
        bits += 64
