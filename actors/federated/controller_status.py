"""The controller's heartbeat: where the run stands, for its clients and for whoever looks on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gradbus.actors.federated.clients import Members
from gradbus.actors.federated.report import Progress
from gradbus.actors.federated.rounds import Round
from gradbus.runtime.wire.control import Status

MAX_NAMED = 64  # clients of each list, and half as many reasons: it is said twice a second


def status_of(
    progress: Progress,
    round_: Round | None,
    members: Members,
    dropped: Mapping[str, int],
    *,
    run_id: int,
    host: str,
    now_s: float,
) -> Status:
    """What to say now.

    Args:
        round_: the open one, if there is one.
        dropped: what was not counted since the last report.
        host: this process, for people. now_s: ``time.monotonic``.
    """
    waited_for = [] if round_ is None else sorted(round_.open)[:MAX_NAMED]
    last = progress.reports[-1] if progress.reports else None
    total = Counter(progress.dropped) + Counter(dropped)
    return Status(
        run_id, progress.round_id, progress.phase, progress.ready, progress.expected, host,
        minimum=progress.minimum, rounds=progress.rounds, clients=len(members),
        round_s=0.0 if round_ is None else max(0.0, now_s - round_.opened_at_s),
        left_s=0.0 if round_ is None else max(0.0, round_.deadline_at_s - now_s),
        waited_for=waited_for, silent_s=[_silent_s(members, client_id, now_s) for client_id in waited_for],
        out=sorted(progress.out)[:MAX_NAMED],
        dropped={reason[:64]: count for reason, count in total.most_common(MAX_NAMED // 2)},
        last_s=0.0 if last is None else last.seconds,
        bytes_up=0 if last is None else last.bytes_up, bytes_down=0 if last is None else last.bytes_down,
        accuracy=-1.0 if progress.accuracy is None else progress.accuracy,
    )  # fmt: skip


def _silent_s(members: Members, client_id: int, now_s: float) -> float:
    heard_s = members.heard_at_s(client_id)
    return 0.0 if heard_s is None else max(0.0, now_s - heard_s)
