"""The one table of what is replaced in this process, each entry with its reason. Nothing else is.

Clock, entropy, processes and files of Python are replaced before gradbus is imported, as ``from x import y`` and
default arguments keep what they found. The product has no door for any of this, so nothing in it can be seeded.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fault_simulation import kernel


class Patch(NamedTuple):
    """One name that is replaced."""

    owner: Any
    name: str
    replacement: Any
    reason: str


def of_python() -> list[Patch]:
    """Return the names of Python that are replaced, before gradbus is imported."""
    clocks = [Patch(time, name, clock, "one virtual clock for all") for name, clock in kernel.CLOCKS.items()]
    return [
        *clocks,
        Patch(os, "urandom", kernel.urandom, "incarnations and run ids come from the seed"),
        Patch(random, "_urandom", kernel.urandom, "the module secrets has bound it: SystemRandom reads it"),
        Patch(os, "getpid", kernel.getpid, "each virtual process has a number"),
        Patch(socket, "gethostname", kernel.gethostname, "each Hello contains it, and so does the trace"),
        Patch(os, "open", kernel.open_file, "descriptors are closed, and locks freed, when their process dies"),
        Patch(os, "close", kernel.close_file, "a dead process must not close a number that another one has now"),
        Patch(os, "write", kernel.write_file, "a dead process writes nothing"),
        Patch(
            os, "fsync", kernel.fsync, "a moment at which a process may die; disks are full or lose what is unsynced"
        ),
        Patch(os, "replace", kernel.replace, "an unsynced rename is lost with the power"),
        Patch(os, "unlink", kernel.unlink, "a dead process removes nothing while its stack unwinds"),
    ]


def of_gradbus() -> list[Patch]:
    """Return the names of gradbus that are replaced. Importing this function's modules loads gradbus."""
    from fault_simulation import decisions, drivers, memory, processes, relay_network
    from gradbus.actors.parameter_server.clocks import Clocks
    from gradbus.actors.parameter_server.requests import ServerRequests
    from gradbus.actors.parameter_server.service import Service
    from gradbus.actors.parameter_server.shard import Shard
    from gradbus.actors.parameter_server.state import ServerState
    from gradbus.actors.secure_aggregation import masking_client, masking_server
    from gradbus.runtime import drive, spinning
    from gradbus.runtime.bus import bus, raw_endpoints
    from gradbus.runtime.collectives.agreement import GenerationAgreement
    from gradbus.runtime.security.identity import handshake, join_client
    from gradbus.runtime.testing import journal
    from gradbus.runtime.transport import peer_processes
    from gradbus.runtime.transport.zenoh import inlet, outlet, place

    def decision(owner: Any, name: str, called: str, facts: decisions.Facts) -> Patch:
        return Patch(
            owner, name, decisions.deciding(called, getattr(owner, name), facts), "a decision without a journal"
        )

    kernel_reason = "the kernel of each virtual machine reports the ends of its own processes"
    return [
        Patch(drive, "driver", drivers.StepDriver, "the virtual loop drives the steps of a bus, not a thread"),
        Patch(drive, "later", drivers.DeferredCall, "deletions run a moment later, on the virtual loop"),
        Patch(drive, "executor", drivers.virtual_executor, "computations run in line, at a virtual cost"),
        Patch(bus.Bus, "drain", drivers.drain_topic, "a thread that waits for acknowledgements would stop the time"),
        Patch(raw_endpoints.RawEndpoints, "drain", drivers.drain_endpoints, "likewise"),
        Patch(place.ZenohPlace, "close_endpoints", relay_network.close_endpoints, "likewise"),
        Patch(inlet, "WINDOW_BYTES", memory.WINDOW_BYTES, "a run has too few samples to fill the shipped window"),
        Patch(outlet, "WINDOW_BYTES", memory.WINDOW_BYTES, "likewise"),
        Patch(peer_processes, "own_claim", processes.own_claim, kernel_reason),
        Patch(peer_processes, "watched", processes.WatchedProcesses(), kernel_reason),
        Patch(peer_processes, "has_ended", processes.has_ended, kernel_reason),
        Patch(peer_processes, "is_stopped", processes.is_stopped, kernel_reason),
        Patch(journal.Probe, "reached", processes.at_place, "a fail point is a moment for faults"),
        Patch(journal.History, "note", processes.noting(journal.History.note), "each decision is a moment for faults"),
        Patch(masking_client, "X25519PrivateKey", processes.SeededKeys, "keys come from the seed"),
        Patch(masking_server, "X25519PrivateKey", processes.SeededKeys, "keys come from the seed"),
        Patch(handshake, "X25519PrivateKey", processes.SeededKeys, "keys come from the seed"),
        Patch(join_client, "X25519PrivateKey", processes.SeededKeys, "keys come from the seed"),
        Patch(spinning.PollHistory, "next_polls", decisions.polls_never, "the virtual time stands still for who polls"),
        decision(Clocks, "push", "push", decisions.of_push),
        decision(Clocks, "ask", "ask", decisions.of_ask),
        decision(Clocks, "lose", "lose", decisions.of_lose),
        decision(Shard, "apply", "apply", decisions.of_apply),
        Patch(
            ServerState,
            "save",
            decisions.deciding("save", decisions.saving(ServerState.save), decisions.of_saved),
            "a decision without a journal, of which the oracles need to know what is saved",
        ),
        decision(ServerState, "load", "load", decisions.of_load),
        decision(GenerationAgreement, "_adopt", "generation", decisions.of_generation),
        decision(GenerationAgreement, "next_view", "view", decisions.of_view),
        Patch(
            Service,
            "_drop",
            decisions.dropping(Service._drop),  # noqa: SLF001 - one place for all
            "the oracles need to know why",
        ),
        Patch(
            ServerRequests,
            "ask",
            decisions.asking(ServerRequests.ask),
            "each request of a worker is a moment for faults",
        ),
    ]


def apply(patches: list[Patch]) -> None:
    """Put the replacements in place, for the life of this process.

    Raises:
        AttributeError: a name is not there, so the table is out of date.
    """
    for patch in patches:
        getattr(patch.owner, patch.name)
        setattr(patch.owner, patch.name, patch.replacement)


def install(import_product: Callable[[], object]) -> None:
    """Replace Python's names, import the product, and replace its names. Once in a process.

    Raises:
        RuntimeError: gradbus is imported already, and has bound the real clocks.
    """
    if "gradbus.runtime" in sys.modules:
        raise RuntimeError("gradbus is imported already: the simulation needs a process of its own")
    apply(of_python())
    import_product()
    apply(of_gradbus())
