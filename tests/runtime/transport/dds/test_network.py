"""The configuration that DDS gets: nothing leaves the machine unless asked for, and a wrong document is an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import gradbus
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network import addresses
from gradbus.runtime.network.network_config import NetworkConfig, Profile
from gradbus.runtime.transport.dds import network
from gradbus.runtime.transport.dds.network import build_xml, has_peers_elsewhere, leaves_machine
from gradbus.runtime.wire.frames import CHUNK_BYTES


def built(config: NetworkConfig, document: str | None = None) -> ET.Element:
    return ET.fromstring(build_xml(config, user_document=document))


def text(tree: ET.Element, path: str) -> str | None:
    return tree.findtext(f"Domain/{path}")


def refused(document: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_xml(NetworkConfig(), user_document=document)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with ``lo`` and ``eth0``."""
    monkeypatch.setattr(addresses, "interfaces", lambda: ["lo", "eth0"])


def test_by_default_only_loopback_is_named_and_nothing_is_multicast() -> None:
    tree = built(NetworkConfig())
    assert [(e.get("name"), e.get("multicast")) for e in tree.iter("NetworkInterface")] == [("lo", "false")]
    assert text(tree, "General/AllowMulticast") == "false"
    assert {e.get("Address", "").partition(":")[0] for e in tree.iter("Peer")} == {"127.0.0.1"}


def test_loopback_uses_large_datagrams_and_a_real_network_those_that_fit_its_packets() -> None:
    loopback, real = built(NetworkConfig()), built(NetworkConfig(profile="network"))
    assert text(loopback, "General/MaxMessageSize") == "65500B"
    assert text(loopback, "General/FragmentSize") == "65000B"
    assert text(real, "General/MaxMessageSize") == "1400B"
    assert text(real, "General/FragmentSize") == "1316B"


@pytest.mark.parametrize("profile", ["loopback", "network"])
def test_a_partition_heals_and_a_late_peer_is_found_in_both_profiles(profile: Profile) -> None:
    tree = ET.fromstring(build_xml(NetworkConfig(profile=profile, peers=("10.0.0.1", "10.0.0.2:7499")), domain_id=2))
    assert [(e.get("Address"), e.get("PruneDelay")) for e in tree.iter("Peer")] == [
        ("10.0.0.1", None),
        ("10.0.0.1:7910", "inf"),
        ("10.0.0.2:7499", "inf"),
    ]
    assert text(tree, "Discovery/InitialLocatorPruneDelay") == "600s"
    assert text(tree, "Discovery/DiscoveredLocatorPruneDelay") == "inf"
    assert text(tree, "Discovery/ParticipantIndex") == "auto"
    assert tree.find("Domain/Internal/SocketReceiveBufferSize") is not None


@pytest.mark.parametrize("profile", ["loopback", "network"])
@pytest.mark.parametrize("name", ["SocketReceiveBufferSize", "SocketSendBufferSize"])
def test_a_users_buffer_in_whatever_capitals_stands_in_place_of_ours(profile: Profile, name: str) -> None:
    theirs = f'<CycloneDDS><Domain><Internal><{name.lower()} max="128KiB"/></Internal></Domain></CycloneDDS>'
    merged = ET.fromstring(build_xml(NetworkConfig(profile=profile), user_document=theirs))
    assert [one.get("max") for one in merged.iter() if one.tag.lower() == name.lower()] == ["128KiB"]


def test_on_a_network_a_sample_fits_into_the_buffer_to_send_so_that_no_heartbeat_overtakes_it() -> None:
    sizes = [
        tree.find("Domain/Internal/SocketSendBufferSize")
        for tree in (built(NetworkConfig()), built(NetworkConfig(profile="network")))
    ]
    assert sizes[0] is None
    assert sizes[1] is not None
    assert sizes[1].get("max") == "2MiB"
    assert network.SEND_BUFFER_BYTES >= 2 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (NetworkConfig(), ("65500B", "65000B")),
        (NetworkConfig(profile="network"), ("1400B", "1316B")),
        (NetworkConfig(profile="network", datagram_bytes=14_700), ("14700B", "14616B")),
    ],
    ids=["loopback", "network", "given"],
)
def test_datagrams_are_as_large_as_the_profile_or_a_setting_has_them_with_room_for_news_of_the_fragment(
    config: NetworkConfig, sizes: tuple[str, str]
) -> None:
    tree = built(config)
    assert (text(tree, "General/MaxMessageSize"), text(tree, "General/FragmentSize")) == sizes


@pytest.mark.parametrize(
    ("element", "named"),
    [
        ("<Tracing><OutputFile>/tmp/ä.log</OutputFile></Tracing>", "'/tmp/ä.log' in <OutputFile>"),
        ("<Tracing><OutputFile>/tmp/&#228;.log</OutputFile></Tracing>", "'/tmp/ä.log' in <OutputFile>"),
        ('<Discovery><Peers><Peer Address="höst"/></Peers></Discovery>', "'höst' in <Peer>"),
        ("<General><Größe>1</Größe></General>", "'Größe' in <Größe>"),
    ],
)
def test_what_is_not_ascii_in_a_users_document_is_an_error_that_says_where_it_stands(element: str, named: str) -> None:
    error = refused(f"<CycloneDDS><Domain>{element}</Domain></CycloneDDS>")
    assert error.startswith(f"CYCLONEDDS_URI: Cyclone DDS takes ASCII characters alone, got {named}. Write it in ASCII")


