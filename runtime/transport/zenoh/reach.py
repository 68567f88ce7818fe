"""Who can be met over links, and what to do about those that do not come: the one place for that text on Zenoh."""

from __future__ import annotations

from dataclasses import dataclass

from gradbus.runtime.network.links import LinkConfig

_OTHER_TRANSPORT = (
    "A process with neither bus.connect nor bus.listen uses DDS, and cannot be met here: 'gradbus doctor --config "
    "FILE' there prints the transport"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReach:
    """Describes how far a bus on links reaches: the :class:`~gradbus.runtime.transport.api.Reachable` of Zenoh.

    Attributes:
        domain: jobs of two domains do not meet, as on DDS. links: as they are set.
    """

    domain: int
    links: LinkConfig

    @property
    def leaves_machine(self) -> bool:
        """Return whether other machines can be reached: not while all endpoints are on loopback."""
        return self.links.is_exposed

    @property
    def is_exposed(self) -> bool:
        """Return whether data can reach another machine: as :attr:`leaves_machine`."""
        return self.links.is_exposed

    @property
    def meeting_place(self) -> str:
        """Return the transport, and the domain if it is not 0. It names no endpoint: one relay has many names."""
        return f"Zenoh, domain {self.domain}" if self.domain else "Zenoh"

    @property
    def attachment(self) -> str:
        """Return the endpoints that are dialled, or else listened on."""
        return " or ".join(self.links.connect or self.links.listen)

    def hint(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to look at first while processes do not come. Arguments: as for
        :meth:`~gradbus.runtime.transport.api.Reachable.hint`."""
        start = "Start it" if one else "Start them"
        if self._is_local and elsewhere:
            return f"This bus reaches only this machine ({self.attachment}): see docs/wan.md, bus.connect"
        return (
            f"{start}, with the same job, domain {self.domain} and key, and bus.connect to {self._relay}; those on DDS "
            f"are not met"
        )

    def advice(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to do about processes that have not come, for an error. Arguments: as for :meth:`hint`."""
        start, they = ("Start it", "It is") if one else ("Start them", "They are")
        if self._is_local and elsewhere is not False:
            start = f"{start}. If on another machine" if elsewhere is None else f"{they} on another machine"
            return (
                f"{start}: this bus reaches only this machine ({self.attachment}). Have a relay or the controller "
                f"listen on tls/0.0.0.0:PORT, and set bus.connect=['tls/HOST:PORT'] elsewhere (docs/wan.md). "
                f"{_OTHER_TRANSPORT}"
            )
        return (
            f"{start}, with the same job, domain {self.domain} and key, and bus.connect to {self._relay}. 'gradbus "
            f"doctor' there checks the way. {_OTHER_TRANSPORT}"
        )

    @property
    def _is_local(self) -> bool:
        return not self.links.is_exposed

    @property
    def _relay(self) -> str:
        """Return what the others must dial, in words."""
        if self.links.connect:
            return f"the relay that this one dials ({self.attachment})"
        return f"this process, which listens on {self.attachment}"
