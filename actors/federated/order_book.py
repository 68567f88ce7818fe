"""How each round is ordered, by the caller, by the strategy or as configured; and the orders that are on the disk.

    order-000007.json     beside the checkpoints: {"run_id": ..., "round_id": 7, "order": {...}, "sha256": ...}

An order that differs from the configuration is written, and synced, before its command is sent. After a crash the round
that was open is repeated by it, so that updates which clients have made for it before still count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.federated.state import RunState
from gradbus.runtime.config.federated import IN_COMMAND, IN_TERMS, FederatedConfig
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.client_orders import MAX_CLIENT_ORDERS_CHARS, format_orders
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids
from gradbus.runtime.wire.messages import TrainCmd

log = get_logger("controller")


def check_order(config: FederatedConfig, order: RoundOrder) -> None:
    """Raise ConfigError if a run with this configuration cannot have such an order; the text says why."""
    clients, least, singles = order.clients, config.clients.min, order.each.values()
    counts_work = any(one.steps or one.epochs for one in (order, *singles))
    refusals = {
        f"clients names {len(clients or ())}, and federated.clients.min is {least}, the least number of updates that "
        f"make a round. Name more, or lower clients.min": clients is not None and len(clients) < least,
        "clients: with federated.mode = asynchronous each client takes the newest model when it is free. Leave it out":
        clients is not None and config.mode == "asynchronous",
        "clients, steps and each: sites pass on epochs, subset_size, lr and seed, and nothing for single clients. "
        "Leave them out in trees": config.clients.kind == "sites" and bool(clients or order.each or order.steps),
        "steps and epochs: federated.asynchronous.proportional_steps gives each client steps of its own. Leave them "
        "out": config.asynchronous.proportional_steps and counts_work,
        f"clients: {len(clients or ())} ids take more than the {MAX_CHARS:,} characters of a message. Name fewer, or "
        f"give the clients consecutive ids": len(format_ids(clients or ())) > MAX_CHARS,
        f"each: the orders of {len(order.each):,} clients take more than the {MAX_CLIENT_ORDERS_CHARS:,} characters of "
        f"a message. Give fewer clients orders of their own, or the same order to more of them":
        len(format_orders(order.each)) > MAX_CLIENT_ORDERS_CHARS,
    }  # fmt: skip
    for reason, holds in refusals.items():
        if holds:
            raise ConfigError(f"order of a round: {reason}")


class OrderBook:
    """Knows the orders of the rounds whose updates may still count."""

    def __init__(self, config: FederatedConfig, strategy: Strategy, state: RunState) -> None:
        self._config = config
        self._strategy = strategy
        self._state = state
        self._orders: dict[int, RoundOrder] = {}

    def open(self, round_id: int, given: RoundOrder, ready: Callable[[], Sequence[int]]) -> RoundOrder:
        """Return the order of a round that begins, which is on the disk from now on. Called on the compute thread.

        Args:
            given: what the caller orders. ready: gives the ids of the clients that are ready, for the strategy.

        Raises:
            ConfigError: the strategy's order is not possible here. CheckpointError: it cannot be written.
        """
        order = self._recorded(round_id, given)
        if order is None:
            order = self._merged(round_id, given, ready)
            check_order(self._config, order)
            if not order.is_plain:
                self._state.save_order(round_id, order.to_json())
        self._orders[round_id] = order
        oldest = round_id - self._window
        for past in [known for known in self._orders if known < oldest]:
            del self._orders[past]
        return order

    def recorded(self, round_id: int) -> RoundOrder | None:
        """Return the order of a round that a crash has cut off; None: there was none, or it was as configured. Raises
        CheckpointError: it is damaged."""
        values = self._state.load_order(round_id)
        if values is None:
            return None
        try:
            return RoundOrder.of(**values)
        except ConfigError as error:
            raise CheckpointError(f"the order of round {round_id} in the state directory: {error}") from None

    def _recorded(self, round_id: int, given: RoundOrder) -> RoundOrder | None:
        found = self.recorded(round_id)
        if found is not None and given.merged(found) != found:
            log.warning(
                "the order of the interrupted round holds", round=round_id, order=found.to_json(),
                given=given.to_json(), reason="clients may have trained by it",
            )  # fmt: skip
        return found

    def _merged(self, round_id: int, given: RoundOrder, ready: Callable[[], Sequence[int]]) -> RoundOrder:
        own = self._strategy.order(round_id, ready()) if self._strategy.gives_orders else None
        if own is None:
            return given
        if not isinstance(own, RoundOrder):
            raise ConfigError(
                f"strategy {self._strategy.name}: order() returned {type(own).__name__}; expected a RoundOrder or None"
            )
        return given.merged(own)

    @property
    def _window(self) -> int:
        """How many rounds before the open one updates may be of."""
        config = self._config
        return config.asynchronous.max_staleness if config.mode == "asynchronous" else 0

    def order(self, round_id: int) -> RoundOrder:
        """Return the order of a round that was opened; else that of the configuration."""
        return self._orders.get(round_id, _AS_CONFIGURED)

    def command(self, round_id: int, lr: float) -> TrainCmd:
        """Return the command of a round. ``lr``: of the schedule."""
        training = self._config.training
        command = {
            "subset_size": training.subset_size, "epochs": training.epochs, "lr": lr, "seed": self._config.seed,
        }  # fmt: skip
        changed = self._changes(round_id)
        return TrainCmd(round_id, **{**command, **{key: changed[key] for key in IN_COMMAND if key in changed}})

    def terms_of(self, round_id: int) -> dict[str, Any]:
        """Return options of a round that go with its command."""
        changed = self._changes(round_id)
        own = {f"training.{key}": value for key, value in changed.items() if key in IN_TERMS}
        return {**self._config.training.terms_of(round_id), **own}

    def each(self, round_id: int) -> str:
        """Return the orders of single clients in a round, as its terms have them."""
        return format_orders(self.order(round_id).each)

    def named(self, round_id: int) -> Collection[int] | None:
        """Return the ids of the clients that a round is ordered from; None: the selector decides."""
        return self.order(round_id).clients

    def work(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return what is asked of the clients in these rounds, both included, as :meth:`.TrainingSettings.work`."""
        first, training = max(1, first), self._config.training
        ordered = [round_id for round_id in self._orders if first <= round_id <= last]
        found = [] if len(ordered) == last - first + 1 else training.work(first, last)
        for round_id in ordered:
            of_all = {"epochs": training.epochs, "steps": training.steps, **self._changes(round_id)}
            of_some = [{**of_all, **one.changes()} for one in self._orders[round_id].each.values()]
            found += [(one["epochs"], one["steps"]) for one in (of_all, *of_some)]
        return found

    def _changes(self, round_id: int) -> dict[str, Any]:
        """Return the settings of a round that differ from those of all rounds."""
        return {**self._config.training.changes(round_id), **self.order(round_id).changes()}


_AS_CONFIGURED = RoundOrder()
