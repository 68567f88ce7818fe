"""One controller or one client for :mod:`federation`: a process of its own that says what happens.

Started as ``python federation_node.py JSON``, with JSON lines on stdout, or forked from a server that has torch loaded.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from host_files import enter_host
from memory_maps import left_over

if __name__ == "__main__":  # this folder is for the import of helpers only
    sys.path.remove(str(Path(__file__).parent))

import torch

import gradbus
from gradbus import codecs
from gradbus.actors import Client, Controller, Site
from gradbus.actors.federated.client import global_model as shared_model_reader
from gradbus.actors.federated.controller import liveness, run_parts, update_sum, uploads
from gradbus.actors.federated.controller import updates_in as update_receiver
from gradbus.actors.federated.controller.clients import ClientRegistry, ExpectedModel, HelloAnswer
from gradbus.actors.federated.controller.rounds import Round
from gradbus.models import NoopTask
from gradbus.runtime import logs
from gradbus.runtime.config.federated import UpstreamConfig
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity import join_transport
from gradbus.runtime.shm import segment
from gradbus.runtime.shm.segment import SharedMemoryFault
from gradbus.runtime.tasks import single_error
from gradbus.runtime.testing import failpoints
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.dds import foreign_readers
from gradbus.runtime.wire.control import Hello, UploadRequest
from gradbus.runtime.wire.messages import Identity, TrainCmd

Say = Callable[[dict[str, Any]], None]


async def _controller(spec: dict[str, Any], say: Say) -> None:
    config = gradbus.FederatedConfig(**spec["federated"])
    if spec["is_lone"]:
        liveness.LISTEN_S = 0.01
    if "duplicate_after_s" in spec:
        _wait_for_rivals(spec["duplicate_after_s"])
    if "clock_offset_s" in spec:
        _jump(spec["clock_offset_s"])
    place = {"job": spec["job"], "domain": spec["domain"], "network": _network(spec), "security": _security(spec)}
    async with AsyncExitStack() as buses:
        bus = await buses.enter_async_context(gradbus.connect(**place, faults=spec.get("faults", "")))
        task, controller = NoopTask(spec["dim"]), None
        if (upstream := spec.get("upstream")) is not None:
            level = {**place, "domain": upstream.pop("domain", spec["domain"]), "job": upstream.pop("job")}
            level["network"] = gradbus.NetworkConfig(**upstream.pop("network", spec["network"]))
            above = await buses.enter_async_context(gradbus.connect(**level))
            rounds = Site(above, bus, task, config, UpstreamConfig(**upstream)).rounds()
        else:
            controller = Controller(bus, task, config, fail_at=spec["fail_at"] or "")
            rounds = controller.rounds()
        say({"event": "started"})
        async for report in rounds:
            _after_round(spec, report.round_id)
            say({"event": "round", "run_id": controller.run_id if controller else 0, **report.to_json()})
        if controller is None:
            say({"event": "done"})
            return
        reports = [report.to_json() for report in controller.progress.reports]
        say(
            {
                "event": "done",
                "reports": reports,
                "never_counted": controller.progress.never_counted,
                "names": list(map(list, controller.progress.names.rows())),
                "rejected": dict(bus.rejected),
                "fired": _fired(bus),
                **_traffic(bus),
            }
        )
    del controller
    _tell_what_is_left(say)


def _jump(seconds: float) -> None:
    """Set the clock of this process; the monotonic one goes on, as it does when a machine's clock is set."""
    now_ns, now_s = time.time_ns, time.time
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    time.time = lambda: now_s() + seconds


def _after_round(spec: dict[str, Any], round_id: int) -> None:
    """What happens to this process in, or after, a round."""
    if spec.get("jump", {}).get("round") == round_id:
        _jump(spec["jump"]["seconds"])
    limit = spec.get("max_file_bytes", {})
    if limit.get("round") == round_id:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit["bytes"], limit["bytes"]))


