"""How the samples of :mod:`.samples` are laid out in bytes: as XCDR1, little-endian, on every transport that has bytes.

On DDS this is the payload of a sample, and everywhere it is what an envelope holds encrypted. All are written with the
encapsulation ``00 01 00 00``, which a reader in any language expects of a final type. What is laid out as XCDR2 is
read, too: offsets are the same there, but for the double of TrainCmd.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NoReturn

from gradbus.runtime.transport.samples import SAMPLES

ENCAPSULATION = b"\x00\x01\x00\x00"
_XCDR1, _XCDR2 = 1, 7  # the second byte of the encapsulation
_MAX_PADDING = 3  # bytes behind a sample; more would be memory that nobody has counted
_SIZE = struct.Struct("<I")


class SampleError(ValueError):
    """The bytes of a sample are cut short, or in a representation that is not ours."""


class SampleLayout(ABC):
    """Writes and reads the samples of one type.

    Attributes:
        name: of the type. prefix: returns the bytes before the octets, from the fields before these and their number;
            raises SampleError: this type has no octets.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix: Callable[..., bytes] = self._refuse
        self._record = SAMPLES[name]

    @abstractmethod
    def parts(self, fields: tuple[Any, ...], octets: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the bytes of a sample in parts, without the padding at its end.

        Args:
            fields: those before the octets. octets: in parts, which are not copied; empty where the type has none.
        """

    @abstractmethod
    def decode(self, data: Any) -> Any:
        """Return the record of a sample, whose octets are a view of ``data``. Raises SampleError."""

    def octets(self, data: Any) -> memoryview:
        """Return the octets of a sample, in place. Raises SampleError: it is damaged, or its type has none."""
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise SampleError(f"{self.name}: this type has no octets")

    def _checked(self, data: Any, need: int) -> memoryview:
        """Return the bytes of a sample. Raises SampleError: less than ``need`` of them, or in other representations."""
        view = memoryview(data)
        if len(view) < need:
            raise SampleError(f"{self.name}: sample of {len(view)} bytes, expected at least {need}")
        if view[0] or view[1] not in (_XCDR1, _XCDR2):
            raise SampleError(
                f"{self.name}: encapsulation {bytes(view[:2]).hex()}, expected 0001 (CDR) or 0007 (XCDR2), "
                f"little-endian"
            )
        return view


class OctetsLayout(SampleLayout):
    """Of a type that ends with a sequence of octets: fixed fields, number of octets, octets, padding to four bytes."""

    def __init__(self, name: str, fixed: str) -> None:
        """``fixed``: the fields before the octets, for ``struct``."""
        super().__init__(name)
        self._fixed = struct.Struct(f"<{fixed}")
        head = struct.Struct(f"<{len(ENCAPSULATION)}s{fixed}I")
        self.prefix = partial(head.pack, ENCAPSULATION)
        self._start = head.size

    def parts(self, fields: tuple[Any, ...], octets: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.prefix(*fields, sum(map(len, octets))), *octets)

    def octets(self, data: Any) -> memoryview:
        view, start = self._checked(data, self._start), self._start
        (size,) = _SIZE.unpack_from(view, start - _SIZE.size)
        behind = len(view) - start - size
        if behind < 0:
            raise SampleError(f"{self.name}: says {size} bytes of data, has {len(view) - start}")
        if behind > _MAX_PADDING:
            raise SampleError(
                f"{self.name}: {behind} bytes behind its {size} bytes of data, at most {_MAX_PADDING} are padding"
            )
        return view[start : start + size]

    def decode(self, data: Any) -> Any:
        found = self.octets(data)
        return self._record(*self._fixed.unpack_from(data, len(ENCAPSULATION)), found)


class CommandLayout(SampleLayout):
    """Of TrainCmd, which has no octets, and whose double stands at a multiple of 8 in XCDR1, and of 4 in XCDR2."""

    _packed = struct.Struct("<4siii4xdi")
    _fields: ClassVar = {_XCDR1: struct.Struct("<iii4xdi"), _XCDR2: struct.Struct("<iiidi")}

    def parts(self, fields: tuple[Any, ...], octets: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._packed.pack(ENCAPSULATION, *fields),)

    def decode(self, data: Any) -> Any:
        shortest = len(ENCAPSULATION) + self._fields[_XCDR2].size
        view = self._checked(data, shortest)
        fields = self._fields[view[1]]
        self._checked(view, len(ENCAPSULATION) + fields.size)
        return self._record(*fields.unpack_from(view, len(ENCAPSULATION)))


UPDATE, MODEL, FRAME = OctetsLayout("ClientUpdate", "iiq"), OctetsLayout("ModelBlob", "i"), OctetsLayout("Frame", "")
LAYOUTS: dict[str, SampleLayout] = {one.name: one for one in (CommandLayout("TrainCmd"), UPDATE, MODEL, FRAME)}
"""By :attr:`.channels.Channel.sample_type`."""
