"""What is missing from a round: clients that are lost to it, that failed or sent nothing, and why.

A round keeps who is awaited; here are the reasons, over all attempts at it, for reports, for the table of clients in
the checkpoint, and for the error of a round that has failed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller.clients import ClientRegistry
from gradbus.actors.federated.controller.participation import MAX_KNOWN, NO_UPDATE, PREPARING_FAILED
from gradbus.actors.federated.controller.rounds import CLIENT_LOST, CLIENT_SILENT, SURPLUS, Round
from gradbus.actors.federated.controller.updates_in import UNCOMPARED
from gradbus.actors.federated.protocol import FAILURES, PAUSED, SAT_OUT, TRAINING_FAILED
from gradbus.runtime.errors import GradbusError, RoundTimeout, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_text
from gradbus.runtime.wire.control import TrainingFailure

MAX_NAMED = 20  # clients in the text of an error
MAX_DISTINCT = 32  # tracebacks that are logged in a run; clients may send any text
MAX_LINE = 1200  # characters of the last line of a traceback, which has the error
MAX_TEXT = 8000  # characters of a traceback, from its end
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

log = get_logger("controller")


class TrainingFailureLog:
    """Logs exceptions of training functions on clients: each distinct one once with its traceback, then counted."""

    def __init__(self, names: ClientNames | None = None) -> None:
        self._names = ClientNames() if names is None else names
        self._seen: Counter[str] = Counter()
        self._newest: dict[int | str, str] = {}  # by client: its id, or its name if it has no id yet
        self._last: dict[int | str, str] = {}  # by client, without what differs from one time to the next

    def note(
        self, client: int | str, round_id: int, text: str, reason: str = TRAINING_FAILED, what: str = "training"
    ) -> None:
        """Log that a client's training failed; ``text`` is the traceback. ``what``: in place of training."""
        text = plain_text(text[-MAX_TEXT:]).strip()
        key = _ADDRESS.sub("0x", text)
        if key not in self._seen and len(self._seen) >= MAX_DISTINCT:
            key = ""
        self._seen[key] += 1
        error = text.rpartition("\n")[2][:MAX_LINE]
        repeated = bool(key) and self._last.get(client) == key  # in the next attempt, or in the next round
        for known, value in ((self._last, key), (self._newest, error)):
            if client not in known and len(known) >= MAX_KNOWN:
                del known[next(iter(known))]
            known[client] = value
        is_first = bool(key) and self._seen[key] == 1
        (log.info if repeated and not is_first else log.error)(
            f"{what} failed {'again ' * (repeated and not is_first)}on a client",
            **self._names.facts(client),
            round=round_id,
            reason=reason,
            error=error,
            times=self._seen[key],
            **({"traceback": text} if is_first else {}),
        )

    def newest(self, client: int | str) -> str:
        """The last line of this client's newest traceback."""
        return self._newest.get(client, "for a reason that it did not report")


