"""All targets by name, in the order in which they run."""

from __future__ import annotations

from fuzz import codecs, files, joining, masks, sealed, wire
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    **wire.TARGETS,
    **sealed.TARGETS,
    **joining.TARGETS,
    **codecs.TARGETS,
    **masks.TARGETS,
    **files.TARGETS,
}
NAMES = tuple(TARGETS)


def _breaks(data: bytes) -> None:
    if len(data) > 8 and data[0] == 0x21:
        raise ValueError("as it should")


# For the test of the program alone: what it has to find.
BROKEN = Target(_breaks, 1 << 20, lambda: [b"0123456789", b""])