async def _client(spec: dict[str, Any], say: Say) -> None:
    hold: dict[str, str] = spec.get("hold", {})
    loop = asyncio.get_running_loop()

    class Task(NoopTask):
        """Says when it trains; holds in the rounds that the test names, until a file is there or it is called off."""

        def prepare(self, client_id: int, num_clients: int) -> None:
            say({"event": "prepare", "client": client_id, "clients": num_clients})
            super().prepare(client_id, num_clients)

        def train(self, model: Any, **arguments: Any) -> Any:
            round_id = arguments["round_id"]
            say({"event": "training", "round": round_id})
            _after_round(spec, round_id)
            time.sleep(spec.get("train_s", 0.0))
            ctypes.PyDLL(None).usleep(int(spec.get("gil_s", 0.0) * 1e6))  # in one call into C, with the interpreter
            gate = hold.get(str(round_id))
            while gate is not None and not Path(gate).exists() and not arguments["should_stop"]():
                time.sleep(0.005)
            if spec.get("block_loop_in") == round_id:
                loop.call_soon_threadsafe(time.sleep, 120.0)  # a mistake of the program around us
            if spec.get("raise_in") == round_id:
                raise RuntimeError("the user's own mistake")
            if spec.get("nan_in") == round_id:
                with torch.no_grad():
                    model.vector[7] = float("nan")
            result = super().train(model, **arguments)
            return dataclasses.replace(result, loss=float("nan")) if spec.get("nan_loss_in") == round_id else result

    class PacketTask(Task):
        """Sends what it has trained in packets of all kinds, which come to a sum that client and round decide."""

        def train(self, model: Any, *, round: Any, **arguments: Any) -> Any:
            result = super().train(model, **arguments)
            share = (round.vector() - round.base) / spec["packets"]
            for number in range(spec["packets"]):
                name = ("fp32", "q8", "s4", "sq8")[number % 4]
                round.send(codecs.get(name, version=2).encode(share * (1 + number)), num_samples=1)
            return result

    config = gradbus.ClientConfig(**spec.get("client", {}))
    place = {"job": spec["job"], "domain": spec["domain"], "network": _network(spec), "security": _security(spec)}
    async with gradbus.connect(**place, faults=spec.get("faults", "")) as bus:
        if "die_after_bytes" in spec:
            bus._sender.sent_bytes = _Deadly(spec["die_after_bytes"])  # noqa: SLF001 - in the middle of an update
        task = (PacketTask if spec.get("packets") else Task)(spec["dim"], delta="seeded")
        client = Client(bus, task, client_id=spec["client_id"], name=spec.get("name", ""), config=config)
        say({"event": "started"})
        try:
            summary = await client.run()
        finally:
            say({"event": "named", "client": client.client_id, "name": client.name})
        counts = {"rounds": summary.rounds, "refused": summary.refused, "bytes_up": summary.bytes_up}
        say({"event": "done", **counts, "fired": _fired(bus), **_traffic(bus)})
    del client
    _tell_what_is_left(say)


def _fired(bus: gradbus.Bus) -> dict[str, int]:
    """Faults that fired, of those that the test has ordered."""
    return dict(bus.faults.fired) if bus.faults is not None else {}


def _network(spec: dict[str, Any]) -> gradbus.NetworkConfig:
    """Return the settings of the network. ``connect``: the endpoint of a relay, and then the bus is on Zenoh; ``tls``:
    as of LinkConfig."""
    said = dict(spec["network"])
    if "connect" in said:
        said["links"] = LinkConfig(
            connect=(said.pop("connect"),), lease_s=said.pop("lease_s"), tls=said.pop("tls", True)
        )
    return gradbus.NetworkConfig(**said)


def _security(spec: dict[str, Any]) -> Security:
    said = spec.get("security", {"insecure": True})  # in a network namespace nobody else is there
    return Security(**{name: Path(value) if name.endswith("_file") else value for name, value in said.items()})


def _traffic(bus: gradbus.Bus) -> dict[str, dict[str, int]]:
    """Bytes of payload by topic: read in memory of others, sent and received in frames."""
    small = ("train/control", "train/train_cmd")
    sent, received = (
        {k: v for k, v in way.items() if not k.startswith(small)} for way in (bus.sent_bytes, bus.received_bytes)
    )
    return {"shared": dict(bus.shared_bytes), "sent": sent, "received": received}


