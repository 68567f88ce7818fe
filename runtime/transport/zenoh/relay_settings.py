"""Settings of Zenoh's queues: how long a message waits for room there before it is dropped, and sent again.

**Of a session that dials.** Zenoh has a mode in which a put waits until there is room (BLOCK). Nothing is put so; only
declarations wait so, which are few and have a queue of their own. While one waits, it holds a lock of the queue that
Zenoh needs to close the link, on the one thread that sends for all sessions of a process: a link that ended in the
middle of an upload left that process without any for as long as the put would wait. So a put waits for
:func:`queue_settings` at most, and a link that has ended is closed after that time.

**Of a session that forwards**, so that a peer that reads slowly, or not at all, holds up no other.

Zenoh passes a message on, on the thread that has received it, where a wait for room holds up all other messages of that
link, and the end of sessions: with two waits without an end a relay stood still for good. Here a message is dropped
after a while, also one that its sender wants to be waited for; an outlet sends its own again, as what is lost on the
way.
"""

from __future__ import annotations

import os
from typing import Any

# How long the first batch of a message waits: 64 KiB leave in this time over a link of 1 Mbit/s. Each further one that
# has found room doubles the time for the next, up to a sum. So much each large message that a slow link has no
# room for costs others: several, until its outlet sends it no more of them together with those of others.
DROP_AFTER_S, DROP_LARGE_AFTER_S = 0.5, 0.5
# For each peer: with 64 KiB each, as much as a frame of 1 MiB, the default. So that gets over a link of any rate, if
# need be alone. Of a larger frame, the rest must leave within DROP_LARGE_AFTER_S.
QUEUE_BATCHES = 16
# The same for a session that dials, which has a thread that may wait. So long a stall costs it the messages that wait.
WAIT_S, WAIT_SHARE = 1.0, 1 / 8  # at most so much, and of the lease: waits of one message add up to three times that
# That pass on what they have received. Each may wait for room in the queue of a peer that takes nothing, and Zenoh has
# two: two senders to such a peer would hold up all others. 14 more take 0.25 MiB. This makes the stall unlikely, not
# impossible: as many senders at the same time take all threads, for DROP_LARGE_AFTER_S at most.
FORWARDING_THREADS = 16

RELAY_SETTINGS: dict[str, Any] = {
    "qos/network": [
        {
            "id": "no peer holds up others",
            "messages": ["put"],
            "key_exprs": ["gradbus/**"],
            "overwrite": {"congestion_control": "drop"},
            "flows": ["egress"],
        }
    ],
    "transport/link/tx/queue/size/data": QUEUE_BATCHES,
    "transport/link/tx/queue/congestion_control/drop": {
        "wait_before_drop": round(1e6 * DROP_AFTER_S),
        "max_wait_before_drop_fragments": round(1e6 * DROP_LARGE_AFTER_S),
    },
}
"""By their names in Zenoh's configuration; for modes that forward."""


def queue_settings(lease_s: float) -> dict[str, Any]:
    """Return the settings of a session that dials, by their names in Zenoh's configuration."""
    wait_us = round(1e6 * min(WAIT_S, WAIT_SHARE * lease_s))
    return {
        "transport/link/tx/queue/size/data": QUEUE_BATCHES,
        "transport/link/tx/queue/congestion_control/drop": {
            "wait_before_drop": wait_us,
            "max_wait_before_drop_fragments": 2 * wait_us,
        },
    }


def reserve_forwarding_threads() -> None:
    """Have Zenoh start :data:`FORWARDING_THREADS` in this process. It reads this, from the environment alone, when the
    first session of a process opens; a later call changes nothing. What a user has set for Zenoh's threads stays."""
    os.environ.setdefault("ZENOH_RUNTIME", f"(rx: (worker_threads: {FORWARDING_THREADS}))")
