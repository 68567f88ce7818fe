"""The parts of a running controller, each made of those before it."""

from __future__ import annotations

from dataclasses import dataclass

from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.client_terms import ClientTerms
from gradbus.actors.federated.controller.clients import ClientRegistry, ExpectedModel, duplicate_after_s
from gradbus.actors.federated.controller.combinations import CheckedChoices, most_clients
from gradbus.actors.federated.controller.cross_site import CrossSiteEvaluation, LocalModelReceiver
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.dispatch import Dispatcher, Recipients
from gradbus.actors.federated.controller.joining import ClientJoining
from gradbus.actors.federated.controller.liveness import LivenessMonitor
from gradbus.actors.federated.controller.masked_rounds import MaskedRounds
from gradbus.actors.federated.controller.model_evaluation import ModelEvaluation
from gradbus.actors.federated.controller.order_book import OrderBook
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.report import Progress
from gradbus.actors.federated.controller.round_losses import RoundLosses
from gradbus.actors.federated.controller.run_membership import RunMembership
from gradbus.actors.federated.controller.selection import ParticipantSelection
from gradbus.actors.federated.controller.state import RunContext, RunState
from gradbus.actors.federated.controller.update_admission import UpdateAdmission
from gradbus.actors.federated.controller.update_sum import UpdateForm, UpdateSum
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.task import FederatedTask
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRun:
    """A run that is restored, or fresh, and of which nothing has been sent.

    Attributes:
        choices: the settings, and what they name.
        identity: of this start of the controller. last_start: incarnation of the start before this one, which may still
            run; 0: there was none.
        base_strategy: what ``strategy`` is without its limits and its privacy.
        form: of the updates. max_update_bytes: length of the longest one that a participant can send.
    """

    choices: CheckedChoices
    identity: Identity
    last_start: int
    model: FlatModel
    state: RunState
    base_strategy: Strategy
    strategy: Strategy
    book: OrderBook
    form: UpdateForm
    max_update_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunParts:
    """The parts of a controller that has its job. See the class of each."""

    context: RunContext
    model: FlatModel
    strategy: Strategy
    book: OrderBook
    progress: Progress
    registry: ClientRegistry
    current_round: CurrentRound
    losses: RoundLosses
    admission: UpdateAdmission
    update_sum: UpdateSum
    receiver: UpdateReceiver
    masked: MaskedRounds | None
    publisher: ModelPublisher
    selection: ParticipantSelection
    terms: ClientTerms
    monitor: LivenessMonitor
    joining: ClientJoining
    dispatcher: Dispatcher
    evaluation: ModelEvaluation
    cross_site: CrossSiteEvaluation | None


def make_parts(
    context: RunContext,
    task: FederatedTask,
    prepared: PreparedRun,
    progress: Progress,
    *,
    above: Welcome | None,
    keeps_counted: bool,
) -> RunParts:
    """Make all parts, on the loop, once the job is this controller's.

    Args:
        above: the Welcome of the level above, as of :class:`~.client_terms.ClientTerms`.
        keeps_counted: as of :class:`~.updates_in.UpdateReceiver`.
    """
    config, state, model, strategy = context.config, context.state, prepared.model, prepared.strategy
    choices = prepared.choices
    context.bus.open_writer(TrainCmd)  # clients are ready when they are matched with it
    registry = ClientRegistry(
        ExpectedModel(model.dim, model.layout, "shared" if model.sharing.has_patterns else config.exchange),
        session=context.identity.incarnation,
        dead_after_s=config.clients.dead_after_s,
        duplicate_after_s=duplicate_after_s(config.clients.heartbeat_s),
        memory=context.bus.memory.here,
        max_members=most_clients(choices),
    )
    current_round = CurrentRound(progress)
    losses = RoundLosses(context.dropped, state.names)
    evaluator = ClientEvaluator(context, registry, current_round) if config.evaluation.is_on else None
    membership = RunMembership(context, registry, progress, current_round, losses, evaluator)
    admission = UpdateAdmission(
        state.quarantine,
        run_id=state.run_id,
        budget_bytes=config.limits.receive_budget_bytes,
        max_bytes=prepared.max_update_bytes + model.buffers.max_bytes,
        max_samples=config.limits.max_samples,
        max_staleness=0 if prepared.form.bases is None else config.asynchronous.max_staleness,
    )
    update_sum = UpdateSum(context, strategy, prepared.form)
    receiver = UpdateReceiver(
        context,
        admission,
        update_sum,
        on_strike=membership.punish,
        on_change=current_round.notify,
        keeps_counted=keeps_counted,
    )
    masked = None
    if config.secure_aggregation.enabled:
        masked = MaskedRounds(context, registry, receiver, membership, progress, current_round)
    publisher = ModelPublisher(context, choices.codecs.downlink, registry)
    selection = ParticipantSelection(context, registry, progress, choices.selector, current_round)
    terms = ClientTerms(
        context,
        registry,
        publisher,
        prepared.book,
        choices=choices,
        names_commands=prepared.last_start > 0 or state.adopts,  # a site has the run of its level above
        above=above,
    )
    monitor = LivenessMonitor(context, registry, progress, current_round, membership)
    joining = ClientJoining(context, registry, membership, receiver, terms, monitor, current_round)
    local_models = cross_site = None
    if config.evaluation.cross_site and evaluator is not None:
        local_models = LocalModelReceiver(context, registry, current_round, dim=model.dim)
        cross_site = CrossSiteEvaluation(context, publisher, evaluator, local_models)
    recipients = Recipients(joining, receiver, local_models, publisher, evaluator, masked, losses, selection)
    return RunParts(
        context=context,
        model=model,
        strategy=strategy,
        book=prepared.book,
        progress=progress,
        registry=registry,
        current_round=current_round,
        losses=losses,
        admission=admission,
        update_sum=update_sum,
        receiver=receiver,
        masked=masked,
        publisher=publisher,
        selection=selection,
        terms=terms,
        monitor=monitor,
        joining=joining,
        dispatcher=Dispatcher(context, registry, membership, monitor, current_round, recipients),
        evaluation=ModelEvaluation(context, task, model, evaluator, progress),
        cross_site=cross_site,
    )
