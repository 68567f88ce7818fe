"""A federated run through one relay that is killed again and again, and over a link that is down for a while.

The suite has a few kills and a short outage; the nightly part has more of both, by ``RELAY_KILLS`` and ``LINK_DOWN_S``.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from federation import Federation, Node, finish
from ports import kept_ports
from relay_scene import RelayProcess
from safetensors.torch import load_file
from tcp_proxy import TcpProxy
from torch import Tensor
from zenoh_node import Relay

from gradbus.commands.lab.namespaces import Host, set_link

KILLS = int(os.environ.get("RELAY_KILLS", "5"))
DOWN_S = float(os.environ.get("LINK_DOWN_S", "5"))
LEASE_S = 60.0
CLIENTS = 3
PATIENCE_S = 60.0  # for one event, as long as a relay takes to start on a busy machine included

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(120 + 10 * KILLS + 8 * DOWN_S)]

Break = Callable[[Node, list[Node]], None]


class Outcome(NamedTuple):
    """Holds the result of a run: its reports without times, and its final weights."""

    rounds: list[tuple[int, list[int], int, int, dict[str, Any]]]
    weights: dict[str, Tensor]


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


def run(ports: list[int], rounds: int, folder: Path, breaks: Break) -> Outcome:
    """Run a controller and clients, each at a port of its own, while ``breaks`` breaks something. The last round waits
    until that has returned. The history must hold, as ``gradbus check`` says."""
    folder.mkdir()
    gate = folder / "gate"

    def at(port: int) -> dict[str, Any]:
        return {"connect": f"tcp/127.0.0.1:{port}"}

    with Federation(domain=0, silence_s=LEASE_S, is_remote=True, network={"shared_memory": False}) as federation:
        controller = federation.controller(
            rounds=rounds,
            clients__num=CLIENTS,
            round__timeout_s=2 * PATIENCE_S,
            checkpoint__dir=str(folder / "state"),
            codec="fp32",
            network=at(ports[0]),
        )
        clients = [
            federation.client(number, train_s=0.1, hold={str(rounds): str(gate)}, network=at(port))
            for number, port in enumerate(ports[1:])
        ]
        breaks(controller, clients)
        gate.touch()
        reports = finish(controller, *clients)
    newest = max(folder.rglob("round-*.safetensors"), key=lambda path: int(path.stem.partition("-")[2]))
    assert int(newest.stem.partition("-")[2]) == rounds
    reported = [
        (one["round_id"], one["clients"], one["attempt"], one["weights_crc32"], one["dropped"]) for one in reports
    ]
    return Outcome(reported, load_file(newest))


def check_equal(found: Outcome, unbroken: Outcome, rounds: int) -> None:
    """Check that no round is lost or tried again, none lacks a client, and each bit is as without faults."""
    everybody = list(range(CLIENTS))
    assert [one[:3] for one in found.rounds] == [(number, everybody, 1) for number in range(1, rounds + 1)]
    assert found.rounds == unbroken.rounds
    assert found.weights.keys() == unbroken.weights.keys()
    for name, tensor in found.weights.items():
        assert tensor.numpy().tobytes() == unbroken.weights[name].numpy().tobytes(), name


def test_a_run_whose_relay_is_killed_again_and_again_has_the_bits_of_an_unbroken_one(
    relay: Relay, tmp_path: Path
) -> None:
    """Killed while a round is commanded, while each client trains, and while the round is committed."""
    rounds = KILLS + 2
    ports = [relay.port] * (1 + CLIENTS)

    def breaks(controller: Node, clients: list[Node]) -> None:
        moments = itertools.cycle(
            [
                lambda number: controller.wait_for("attempt", PATIENCE_S, round=number),
                *(lambda number, one=one: one.wait_for("training", PATIENCE_S, round=number) for one in clients),
                lambda number: controller.wait_for("round", PATIENCE_S, round_id=number),
            ]
        )
        for number, moment in zip(range(1, KILLS + 1), moments, strict=False):
            moment(number)
            relay.kill()
            relay.start()

    unbroken = run(ports, rounds, tmp_path / "unbroken", lambda controller, clients: None)
    check_equal(run(ports, rounds, tmp_path / "broken", breaks), unbroken, rounds)


def test_a_round_goes_on_at_once_without_a_client_that_is_killed_behind_a_relay(tmp_path: Path) -> None:
    """Long before its lease, and the deadline of the round. Its next start takes part again."""
    rounds = 3
    gate = tmp_path / "gate"
    with (
        kept_ports(1) as (port,),
        RelayProcess("--listen", f"tcp/127.0.0.1:{port}") as relay,
        Federation(
            domain=0,
            silence_s=10 * LEASE_S,
            is_remote=True,
            network={"shared_memory": False, "connect": f"tcp/127.0.0.1:{port}"},
        ) as federation,
    ):
        relay.ready()
        controller = federation.controller(
            rounds=rounds, clients__num=CLIENTS, clients__min=CLIENTS - 1, round__timeout_s=10 * LEASE_S
        )
        never = {"2": str(tmp_path / "never")}
        clients = [federation.client(number, hold={"3": str(gate)}) for number in range(CLIENTS - 1)]
        killed = federation.client(CLIENTS - 1, hold=never)
        killed.wait_for("training", PATIENCE_S, round=2)
        relay.wait_for("session joined", count=CLIENTS + 1)
        killed.signal(signal.SIGKILL)
        report = controller.wait_for("round", PATIENCE_S, round_id=2)
        assert report["clients"] == [0, 1]
        assert report["dropped"] == {"client silent": 1}
        again = federation.client(CLIENTS - 1)
        relay.wait_for("session joined", count=CLIENTS + 2)
        gate.touch()
        reports = finish(controller, *clients, again)
    assert [one["attempt"] for one in reports] == [1] * rounds


@pytest.mark.netns
def test_between_machines_a_client_that_is_cut_off_is_waited_for_and_one_that_is_killed_is_not(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """While it is cut off it gives up its link, as it gets nothing from the relay. That arrives there once the link
    works again, as the end of a process does."""
    (left, right), relay_lease_s = hosts, 2.0
    endpoint = f"tcp/{left.address}:7447"
    settings = ("--listen", endpoint, "--set", "relay.tls=false", "--set", f"relay.lease_s={relay_lease_s:g}")
    gate, never = tmp_path / "gate", tmp_path / "never"
    with (
        RelayProcess(*settings, prefix=left.prefix) as relay,
        Federation(
            domain=0,
            silence_s=10 * LEASE_S,
            network={"shared_memory": False, "connect": endpoint, "tls": False},
        ) as federation,
    ):
        relay.ready()
        controller = federation.controller(
            rounds=3, clients__num=2, clients__min=1, round__timeout_s=10 * LEASE_S, prefix=left.prefix
        )
        near = federation.client(0, prefix=left.prefix, hold={"2": str(gate)})
        far = federation.client(1, prefix=right.prefix, hold={"2": str(gate), "3": str(never)})
        far.wait_for("training", PATIENCE_S, round=2)
        set_link(right, up=False)
        time.sleep(3 * relay_lease_s)  # the fault, not a wait for something
        set_link(right, up=True)
        relay.wait_for("session joined", count=4)  # side links take part in no job
        gate.touch()
        assert controller.wait_for("round", PATIENCE_S, round_id=2)["clients"] == [0, 1]
        far.wait_for("training", PATIENCE_S, round=3)
        far.signal(signal.SIGKILL)
        assert controller.wait_for("round", PATIENCE_S, round_id=3)["clients"] == [0]
        near.wait()  # the controller stays for a while, as the other one may come back


@pytest.mark.parametrize("who", ["the controller", "a client"])
def test_a_run_whose_link_is_down_for_less_than_its_lease_has_the_bits_of_an_unbroken_one(
    who: str, relay: Relay, tmp_path: Path
) -> None:
    rounds = 4
    unbroken = run([relay.port] * (1 + CLIENTS), rounds, tmp_path / "unbroken", lambda controller, clients: None)
    with TcpProxy(relay.port) as link:
        ports = [relay.port] * (1 + CLIENTS)
        ports[0 if who == "the controller" else 1] = link.port

        def breaks(controller: Node, clients: list[Node]) -> None:
            clients[0].wait_for("training", PATIENCE_S, round=2)
            link.hold()
            time.sleep(DOWN_S)  # the fault, not a wait for something
            link.let_pass()

        check_equal(run(ports, rounds, tmp_path / "broken", breaks), unbroken, rounds)
