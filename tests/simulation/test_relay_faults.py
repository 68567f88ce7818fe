"""What becomes of the faults of a plan where all processes meet at a relay."""

from __future__ import annotations

import random
from dataclasses import replace

from fault_simulation.faults import Fault, Moment
from fault_simulation.relay_faults import on_links

MOMENT = Moment("step", 7, "controller")
CUT = Fault(MOMENT, "cut", "controller", 5.0, machines=(0, 2))


def test_two_machines_are_not_cut_off_from_each_other_but_one_from_the_relay_or_the_relay_dies() -> None:
    found = on_links(random.Random(1), [CUT] * 100)
    assert {fault.action for fault in found} == {"unlink", "relay"}
    unlinked = [fault for fault in found if fault.action == "unlink"]
    assert {fault.machines[0] for fault in unlinked} == {0, 2}
    assert all(fault.seconds == CUT.seconds and fault.moment == MOMENT for fault in unlinked)
    assert str(replace(unlinked[0], machines=(2, 2))) == "at callback 7: machine 2 is cut off from the relay for 5.00 s"


def test_a_lease_that_ends_on_one_side_is_a_link_that_breaks() -> None:
    (fault,) = on_links(random.Random(1), [Fault(MOMENT, "lease", "controller", 3.0, "client-1")])
    assert str(fault) == "at callback 7: the link of controller breaks, and is refused for 3.00 s"


def test_all_other_faults_stay_as_they_are() -> None:
    plan = [Fault(MOMENT, action, "controller", 1.0) for action in ("kill", "stop", "power", "pause", "slow", "disk")]
    assert on_links(random.Random(1), plan) == tuple(plan)