def test_a_comment_of_a_users_document_may_have_any_characters() -> None:
    build_xml(NetworkConfig(), user_document="<CycloneDDS><!-- größer --><Domain/></CycloneDDS>").encode("ascii")


def test_octets_of_the_environment_that_are_no_text_are_an_error_that_names_the_variable() -> None:
    document = b"<CycloneDDS><Domain><Discovery><Tag>\xff</Tag></Discovery></Domain></CycloneDDS>"
    assert refused(document.decode("utf-8", "surrogateescape")).startswith("CYCLONEDDS_URI is not UTF-8 text")


def test_the_lease_is_long_where_the_kernel_tells_of_deaths_and_shorter_on_a_network_unless_it_is_given() -> None:
    assert text(built(NetworkConfig()), "Discovery/LeaseDuration") == "60s"
    assert text(built(NetworkConfig(profile="network")), "Discovery/LeaseDuration") == "10s"
    tree = built(NetworkConfig(lease_s=0.5))
    assert (text(tree, "Discovery/LeaseDuration"), text(tree, "Discovery/SPDPInterval")) == ("0.5s", "0.2s")


@pytest.mark.usefixtures("two_interfaces")
def test_another_interface_has_no_peers_but_those_that_are_given() -> None:
    config = NetworkConfig(profile="network", interface="eth0")
    assert list(built(config).iter("Peer")) == []


@pytest.mark.usefixtures("two_interfaces")
def test_multicast_is_on_only_where_it_is_asked_for() -> None:
    tree = built(NetworkConfig(interface="eth0", multicast=True))
    assert [(e.get("name"), e.get("multicast")) for e in tree.iter("NetworkInterface")] == [("eth0", "true")]
    assert text(tree, "General/AllowMulticast") == "true"


def test_loss_is_only_there_when_it_is_asked_for() -> None:
    assert text(built(NetworkConfig()), "Internal/Test/XmitLossiness") is None
    assert text(built(NetworkConfig(loss_per_mille=20)), "Internal/Test/XmitLossiness") == "20"


@pytest.mark.usefixtures("two_interfaces")
def test_an_interface_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"'etho'.*did you mean 'eth0'.*lo, eth0"):
        build_xml(NetworkConfig(interface="etho"))
    with pytest.raises(ConfigError, match=r"'wlan7'.*lo, eth0"):
        build_xml(NetworkConfig(interface="wlan7"))


@pytest.mark.usefixtures("two_interfaces")
def test_an_interface_in_the_users_document_is_checked_as_well() -> None:
    inner = '<General><Interfaces><NetworkInterface name="eth9"/></Interfaces></General>'
    assert "'eth9'" in refused(domain(inner))


def domain(inner: str) -> str:
    return f"<CycloneDDS><Domain Id='any'>{inner}</Domain></CycloneDDS>"


def test_an_element_of_the_user_replaces_ours_and_the_rest_stays() -> None:
    tree = built(NetworkConfig(), domain("<General><MaxMessageSize>9000B</MaxMessageSize></General>"))
    assert [e.text for e in tree.iter("MaxMessageSize")] == ["9000B"]
    assert text(tree, "General/FragmentSize") == "65000B"
    assert [e.get("name") for e in tree.iter("NetworkInterface")] == ["lo"]


def test_a_section_that_we_do_not_have_is_added() -> None:
    tree = built(NetworkConfig(), domain("<Tracing><Verbosity>warning</Verbosity></Tracing>"))
    assert text(tree, "Tracing/Verbosity") == "warning"


@pytest.mark.usefixtures("two_interfaces")
def test_what_leaves_the_machine_is_known_whatever_the_capitals_of_the_users_document() -> None:
    """Cyclone does not look at them."""
    inner = '<General><interfaces><networkinterface name="eth0"/></interfaces></General>'
    document = build_xml(NetworkConfig(), user_document=domain(inner))
    assert leaves_machine(document)
    assert [e.get("name") for e in ET.fromstring(document).iter("NetworkInterface")] == ["eth0"]
    inner = '<Discovery><PEERS><peer ADDRESS="192.0.2.10"/></PEERS></Discovery>'
    assert has_peers_elsewhere(build_xml(NetworkConfig(), user_document=domain(inner)))
    assert "old way" in refused(domain("<General><NetworkInterfaceAddress>eth0</NetworkInterfaceAddress></General>"))


