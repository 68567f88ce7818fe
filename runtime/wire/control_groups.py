"""Control messages of groups of ranks. What they have in common with all others is in control.py."""

from __future__ import annotations

import dataclasses

from pydantic.dataclasses import dataclass

from gradbus.runtime.wire.control_types import STRICT, U32, U64, Counts, Label, Name, Ranks, Round, Seconds, Text, World


@dataclass(frozen=True, slots=True, config=STRICT)
class GroupHello:
    """Rank to all: I want to form this group. Said until the group is formed, and to whoever still says it.

    Attributes:
        group: its name. world: how many ranks it shall have.
        members: hash over the incarnations of all ranks, 0 while some have not been heard.
        linked: frames of all other ranks of ``members`` have come, over every topic.
        formed: all ranks have said ``linked`` for the same ``members``.
        options: hash over what all ranks must have set alike.
        host: host name and process id, for people.
        memory: where on this machine my shared memory is; empty: there is none.
        attached: ranks of ``members`` whose shared memory I have mapped.
    """

    group: Name
    world: World
    members: U64
    linked: bool
    formed: bool
    options: U64
    host: Label
    memory: Name
    attached: Ranks


@dataclass(frozen=True, slots=True, config=STRICT)
class GroupLeave:
    """Rank to all: I leave this group; all that I have sent has arrived.

    Attributes:
        members: which forming of the group.
        ok: in order; if not, the others need not wait for what I owe.
        lost: ranks that I know to be gone, which may be why.
    """

    group: Name
    members: U64
    ok: bool
    reason: Text
    lost: Ranks


@dataclass(frozen=True, slots=True, config=STRICT)
class Pulse:
    """Rank to all, once a second: where I stand, for whoever looks on. The other ranks make no use of it.

    Attributes:
        group: its name. world: how many ranks it has. host: host name and process id, for people.
        up_s: since the group has formed.
        step, epoch: that the worker is in, -1 where there is none. steps_per_s: since the last pulse.
        bytes_out, bytes_in: payload of collectives since the group has formed.
        pending: collectives that have not ended. oldest: the name of the one that waits longest, oldest_s: for so long,
            missing: ranks that it waits for and that have not made the call, as far as this rank knows.
        lost: ranks that I know to be gone.
        dropped: frames that were not used, by reason.
    """

    group: Name
    world: World
    host: Label
    up_s: Seconds
    step: Round = -1
    epoch: Round = -1
    steps_per_s: float = 0.0
    bytes_out: U64 = 0
    bytes_in: U64 = 0
    pending: U32 = 0
    oldest: Label = ""
    oldest_s: Seconds = 0.0
    missing: Ranks = dataclasses.field(default_factory=list)
    lost: Ranks = dataclasses.field(default_factory=list)
    dropped: Counts = dataclasses.field(default_factory=dict)