def _tell_what_is_left(say: Say) -> None:
    """Of shared memory, when all is over. Errors hold what they are about until they are collected."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("gradbus") and thread.name != "gradbus-unmap":  # which stays for the process
            thread.join(10.0)
    count, files = left_over()
    say({"event": "left", "mapped": count, "open_files": files})


def _tell_warnings(say: Say) -> None:
    class Log:
        def __init__(self, log: Any) -> None:
            self._log = log

        def warning(self, event: str, **facts: Any) -> None:
            say({"event": "warning", "text": event, **facts})

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

    for module in (update_receiver, shared_model_reader, segment, join_transport, foreign_readers):
        module.log = Log(module.log)  # type: ignore[attr-defined]


def _wait_for_rivals(duplicate_after_s: float) -> None:
    def members(model: ExpectedModel, **options: Any) -> ClientRegistry:
        return ClientRegistry(model, **{**options, "duplicate_after_s": duplicate_after_s})

    run_parts.ClientRegistry = members  # type: ignore[assignment, misc]


def _be_patient() -> None:
    """A machine that stands still for seconds changes nothing of what is sent and read: that is counted exactly."""
    uploads.REPAIR_AFTER_S = 5.0
    liveness.BYE_S = shared_model_reader.LAST_READ_S = 4.0


def _refuse_memory() -> None:
    def read(place: str, size: int) -> memoryview:
        raise SharedMemoryFault("permission denied, says the test") from PermissionError()

    update_sum.read = shared_model_reader.read = read  # type: ignore[attr-defined]


def _read_late(delay_s: float) -> None:
    read = shared_model_reader.read

    def late(place: str, size: int) -> memoryview:
        time.sleep(delay_s)  # stands for a machine that has much to do
        return read(place, size)

    shared_model_reader.read = late  # type: ignore[attr-defined]


def _tell_what_is_said(say: Say, *, dies: bool) -> None:
    """Tell of a command, and the how manieth it is for its round; and of a client that says it is ready, or what else
    it does than before. ``dies``: when
    it has offered an update, before it hears an answer."""
    publish, commands, told, phase = gradbus.Bus.publish, Counter[int](), set[int](), ""

    async def watched(self: gradbus.Bus, sender: Identity, message: Any) -> None:
        nonlocal phase
        await publish(self, sender, message)
        if isinstance(message, Hello) and message.phase != phase:
            phase = message.phase
            say({"event": "phase", "phase": phase, "round": message.round_id})
        if isinstance(message, TrainCmd):
            commands[message.round_id] += 1
            say({"event": "attempt", "round": message.round_id, "number": commands[message.round_id]})
        if isinstance(message, Hello) and message.ready and message.session and message.next_round not in told:
            told.add(message.next_round)
            say({"event": "ready", "from_round": message.next_round})
        if dies and isinstance(message, UploadRequest):
            os.kill(os.getpid(), signal.SIGKILL)

    gradbus.Bus.publish = watched  # type: ignore[method-assign]


def _tell_who_takes_part(say: Say) -> None:
    """Tell of a client that is silent, and of one that the controller counts as ready, and from which round on, if that
    has not begun yet, or that is heard again after it was silent: only then is its word not on its way any more, and
    whatever else the controller is waiting for may end."""
    hello, told = ClientRegistry.answer_hello, set[tuple[int, int, int]]()

    def watched(
        self: ClientRegistry, sender: Identity, said: Hello, number: int, **facts: Any
    ) -> tuple[HelloAnswer, str]:
        client_id, incarnation = sender.sender, sender.incarnation
        answer = hello(self, sender, said, number, **facts)
        member = self.get(client_id, incarnation)
        if member is not None and client_id in self.ready(member.from_round):
            counted = client_id, incarnation, member.from_round
            if counted not in told:
                told.add(counted)
                say({"event": "takes part", "client": client_id, "from_round": member.from_round})
        return answer

    def follow(self: Round, *table: Any) -> tuple[list[int], list[int]]:
        lost, found = follows(self, *table)
        for client_id in lost:
            say({"event": "lost", "client": client_id, "round": self.round_id})
        for client_id in found:
            say({"event": "takes part", "client": client_id, "from_round": self.round_id})
        return lost, found

    def mark_silent(self: ClientRegistry, now_s: float) -> list[Any]:
        found = finds(self, now_s)
        for member in found:
            say({"event": "silent", "client": member.client_id})
        return found

    follows, finds = Round.follow_clients, ClientRegistry.mark_silent
    ClientRegistry.mark_silent = mark_silent  # type: ignore[method-assign]
    Round.follow_clients = follow  # type: ignore[method-assign]
    ClientRegistry.answer_hello = watched  # type: ignore[method-assign]


class _Deadly(Counter[str]):
    """Counts what the write thread sends. The same thread ends the process in the midst of an update, before it goes
    on: another one might find that all of it is sent."""

    def __init__(self, sent_bytes: int) -> None:
        super().__init__()
        self._most = sent_bytes

    def __setitem__(self, topic: str, count: int) -> None:
        super().__setitem__(topic, count)
        if topic == "train/client_update" and count >= self._most:
            os.kill(os.getpid(), signal.SIGKILL)


def run(spec: dict[str, Any], say: Say) -> int:
    """Play the role; returns the exit code."""
    logs.configure(level=os.environ.get("TEST_LOG", "warning" if "faults" not in spec else "error"))
    os.environ[failpoints.ENVIRONMENT] = spec.get("fail_at") or ""
    torch.set_num_threads(1)
    if "namespace" in spec:
        enter_host(spec["namespace"])
    _tell_what_is_said(say, dies=spec.get("die_after_offer", False))
    _tell_who_takes_part(say)
    _tell_warnings(say)
    if spec["patient"]:
        _be_patient()
    if spec.get("is_remote"):
        peer_processes.own_claim = lambda: ""  # as a process of another machine, of which the kernel does not tell
    if spec.get("refuse_memory"):
        _refuse_memory()
    if "read_delay_s" in spec:
        _read_late(spec["read_delay_s"])
    code = 0
    try:
        asyncio.run(_controller(spec, say) if spec["role"] == "controller" else _client(spec, say))
    except* GradbusError as group:
        error = single_error(group)
        say({"event": "error", "kind": type(error).__name__, "text": str(error)})
        code = 3
    return code


def run_forked(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process: events go into the pipe."""
    sys.exit(run(spec, pipe.send))


def _print_event(event: Any) -> None:
    sys.stdout.write(
        f"{json.dumps(event)}\n"
    )  # threads tell of events, too: print() writes the end of a line by itself
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), _print_event))
