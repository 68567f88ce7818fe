"""Faults that are planted in the shipped code, to see what finds them: one line changed in each, at run time.

A net of tests is as fine as the faults that it finds. Each mutation here breaks one promise of admission, commit,
resume, receipts, trees, masks, servers, agreement or links, and a seed of the simulation should find it, or the
test that it names::

    with find("an update counts twice").planted():
        ...

A mutation names the lines as they are in the source. Where these change, :meth:`Mutation.apply` fails, and the table is
to be brought up to date; tests/simulation/test_mutations.py sees to that.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

Patch = Callable[[Any, str, Any], object]  # as setattr, or MonkeyPatch.setattr


class Outdated(AssertionError):
    """The shipped code no longer has the lines that a mutation changes."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Holds one planted fault.

    Attributes:
        name: of the fault. subject: admission, commit, resume, receipts, commands, trees, masks, servers,
            agreement or links.
        place: of the function, ``module:function`` or ``module:Class.method``, without ``gradbus.``.
        shipped: lines of its source, which are there once. mutant: what stands in their place.
        promise: what it breaks: an invariant of ``gradbus check``, or a sentence.
        flavour: of the simulated runs that meet these lines; any: each seed has a flavour of its own.
        transport: of these runs; empty: any will do.
        found_by: the test that finds it, where no simulated run meets these lines, or seldom one does wrong there.
    """

    name: str
    subject: str
    place: str
    shipped: str
    mutant: str
    promise: str
    flavour: str = "any"
    transport: str = ""
    found_by: str = ""

    @property
    def file(self) -> str:
        """Return the source file, from the root of the repository."""
        return self.place.partition(":")[0].replace(".", "/") + ".py"

    def apply(self, patch: Patch) -> None:
        """Plant the fault in this process. ``patch`` sets an attribute, and may undo that later.

        Raises:
            Outdated: the lines are not there, or not once.
        """
        module_name, _, path = self.place.partition(":")
        module = importlib.import_module(f"gradbus.{module_name}")
        *owners, function_name = path.split(".")
        owner: Any = module
        for name in owners:
            owner = getattr(owner, name)
        shipped = inspect.unwrap(owner.__dict__[function_name])
        patch(owner, function_name, self._rewritten(shipped, function_name))

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Have the fault in this process meanwhile. Raises Outdated: see :meth:`apply`."""
        with contextlib.ExitStack() as shipped:

            def patch(owner: Any, name: str, value: Any) -> None:
                shipped.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)

            self.apply(patch)
            yield

    def _rewritten(self, shipped: FunctionType, function_name: str) -> Any:
        source = textwrap.dedent(inspect.getsource(shipped))
        old, new = textwrap.dedent(self.shipped).strip("\n"), textwrap.dedent(self.mutant).strip("\n")
        indented = _found(source, old)
        if indented is None:
            raise Outdated(f"{self.name}: {self.place} has these lines not once:\n{old}")
        text, margin = indented
        tree = ast.parse(source.replace(text, textwrap.indent(new, margin)))
        ast.increment_lineno(tree, shipped.__code__.co_firstlineno - 1)
        made: dict[str, Any] = {}
        code = compile(tree, shipped.__code__.co_filename, "exec", annotations.compiler_flag)  # as the shipped files
        exec(code, shipped.__globals__, made)  # noqa: S102 - the project's own source, with a line of this file in it
        return made[function_name]


def _found(source: str, lines: str) -> tuple[str, str] | None:
    """Return the lines as they stand in the source, and their margin; None: they are not there once."""
    found = [
        (textwrap.indent(lines, margin), margin)
        for margin in (" " * count for count in range(4, 24, 4))
        if f"\n{textwrap.indent(lines, margin)}\n" in f"\n{source}\n"
    ]
    return found[0] if len(found) == 1 and source.count(found[0][0]) == 1 else None


