"""Settings of the network are checked once, when they are made."""

from __future__ import annotations

import pytest

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.network_config import NetworkConfig


def test_the_profile_decides_lease_and_datagrams_unless_they_are_given() -> None:
    assert (NetworkConfig().effective_lease_s, NetworkConfig().effective_datagram_bytes) == (60.0, 65_500)
    real = NetworkConfig(profile="network")
    assert (real.effective_lease_s, real.effective_datagram_bytes) == (10.0, 1_400)
    given = NetworkConfig(profile="network", lease_s=0.5, datagram_bytes=14_700)
    assert (given.effective_lease_s, given.effective_datagram_bytes) == (0.5, 14_700)


@pytest.mark.parametrize("size", [0, 1_199, 65_501])
def test_datagrams_that_no_network_carries_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="1,200 to 65,500"):
        NetworkConfig(datagram_bytes=size)


@pytest.mark.parametrize("address", ["höst", "10.0.0.1\udcff", "10.0.0.1\x01"])
def test_a_peer_that_is_no_ascii_text_is_an_error_that_names_the_setting(address: str) -> None:
    with pytest.raises(ConfigError, match=r"peers \(bus\.peers\): .*Name the machine by its IP address"):
        NetworkConfig(peers=("10.0.0.2", address))
