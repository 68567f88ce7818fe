"""What clients are told of how to train: the Welcome of each, and the terms of each round.

At a site both are those of the level above: it passes on codec, rule and options as they have come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gradbus.actors.federated.controller.asynchronous import proportional_steps
from gradbus.actors.federated.controller.clients import FIRST_HOST, ClientRegistry, Member
from gradbus.actors.federated.controller.combinations import CheckedChoices
from gradbus.actors.federated.controller.order_book import OrderBook
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.state import RunContext
from gradbus.runtime.errors import BusError
from gradbus.runtime.wire.control import RoundTerms, Welcome
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids

_SAME_SPEED = 0.2  # a change of the steps by less than this share is none


def ids_in_terms(participants: Collection[int], ordered: Collection[int] | None, *, may_name_all: bool) -> str:
    """Return the text that names the participants of a round in its terms; empty: all clients.

    Where it has no room, more are named, and updates of those that may not take part are refused: all that the round is
    ``ordered`` from, an order of which has room, or, without an order, all clients if ``may_name_all``.
    """
    named = format_ids(participants)
    if len(named) > MAX_CHARS and ordered is not None:
        return format_ids(ordered)
    return "" if len(named) > MAX_CHARS and may_name_all else named


class ClientTerms:
    """Tells clients how to train, and those of rounds in proportion how many steps each makes.

    Attributes:
        above: the Welcome of the level above, which says how to train and to encode; None: the settings do.
    """

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        publisher: ModelPublisher,
        book: OrderBook,
        *,
        choices: CheckedChoices,
        names_commands: bool,
        above: Welcome | None,
    ) -> None:
        """Terms as of the settings and the orders in ``book``.

        Args:
            choices: the codecs that clients are told of. Where the selector asks a part of the clients, the others are
                not sent the model of a round.
            names_commands: each command is repeated at once in a message that names this start of the controller.
        """
        self._context = context
        self._registry = registry
        self._publisher = publisher
        self._book = book
        self._codecs = choices.codecs
        self._fetch_models = choices.selector.partial
        self._names_commands = names_commands
        self.above = above
        self._speeds: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    async def welcome(self, client: Member, *, to: int | None = None) -> None:
        """Send a client its Welcome. ``to``: as what it sends, where that is not its id."""
        config = self._context.config
        training, sharing = config.training, self._context.state.model.sharing
        masked = config.secure_aggregation.enabled
        is_host = client.client_id >= FIRST_HOST
        welcome = Welcome(
            to=client.client_id if to is None else to,
            incarnation=client.incarnation,
            run_id=self._context.run_id,
            next_round=client.from_round,
            codec=config.codec.name,
            codec_options=self._codecs.update_options,
            num_clients=config.clients.num or 0,
            heartbeat_s=config.clients.heartbeat_s,
            memory=self._context.bus.memory.here,
            frozen=self._publisher.frozen_hash,
            rule=training.rule.name,
            options=self._options(client.client_id),
            round_s=config.round.timeout_s,
            broadcast=self._publisher.num_broadcast,
            has_terms=self._book.has_terms or self._fetch_models or is_host or masked,
            fetch_models=self._fetch_models,
            masked=masked,
            include=list(sharing.include) if sharing.has_patterns else [],
            exclude=list(sharing.exclude),
            buffers=dict(sharing.buffers),
            buffer_layout=self._context.state.model.buffers.digest,
            section_codec=config.section_codec.name,
            section_options=self._codecs.section_options,
            downlink_codec=config.downlink_codec.name,
            client_id=-1 if is_host else client.client_id,
            named_commands=self._names_commands,
            name=client.hello.name if is_host else self._context.state.names.own_name_of(client.client_id),
        )
        if (above := self.above) is not None:
            welcome = replace(
                welcome,
                codec=above.codec,
                codec_options=above.codec_options,
                section_codec=above.section_codec,
                section_options=above.section_options,
                rule=above.rule,
                options=above.options,
            )
        await self._context.publish(welcome)

    async def announce_model(self, client: Member) -> None:
        """Send a client that has had its Welcome, and reads memory, the place of the model."""
        await self._publisher.announce_memory_for(client.client_id)

    async def let_into_round(self, round_id: int) -> None:
        """Let the clients that came for a later round into this one, and send them the Welcome that says so."""
        for member in self._registry.let_into(round_id):
            with contextlib.suppress(BusError):  # its next Hello brings another
                await self.welcome(member)

    def _options(self, client_id: int) -> dict[str, Any]:
        own = {"training.steps": self._steps[client_id]} if client_id in self._steps else {}
        return {**self._context.config.sent_options(), **self._context.state.terms(), **own}

    @property
    def names_commands(self) -> bool:
        """Whether each command is repeated at once in a message that names this start of the controller."""
        return self._names_commands

    def of_round(
        self, round_id: int, participants: Collection[int], *, held: bool, attempt: int = 0
    ) -> RoundTerms | None:
        """Return what belongs to the command of a round, and has no field in it; None: there is no such setting.

        Args:
            held: no update is added before those of all are announced.
            attempt: at the round, with secure aggregation.
        """
        book = self._book
        names_them = self._fetch_models or self._registry.has_hosts or bool(attempt)
        if not book.has_terms and not names_them:
            return None
        ordered = book.named(round_id)
        named = ""
        if names_them or ordered is not None:
            named = ids_in_terms(participants, ordered, may_name_all=not self._fetch_models)
        return RoundTerms(
            self._context.run_id,
            round_id,
            book.terms_of(round_id),
            named,
            held=held,
            attempt=attempt,
            each=book.each(round_id),
        )

    async def adapt_steps(self, speeds: Mapping[int, float]) -> None:
        """Give clients steps in proportion to these, in steps a second: one whose number changes is welcomed anew."""
        here = {client.client_id for client in self._registry}  # one that has left sets no pace
        self._speeds = {one: speed for one, speed in {**self._speeds, **speeds}.items() if one in here}
        for client_id, steps in proportional_steps(self._context.config.training.steps, self._speeds).items():
            before = self._steps.get(client_id, self._context.config.training.steps)
            if abs(steps - before) <= before * _SAME_SPEED:
                continue
            self._steps[client_id] = steps
            incarnation = self._registry.incarnation_of(client_id)
            client = None if incarnation is None else self._registry.get(client_id, incarnation)
            if client is not None:
                with contextlib.suppress(BusError):  # its next Welcome has it
                    await self.welcome(client)
