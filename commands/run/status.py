"""``gradbus status``: what a job is doing, from what its members send to each other.

Controllers, clients and ranks send all others their status once or twice a second. The observer is a participant that
only reads: it listens for two seconds and puts together what it receives, and no process waits for it. In an encrypted
job it joins as a member.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from gradbus.commands.amounts import number, percent, ranges, size
from gradbus.commands.buses import open_bus, place_of
from gradbus.commands.exit_codes import NoJob
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import Settings, load_settings, read_settings
from gradbus.runtime.errors import ConfigError, NotReachable
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.transport.channels import BestEffort, ToClients, ToController
from gradbus.runtime.wire.control import (
    GroupHello,
    GroupLeave,
    GroupView,
    Hello,
    Leave,
    RankStatus,
    Status,
    rank_status_period_s,
)
from gradbus.runtime.wire.frames import CONTROLLER, UNASSIGNED
from gradbus.runtime.wire.id_ranges import parse_ids
from gradbus.runtime.wire.messages import Control, Message, PeerGone

if TYPE_CHECKING:
    from gradbus.runtime.bus.bus import Bus

_AGAIN_S = 0.5  # from one attempt to join to the next
SILENT_S = 1.6  # clients send twice a second, ranks once, those of large groups less often

DOING = {
    "preparing": "loads its data",
    "fetching": "waits for the model",
    "training": "trains",
    "evaluating": "evaluates",
    "offering": "has offered its update",
    "uploading": "sends its update",
    "paused": "has paused",
    "idle": "has not begun",
}
"""What the phases of a client mean while its update is waited for."""

MAX_METRICS = 3  # beside the accuracy
MAX_NAMED_CLIENTS = 8  # that a line shows with their names
MAX_LINES = 40  # clients, or ranks of one group, that get a line of their own


# -- which bus ---------------------------------------------------------------------------------------------------------


class BusFile(Settings):
    """The part of any configuration that describes the bus; other parts are ignored."""

    model_config = ConfigDict(extra="ignore")

    bus: BusSettings = BusSettings()


def refuse_relay_file(config: Path | None, next_step: str) -> None:
    """Raises ConfigError: the configuration is that of a relay, which has no bus. Its text ends with ``next_step``."""
    if config is not None and "relay" in read_settings(config):
        raise ConfigError(
            f"configuration {config}: expected that of a process with a bus, got that of a relay (it has the section "
            f"relay). {next_step}"
        )


def settings_of(config: Path | None, options: Mapping[str, Any]) -> BusSettings:
    """From, weak to strong, a configuration file, the environment, and options of the command. A key without a
    level is that of the job.

    Raises:
        ConfigError: something is wrong with them, no job is named, or the configuration is that of a relay.
    """
    refuse_relay_file(
        config,
        "A relay knows no job: ask as its clients do, with their configuration, or with 'gradbus status JOB --connect "
        "tls/HOST:PORT --tls-ca ca.pem --key-file job.key'",
    )
    overrides = [f"bus.{key}={json.dumps(value)}" for key, value in options.items()]
    settings = load_settings(BusFile, config, overrides=overrides).bus
    if settings.listen:
        if not settings.connect:
            raise ConfigError(
                f"this configuration listens on {settings.listen[0]}, as a controller does that may be running now: "
                f"dial it with --connect tls/HOST:PORT and --tls-ca FILE"
            )
        settings = settings.model_copy(update={"listen": (), "tls_clients": False})
    if "key_file" in options and settings.security in ("none", "user"):
        settings = settings.model_copy(update={"security": "psk"})
    if config is None and "job" not in options and "job" not in settings.model_fields_set:
        raise ConfigError("which job? Name it, as in: gradbus status mnist, or give its configuration with --config")
    return settings


# -- what is received --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Received:
    body: Any
    incarnation: int
    at_s: float


@dataclass(slots=True)
class Observer:
    """Puts together the received messages.

    Attributes:
        controllers: by incarnation. clients: by id, and hosts of clients by theirs. ranks: by group and rank.
        forming: those whose group forms. elastic: processes of an elastic group, by number.
    """

    controllers: dict[int, _Received] = field(default_factory=dict)
    clients: dict[int, _Received] = field(default_factory=dict)
    ranks: dict[tuple[str, int], _Received] = field(default_factory=dict)
    forming: dict[tuple[str, int], _Received] = field(default_factory=dict)
    elastic: dict[int, _Received] = field(default_factory=dict)

    def take(self, message: Message, now_s: float) -> bool:
        """Take a message. Returns whether it is a status of the job."""
        match message:
            case Control(sender=sender, incarnation=incarnation, body=body):
                received = _Received(body, incarnation, now_s)
                match body:
                    case Status() if sender == CONTROLLER:
                        self.controllers[incarnation] = received
                    case Hello() if sender != UNASSIGNED:  # it has no id yet
                        self.clients[sender] = received
                    case RankStatus():
                        self.ranks[body.group, sender] = received
                        self.forming.pop((body.group, sender), None)
                    case GroupHello() if not body.formed:
                        self.forming[body.group, sender] = received
                    case GroupView():
                        self.elastic[sender] = received
                    case Leave():
                        self.clients.pop(sender, None)
                    case GroupLeave():
                        self.ranks.pop((body.group, sender), None)
                    case _:
                        return False
                return True
            case PeerGone(sender=sender, incarnation=incarnation):
                tables: tuple[dict[Any, _Received], ...] = (self.clients, self.ranks, self.forming, self.elastic)
                for table in tables:
                    for key in [k for k, received in table.items() if received.incarnation == incarnation]:
                        del table[key]
        return False

    @property
    def listen_s(self) -> float:
        """Return how long it takes at least until every known rank has sent its status."""
        return SILENT_S * max(
            (rank_status_period_s(received.body.world) for received in self.ranks.values()), default=0.0
        )

    def picture(self, job: str, now_s: float) -> dict[str, Any]:
        """All that is known, as a JSON object."""
        newest = max(
            self.controllers.values(), key=lambda received: (received.at_s, received.incarnation), default=None
        )
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
        if self.elastic:
            found["elastic"] = _elastic(
                self.elastic, found.get("groups", ()), [received.body for received in self.ranks.values()]
            )
        return found

    def _clients(self, status: Status | None, now_s: float) -> list[dict[str, Any]]:
        silent = {} if status is None else dict(zip(status.awaited, status.silent_s, strict=False))
        own = {client_id: received for client_id, received in self.clients.items() if not received.body.ids}
        # Of the clients of a host, those that are waited for: it may have any number.
        hosted = [(ids, one) for one in self.clients.values() for ids in parse_ids(one.body.ids)]
        hosted.sort(key=lambda place: place[0].start)
        for client_id in silent.keys() - own.keys():
            place = bisect_right(hosted, client_id, key=lambda place: place[0].start) - 1
            if place >= 0 and client_id in hosted[place][0]:
                own[client_id] = hosted[place][1]
        return [_client(i, own.get(i), silent.get(i), status, now_s) for i in sorted({*own, *silent})]

    def _group(self, name: str, now_s: float) -> dict[str, Any]:
        pulses = {rank: received for (group, rank), received in self.ranks.items() if group == name}
        forming = {rank: received for (group, rank), received in self.forming.items() if group == name}
        world = max(received.body.world for received in (*pulses.values(), *forming.values()))
        ranks = []
        for rank in range(world):
            received = pulses.get(rank) or forming.get(rank)
            ranks.append(_rank(rank, received, now_s))
        return {"group": name, "world": world, "ranks": ranks}


def _elastic(
    processes: Mapping[int, _Received], groups: Sequence[Mapping[str, Any]], statuses: Iterable[RankStatus]
) -> dict[str, Any]:
    """Return who is in the newest generation that a process knows, and who is not. Ranks that are in no step, while
    others are, get a copy of the state: that is noted in ``groups``, too."""
    newest: GroupView = max((received.body for received in processes.values()), key=lambda view: view.generation)
    name = f"{newest.group}_{newest.generation}"
    ranks = [rank for group in groups if group["group"] == name for rank in group["ranks"] if "step" in rank]
    trains = newest.generation > 1 and any(rank["step"] >= 0 for rank in ranks)  # in the first one nobody has a state
    _, mean_ranks = max(((one.step, one.mean_ranks) for one in statuses if one.group == name), default=(-1, 0.0))
    copying = [rank for rank in ranks if trains and rank["step"] < 0 and rank["rank"] < len(newest.numbers)]
    for rank in copying:
        if rank["state"] == "works":
            rank["state"] = "gets its copy"
    return {
        "group": newest.group,
        "generation": newest.generation,
        "members": newest.numbers,
        "copying": sorted(newest.numbers[rank["rank"]] for rank in copying),
        "waiting": sorted(set(processes) - set(newest.numbers)),
        "silent": sorted(set(newest.numbers) - set(processes)),
        "leaving": sorted(number for number, received in processes.items() if received.body.leaving),
        "mean_ranks": round(mean_ranks, 3) if mean_ranks else None,
    }


def _controller(received: _Received, now_s: float) -> dict[str, Any]:
    status: Status = received.body
    return {
        "run": f"{status.run_id:016x}",
        "phase": status.phase,
        "round": status.round_id,
        "rounds": status.rounds,
        "ready": status.ready,
        "expected": status.expected,
        "minimum": status.minimum,
        "clients": status.clients,
        "round_s": round(status.round_s, 1),
        "left_s": round(status.remaining_s, 1),
        "waited_for": status.awaited,
        "kept_out": status.quarantined,
        "dropped": status.dropped,
        "last_round_s": round(status.last_s, 3),
        "bytes_up": status.bytes_up,
        "bytes_down": status.bytes_down,
        "accuracy": status.accuracy if status.accuracy >= 0 else None,
        "metrics": status.metrics,
        "epsilon": status.epsilon if status.epsilon >= 0 else None,
        "epsilon_budget": status.epsilon_budget if status.epsilon_budget >= 0 else None,
        "silent_s": _silent(received, now_s),
    }


def _client(
    client_id: int, received: _Received | None, reported_silent_s: float | None, status: Status | None, now_s: float
) -> dict[str, Any]:
    waited_for = reported_silent_s is not None
    silent_s = reported_silent_s or 0.0
    found: dict[str, Any] = {"client": client_id, "waited_for": waited_for}
    if received is not None:
        hello: Hello = received.body
        silent_s = max(silent_s, _silent(received, now_s))
        if name := _name_in(client_id, hello):
            found["name"] = name
        found |= {"phase": hello.phase, "phase_s": round(hello.phase_s, 1), "round": hello.round_id, "host": hello.host}
    found["silent_s"] = round(silent_s, 1)
    if waited_for:
        if silent_s > SILENT_S or received is None:
            found["why"] = f"silent since {silent_s:.1f} s"
        else:
            doing = DOING.get(found["phase"], found["phase"])
            late = " (another round)" if status is not None and found["round"] not in (-1, status.round_id) else ""
            found["why"] = f"{doing}{late} since {found['phase_s']:.1f} s"
    elif status is not None and client_id in status.quarantined:
        found["why"] = "kept out for bad updates"
    return found


def _name_in(client_id: int, hello: Hello) -> str:
    """The name of a client, which may be one of a host's."""
    return f"{hello.name}.{client_id}" if hello.name and hello.ids else hello.name


