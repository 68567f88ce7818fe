"""Writers are deleted, and their types with them, only when no write is in them: each test in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dds_domains import new_domain

DOMAIN = new_domain()

# A write takes microseconds: to hold one half way, what makes its sample is replaced.
HELD_WRITE = """
import os, threading
from gradbus.runtime.transport.dds import domains, libddsc
from gradbus.runtime.transport.dds import participant as dds
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds.participant import Participant
from gradbus.runtime.transport.channels import collective_channel
from gradbus.runtime.errors import BusClosed

began, go = threading.Event(), threading.Event()
sample_of = libddsc._sample_of

def held(*arguments):
    began.set()
    assert go.wait(30)
    return sample_of(*arguments)

def write():
    outcome.append(writer.write((), (b"head", bytes(64))))

node = Participant(domain_id=DOMAIN, partition=f"late-{os.getpid()}", network=NetworkConfig())
writer = node.outlet(collective_channel("late"))
outcome = []
libddsc._sample_of = held
writing = threading.Thread(target=write)
writing.start()
assert began.wait(30)
"""

CLOSES_MEANWHILE = """
closing = threading.Thread(target=node.close)
closing.start()
closing.join(0.5)  # it would have freed the type by then
go.set()
writing.join(30)
closing.join(30)
print(outcome, closing.is_alive(), bool(domains.own_prefixes(DOMAIN)))
"""

STAYS = """
dds.WRITE_END_S = 0.1
node.close()
print(bool(domains.own_prefixes(DOMAIN)))
go.set()
writing.join(30)
print(outcome)
"""

AFTER_THE_DELETION = """
go.set()
writing.join(30)
writer.close()
try:
    writer.write((), (b"head", bytes(64)))
except BusClosed as error:
    print(error)
node.close()
"""


def ran(program: str) -> list[str]:
    """Run it after what holds a write up, and return the lines of its output."""
    command = [sys.executable, "-c", (HELD_WRITE + program).replace("DOMAIN", str(DOMAIN))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [*done.stderr.splitlines(), *done.stdout.splitlines()]


@pytest.mark.slow
def test_a_write_that_is_under_way_while_the_last_bus_closes_ends_before_its_type_goes() -> None:
    assert ran(CLOSES_MEANWHILE) == ["[True] False False"]


@pytest.mark.slow
def test_a_writer_whose_write_does_not_end_in_time_stays_and_the_log_says_so() -> None:
    logged, *lines = ran(STAYS)
    assert "writer not deleted" in logged
    assert "topic=train/frame/late" in logged
    assert lines == ["True", "[True]"]


@pytest.mark.slow
def test_a_write_after_the_deletion_of_its_writer_is_an_error_that_names_the_topic() -> None:
    (text,) = ran(AFTER_THE_DELETION)
    assert text == "topic 'train/frame/late': its writer is deleted, as its group or bus is closed"
