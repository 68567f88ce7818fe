"""torch's store of one generation: its ranks have met already, and need it for further process groups alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Store

from gradbus.runtime.bus.background import JOB_KEY
from gradbus.runtime.collectives.group import Group
from gradbus.torch.groups import HeldGroup
from gradbus.torch.store.address import Address
from gradbus.torch.store.link import StoreLink
from gradbus.torch.store.rendezvous import open_store
from gradbus.torch.store.store import DdsStore


class GenerationStore(DdsStore):
    """A store over DDS that is opened with its first key. See :class:`~gradbus.torch.groups.FormedStore`."""

    def __init__(
        self, address: Address, bus_number: str, hold: Callable[[], tuple[Group, HeldGroup]], timeout: timedelta
    ) -> None:
        """
        Args:
            address: of this generation alone. bus_number: of the bus that its process groups share.
            hold: returns the group of all ranks.
        """
        Store.__init__(self)
        self.set_timeout(timeout)
        self.hold = hold
        self._address = address
        self._bus_number = bus_number
        self._opening = threading.Lock()
        self._opened: DdsStore | None = None
        self._is_closed = False

    @property
    def _link(self) -> StoreLink:  # type: ignore[override]  # others get it when they are made
        return self._open()._link  # noqa: SLF001 - of its class

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Return the number of the bus for its key, without the store. Any other key is set as in any store."""
        return self._bus_number.encode() if key == JOB_KEY else super().compare_set(key, expected_value, desired_value)

    def close(self) -> None:
        """Leave the store, if it was opened. Waits for a thread that is opening it, for at most its timeout."""
        with self._opening:
            self._is_closed = True
            if self._opened is not None:
                self._opened.close()

    def _open(self) -> DdsStore:
        with self._opening:
            if self._opened is None and not self._is_closed:
                self._opened = open_store(self._address, cast(Any, self).timeout)
        if self._opened is None:
            raise RuntimeError(f"store {self._address.name}: its generation is over")
        return self._opened
