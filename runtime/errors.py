"""The tree of errors. The facts are attributes, not only text, so that a caller can act on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class GradbusError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(GradbusError, ValueError):
    """A setting is wrong; the text names it, what was expected, what was found and what to do."""


class BusError(GradbusError):
    """DDS refused something: the text names the call, the return code and the likely cause."""


class BusClosed(BusError):
    """The bus is closed or closing; nothing more can be sent or received."""


class ForkedProcess(BusClosed):
    """This process was forked from the one that the bus belongs to, and cannot use it."""


class NotReachable(BusError):
    """Nothing answers yet where the others are to be met, such as a relay that has not started: another attempt may
    succeed. The text names the place, and what happened there."""


class WriteTimeout(BusError, TimeoutError):
    """Data could not be handed to DDS in time: some matched reader does not take its data.

    Attributes:
        topic: name of the DDS topic.
        timeout_s: how long no progress was made.
    """

    def __init__(self, topic: str, timeout_s: float) -> None:
        super().__init__(
            f"topic {topic!r}: no progress for {timeout_s:g} s; a matched reader does not take its data. "
            f"It is dropped when its process ends, or, elsewhere, its lease; see the peers with 'gradbus doctor'"
        )
        self.topic = topic
        self.timeout_s = timeout_s


class FrameError(GradbusError, ValueError):
    """Bytes from the wire are not a frame that can be accepted.

    Attributes:
        reason: one short word, used as the key when rejected frames are counted.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class JobInUse(GradbusError):
    """The job has a controller already; the text says which."""


class ControllerReplaced(GradbusError):
    """Another controller has taken the place of this one while it was paused or cut off; the text says which.

    Attributes:
        run_id, incarnation: of the controller in its place: the run, and which start. host: its host name and process
            id; empty: not known.
    """

    def __init__(self, text: str, run_id: int, incarnation: int, host: str) -> None:
        super().__init__(text)
        self.run_id = run_id
        self.incarnation = incarnation
        self.host = host


class CheckpointError(GradbusError):
    """A checkpoint is missing, damaged, or does not fit; the text names the file."""


class JoinRefused(GradbusError):
    """The controller does not let this process take part; ``why`` is its reason, in words."""

    def __init__(self, why: str, who: str = "client") -> None:
        """``who``: what it wanted to be."""
        super().__init__(f"{self._begin(who)}: {why}")
        self.why = why

    def _begin(self, who: str) -> str:
        return f"the controller refused this {who}"


class JoinDeclined(JoinRefused):
    """This client takes no part in the run: the controller asks for what it does not give; ``why`` says what."""

    def _begin(self, who: str) -> str:
        return f"this {who} takes no part in the run"


