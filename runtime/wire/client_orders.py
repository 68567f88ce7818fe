"""What single clients are ordered to do differently in a round, as text in its RoundTerms: a JSON object of orders
by the ids that each is for, ``{"0-3,7": {"lr": 0.1}}``.

A message has room for 16 lists and objects, which bounds the memory that it takes to read it. Text has room for the
orders of a thousand clients, each with its own.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from gradbus.runtime.json_text import parse_json
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids, has_id, parse_ids

MAX_CLIENT_ORDERS_CHARS = MAX_CHARS
_MAX_VALUES = 16_384  # of JSON in such a text
_PER_CLIENT = ("lr", "epochs", "steps", "subset_size", "seed")
_COUNTS = {"epochs", "steps"}


def whole_number(value: Any) -> Any:
    """Return a whole number of any kind, such as one of NumPy, as an int; other values as they are."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def real_number(value: Any) -> Any:
    """Return a real number of any kind, such as one of NumPy, as a float. Raises ValueError: it is none, such as text
    or a truth value, even one that Python could convert."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError("expected a number")
    return float(value)


Whole = Annotated[int, Field(ge=0, le=0x7FFF_FFFF, strict=True), BeforeValidator(whole_number)]
AtLeastOne = Annotated[int, Field(ge=1, le=0x7FFF_FFFF, strict=True), BeforeValidator(whole_number)]


class ClientOrder(BaseModel):
    """Tells how a client is to train in a round. What is None is as the configuration has it.

    Attributes:
        lr: learning rate.
        epochs: number of passes over its samples. steps: number of optimizer steps, instead of ``epochs``.
        subset_size: number of samples that it trains on; 0: all of its own.
        seed: of its random numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(real_number)] | None = None
    epochs: AtLeastOne | None = None
    steps: AtLeastOne | None = None
    subset_size: Whole | None = None
    seed: Whole | None = None

    @model_validator(mode="after")
    def _counts_once(self) -> ClientOrder:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps: a round is counted in one of them, give one")
        return self

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from the configuration, by name. Epochs come with 0 steps: both are counts
        of the same work."""
        found = self.given()
        return {**found, "steps": 0} if "epochs" in found else found

    def over(self, other: ClientOrder) -> dict[str, Any]:
        """Return what this order has, and of ``other`` what it leaves open."""
        return {**other.without(self).given(), **self.given()}

    def without(self, other: ClientOrder) -> ClientOrder:
        """Return what ``other`` leaves open of this order. Epochs and steps are counts of the same work."""
        decided = set(other.given())
        if decided & _COUNTS:
            decided |= _COUNTS
        return ClientOrder(**{key: value for key, value in self.given().items() if key not in decided})

    def given(self) -> dict[str, Any]:
        """Return the settings that this order has, by name."""
        return {key: value for key, value in self if key in _PER_CLIENT and value is not None}


_ORDERS = TypeAdapter(dict[str, ClientOrder])


def format_orders(orders: Mapping[int, ClientOrder]) -> str:
    """Return the text of these orders by client id; empty: there are none."""
    ids: dict[str, list[int]] = {}
    for client_id, order in orders.items():
        ids.setdefault(order.model_dump_json(exclude_none=True), []).append(client_id)
    entries = sorted((min(some), f'"{format_ids(some)}":{text}') for text, some in ids.items())
    return "{" + ",".join(entry for _, entry in entries) + "}" if entries else ""


@functools.lru_cache(maxsize=4)  # terms are repeated with each heartbeat
def parse_orders(text: str) -> tuple[tuple[tuple[range, ...], ClientOrder], ...]:
    """Return the orders of a text, each with the ids that it is for.

    Raises:
        ValueError: it is not what :func:`format_orders` writes.
    """
    if len(text) > MAX_CLIENT_ORDERS_CHARS:
        raise ValueError(f"orders in {len(text)} characters, at most {MAX_CLIENT_ORDERS_CHARS}")
    if not text:
        return ()
    found = _ORDERS.validate_python(parse_json(text, max_values=_MAX_VALUES))
    return tuple((parse_ids(ids), order) for ids, order in found.items())


def order_of(text: str, client_id: int) -> ClientOrder | None:
    """Return the order for this client; None: it has none of its own."""
    return next((order for ids, order in parse_orders(text) if has_id(ids, client_id)), None)


def checked_orders(text: str) -> str:
    """Return the text itself. Raises ValueError as :func:`parse_orders`."""
    parse_orders(text)
    return text
