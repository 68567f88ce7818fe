"""Ranks on two hosts that torch's store connects, and the bus does not: it was left on ``lo``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from gradbus.commands.lab.namespaces import Host
from gradbus.runtime.bus.transport_factory import reach_of
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.torch.formation import RankLocation

# How often a rank looks whether it can ever meet the others, which takes no longer where all share a machine.
RANK = """
import torch.distributed as dist
from gradbus.torch import groups
groups._CHECK_S = 0.5
print("meets", flush=True)
dist.init_process_group("dds")
"""


@pytest.mark.slow
@pytest.mark.netns
def test_ranks_whose_buses_were_left_on_lo_fail_in_seconds_and_are_told_which_variables_to_set(
    hosts: tuple[Host, Host],
) -> None:
    ranks = []
    for rank, host in enumerate(hosts):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29511",
        }
        command = [*host.prefix, sys.executable, "-P", "-c", RANK]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "meets\n"
        began_s = time.monotonic()
        told = [process.communicate(timeout=90.0)[1].strip().splitlines()[-1] for process in ranks]
        assert time.monotonic() - began_s < 60  # of torch's 30 minutes
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    for rank, text in enumerate(told):
        assert f"ranks [{1 - rank}] cannot be met. Rank {1 - rank} is on " in text
        assert "They are on other machines: this bus is on lo" in text
        assert re.search(rf"GRADBUS_BUS__INTERFACE=NAME \(here: {hosts[rank].interface}\)", text), text
        assert "GRADBUS_BUS__NETWORK=network" in text


def place(network: str, **settings: object) -> RankLocation:
    own = RankLocation.here(reach_of(0, NetworkConfig()))
    return RankLocation(
        **{**{name: getattr(own, name) for name in RankLocation.__slots__}, "network": network, **settings}
    )  # type: ignore[arg-type]


def test_only_what_is_certain_ends_the_wait() -> None:
    assert not place("a").never_meets(place("a"))
    assert place("a").never_meets(place("b"))
    assert place("a", leaves_machine=True).never_meets(place("b"))
    assert not place("a", leaves_machine=True).never_meets(place("b", leaves_machine=True))
    assert not place("").never_meets(place("b"))
    assert place("a").never_meets(place("a", meeting_place="DDS domain 3"))