def _rank(rank: int, received: _Received | None, now_s: float) -> dict[str, Any]:
    if received is None:
        return {"rank": rank, "state": "no status received"}
    silent_s, body = _silent(received, now_s), received.body
    if isinstance(body, GroupHello):
        return {"rank": rank, "state": "waits for the group to form", "host": body.host, "silent_s": silent_s}
    found = {
        "rank": rank, "state": "works", "host": body.host, "up_s": round(body.up_s, 1), "step": body.step,
        "epoch": body.epoch, "steps_per_s": round(body.steps_per_s, 2), "bytes_out": body.bytes_out,
        "bytes_in": body.bytes_in, "pending": body.pending, "lost": body.lost, "dropped": body.dropped,
        "silent_s": silent_s,
    }  # fmt: skip
    if silent_s > 2 * SILENT_S * rank_status_period_s(body.world):
        found["state"] = f"silent since {silent_s:.1f} s"
    elif body.pending and body.oldest_s > SILENT_S:
        found["state"] = f"waits in {body.oldest!r} since {body.oldest_s:.1f} s"
        found |= {"waits_for": body.missing, "collective": body.oldest, "waits_s": round(body.oldest_s, 1)}
    return found


def _silent(received: _Received, now_s: float) -> float:
    return round(max(0.0, now_s - received.at_s), 1)


