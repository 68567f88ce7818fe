"""Orders of one round: how its clients are to train, where that differs from the configuration.

    RoundOrder(lr=0.05, epochs=2, clients=(0, 2), each={2: ClientOrder(epochs=1)})

A caller gives them to :meth:`.OrderedRun.round`, and a strategy returns them from :meth:`.Strategy.order`. The
controller writes an order to the disk before it sends it: a round that a crash cuts off is repeated by the same order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.client_orders import ClientOrder, Whole, whole_number

__all__ = ["ClientOrder", "RoundOrder"]

MAX_IN_ORDER = 1 << 20  # clients
_ID = re.compile(r"[0-9]{1,10}")


def _ascending(ids: Any) -> Any:
    return ids if isinstance(ids, str | bytes) else tuple(sorted({whole_number(one) for one in ids}))


class RoundOrder(ClientOrder):
    """Tells how the clients are to train in a round, and which ones.

    Attributes:
        clients: ids of those that are asked, ascending; None: as the configuration selects them.
        each: what differs for single clients, by id: it is over the order itself.
    """

    clients: (
        Annotated[tuple[Whole, ...], Field(min_length=1, max_length=MAX_IN_ORDER), BeforeValidator(_ascending)] | None
    ) = None
    each: Annotated[dict[Whole, ClientOrder], Field(max_length=MAX_IN_ORDER)] = Field(default={})

    @classmethod
    def of(cls, /, **values: Any) -> Self:
        """Return the order with these values. Raises ConfigError: one of them is not possible; the text says which."""
        try:
            return cls(**values)
        except (ValidationError, TypeError) as error:
            if not isinstance(error, ValidationError):
                raise ConfigError(f"order of a round: {error}") from None
            first = error.errors(include_url=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            got = f", got {repr(first['input'])[:80]}" if where else ""
            raise ConfigError(f"order of a round{where and f', {where}'}: {first['msg']}{got}") from None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the order that :meth:`to_json` has written: JSON has ids as text. Raises ConfigError as :meth:`of`."""
        each = values.get("each")
        if isinstance(each, dict):
            ids = {one: int(one) if isinstance(one, str) and _ID.fullmatch(one) else one for one in each}
            values = {**values, "each": {ids[one]: order for one, order in each.items()}}
        return cls.of(**values)

    @property
    def is_plain(self) -> bool:
        """Return whether it orders nothing but what the configuration has."""
        return not self.model_fields_set or self == RoundOrder()

    def merged(self, other: RoundOrder) -> RoundOrder:
        """Return this order, and of ``other`` what it leaves open, also for the clients that ``other`` names."""
        nothing = ClientOrder()
        each = {
            one: ClientOrder(**self.each.get(one, nothing).over(other.each.get(one, nothing).without(self)))
            for one in sorted({*self.each, *other.each})
        }
        each = {one: order for one, order in each.items() if one in self.each or order != nothing}
        clients = other.clients if self.clients is None else self.clients
        return RoundOrder(**self.over(other), clients=clients, each=each)

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the configuration, as a JSON object."""
        found = self.model_dump(mode="json", exclude_none=True)
        return found if found.get("each") else {key: value for key, value in found.items() if key != "each"}
