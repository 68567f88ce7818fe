"""What the update of a round is made from: what has arrived for it, and how that is to be trained."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradbus.actors.federated.client.client_optimizer import split_options, split_terms
from gradbus.actors.federated.client.pacing import PacedTraining, Pacer
from gradbus.actors.federated.client.packets_out import PacketRoute, RoundPackets
from gradbus.actors.federated.client.rules.base import ClientRule, make_rule
from gradbus.actors.federated.client.run_terms import RunTerms
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.privacy.client import without_privacy
from gradbus.codecs import Codec
from gradbus.runtime.choices import Choice
from gradbus.runtime.config.federated import IN_COMMAND, IN_TERMS
from gradbus.runtime.wire.client_orders import order_of
from gradbus.runtime.wire.control import RoundTerms, Welcome
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import TrainCmd


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundInputs:
    """Holds what the update of a round is made from.

    Attributes:
        welcome: how to train. command: what the controller asks for; terms: what that has no field for.
        base: float32, shape (D,): the global model. broadcast: float32, what came behind it. buffers: the block of its
            merged buffers.
        commanded_s: when the command came, by ``time.perf_counter``.
        spent: with secure aggregation: rounds whose sum may be known, with this client's update in it, and the terms on
            which it was masked.
        route: opens the way by which packets of the update leave while it is trained; None: they are added here.
        pacer: holds the training to the budget of this client; None: there is none.
    """

    welcome: Welcome
    command: TrainCmd
    base: Tensor
    broadcast: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    buffers: bytes = b""
    terms: RoundTerms | None = None
    commanded_s: float = 0.0
    spent: Mapping[int, Hashable] = field(default_factory=dict)
    route: Callable[[], PacketRoute] | None = None
    pacer: Pacer | None = None

    def options(self) -> dict[str, object]:
        """Return the options of the rule and of the optimizer in this round."""
        return {**self.welcome.options, **({} if self.terms is None else self.terms.options)}

    def for_client(self, client_id: int) -> RoundInputs:
        """Return the same with what this client is ordered to do differently."""
        order = None if self.terms is None else order_of(self.terms.each, client_id)
        if self.terms is None or order is None:
            return self
        changes = order.changes()
        command = replace(self.command, **{key: changes[key] for key in IN_COMMAND if key in changes})
        options = {f"training.{key}": value for key, value in changes.items() if key in IN_TERMS}
        terms = replace(self.terms, options={**self.terms.options, **options})
        return replace(self, command=command, terms=terms)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundPlan:
    """Tells how the update of a round is trained.

    Attributes:
        run: the choices of the run. inputs: what it is made from.
        rule: what is added to the training of the task. optimizer: that the controller names; None: the task's.
        codec: of the update. steps: of the optimizer that are asked for; 0: as many as the epochs have.
        keeps_optimizer: its state stays at this client from round to round. paced: says when to stop.
        number: of the training: that of its round, or, where many are of one round, counted on.
    """

    run: RunTerms
    inputs: RoundInputs
    rule: ClientRule
    optimizer: Choice | None
    codec: Codec
    steps: int
    keeps_optimizer: bool
    paced: PacedTraining
    number: int

    @classmethod
    def of(cls, inputs: RoundInputs, run: RunTerms, should_stop: Callable[[], bool], *, next_number: int) -> RoundPlan:
        """Read what this round asks for, and begin its time.

        ``next_number``: the first number that no training which counts has had.

        Raises:
            ConfigError: what it asks for cannot be, or is not allowed.
        """
        sent, terms = split_terms(without_privacy(inputs.options()))
        options, optimizer = split_options(sent)
        rule = make_rule(inputs.welcome.rule, options, allowed=run.allowed.rule)
        paced = PacedTraining(None, should_stop) if inputs.pacer is None else inputs.pacer.begin(should_stop)
        number = inputs.command.round_id
        if "repeats" in terms:
            number = max(number, next_number)
        return cls(
            run=run,
            inputs=inputs,
            rule=rule,
            optimizer=optimizer,
            codec=run.codec_in(terms),
            steps=int(terms.get("steps", 0)),
            keeps_optimizer=bool(terms.get("keep_optimizer")),
            paced=paced,
            number=number,
        )

    def is_in_one_piece(self, model: FlatModel) -> bool:
        """Return whether something has to be done with the whole update before it leaves."""
        return self.inputs.welcome.masked or self.run.privacy is not None or bool(self.rule.sections or model.buffers)

    def open_packets(self, model: FlatModel, key: FrameKey, *, leave: bool) -> RoundPackets:
        """Return the packets of the update, none yet. ``leave``: they leave while the model trains, if there is a
        way."""
        route = self.inputs.route() if leave and self.inputs.route is not None else None
        return RoundPackets(self.inputs.base, model.layers, model.read, key, route, (type(self.run.codec),))