@contextlib.asynccontextmanager
async def _joined(settings: BusSettings, timeout_s: float, tell: Callable[[str], None]) -> AsyncIterator[Bus]:
    """Join a job to observe it. Where nothing answers, say so at once, and go on trying for so long."""
    until_s = time.monotonic() + timeout_s
    async with contextlib.AsyncExitStack() as stack:
        has_told = False
        while True:
            try:
                bus = await stack.enter_async_context(open_bus(settings, observes=True, first_link_s=0.0))
                break
            except NotReachable as error:
                if time.monotonic() >= until_s:
                    raise NotReachable(f"{error}. It was tried for {timeout_s:g} s (--timeout)") from None
                if not has_told:
                    tell(f"{error}. It is tried again for {timeout_s:g} s (--timeout)")
                    has_told = True
            await asyncio.sleep(min(_AGAIN_S, max(0.0, until_s - time.monotonic())))
        yield bus


async def observe(
    settings: BusSettings, *, timeout_s: float, listen_s: float, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The picture of a job.

    Args:
        timeout_s: give up when nothing of it has been received for so long, or nothing answers to a link.
        listen_s: how long to listen from the first status on; longer for large groups, whose ranks send less often.
        tell: is given what a person who waits should know at once.

    Raises:
        NoJob: nothing was received. NotReachable: nothing answers where the members meet.
    """
    observer = Observer()
    async with _joined(settings, timeout_s, tell) as bus:
        with bus.subscribe(*map(BestEffort, (ToController, ToClients, Control))) as inbox:
            until_s = time.monotonic() + timeout_s
            first_s = 0.0
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                        message = await inbox.get()
                    if observer.take(message, time.monotonic()):
                        first_s = first_s or time.monotonic()
                        until_s = first_s + max(listen_s, observer.listen_s)
            if not first_s:
                why = bus.access_policy.refusal or _about_key(bus.rejected) or bus.misconfiguration
                raise NoJob(
                    f"no job {settings.job!r} was found within {timeout_s:g} s: {place_of(settings)}, profile "
                    f"{settings.network}. Is it running, and are these its settings (--domain, --network, --interface, "
                    f"--peers, or --connect, which makes it use Zenoh)? {why}".rstrip()
                )
            return observer.picture(settings.job, time.monotonic())


def _about_key(rejected: Mapping[str, int]) -> str:
    """Advice about the key, if there are members whose messages cannot be decrypted without it."""
    if rejected.get("other key"):
        return (
            "The members have another key than this process, which may be another user: give the key of the job with "
            "--key-file FILE, or with --config the configuration of a member"
        )
    if rejected.get("sealed"):
        return (
            "The members encrypt what they send: leave out GRADBUS_BUS__SECURITY, and give the key of the job, if it "
            "is not that of this user, with --key-file FILE, or with --config the configuration of a member"
        )
    if rejected.get("not sealed"):
        return "The members do not encrypt what they send: leave out the key, and set GRADBUS_BUS__SECURITY=none"
    return ""


# -- as lines for people -----------------------------------------------------------------------------------------------


def lines_of(picture: Mapping[str, Any]) -> list[str]:
    """All of it, what is waited for first."""
    lines = [f"job {picture['job']}"]
    if "federated" in picture:
        lines += _federated_lines(picture["federated"])
    if "elastic" in picture:
        lines.append(_elastic_line(picture["elastic"]))
    for group in picture.get("groups", ()):
        lines += _group_lines(group)
    return [plain_line(line) for line in lines]


def _federated_lines(found: Mapping[str, Any]) -> list[str]:
    controller, clients = found["controller"], found["clients"]
    lines = (
        ["no status of a controller was received: its clients wait for it"]
        if controller is None
        else _controller_lines(controller)
    )
    if found["controllers"] > 1:
        lines.append(f"{found['controllers']} controllers have sent their status: one of them has just been replaced")
    waited_for = [client for client in clients if client["waited_for"]]
    others = [client for client in clients if not client["waited_for"]]
    for client in waited_for[:MAX_LINES]:
        lines.append(f"  waiting for client {_shown(client)}: {client['why']}" + _at(client))
    if len(waited_for) > MAX_LINES:
        lines.append(f"  and for {len(waited_for) - MAX_LINES} more")
    out = [client["client"] for client in others if "why" in client]
    if others:
        few = len(others) <= MAX_NAMED_CLIENTS and any("name" in client for client in others)
        shown = ", ".join(map(_shown, others)) if few else ranges(client["client"] for client in others)
        lines.append(f"  clients that are not waited for: {shown}")
    if out or (controller and controller["kept_out"]):
        lines.append(f"  kept out for bad updates: {ranges(controller['kept_out'] if controller else out)}")
    return lines


def _controller_lines(found: Mapping[str, Any]) -> list[str]:
    of = f"/{found['rounds']}" if found["rounds"] else ""
    lines = [f"{found['phase']}, round {found['round']}{of}, {found['clients']} clients" + _silence(found)]
    if found["phase"] == "training":
        lines.append(
            f"  updates {found['ready']}/{found['expected']} (min {found['minimum']}) after {found['round_s']:.1f} s, "
            f"{found['left_s']:.0f} s until the deadline"
        )
    if found["last_round_s"]:
        accuracy = "" if found["accuracy"] is None else f", accuracy {percent(found['accuracy'])}"
        shown = list(found["metrics"].items())[:MAX_METRICS]
        accuracy += "".join(f", {name} {number(value, 4)}" for name, value in shown)
        lines.append(
            f"  last round {found['last_round_s']:.2f} s, up {size(found['bytes_up'])}, down "
            f"{size(found['bytes_down'])}{accuracy}"
        )
    if found["epsilon"] is not None:
        allowed = "" if found["epsilon_budget"] is None else f" of {found['epsilon_budget']:g}"
        lines.append(f"  privacy: epsilon {found['epsilon']:.4g}{allowed} spent")
    if found["dropped"]:
        lines.append("  not counted: " + ", ".join(f"{reason} {n}" for reason, n in found["dropped"].items()))
    return lines


def _elastic_line(found: Mapping[str, Any]) -> str:
    members = ranges(sorted({*found["members"]} - {*found["copying"]}))
    parts = [f"elastic group {found['group']}: generation {found['generation']}, processes {members} take part"]
    if not found["generation"]:
        parts = [f"elastic group {found['group']}: waits for its first generation"]
    parts += [f"{found['mean_ranks']:.2f} a step in this epoch"] if found["mean_ranks"] else []
    parts += [f"gets its copy: {ranges(found['copying'])}"] if found["copying"] else []
    parts += [f"{what} {ranges(found[what])}" for what in ("waiting", "leaving", "silent") if found[what]]
    return "; ".join(parts)


def _group_lines(found: Mapping[str, Any]) -> list[str]:
    ranks: Sequence[Mapping[str, Any]] = found["ranks"]
    here = sum("host" in rank for rank in ranks)
    lines = [f"group {found['group']}: {here} of {found['world']} ranks have sent their status"]
    for rank in ranks[:MAX_LINES]:
        parts = [rank["state"]]
        if "waits_for" in rank:
            parts[0] += f" for ranks {rank['waits_for']}" if rank["waits_for"] else ""
        if rank.get("step", -1) >= 0:
            parts.append(f"epoch {rank['epoch'] + 1}, step {rank['step']}, {rank['steps_per_s']:.1f} steps/s")
        if "bytes_out" in rank:
            parts.append(f"sent {size(rank['bytes_out'])}")
        if rank.get("lost"):
            parts.append(f"has lost ranks {rank['lost']}")
        if rank.get("dropped"):
            parts.append("not used: " + ", ".join(f"{reason} {n}" for reason, n in rank["dropped"].items()))
        lines.append(f"  rank {rank['rank']}: " + ", ".join(parts) + _at(rank))
    if len(ranks) > MAX_LINES:
        lines.append(f"  and {len(ranks) - MAX_LINES} more ranks")
    return lines


def _shown(client: Mapping[str, Any]) -> str:
    """Id and name of a client."""
    return f"{client['client']} ({client['name']})" if "name" in client else str(client["client"])


def _at(found: Mapping[str, Any]) -> str:
    return f" [{found['host']}]" if "host" in found else ""


def _silence(found: Mapping[str, Any]) -> str:
    return f" (silent since {found['silent_s']:.1f} s)" if found["silent_s"] > 2 else ""