class TrainingFailed(GradbusError):
    """The user's own training code raised, on all clients that could have sent an update.

    Attributes:
        clients: ids of those whose training failed, as far as they are known here.
    """

    def __init__(self, text: str, clients: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.clients = tuple(clients)


class RunAborted(TrainingFailed):
    """The controller has ended the run with an error, for which this client need not be to blame; the text has the
    controller's words."""


class OutOfTurn(GradbusError, RuntimeError):
    """A client was used out of order, such as a second ``run``, or a second ``send`` for one ``receive`` in a script;
    the text says what to call."""


class RunOver(GradbusError):
    """There is no round left to order: all are done, or the run has ended early; the text says why."""


_SHOWN = 20  # ids that a text lists


class BarrierTimeout(GradbusError, TimeoutError):
    """Not everybody was there in time.

    Attributes:
        missing: ids that did not come, where the ids are known.
        ready: how many were ready.
        needed: how many had to be.
    """

    def __init__(
        self,
        what: str,
        *,
        missing: Sequence[int] | Mapping[int, str],
        ready: int,
        needed: int,
        timeout_s: float,
        misconfiguration: str = "",
        hint: str = "",
    ) -> None:
        """``missing``: ids, or ids and what the text shows for them. ``misconfiguration``: the likely reason, see
        ``Bus.misconfiguration``. ``hint``: what to do, see ``Reach.advice``."""
        shown = list(missing.values() if isinstance(missing, Mapping) else map(str, missing))
        more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
        names = f", missing [{', '.join(shown[:_SHOWN])}{more}]" if shown else ""
        super().__init__(
            f"{what}: {ready} of {needed} ready after {timeout_s:g} s{names}. "
            + (f"Likely reason: {misconfiguration}. " if misconfiguration else "")
            + (hint or "Start the missing ones, with the same job, domain and network settings")
        )
        self.missing = tuple(missing)
        self.ready = ready
        self.needed = needed


class CollectiveError(GradbusError):
    """A collective operation cannot be done: the ranks do not ask for the same, or a bound was passed."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some ranks stayed silent until the deadline of a collective.

    Attributes:
        name: of the collective. missing: ranks that something is still owed by. timeout_s: the deadline.
    """

    def __init__(self, name: str, missing: Sequence[int], timeout_s: float) -> None:
        who = f"still waiting for ranks {list(missing)}" if missing else "its own data could not be sent"
        super().__init__(
            f"{name!r}: {who} after {timeout_s:g} s; they may be waiting for others themselves. Have all ranks started "
            f"a collective of this name, and do they still run?"
        )
        self.name = name
        self.missing = tuple(missing)
        self.timeout_s = timeout_s


class PeerLost(CollectiveError):
    """Ranks of the group have died or left, so nothing that needs them can be done any more.

    Attributes:
        ranks: who is gone. reasons: what is known of each, by rank.
    """

    def __init__(self, group: str, reasons: Mapping[int, str]) -> None:
        self.ranks = tuple(sorted(reasons))
        self.reasons = dict(reasons)
        lost = "; ".join(f"rank {rank}: {self.reasons[rank]}" for rank in self.ranks)
        super().__init__(f"group {group!r} has lost {lost}. Form the group anew to go on, from the last checkpoint")


class ReplicasDiverged(GradbusError):
    """Ranks that must hold equal parameters do not.

    Attributes:
        step: where it was seen. hashes: of the parameters, by rank.
    """

    def __init__(self, step: int, hashes: Sequence[int]) -> None:
        self.step = step
        self.hashes = tuple(hashes)
        most = max(set(hashes), key=lambda value: (hashes.count(value), value == hashes[0]))
        self.ranks = tuple(rank for rank, value in enumerate(hashes) if value != most)
        super().__init__(
            f"step {step}: parameters of ranks {list(self.ranks)} differ from those of the others "
            f"({', '.join(f'{value:016x}' for value in hashes)}). Does the model change its parameters outside of the "
            f"optimizer, or do the ranks run different versions of it?"
        )


class TrainingDiverged(GradbusError):
    """Training has come to NaN or infinity, and cannot go on.

    Attributes:
        step: steps done in all, those that were skipped included. ranks: that had NaN or infinity in the last step, as
            far as is known.
    """

    def __init__(self, step: int, what: str, advice: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(f"step {step}: {what}. {advice}")
        self.step = step
        self.ranks = tuple(ranks)


class CallbackFailed(GradbusError):
    """A callback of the user's has raised an exception, which is the cause of this one.

    Attributes:
        callback: its name. method: that was called.
    """

    def __init__(self, callback: str, method: str, error: Exception) -> None:
        super().__init__(f"callback {callback}: {method} raised {type(error).__name__}: {error}")
        self.callback = callback
        self.method = method


class CallbackTimeout(CallbackFailed):
    """A callback of the user's has not returned in time, once the run had ended. It is no TimeoutError, which of
    ``receive`` of a script means to call it again.

    Attributes:
        timeout_s: how long it had for that.
    """

    def __init__(self, callback: str, method: str, timeout_s: float) -> None:
        GradbusError.__init__(
            self,
            f"callback {callback}: {method} has not returned within {timeout_s:g} s, although the run has ended, and "
            f"is not waited for any longer. Let it return, and do what takes long on a thread of its own",
        )
        self.callback = callback
        self.method = method
        self.timeout_s = timeout_s


class RoundTimeout(GradbusError, TimeoutError):
    """A round ended with too few updates, as often as the configuration allows.

    Attributes:
        round_id: the round.
        got: updates that arrived.
        minimum: updates that were needed.
    """

    def __init__(self, round_id: int, got: int, minimum: int, attempts: int, why: str = "") -> None:
        super().__init__(
            f"round {round_id}: {got} updates where {minimum} are needed, after {attempts} attempts"
            f"{': ' * bool(why)}{why}. The last committed model is safe; start clients and run the controller again to "
            f"continue"
        )
        self.round_id = round_id
        self.got = got
        self.minimum = minimum
