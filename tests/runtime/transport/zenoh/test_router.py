"""What a router is told of access and limits, and what it makes of what Zenoh reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.keys import session_token
from gradbus.runtime.transport.zenoh.relay_settings import DROP_AFTER_S, DROP_LARGE_AFTER_S, RELAY_SETTINGS
from gradbus.runtime.transport.zenoh.router import (
    ANY,
    JobMember,
    RouterLimits,
    access_rules,
    member_of,
    router_settings,
)
from gradbus.runtime.transport.zenoh.session import OPEN_S, session_settings

PAGE = Path(__file__).parents[4] / "docs/relay.md"
SENDER = "0a" * 12


def test_without_names_every_client_may_use_all_keys_of_gradbus_and_no_others() -> None:
    settings = router_settings(RouterLimits(sessions=7, message_bytes=1 << 20), {})
    rules = settings["access_control"]
    assert (rules["enabled"], rules["default_permission"]) == (True, "deny")
    assert [(rule["permission"], rule["key_exprs"]) for rule in rules["rules"]] == [
        ("allow", ["gradbus/**"]),
        ("deny", ["gradbus/*/*/session/**"]),
    ]
    assert rules["subjects"] == [{"id": "client-0"}, {"id": "everybody"}]
    assert settings["transport/unicast/max_sessions"] == 7
    assert settings["transport/link/rx/max_message_size"] == 1 << 20


def test_who_forwards_lets_no_client_hold_up_another() -> None:
    links = LinkConfig(listen=("tcp/127.0.0.1:7447",))
    assert session_settings(links, "router").items() >= RELAY_SETTINGS.items()
    assert not session_settings(LinkConfig(connect=links.listen), "client").keys() & {"qos/network"}


def test_no_put_waits_for_room_for_longer_than_a_part_of_the_lease() -> None:
    for lease_s, wait_s in ((2.0, 0.25), (60.0, 1.0)):
        links = LinkConfig(connect=("tcp/127.0.0.1:7447",), lease_s=lease_s)
        waits = session_settings(links, "client")["transport/link/tx/queue/congestion_control/drop"]
        assert waits == {"wait_before_drop": 1e6 * wait_s, "max_wait_before_drop_fragments": 2e6 * wait_s}


def test_as_many_links_may_be_opening_as_may_be_open_and_none_longer_than_a_client_waits() -> None:
    settings = router_settings(RouterLimits(sessions=777, message_bytes=1 << 24), {})
    assert settings["transport/unicast/accept_pending"] == 777
    assert settings["transport/unicast/accept_timeout"] == 1e3 * OPEN_S


def test_the_page_says_after_what_time_messages_are_dropped() -> None:
    page = " ".join(PAGE.read_text().split())
    assert f"messages for it are dropped after {DROP_AFTER_S:g} s, large ones after {DROP_LARGE_AFTER_S:g} s" in page


def test_a_client_has_the_keys_of_its_jobs_and_a_job_is_no_pattern() -> None:
    rules = access_rules({"site-1": ("cells", "a/b*"), "site-2": (), "admin": ("cells", ANY), ANY: ("open",)})
    keys = {
        (subject.get("cert_common_names") or [ANY])[0]: rule["key_exprs"]
        for rule, subject in zip(rules["rules"], rules["subjects"], strict=True)
        if rule["permission"] == "allow"
    }
    assert keys == {
        "site-1": ["gradbus/*/cells/**", "gradbus/*/a%2Fb%2A/**"],
        "admin": ["gradbus/**"],
        ANY: ["gradbus/*/open/**"],
    }
    assert [policy["rules"] for policy in rules["policies"]] == [[rule["id"]] for rule in rules["rules"]]
    assert all("query" not in rule["messages"] for rule in rules["rules"]), "nobody asks a router for its state"


def test_who_takes_part_is_read_from_the_token_of_its_session() -> None:
    token = session_token("my job/1", "c1a", bytes.fromhex(SENDER))
    assert member_of(token) == JobMember("c1a", "my job/1", SENDER)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "gradbus",
        f"gradbus/1/job/channel/in/{SENDER}.3",
        f"other/1/job/session/c1/{SENDER}",
        f"gradbus/1/job/session/x/{SENDER}",
        f"gradbus/1/job/session/{33 * 'c'}/{SENDER}",
        "gradbus/1/job/session/c1/0a",
        f"gradbus/1/job/session/c1/{SENDER}/more",
        f"gradbus/1/{600 * 'j'}/session/c1/{SENDER}",
    ],
)
def test_a_token_that_is_not_of_a_session_gives_nobody(token: str) -> None:
    assert member_of(token) is None
