"""Targets: what is said about joining, and the list of those that may take part."""

from __future__ import annotations

import contextlib
import functools

from fuzz.target import Target, must
from gradbus.runtime.errors import ConfigError, FrameError
from gradbus.runtime.security.identity import join_messages, key_messages
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import AllowList, Entry, parse_allow_list
from gradbus.runtime.security.identity.controller_signatures import BroadcastVerifier
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.join_messages import (
    Beacon,
    JoinConfirm,
    JoinHello,
    JoinRefusal,
    JoinWelcome,
    Message,
)
from gradbus.runtime.security.identity.key import NodeKey, new_node_key

_JOB = "fuzz"
_PARTY_BYTES = 64 << 10  # what controller and node may take for a message that they do not know


@functools.cache
def _parties() -> tuple[NodeKey, NodeKey, Admission, JoinClient]:
    server, node = new_node_key("server"), new_node_key("robot-1")
    controller = Admission(_JOB, server, AllowList((Entry(node.name, "client", node.public, ((1, 1),)),)), now_s=0.0)
    return server, node, controller, JoinClient(_JOB, node, server.public, "client")


def _read_joining(data: bytes) -> None:
    """As it is, as a message of each kind, and as what is said about keys and by the controller."""
    server, _, controller, client = _parties()
    for head in (b"", *(b"GBJ\0" + bytes([join_messages.VERSION, kind]) for kind in join_messages.JoinKind)):
        with contextlib.suppress(FrameError):
            signed = join_messages.parse(memoryview(head + data))
            must(signed.whole + signed.stamp == head + data, "a message is not what its bytes were")
            must(join_messages.pack(signed.message) == signed.body, "a message comes back as another one")
        for receive in (controller.receive, client.receive, lambda data, now_s: client.receive_beacon(data, 1, now_s)):
            try:
                must(not receive(memoryview(head + data), 1.0), "a forgery got an answer")
            except FrameError:
                continue
    must(
        not controller.members and not controller.is_busy and client.keys is None, "a forgery has left something behind"
    )
    with contextlib.suppress(FrameError):
        must(
            key_messages.pack(key_messages.parse(memoryview(data))) == data,
            "a word about keys comes back as another one",
        )
    try:
        BroadcastVerifier(_JOB, server.public, bytes(16)).verify(key_messages.CONTROL, memoryview(data))
    except FrameError:
        return
    must(False, "a word that the controller has not signed was taken")


def _joining_seeds() -> list[bytes]:
    some, key = bytes(range(16)), bytes(range(32))
    _, _, controller, _ = _parties()
    messages: list[Message] = [
        Beacon(some, 7, key), JoinHello(some, controller.session, 7, 1, key, key, key, key, 0, "robot-1"),
        JoinWelcome(some, some, 7, 5, key, key), JoinConfirm(controller.session, some, key),
        JoinRefusal(some, some, key, "no"),
    ]  # fmt: skip
    to_ranks = key_messages.RankKeyGrant(3, key, ((0, 3), (9, 9)), (some, some))
    words = [
        key_messages.pack(word)
        for word in (key_messages.KeyAck(3), key_messages.KeyGrant(3, key, (1, 2, 3), (4, 5)), to_ranks)
    ]
    packed = [join_messages.pack(message) + bytes(64) for message in messages]
    packed += [one + bytes(join_messages.STAMP_BYTES) for one in packed]
    return [*packed, *(one[6:] for one in packed), *words, bytes(200), b""]


def _read_list(data: bytes) -> None:
    try:
        allowed = parse_allow_list(data.decode("ascii", "replace"), "here")
    except ConfigError as error:
        must(len(str(error)) < 600, "an error that nobody reads to its end")
        return
    must(parse_allow_list(allowed.text, "here").entries == allowed.entries, "a list comes back as another one")
    for entry in allowed.entries:
        for first, last in entry.ids if entry.role == "client" else ():
            must(allowed.owner_of(first) == allowed.owner_of(last) == entry.name, "an id of two nodes")


def _list_seeds() -> list[bytes]:
    one, other = ("ed25519:" + digit * 64 for digit in "ab")
    lines = f"robot-1 client {one} 0-3,7\n", f"# us\ndesk observer {other}  # in the hall\n", f"h worker {one} 1-3\n"
    return [line.encode() for line in (*lines, "".join(lines[:2]), lines[0] * 2, "a b c d e", "")]


TARGETS = {
    "joining": Target(_read_joining, _PARTY_BYTES, _joining_seeds, max_len=join_messages.MAX_MESSAGE_BYTES),
    "allow_list": Target(_read_list, 1 << 20, _list_seeds),
}
