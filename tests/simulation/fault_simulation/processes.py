"""What gradbus asks the kernel of its machine, and the moments at which a process may be hit by a fault."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fault_simulation.kernel import VirtualProcess, running
from gradbus.runtime.testing.journal import History, Probe


def own_claim() -> str:
    """Stand in for ``peer_processes.own_claim``."""
    return running().claim


def has_ended(claim: str) -> bool | None:
    """Stand in for ``peer_processes.has_ended``."""
    own = running()
    other = own.world.by_claim.get(claim)
    return None if other is None or other.machine != own.machine else other.dead


def is_stopped(claim: str) -> bool:
    """Stand in for ``peer_processes.is_stopped``."""
    own = running()
    other = own.world.by_claim.get(claim)
    return other is not None and other.machine == own.machine and other.paused


class WatchedProcesses:
    """Stands in for ``peer_processes.watched``."""

    def watch(self, claim: str, ended: Callable[[str], None]) -> bool:
        """See ``PeerProcesses.watch``."""
        own = running()
        other = own.world.by_claim.get(claim)
        if other is None or other.machine != own.machine:
            return False
        if other.dead:
            ended(claim)
        elif other is not own:
            other.watchers.append((ended, contextvars.copy_context()))
        return True

    def unwatch(self, claim: str, ended: Callable[[str], None]) -> None:
        """See ``PeerProcesses.unwatch``."""
        other = running().world.by_claim.get(claim)
        if other is not None:
            other.watchers = [one for one in other.watchers if one[0] != ended]

    def rest(self) -> None:
        """Do nothing: there is no thread."""


def at_place(probe: Probe, name: str, round_id: int) -> None:
    """Stand in for ``Probe.reached``."""
    process = running()
    process.world.at_decision(process, "place", name, "", round_id)


def _is_replaced(process: VirtualProcess) -> bool:
    return process.replaced


def noting(note: Callable[..., None]) -> Callable[..., None]:
    """Return what stands in for ``History.note``: a moment before and after each line, and a line of the trace."""

    def noted(history: History, event: str, **facts: Any) -> None:
        process = running()
        if _is_replaced(process):  # whoever checks the run reads the journal of the newer one
            return
        process.world.at_decision(process, "note", event, "before")
        if _is_replaced(process):  # just now
            return
        process.world.on_note(process, event, facts, is_kept=history.on)
        note(history, event, **facts)
        process.world.at_decision(process, "note", event, "after")

    return noted


class SeededKeys:
    """Stands in for X25519PrivateKey, which takes its entropy from OpenSSL."""

    from_private_bytes = X25519PrivateKey.from_private_bytes

    @staticmethod
    def generate() -> X25519PrivateKey:
        """Return a key of the process's own entropy."""
        return X25519PrivateKey.from_private_bytes(os.urandom(32))
