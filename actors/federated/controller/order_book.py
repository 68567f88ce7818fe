"""How each round is ordered, by the caller, by the strategy or as configured; and the orders that are on the disk.

    order-000007.json     beside the checkpoints: {"run_id": ..., "round_id": 7, "order": {...}, "sha256": ...}

An order is written, and synced, before the first command of its round is sent, and after its clients have come: one
that could not begin does not hold. After a crash the round that was open is repeated by it, so that updates which
clients have made for it before still count. Where the caller orders rounds, all orders are written, so that a round
that was as configured stays so; else only those that differ from the configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from gradbus.actors.aggregation.orders import ClientOrder, RoundOrder
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.federated.controller.deadline import AskedWork, work_of
from gradbus.actors.federated.controller.state import RunState
from gradbus.runtime.config.federated import IN_COMMAND, IN_TERMS, FederatedConfig
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.optimization.schedules import RoundRates
from gradbus.runtime.wire.client_orders import MAX_CLIENT_ORDERS_CHARS, format_orders
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids
from gradbus.runtime.wire.messages import TrainCmd

log = get_logger("controller")


def check_order(config: FederatedConfig, order: RoundOrder) -> None:
    """Raise ConfigError if a run with this configuration cannot have such an order; the text says why."""
    clients, least, singles = order.clients, config.clients.min, order.each.values()
    is_tree = config.clients.kind == "sites"
    counts_work = any(one.steps or one.epochs for one in (order, *singles))
    refusals = {
        f"clients names {len(clients or ())}, and federated.clients.min is {least}, the least number of updates that "
        f"make a round. Name more, or lower clients.min": clients is not None and len(clients) < least,
        "clients: with federated.mode = asynchronous each client takes the newest model when it is free. Leave it out":
        clients is not None and config.mode == "asynchronous",
        "clients, steps and each: sites pass on epochs, subset_size, lr and seed, and nothing for single clients. "
        "Leave them out in trees": is_tree and bool(clients or order.each or order.steps),
        "epochs: federated.training.steps counts the rounds in steps, and sites pass that on. Leave epochs out, or set "
        "training.epochs instead of steps": is_tree and bool(order.epochs and config.training.steps),
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
    """Knows the orders of the rounds whose updates may still count.

    Attributes:
        has_terms: rounds may have settings that their commands have no field for: options that differ, or orders, also
            those on the disk, by which rounds may be repeated.
    """

    def __init__(
        self, config: FederatedConfig, strategy: Strategy, state: RunState, rates: RoundRates, *, has_caller: bool
    ) -> None:
        """``rates``: the learning rates of the rounds. ``has_caller``: the caller orders each round, in its own way."""
        self._config = config
        self._strategy = strategy
        self._state = state
        self._has_caller = has_caller
        self._rates = rates
        self.has_terms = config.training.has_terms or has_caller or strategy.gives_orders or state.has_orders
        self._orders: dict[int, RoundOrder] = {}
        self._unwritten: int | None = None  # a round whose order is not on the disk yet

    def decide_order(self, round_id: int, given: RoundOrder, ready: Sequence[int]) -> RoundOrder:
        """Return the order of a round that begins. Called on the compute thread.

        Args:
            given: what the caller orders. ready: ids of the clients that are ready, for the strategy.

        Raises:
            ConfigError: the strategy's order is not possible here, or that of a round that a crash has cut off is not
                possible with this configuration. CheckpointError: such an order is damaged.
        """
        # The strategy is asked in any case: what it remembers of its orders is then as if there had been no crash.
        order, found = self._merged(round_id, given, ready), self.recorded(round_id)
        if found is None:
            check_order(self._config, order)
            self._unwritten = round_id if self._has_caller or not order.is_plain else None
        else:
            order = self._confirmed(round_id, found, order)
        self._orders[round_id] = order
        oldest = round_id - self._window
        for past in [known for known in self._orders if known < oldest]:
            del self._orders[past]
        return order

    def write(self, round_id: int) -> None:
        """Write the order of a round, whose first command is about to be sent. Called on the compute thread. Raises
        CheckpointError: it cannot be written."""
        if self._unwritten == round_id:
            self._state.save_order(round_id, self._orders[round_id].to_json())
            self._unwritten = None

    @property
    def is_unwritten(self) -> bool:
        """Return whether there is an order for :meth:`write`."""
        return self._unwritten is not None

    def recorded(self, round_id: int) -> RoundOrder | None:
        """Return the order of a round that a crash has cut off; None: there is none on the disk.

        Raises:
            CheckpointError: it is damaged.
        """
        values = self._state.load_order(round_id)
        if values is None:
            return None
        try:
            return RoundOrder.from_json(values)
        except ConfigError as error:
            file, remedy = self._state.order_file(round_id), self._state.order_remedy(round_id)
            raise CheckpointError(f"{file} in the state directory: {error}. {remedy}") from None

    def _confirmed(self, round_id: int, found: RoundOrder, wanted: RoundOrder) -> RoundOrder:
        """Return the order that holds for a round that a crash has cut off, whatever is wanted now."""
        if wanted != found:
            log.warning(
                "the order of the interrupted round holds",
                round=round_id,
                order=found.to_json(),
                given=wanted.to_json(),
                reason="clients may have trained by it",
            )
        try:
            check_order(self._config, found)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. It is of round {round_id}, which was cut off: go on with the configuration that it was "
                f"ordered with, or remove {self._state.order_file(round_id)} from the state directory to order it anew"
            ) from None
        return found

    def _merged(self, round_id: int, given: RoundOrder, ready: Sequence[int]) -> RoundOrder:
        own = self._strategy.order(round_id, ready) if self._strategy.gives_orders else None
        if own is None:
            return given
        if not isinstance(own, RoundOrder):
            raise ConfigError(
                f"strategy {self._strategy.name}: order() returned {type(own).__name__}; expected a RoundOrder or None"
            )
        return given.merged(own)

    @property
    def _window(self) -> int:
        """Return how many rounds before the open one updates may be of."""
        config = self._config
        return config.asynchronous.max_staleness if config.mode == "asynchronous" else 0

    def order(self, round_id: int) -> RoundOrder:
        """Return the order of a round that was opened; else that of the configuration."""
        return self._orders.get(round_id, _AS_CONFIGURED)

    def reported(self, round_id: int) -> dict[str, Any]:
        """Return what the order of a round changes of the configuration, as a JSON object."""
        order = self.order(round_id)
        return {} if order == _AS_CONFIGURED else order.to_json()

    def command(self, round_id: int) -> TrainCmd:
        """Return the command of a round. Called on the compute thread, as a schedule may be the user's own."""
        training = self._config.training
        command = {
            "subset_size": training.subset_size,
            "epochs": training.epochs,
            "lr": self._rates.at(round_id),
            "seed": self._config.seed,
        }
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

    def list_work(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the work that these rounds ask of clients, both included, as :meth:`.TrainingSettings.list_work`."""
        first, training = max(1, first), self._config.training
        ordered = [round_id for round_id in self._orders if first <= round_id <= last]
        found = [] if len(ordered) == last - first + 1 else training.list_work(first, last)
        for round_id in ordered:
            of_all = {"epochs": training.epochs, "steps": training.steps, **self._changes(round_id)}
            of_some = [{**of_all, **one.changes()} for one in self._orders[round_id].each.values()]
            found += [(one["epochs"], one["steps"]) for one in (of_all, *of_some)]
        return found

    def find_most_work(self, round_id: int) -> AskedWork | None:
        """Return the most work that a round asks of a client; None: it cannot be compared, as some clients are to count
        epochs and others steps."""
        training, each = self._config.training, self.order(round_id).each.values()
        of_all = {
            "epochs": training.epochs, "steps": training.steps, "subset_size": training.subset_size,
            **self._changes(round_id),
        }  # fmt: skip
        asked = [{**of_all, **one.changes()} for one in (ClientOrder(), *each)]
        found = [work_of(one["epochs"], one["steps"], one["subset_size"]) for one in asked]
        return max(found) if len({one.unit for one in found}) == 1 else None

    def _changes(self, round_id: int) -> dict[str, Any]:
        """Return the settings of a round that differ from those of all rounds."""
        return {**self._config.training.changes(round_id), **self.order(round_id).changes()}


_AS_CONFIGURED = RoundOrder()