class RoundLosses:
    """The losses of one round after the other."""

    def __init__(self, dropped: Counter[str], names: ClientNames | None = None) -> None:
        """``dropped``: counts, for the reports, what did not count. ``names``: of the clients, for people."""
        self._dropped = dropped
        self._names = ClientNames() if names is None else names
        self._failures = TrainingFailureLog(self._names)
        self._missed: dict[int, str] = {}  # clients that are lost to the open round, and why

    def clear(self) -> None:
        """Forget who is lost: another round begins, or the one before is committed."""
        self._missed = {}

    def follow_registry(self, round_: Round, registry: ClientRegistry) -> None:
        """Follow the registry in the open round. A client that died and is back already takes part from the next round
        on: to this one it is lost. One that has paused sits it out."""
        for client_id in sorted(round_.open.intersection(registry.paused_ids())):
            self._sit_out(round_, client_id, PAUSED)
        silent = registry.silent_ids(round_.round_id)
        lost, found = round_.follow_clients(registry.taking_part(round_.round_id), silent)
        for client_id in lost:
            reason = CLIENT_SILENT if client_id in silent else CLIENT_LOST
            self._dropped[reason] += 1
            self._missed[client_id] = reason
            log.warning(reason, **self._names.facts(client_id), round=round_.round_id)
        for client_id in found:
            if self._missed.pop(client_id, None) == CLIENT_SILENT:  # else it was silent before the round began
                self._dropped -= Counter({CLIENT_SILENT: 1})  # it is not lost to this round any more
            log.info("client waited for again", **self._names.facts(client_id), round=round_.round_id)

    def note_failure(self, round_: Round | None, client_id: int, report: TrainingFailure, *, attempt: int = 1) -> bool:
        """Note that the training of a client failed, or that it had nothing to train; whether that is new to the open
        round. ``attempt``: at the round. Of a client that had paused in an earlier one, and goes on by now, the report
        may be late: it sits out no other attempt. Another failure counts in whatever attempt it arrives."""
        if report.reason == PAUSED and 0 < report.attempt < attempt:
            return False
        if round_ is None or round_.staleness(report.round_id) < 0 or client_id not in round_.open:
            return False  # known already: it is repeated until the next command
        if report.reason in (SAT_OUT, PAUSED):
            self._sit_out(round_, client_id, report.reason)
            return True
        reason = report.reason if report.reason in FAILURES else TRAINING_FAILED
        self._failures.note(client_id, report.round_id, report.text, reason)
        round_.fail(client_id, reason)
        self._dropped[reason] += 1
        return True

    def _sit_out(self, round_: Round, client_id: int, reason: str) -> None:
        """Note that a client gives no update in the open round, which is no failure."""
        log.info("client sits out", **self._names.facts(client_id), round=round_.round_id, reason=reason)
        round_.fail(client_id, reason)
        self._dropped[reason] += 1

    def note_unprepared(self, client: int | str, report: TrainingFailure) -> str:
        """Log that a client could not get ready for its first round. Returns why, in one line."""
        self._failures.note(client, report.round_id, report.text, PREPARING_FAILED, what="preparing")
        return self._failures.newest(client)

    def note_attempt(self, round_: Round) -> None:
        """An attempt at the round had too few updates, and another one follows."""
        self._missed.update(self.of(round_))

    @property
    def missed(self) -> dict[int, str]:
        """Clients that are lost to the open round, with the reasons: what is known before it is over."""
        return self._missed

    def of(self, round_: Round) -> dict[int, str]:
        """The clients that were expected in this round and do not count, with the reasons."""
        missed = {
            **dict.fromkeys(round_.silent, CLIENT_SILENT),
            **dict.fromkeys(round_.open, SURPLUS if round_.is_full else NO_UPDATE), **self._missed,
        }  # fmt: skip
        for client_id, reason in round_.failed.items():
            is_own = reason in FAILURES
            missed[client_id] = f"{reason}: {self._failures.newest(client_id)}" if is_own else reason
        return {client_id: why for client_id, why in missed.items() if client_id not in round_.accepted}

    def error(self, round_: Round, attempts: int, why: str = "") -> GradbusError:
        """The error of a failed round: of the clients' own code, if that is why there are too few updates, else of the
        number. ``why``: it failed for another reason than the number of updates."""
        by_reason: dict[str, list[int]] = {}
        for client_id, reason in sorted(round_.failed.items()):
            by_reason.setdefault(TRAINING_FAILED if reason in FAILURES else reason, []).append(client_id)
        no_fault = {SAT_OUT: "had nothing to train", PAUSED: "paused"}
        failed, alone = (by_reason.get(reason, []) for reason in (TRAINING_FAILED, UNCOMPARED))
        sat_out = [client_id for reason in no_fault for client_id in by_reason.get(reason, [])]
        would_do = len(round_.accepted) + len(failed) + len(alone) >= round_.minimum  # else others are missing as well
        if failed and would_do and round_.expected == round_.accepted.union(failed, sat_out, alone):
            return TrainingFailed(
                f"{self._describe(failed)}. Mend it there, start the clients and then the controller again: the run "
                f"goes on from the last committed model",
                failed,
            )
        reasons = [why] if why else []
        if failed:
            reasons.append(self._describe(failed))
        reasons += [f"{self._named(by_reason[one])} {did}" for one, did in no_fault.items() if one in by_reason]
        known = (TRAINING_FAILED, UNCOMPARED, *no_fault)
        others = [] if why else [reason for reason in by_reason if reason not in known]
        reasons += [f"updates of {self._named(by_reason[one])}: {one}, see the log" for one in others[:MAX_NAMED]]
        why = "; ".join(reasons)
        return RoundTimeout(round_.round_id, len(round_.accepted), round_.minimum, attempts, why)

    def _describe(self, failed: Sequence[int]) -> str:
        return f"training failed on {self._named(failed)}: {self._failures.newest(failed[0])}"

    def _named(self, clients: Collection[int]) -> str:
        named = ", ".join(map(self._names.label, list(clients)[:MAX_NAMED]))
        return f"client{'s' * (len(clients) > 1)} {named}{' ...' * (len(clients) > MAX_NAMED)}"
