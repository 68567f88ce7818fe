"""What a job is doing, from what its members say to each other: a participant that only reads, and whom nobody awaits.

Controllers, clients and ranks tell all others where they stand, once or twice a second. The observer listens for two
seconds and puts it together. It says nothing, and nobody waits for it; of a sealed job it is a member, and greets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradbus.experiments.buses import open_bus
from gradbus.experiments.cli.exit_codes import NoJob
from gradbus.runtime.collectives.status import period_s
from gradbus.runtime.config.federated import BusSettings
from gradbus.runtime.dds.topics import Overheard
from gradbus.runtime.wire.control import GroupHello, GroupLeave, Hello, Leave, Pulse, Status
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Message, PeerGone

SILENT_S = 1.6  # clients say something twice a second, ranks once, those of large groups less often

DOING = {
    "preparing": "loads its data",
    "fetching": "waits for the model",
    "training": "trains",
    "offering": "has offered its update",
    "uploading": "sends its update",
    "idle": "has not begun",
}
"""What the phases of a client mean while its update is waited for."""


@dataclass(slots=True)
class _Heard:
    body: Any
    incarnation: int
    at_s: float


@dataclass(slots=True)
class Observer:
    """Puts together what was overheard.

    Attributes:
        controllers: by incarnation. clients: by id. ranks: by group and rank. forming: those whose group forms.
    """

    controllers: dict[int, _Heard] = field(default_factory=dict)
    clients: dict[int, _Heard] = field(default_factory=dict)
    ranks: dict[tuple[str, int], _Heard] = field(default_factory=dict)
    forming: dict[tuple[str, int], _Heard] = field(default_factory=dict)

    def hear(self, message: Message, now_s: float) -> bool:
        """Take a message. Whether it tells of the job."""
        match message:
            case Control(sender=sender, incarnation=incarnation, body=body):
                heard = _Heard(body, incarnation, now_s)
                match body:
                    case Status() if sender == CONTROLLER:
                        self.controllers[incarnation] = heard
                    case Hello():
                        self.clients[sender] = heard
                    case Pulse():
                        self.ranks[body.group, sender] = heard
                        self.forming.pop((body.group, sender), None)
                    case GroupHello() if not body.formed:
                        self.forming[body.group, sender] = heard
                    case Leave():
                        self.clients.pop(sender, None)
                    case GroupLeave():
                        self.ranks.pop((body.group, sender), None)
                    case _:
                        return False
                return True
            case PeerGone(sender=sender, incarnation=incarnation):
                tables: tuple[dict[Any, _Heard], ...] = (self.clients, self.ranks, self.forming)
                for table in tables:
                    for key in [k for k, heard in table.items() if heard.incarnation == incarnation]:
                        del table[key]
        return False

    @property
    def listen_s(self) -> float:
        """How long it takes at least until every rank that was heard of has said something."""
        return SILENT_S * max((period_s(heard.body.world) for heard in self.ranks.values()), default=0.0)

    def picture(self, job: str, now_s: float) -> dict[str, Any]:
        """All that is known, as a JSON object."""
        newest = max(self.controllers.values(), key=lambda heard: (heard.at_s, heard.incarnation), default=None)
        found: dict[str, Any] = {"job": job}
        if newest is not None or self.clients:
            found["federated"] = {
                "controller": None if newest is None else _controller(newest, now_s),
                "controllers": len(self.controllers),
                "clients": self._clients(None if newest is None else newest.body, now_s),
            }
        groups = sorted({group for group, _ in (*self.ranks, *self.forming)})
        if groups:
            found["groups"] = [self._group(group, now_s) for group in groups]
        return found

    def _clients(self, status: Status | None, now_s: float) -> list[dict[str, Any]]:
        silent = {} if status is None else dict(zip(status.waited_for, status.silent_s, strict=False))
        known = sorted({*self.clients, *silent})
        return [_client(i, self.clients.get(i), silent.get(i), status, now_s) for i in known]

    def _group(self, name: str, now_s: float) -> dict[str, Any]:
        pulses = {rank: heard for (group, rank), heard in self.ranks.items() if group == name}
        forming = {rank: heard for (group, rank), heard in self.forming.items() if group == name}
        world = max(heard.body.world for heard in (*pulses.values(), *forming.values()))
        ranks = []
        for rank in range(world):
            heard = pulses.get(rank) or forming.get(rank)
            ranks.append(_rank(rank, heard, now_s))
        return {"group": name, "world": world, "ranks": ranks}


def _controller(heard: _Heard, now_s: float) -> dict[str, Any]:
    status: Status = heard.body
    return {
        "run": f"{status.run_id:016x}", "phase": status.phase, "round": status.round_id, "rounds": status.rounds,
        "ready": status.ready, "expected": status.expected, "minimum": status.minimum, "clients": status.clients,
        "round_s": round(status.round_s, 1), "left_s": round(status.left_s, 1), "waited_for": status.waited_for,
        "kept_out": status.out, "dropped": status.dropped, "last_round_s": round(status.last_s, 3),
        "bytes_up": status.bytes_up, "bytes_down": status.bytes_down,
        "accuracy": status.accuracy if status.accuracy >= 0 else None, "silent_s": _silent(heard, now_s),
    }  # fmt: skip


def _client(
    client_id: int, heard: _Heard | None, told_silent_s: float | None, status: Status | None, now_s: float
) -> dict[str, Any]:
    waited_for = told_silent_s is not None
    silent_s = told_silent_s or 0.0
    found: dict[str, Any] = {"client": client_id, "waited_for": waited_for}
    if heard is not None:
        hello: Hello = heard.body
        silent_s = max(silent_s, _silent(heard, now_s))
        found |= {"phase": hello.phase, "phase_s": round(hello.phase_s, 1), "round": hello.round_id, "host": hello.host}
    found["silent_s"] = round(silent_s, 1)
    if waited_for:
        if silent_s > SILENT_S or heard is None:
            found["why"] = f"silent since {silent_s:.1f} s"
        else:
            doing = DOING.get(found["phase"], found["phase"])
            late = " (another round)" if status is not None and found["round"] not in (-1, status.round_id) else ""
            found["why"] = f"{doing}{late} since {found['phase_s']:.1f} s"
    elif status is not None and client_id in status.out:
        found["why"] = "kept out for bad updates"
    return found


def _rank(rank: int, heard: _Heard | None, now_s: float) -> dict[str, Any]:
    if heard is None:
        return {"rank": rank, "state": "not heard"}
    silent_s, body = _silent(heard, now_s), heard.body
    if isinstance(body, GroupHello):
        return {"rank": rank, "state": "waits for the group to form", "host": body.host, "silent_s": silent_s}
    found = {
        "rank": rank, "state": "works", "host": body.host, "up_s": round(body.up_s, 1), "step": body.step,
        "epoch": body.epoch, "steps_per_s": round(body.steps_per_s, 2), "bytes_out": body.bytes_out,
        "bytes_in": body.bytes_in, "pending": body.pending, "lost": body.lost, "dropped": body.dropped,
        "silent_s": silent_s,
    }  # fmt: skip
    if silent_s > 2 * SILENT_S * period_s(body.world):
        found["state"] = f"silent since {silent_s:.1f} s"
    elif body.pending and body.oldest_s > SILENT_S:
        found["state"] = f"waits in {body.oldest!r} since {body.oldest_s:.1f} s"
        found |= {"waits_for": body.missing, "collective": body.oldest, "waits_s": round(body.oldest_s, 1)}
    return found


def _silent(heard: _Heard, now_s: float) -> float:
    return round(max(0.0, now_s - heard.at_s), 1)


async def observe(settings: BusSettings, *, timeout_s: float, listen_s: float) -> dict[str, Any]:
    """The picture of a job.

    Args:
        timeout_s: give up when nothing has been heard of it for so long.
        listen_s: how long to listen from the first word on; longer for large groups, whose ranks speak less often.

    Raises:
        NoJob: nothing was heard.
    """
    observer = Observer()
    async with open_bus(settings, observes=True) as bus:
        with bus.subscribe(Overheard) as inbox:
            until_s = time.monotonic() + timeout_s
            first_s = 0.0
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                        message = await inbox.get()
                    if observer.hear(message, time.monotonic()):
                        first_s = first_s or time.monotonic()
                        until_s = first_s + max(listen_s, observer.listen_s)
            if not first_s:
                why = bus.standing.refusal or _about_key(bus.rejected) or bus.doubt
                raise NoJob(
                    f"no job {settings.job!r} was found within {timeout_s:g} s, in domain {settings.domain} on "
                    f"{settings.interface}, profile {settings.network}. Is it running, and are these its settings "
                    f"(--domain, --network, --interface, --peers)? {why}".rstrip()
                )
            return observer.picture(settings.job, time.monotonic())


def _about_key(rejected: Mapping[str, int]) -> str:
    """What to do about the key, if members were heard that cannot be understood for want of it."""
    if rejected.get("other key"):
        return (
            "Somebody there has another key than this process, which may be another user: give the key of the job with "
            "--key-file FILE, or with --config the configuration of a member"
        )
    if rejected.get("sealed"):
        return (
            "Somebody there seals what he says: leave out GRADBUS_BUS__SECURITY, and give the key of the job, if it is "
            "not that of this user, with --key-file FILE, or with --config the configuration of a member"
        )
    if rejected.get("not sealed"):
        return "Somebody there does not seal what he says: leave out the key, and set GRADBUS_BUS__SECURITY=none"
    return ""
