"""Who can be met over links, and what a user is told of those that do not come."""

from __future__ import annotations

from gradbus.runtime.bus.transport_factory import reach_of
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.zenoh.reach import LinkReach

FAR = LinkConfig(connect=("tls/relay.example.org:443",))
LISTENS = LinkConfig(listen=("tcp/0.0.0.0:7447",), tls=False)
HERE = LinkConfig(connect=("tcp/127.0.0.1:7447",))


def reach(links: LinkConfig, domain: int = 0) -> LinkReach:
    found = reach_of(domain, NetworkConfig(links=links))
    assert isinstance(found, LinkReach)
    return found


def test_all_but_loopback_is_exposed() -> None:
    assert [reach(links).is_exposed for links in (FAR, LISTENS, HERE)] == [True, True, False]
    assert [reach(links).leaves_machine for links in (FAR, LISTENS, HERE)] == [True, True, False]


def test_processes_that_name_one_relay_differently_have_one_meeting_place() -> None:
    """Else a rank that listens would be told that it never meets those that dial it."""
    assert reach(FAR).meeting_place == reach(LISTENS).meeting_place == "Zenoh"
    assert reach(FAR, 3).meeting_place == "Zenoh, domain 3" != reach_of(3, NetworkConfig()).meeting_place
    assert reach(FAR).attachment == "tls/relay.example.org:443"
    assert reach(LISTENS).attachment == "tcp/0.0.0.0:7447"


def test_advice_names_the_relay_and_the_other_transport() -> None:
    text = reach(FAR).advice()
    assert "bus.connect to the relay that this one dials (tls/relay.example.org:443)" in text
    assert "'gradbus doctor' there checks the way" in text
    assert "A process with neither bus.connect nor bus.listen uses DDS, and cannot be met here" in text
    assert "'gradbus doctor --config FILE' there prints the transport" in text
    assert "this process, which listens on tcp/0.0.0.0:7447" in reach(LISTENS).advice(one=True)


def test_a_bus_on_loopback_says_that_it_reaches_this_machine_alone() -> None:
    assert reach(HERE).advice().startswith("Start them. If on another machine: this bus reaches only this machine")
    assert reach(HERE).advice(elsewhere=True, one=True).startswith("It is on another machine: this bus reaches")
    assert "another machine" not in reach(HERE).advice(elsewhere=False)
    assert reach(HERE).hint(elsewhere=True).startswith("This bus reaches only this machine (tcp/127.0.0.1:7447)")


def test_hints_are_short_and_name_the_relay() -> None:
    for links in (FAR, LISTENS, HERE):
        for one in (True, False):
            hint = reach(links).hint(one=one)
            assert hint.startswith("Start it, " if one else "Start them, ")
            assert len(hint) < 200
