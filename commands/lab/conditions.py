"""What a network between hosts is like, and how people write it: ``50mbit``, ``20ms``, ``1%``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradbus.runtime.errors import ConfigError

QUEUE_BYTES = 64_000_000  # more than sockets here may send at once, so that a full queue loses nothing
_RATES: Mapping[str, float] = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES: Mapping[str, float] = {"b": 1.0, "kb": 1e3, "mb": 1e6}
_SHARES: Mapping[str, float] = {"%": 0.01}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConditions:
    """The link of each host to one switch.

    Attributes:
        rate_bit_s: of each link, in each direction, Ethernet headers included; None: as fast as the machine goes.
        delay_s: from one host to another, one way, beside what sending takes. jitter_s: by so much more or less, evenly
            distributed, so that packets may overtake each other.
        loss, duplicate: shares of packets, of each way from host to host, drawn one by one.
        queue_bytes: that wait in front of a link; what comes then is lost. mtu: bytes of the largest IP packet.
        seed: of what a switch in user space draws; with the same one the n-th packet from a host to another has the
            same fate. The kernel draws its own.
    """

    rate_bit_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    queue_bytes: int = QUEUE_BYTES
    mtu: int = 1500
    seed: int = 1

    def __post_init__(self) -> None:
        if self.rate_bit_s is not None and not 1e4 <= self.rate_bit_s <= 1e12:
            raise ConfigError(f"a link's rate must be 10 kbit to 1000 gbit a second, got {self.rate_bit_s:g} bit/s")
        if not 0.0 <= self.jitter_s <= self.delay_s <= 60.0:
            raise ConfigError(
                f"delay must be 0 to 60 s, and jitter no more: got {self.delay_s:g} and {self.jitter_s:g} s"
            )
        if not (0.0 <= self.loss < 1.0 and 0.0 <= self.duplicate < 1.0):
            raise ConfigError(f"loss and duplicates must be 0 to 99 %: got {self.loss:.1%} and {self.duplicate:.1%}")
        if not 1280 <= self.mtu <= 65_000:
            raise ConfigError(f"the MTU must be 1280 to 65000 bytes, got {self.mtu}")
        if self.queue_bytes < 2 * self.mtu:
            raise ConfigError(f"the queue must hold two packets of {self.mtu} bytes, got {self.queue_bytes} bytes")

    @property
    def burst_bytes(self) -> int:
        """Return what may leave at once: 2 ms, which a timer of a busy machine may be late, and no less than four
        packets."""
        return max(int((self.rate_bit_s or 0.0) / 8 * 2e-3), 4 * (self.mtu + 14))

    def __str__(self) -> str:
        words = ["any rate" if self.rate_bit_s is None else f"{self.rate_bit_s / 1e6:g} Mbit/s"]
        jitter = f" +-{1e3 * self.jitter_s:g}" if self.jitter_s else ""
        words += [f"{1e3 * self.delay_s:g}{jitter} ms one way"] if self.delay_s else []
        words += [f"{100 * self.loss:g} % lost"] if self.loss else []
        words += [f"{100 * self.duplicate:g} % doubled"] if self.duplicate else []
        words += [f"MTU {self.mtu}"] if self.mtu != 1500 else []
        return ", ".join(words)


def bits_per_second(text: str) -> float:
    """``10kbit``, ``50mbit``, ``1gbit``. Raises ConfigError, as do the functions below."""
    return _amount(text, _RATES, "a rate such as 50mbit or 1gbit")


def seconds(text: str) -> float:
    """``500us``, ``20ms``, ``0.1s``; a bare 0 as well."""
    return 0.0 if text.strip() == "0" else _amount(text, _TIMES, "a time such as 50ms or 0.1s")


def share(text: str) -> float:
    """``1%`` as 0.01; a bare 0 as well."""
    return 0.0 if text.strip() == "0" else _amount(text, _SHARES, "a share such as 1%")


def num_bytes(text: str) -> int:
    """``64kb``, ``1mb``."""
    return round(_amount(text, _SIZES, "a size such as 64kb or 1mb"))


def _amount(text: str, units: Mapping[str, float], expected: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z%]+)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ConfigError(f"expected {expected} ({', '.join(units)}), got {text!r:.60}")
    return float(found[1]) * units[found[2]]