ROUNDS = "actors.federated.controller.rounds:Round"
RECEIVER = "actors.federated.controller.updates_in:UpdateReceiver"
ANSWERS = "actors.federated.controller.update_answers:UpdateAnswers"
CONTROLLER = "actors.federated.controller.controller:Controller"
COMMITTER = "actors.federated.controller.round_commit:RoundCommitter"
SESSION = "actors.federated.client.session:ControllerSession"
CLIENT_RUN = "actors.federated.client.client_run:ClientRun"
CLIENT_ROUNDS = "actors.federated.client.client_rounds:ClientRounds"
AGREEMENT = "runtime.collectives.agreement:GenerationAgreement"
MASKING = "actors.secure_aggregation"
SITE = "actors.federated.site.site_controller:SiteController"
ADMISSION = "runtime.security.identity.admission:Admission"
SERVER = "actors.parameter_server.server:ParameterServer"
SERVICE = "actors.parameter_server.service:Service"
ELASTIC = "actors.data_parallel.elastic:ElasticWorker"
OUTLET = "runtime.transport.zenoh.outlet:ZenohOutlet"
INLET = "runtime.transport.zenoh.inlet:ZenohInlet"
PLACE = "runtime.transport.zenoh.place:ZenohEndpoint"

MUTATIONS = (
    Mutation(
        "an update counts twice", "admission", f"{ROUNDS}.may_send",
        """
        if client_id in self.accepted:
            return REPEATED
        """,
        "", "I1",
        found_by="tests/actors/federated/test_rounds.py::test_only_an_expected_client_that_has_not_answered_may_send",
    ),
    Mutation(
        "a late update counts", "admission", f"{ROUNDS}.staleness",
        "return 0 if round_id == self.round_id else -1",
        "return 0", "I1: an update counts in its own round",
    ),
    Mutation(
        "an update beyond those that are enough counts", "admission", f"{ROUNDS}.may_send",
        """
        if self.is_full:
            return SURPLUS
        """,
        "", "a round has as many updates as its selection asks for",
        found_by="tests/actors/federated/test_rounds.py::test_a_round_that_has_enough_updates_takes_no_further_one",
    ),
    Mutation(
        "a quarantined client counts", "admission",
        "actors.federated.controller.update_admission:UpdateAdmission.refusal",
        "if (why := self.quarantine.exclusion_reason(client_id, request.round_id)) is not None:",
        "if (why := None) is not None:", "a client in quarantine does not count",
        found_by="tests/actors/federated/test_updates_in.py::test_bad_updates_are_strikes_and_who_has_too_many_is_turned_away_before_it_sends",
    ),
    Mutation(
        "an older training of a client is not dropped for its newer one", "admission", f"{RECEIVER}.on_request",
        "if not transfer.source.goes_with(update):",
        "if False:", "only the newest update of a client counts",
        found_by="tests/actors/federated/test_updates_in_clients.py::test_the_offer_of_a_restarted_client_replaces_its_older_transfer",
    ),
    Mutation(
        "what has counted is forgotten", "receipts", f"{RECEIVER}.on_request",
        "if self._answers.is_counted(update):  # the receipt was lost",
        "if False:", "I8",
    ),
    Mutation(
        "what has counted is not saved", "receipts", "actors.federated.controller.state:RunState._meta",
        "for client_id, key in list(self.counted.items())[-MAX_KNOWN:]",
        "for client_id, key in []", "I8",
    ),
    Mutation(
        "the next start of the controller is not asked for a receipt", "receipts", f"{CLIENT_ROUNDS}._send",
        """
        receipt = await deliver(
            update,
            check=lambda: self._context.is_same_run(welcome.run_id),
        """,
        """
        session = self._context.session.incarnation
        receipt = await deliver(
            update,
            check=lambda: self._context.is_same_session(session),
        """,
        "I8",
    ),
    Mutation(
        "a receipt goes out before the sum", "receipts", f"{RECEIVER}._fold",
        "started_s = time.perf_counter()",
        """
        receipts.create_task(self._answers.send_receipt(update), name="receipt")
        started_s = time.perf_counter()
        """,
        "I1: a receipt is of an update that counts",
    ),
    Mutation(
        "a refused update gets the receipt of one that counts", "receipts", f"{ANSWERS}.refuse",
        "await self.send_receipt(update, refusal.text or refusal.reason)",
        "await self.send_receipt(update)", "I1: a receipt is of an update that counts",
    ),
    Mutation(
        "the residual is kept whatever the answer is", "receipts",
        "actors.federated.client.local_training:LocalTraining.on_receipt",
        """
        if not receipt.accepted:
            return
        """,
        "", "sent and residual make the whole change",
        found_by="tests/actors/federated/test_local_training.py::test_the_residual_of_an_update_that_was_refused_is_not_kept",
    ),
    Mutation(
        "the end of the run ends the wait for its last receipt", "receipts", f"{SESSION}.end",
        "self._ended_s = time.monotonic()",
        "self._ended_s = -LAST_ANSWERS_S", "clients know what counts",
    ),
    Mutation(
        "an update is offered once", "receipts", "actors.federated.client.updates_out:UpdateSender.deliver",
        "async with asyncio.timeout(wait_s):",
        "async with asyncio.timeout(1e6):", "a lost request costs half a second",
    ),
    Mutation(
        "the model is published before it is committed", "commit", f"{COMMITTER}.commit",
        """
        if state.is_durable or self._context.history.on:
            await self._context.compute.run(self._make_durable, report)
        else:
            self._make_durable(report)
        committed_s = time.perf_counter()
        """,
        """
        with tolerate_write_timeout("model", round_id):
            await parts.publisher.publish()
        await self._context.compute.run(self._make_durable, report)
        committed_s = time.perf_counter()
        """,
        "I2 and I4: a round that a client knows is not lost",
    ),
    Mutation(
        "a commit is noted before it is saved", "commit", f"{COMMITTER}._make_durable",
        """
        self._state.commit(report, self._parts.publisher.held_apart)
        self._context.probe.reached("after_commit_before_note", report.round_id)
        self._parts.publisher.note_commit(report)
        """,
        """
        self._parts.publisher.note_commit(report)
        self._context.probe.reached("after_commit_before_note", report.round_id)
        self._state.commit(report, self._parts.publisher.held_apart)
        """,
        "I4",
    ),
    Mutation(
        "the file of a checkpoint is not synced", "commit", "runtime.checkpoint:_replacing",
        "_sync(temporary)",
        "pass", "I4, where the machine loses its power", flavour="s4",
    ),
    Mutation(
        "the folder of a checkpoint is not synced", "commit", "runtime.checkpoint:CheckpointStore.save",
        """
        with _replacing(meta_path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        _sync(self.directory)
        """,
        """
        with _replacing(meta_path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        """,
        "I4, where the machine loses its power", flavour="s4",
    ),
    Mutation(
        "a checkpoint is saved over that of a later start", "commit",
        "actors.federated.controller.state:RunState._check_holder",
        "if newest is not None and int(newest.incarnation, 16) > self.incarnation:",
        "if False:", "the newest start has the state directory",
        found_by="tests/actors/federated/test_state.py::test_a_controller_that_was_replaced_saves_nothing_over_the_newer_state",
    ),
    Mutation(
        "a resumed run has another id", "resume", "actors.federated.controller.state:RunState._restore",
        "self.run_id = int(saved.run_id, 16)",
        "pass", "I4",
    ),
    Mutation(
        "a strategy begins afresh after a resume", "resume", "actors.federated.controller.state:RunState._restore",
        "self._strategy.load_state(checkpoint.tensors)",
        "pass", "I3: a resumed run continues bit-equal", flavour="adam",
    ),
    Mutation(
        "what the clients hold is forgotten at a resume", "resume",
        "actors.federated.controller.state:RunState._restore",
        "self.held = held",
        "pass", "I2: a client holds the model that the controller believes it holds", flavour="downlink",
    ),
    Mutation(
        "a start has the incarnation of the one before", "resume", f"{CONTROLLER}._prepare",
        "incarnation = max(new_incarnation(), again)",
        "incarnation = last_start or new_incarnation()",
        "clients tell two starts of a controller apart",
    ),
    Mutation(
        "a start of the controller is not written down", "resume",
        "actors.federated.controller.state:RunState.record_start",
        "self._store.save_document(_START, start)",
        "pass", "a later start has a higher incarnation",
        found_by="tests/actors/federated/test_state.py::test_a_start_that_has_committed_nothing_is_known_to_the_next_one",
    ),
    Mutation(
        "a round that is done again begins with the residual after it", "resume",
        "actors.federated.client.client_state:ClientStateStore.last_before",
        "return max((known for known in self._by_round if known < round_id), default=0)",
        "return max((known for known in self._by_round if known <= round_id), default=0)",
        "a resumed run continues bit-equal",
        found_by="tests/actors/federated/test_local_training_residuals.py::test_a_round_that_is_done_again_starts_with_the_same_residual_again",
    ),
    Mutation(
        "a controller that was replaced is followed", "commands", f"{SESSION}.accepts_session",
        "if session != self._other_run or now_s - self._session_seen_s < OLD_SESSION_S:",
        "if False:", "clients follow the newest controller", flavour="replaced",
    ),
    Mutation(
        "a model of a controller that was replaced is taken", "commands",
        "actors.federated.client.global_model:ModelReplica._follow",
        "if (key.job, key.incarnation) != (self._run_id, self._session):",
        "if key.job != self._run_id:", "I2", flavour="replaced",
    ),
    Mutation(
        "a controller that was replaced goes on", "commands",
        "actors.federated.controller.dispatch:Dispatcher._check_duplicates",
        """
        if taken is not None:
            raise taken
        """,
        "", "a controller that was replaced ends", flavour="replaced",
    ),
    Mutation(
        "a command that does not name its controller is followed after a resume", "commands", f"{CLIENT_RUN}.handle",
        "case TrainCmd() if self._session.names_commands:",
        "case TrainCmd() if False:", "clients follow the newest controller",
        found_by="tests/actors/test_replaced_controllers.py::test_clients_of_a_later_start_take_no_command_that_does_not_name_it",
    ),
    Mutation(
        "an update for the session before is still offered", "commands", f"{SESSION}.is_current",
        "return self.incarnation == session and self.welcome is not None and self.ended is None",
        "return self.welcome is not None and self.ended is None",
        "an update is from the model of its own session",
        found_by="tests/actors/federated/test_session.py::test_an_update_is_for_the_start_of_the_controller_that_has_commanded_it",
    ),
    Mutation(
        "a training that was called off is sent", "commands", f"{CLIENT_ROUNDS}._train",
        """
        is_called_off = session != current.incarnation or current.is_superseded(command) or self._making.is_called_off()
        """,
        "is_called_off = False", "an update is of the round that is open",
    ),
    Mutation(
        "a client trains again though its update counts", "commands", f"{SESSION}.is_wanted",
        "is_next = command.round_id > self.counted_round or self.repeats is True",
        "is_next = True", "a client trains once for a command",
        found_by="tests/actors/federated/test_session.py::test_a_repeated_command_has_no_effect_where_its_update_counts",
    ),
    Mutation(
        "a lost command is not repeated", "commands",
        "actors.federated.controller.clients:ClientRegistry.lacks_command",
        """
        return bool(lacking) and any(
            _record(self._members[one]).client_id in lacking for one in ids if one in self._members
        )
        """,
        "return False", "a lost message costs a heartbeat",
        found_by="tests/actors/federated/test_clients.py::test_a_client_lacks_a_command_as_long_as_its_hello_names_another_round",
    ),
    Mutation(
        "a repeated command is trained for again", "commands", f"{SESSION}.take_repeated",
        "if is_known and repeated.attempt <= self._attempt:",
        "if False:", "a client trains once for a command",
        found_by="tests/actors/federated/test_session.py::test_a_repeated_command_of_a_later_attempt_is_given_again_once",
    ),
    Mutation(
        "a site takes any sum that it has sent for counted", "trees", f"{SITE}.adopt",
        "if gathered is not None and gathered.round.round_id == round_id == self.counted_round:",
        "if gathered is not None and gathered.round.round_id == round_id:",
        "a site knows whether its sum counts", flavour="tree",
    ),
    Mutation(
        "what has counted at a site in a round counts in its next one", "trees", f"{SITE}.adopt",
        "self._accepted = set()", "", "a round waits for the clients that have not answered in it", flavour="tree",
    ),
    Mutation(
        "a site passes on another model than that from above", "trees",
        "actors.federated.site.site_controller:SiteSum.finish", "weights.copy_(self.next_model)",
        "weights.add_(self.next_model).mul_(0.5)", "a round has one model at all levels", flavour="tree",
    ),
    Mutation(
        "another attempt at a round of a site forgets what has counted in it", "trees", f"{SITE}.gather",
        "self._gathered = await self._run.collector.collect(command.round_id, self._accepted, due_s=due_s)",
        "self._gathered = await self._run.collector.collect(command.round_id, set(), due_s=due_s)",
        "an update counts at most once through both levels", flavour="tree",
    ),
    Mutation(
        "changes of the allow list are not read", "admission",
        "runtime.security.identity.allow_list:AllowListWatcher.news",
        "if self._looked == self._seen or self._looked != before:", "if True:",
        "a node that is not on the allow list never counts", flavour="admission",
    ),
    Mutation(
        "a node that has the name of another is admitted", "admission", f"{ADMISSION}._refusal_reason",
        """
        if entry.public != hello.public:
            return f"the allow list of the controller has another key of {hello.name}, id {entry.public[:4].hex()}"
        """,
        "", "a node that is not on the allow list never counts", flavour="admission",
    ),
    Mutation(
        "the masks of a client that dropped out stay in the sum", "masks",
        f"{MASKING}.masking_server:MaskingServer._seeds",
        "for survivor in self.survivors:  # each has added or taken off what it shares with the one that is missing",
        "for survivor in ():", "I3",
        flavour="secure",
    ),
    Mutation(
        "shares that unmask are not compared with what was fixed", "masks",
        f"{MASKING}.masking_server:MaskingServer.add_unmasking",
        "self._check_share(sender, client_id, share)",
        "pass", "a client that gives a wrong share is named",
        found_by="tests/actors/secure_aggregation/test_lying_clients.py::test_who_gives_wrong_shares_to_unmask_is_named_and_struck_and_its_update_counts",
    ),
    Mutation(
        "a client unmasks two sets of survivors", "masks", f"{MASKING}.masking_client:MaskingClient.unmask",
        "if self._survivors is not None and survivors != self._survivors:",
        "if False:", "no update is ever seen alone",
        found_by="tests/actors/secure_aggregation/test_protocol.py::test_no_client_reveals_both_shares_of_another_whatever_the_server_asks",
    ),
    Mutation(
        "two vectors are masked with the same masks", "masks", f"{MASKING}.masking_client:MaskingClient.mask",
        "self._is_masked = True",
        "pass", "no update is ever seen alone",
        found_by="tests/actors/secure_aggregation/test_protocol.py::test_masked_values_say_nothing_and_are_made_once",
    ),
    Mutation(
        "half of the members decide though the others may live", "agreement", f"{AGREEMENT}._is_quorum",
        "return all(member in of or member in self._dead for member in self.members)",
        "return True", "a generation has one successor",
        found_by="tests/runtime/collectives/test_agreement.py::test_whatever_happens_there_is_one_membership_a_generation_and_the_living_go_on[0]",
    ),
    Mutation(
        "a proposal that may have been decided is not kept", "agreement", f"{AGREEMENT}._value",
        "return value if newest else self._target()",
        "return self._target()", "a generation has one successor",
        found_by="tests/runtime/collectives/test_agreement.py::test_whatever_happens_there_is_one_membership_a_generation_and_the_living_go_on[3]",
    ),
    Mutation(
        "a ballot below the promised one is accepted", "agreement", f"{AGREEMENT}._vote",
        "if view.accepted > self._accepted and view.accepted >= self._promised:",
        "if view.accepted > self._accepted:", "a generation has one successor",
        found_by="tests/runtime/collectives/test_agreement.py::test_whatever_happens_there_is_one_membership_a_generation_and_the_living_go_on[4]",
    ),
    Mutation(
        "an older view of a process takes the place of a newer one", "agreement", f"{AGREEMENT}.receive",
        """
        if known is not None and view.version < known.version:
            return
        """,
        "", "a promise that was given is not forgotten",
        found_by="tests/runtime/collectives/test_agreement.py::test_an_older_view_that_comes_late_is_not_taken_for_the_newer_one",
    ),
    Mutation(
        "a server begins with a fresh optimizer after a resume", "servers",
        "actors.parameter_server.shard:Shard.restore",
        "self.optimizer.load(own)",
        "pass", "a resumed run continues bit-equal", flavour="servers",
    ),
    Mutation(
        "a version is removed before all servers have the next one", "servers", f"{SERVICE}._save",
        "self._has_saved = True",
        "await self._compute.run(self.kept.state.prune)", "a version that all servers have saved is never lost",
        flavour="servers",
    ),
    Mutation(
        "a server goes on with new weights after a resume", "servers", f"{SERVER}._meet",
        "await compute.run(shard.restore, checkpoint)",
        "pass", "a resumed run continues bit-equal", flavour="servers",
    ),
    Mutation(
        "a worker goes on however slow the others are", "servers", "actors.parameter_server.clocks:Clocks._decide",
        "if not request.meets and self._live[rank].clock - slowest <= (self.staleness or 0)",
        "if not request.meets", "no worker is further ahead than the staleness allows", flavour="servers_stale",
    ),
    Mutation(
        "a generation takes the batches of the last step again", "agreement", f"{ELASTIC}._note_place",
        "position.epoch_batches = plan.batches_done(position.epoch_step)",
        "position.epoch_batches = plan.batches_done(position.epoch_step - 1)", "no batch is lost or taken twice",
        flavour="elastic",
    ),
    Mutation(
        "what an inlet lacks is not sent again", "links", f"{OUTLET}._take_answer",
        "self._send_again(inlet, ack)",
        "pass", "what is lost is sent again", transport="zenoh",
    ),
    Mutation(
        "a sample that was sent is not kept until it has arrived", "links", f"{OUTLET}._forget_acknowledged",
        "lacking = [one.acknowledged for one in self._inlets.values() if one.is_reliable and not one.has_missed]",
        "lacking = [one.sent for one in self._inlets.values() if one.is_reliable and not one.has_missed]",
        "a sample is kept until all have acknowledged it",
        found_by="tests/runtime/transport/zenoh/test_framing.py::test_whatever_becomes_of_links_within_the_lease_each_sample_arrives_once_and_in_order[0]",
    ),
    Mutation(
        "a START that was lost is not repeated", "links", f"{OUTLET}._look_at_progress",
        "if self._lacks(inlet) and now_s >= inlet.probe_s:",
        "if inlet.is_matched and self._lacks(inlet) and now_s >= inlet.probe_s:",
        "a match begins whatever is lost", transport="zenoh",
    ),
    Mutation(
        "the last sample is not missed", "links", f"{OUTLET}._lacks",
        "knows_all = inlet.is_matched and inlet.is_heard and inlet.acknowledged >= self._kept.last",
        "knows_all = inlet.is_matched", "what is lost is sent again", transport="zenoh",
    ),
    Mutation(
        "an inlet that knows of no match is not begun again with", "links", f"{OUTLET}._hear",
        "self._restart(inlet)",
        "pass", "a match that one side has forgotten begins again",
        found_by="tests/runtime/transport/zenoh/test_framing.py::test_peers_are_lost_when_the_own_link_is_down_for_the_lease_and_no_sooner",
    ),
    Mutation(
        "a sample that is here is taken again", "links", f"{INLET}._take_in",
        "if number < outlet.wanted:",
        "if number < outlet.wanted - 1:", "a sample arrives once", transport="zenoh",
    ),
    Mutation(
        "a gap is skipped", "links", f"{INLET}._take_in",
        "if self._skips_gaps:",
        "if self._skips_gaps or number > outlet.wanted + 1:", "a gap is never handed over", transport="zenoh",
    ),
    Mutation(
        "what was behind a gap is not handed over", "links", f"{INLET}._take_in",
        """
        if outlet.early:
            self._hand_over(outlet)
        """,
        "", "what is lost is sent again, and no more than that", transport="zenoh",
    ),
    Mutation(
        "an inlet has room for all", "links", f"{INLET}._credit",
        "return max(outlet.granted, outlet.wanted - 1 - outlet.queued + share)",
        "return max(outlet.granted, outlet.wanted - 1 + 4 * share)", "no inlet holds more than its bound",
        found_by="tests/runtime/transport/zenoh/test_framing.py::test_the_credit_of_an_inlet_is_shared_by_its_outlets",
    ),
    Mutation(
        "a token that went with the own link is a loss at once", "links", f"{PLACE}._miss",
        "if self.place.link_broke_since(since_s - GRACE_S):",
        "if False:", "a broken link within the lease loses no peer",
        found_by="tests/runtime/transport/zenoh/test_framing.py::test_a_restart_of_the_relay_loses_no_peer",
    ),
    Mutation(
        "a match does not go on where it was", "links", f"{OUTLET}.find_peer",
        "inlet.note_progress(self.schedule.now_s())",
        "self._begin(inlet, self._kept.last + 1)", "after a reconnect within the lease nothing is lost",
        transport="zenoh",
    ),
)  # fmt: skip


def find(name: str) -> Mutation:
    """Return the mutation of this name. Raises LookupError: there is none; the text has all names."""
    for mutation in MUTATIONS:
        if mutation.name == name:
            return mutation
    raise LookupError(f"no mutation {name!r}; there are: {'; '.join(one.name for one in MUTATIONS)}")


def select(wanted: str) -> list[Mutation]:
    """Return all mutations, those of a subject, or the one of this name. Raises LookupError: there is none."""
    chosen = [mutation for mutation in MUTATIONS if wanted in ("all", mutation.subject)]
    return chosen or [find(wanted)]