@pytest.mark.parametrize(
    ("address", "elsewhere"),
    [
        ("127.0.0.1", False),
        ("127.0.0.1:7410", False),
        ("localhost", False),
        ("localhost:7410", False),
        ("[::1]", False),
        ("2001:db8::1", True),
        ("192.0.2.10", True),
        ("127.evil.example", True),
        ("localhost.evil.example", True),
        ("239.255.0.1", True),
    ],
)
def test_a_peer_is_on_this_machine_if_its_address_is_and_not_if_it_only_begins_like_one(
    address: str, elsewhere: bool
) -> None:
    assert has_peers_elsewhere(build_xml(NetworkConfig(peers=(address,)))) is elsewhere


@pytest.mark.usefixtures("two_interfaces")
def test_the_users_interfaces_replace_ours() -> None:
    inner = '<General><Interfaces><NetworkInterface name="eth0"/></Interfaces></General>'
    assert [e.get("name") for e in built(NetworkConfig(), domain(inner)).iter("NetworkInterface")] == ["eth0"]


def test_a_document_as_cyclone_documents_it_with_a_namespace_is_taken() -> None:
    document = (
        '<?xml version="1.0" encoding="UTF-8" ?>'
        '<CycloneDDS xmlns="https://cdds.io/config" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
        'xsi:schemaLocation="https://cdds.io/config https://example.invalid/cyclonedds.xsd">'
        "<Domain Id='any'><General><FragmentSize>4000B</FragmentSize></General></Domain></CycloneDDS>"
    )
    tree = built(NetworkConfig(), document)
    assert [e.text for e in tree.findall("Domain/General/FragmentSize")] == ["4000B"]


def test_a_document_without_the_outermost_element_is_taken_as_cyclone_takes_it() -> None:
    tree = built(NetworkConfig(), "<Domain><General><FragmentSize>4000B</FragmentSize></General></Domain>")
    assert text(tree, "General/FragmentSize") == "4000B"


@pytest.mark.parametrize("document", [None, "", "  \n"])
def test_no_document_is_ours_alone(document: str | None) -> None:
    assert build_xml(NetworkConfig(), user_document=document) == build_xml(NetworkConfig())


def test_a_document_may_be_a_file_or_its_address(tmp_path: Path) -> None:
    path = tmp_path / "my cyclone.xml"
    path.write_text(domain("<General><FragmentSize>4000B</FragmentSize></General>"), encoding="utf-8")
    for where in (str(path), path.as_uri(), f"file://{path}"):
        assert text(built(NetworkConfig(), where), "General/FragmentSize") == "4000B"


def test_a_file_that_is_missing_or_is_no_text_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.xml"
    assert str(missing) in refused(str(missing))
    assert str(missing) in refused(missing.as_uri())
    binary = tmp_path / "binary.xml"
    binary.write_bytes(b"\xff\xfe\x00\xd8<")
    assert str(binary) in refused(str(binary))


def test_an_unclosed_document_is_an_error_and_not_cyclones_defaults() -> None:
    assert "not well-formed" in refused("<CycloneDDS><Domain><General>")
    assert "not well-formed" in refused(domain("") + "<!-- unclosed")


def test_another_root_is_named() -> None:
    assert "<dds>" in refused("<dds/>")
    assert "<Domian>" in refused("<CycloneDDS><Domian/></CycloneDDS>")


def test_an_unknown_section_is_named_with_the_nearest_one() -> None:
    text = refused(domain("<Discovry/>"))
    assert "<Discovry>" in text
    assert "<Discovery>" in text


def test_a_bus_does_not_open_with_a_malformed_document_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYCLONEDDS_URI", "<CycloneDDS><Domain>")

    async def open_bus() -> None:
        async with gradbus.connect(job="never", domain=41):
            pass

    with pytest.raises(ConfigError, match="CYCLONEDDS_URI is not well-formed"):
        asyncio.run(open_bus())


def test_a_bus_does_not_open_with_a_document_that_cyclone_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYCLONEDDS_URI", domain("<General><MaxMessageSize>large</MaxMessageSize></General>"))

    async def open_bus() -> None:
        async with gradbus.connect(job="never", domain=42):
            pass

    with pytest.raises(ConfigError, match="Cyclone DDS refused the configuration"):
        asyncio.run(open_bus())
    monkeypatch.delenv("CYCLONEDDS_URI")
    asyncio.run(open_bus())  # and the domain can still be used


WRONG_ARGUMENTS = [
    ({"job": ""}, "job name ''"),
    ({"job": "a*"}, r"job name 'a\*'"),
    ({"job": "x" * 65}, "job name"),
    ({"domain": 233}, "domain 233"),
    ({"domain": -1}, "domain -1"),
    ({"network": "wifi"}, "'wifi'"),
    ({"interface": "nowhere0"}, "nowhere0"),
]


@pytest.mark.parametrize(("arguments", "match"), WRONG_ARGUMENTS)
def test_a_wrong_argument_of_connect_is_named(arguments: dict[str, object], match: str) -> None:
    async def open_bus() -> None:
        async with gradbus.connect(**arguments):  # type: ignore[arg-type]
            pass

    with pytest.raises(ConfigError, match=match):
        asyncio.run(open_bus())
