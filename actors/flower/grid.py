"""Flower's Grid over a hub: what a ServerApp, and with it every strategy, sends and receives by.

Messages with the same content, as strategies make them, are serialised once and sent once for all their nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from gradbus.actors.flower.hub import Address, Answer, MessageHub
from gradbus.actors.flower.payload import collect, decode, encode
from gradbus.actors.flower.protocol import make_payload
from gradbus.actors.flower.reply_tally import ReplyTally, RoundName
from gradbus.runtime.errors import FrameError
from gradbus.runtime.shm.segment import PayloadMemory

NODE_ID_BASE = 1000  # the id of the node with number 0; Flower has 0 and 1 for itself
_POLL_S = 1.0  # at most so long a call waits in one piece

T = TypeVar("T")

_CODES = {
    "gone": ErrorCode.NODE_UNAVAILABLE,
    "expired": ErrorCode.MESSAGE_UNAVAILABLE,
    "refused": ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
}


@dataclass(slots=True)
class _Pushed:
    """A message that was pushed and whose reply was not pulled. ``stub``: it, without its content."""

    address: Address
    stub: Message


class BusGrid(Grid):  # type: ignore[misc] # flwr has no types where it is not installed
    """For one ServerApp. Its methods block and may be called from any thread but that of the hub's loop.

    Attributes:
        tally: of the replies that the ServerApp got.
    """

    def __init__(self, hub: MessageHub, memory: PayloadMemory, loop: asyncio.AbstractEventLoop, run: Run) -> None:
        self._hub = hub
        self._memory = memory
        self._loop = loop
        self._run = run
        self._pushed: dict[str, _Pushed] = {}
        self._pulled_bytes = 0  # since messages were pushed last
        self.tally = ReplyTally()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()
            raise

    def set_run(self, run: Run) -> None:
        """Set the run. The bus knows one, so its id has to stay.

        Raises:
            TypeError: it is no Run. ValueError: it is another run.
        """
        if not isinstance(run, Run):
            raise TypeError(f"expected a flwr Run, got {type(run).__name__}")
        if run.run_id != self._run.run_id:
            raise ValueError(f"this grid is that of run {self._run.run_id}, not of run {run.run_id}")
        self._run = run

    @property
    def run(self) -> Run:
        """A copy of the run's description."""
        return Run(**vars(self._run))

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message, as Flower's constructor does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Ids of the nodes that can take a message now, ascending."""
        return [NODE_ID_BASE + number for number in self._call(self._nodes())]

    async def _nodes(self) -> list[int]:
        return self._hub.nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages. Returns an id for each, in their order.

        Raises:
            ValueError: a message is a reply, has an error or no time to live.
        """
        collect(self._pulled_bytes)
        self._pulled_bytes = 0
        groups: list[tuple[Message, dict[int, Message]]] = []
        newest: dict[tuple[object, ...], dict[int, Message]] = {}
        ordered = list(messages)
        for message in ordered:
            _check(message)
            key = (id(message.content), message.metadata.message_type, message.metadata.group_id, message.metadata.ttl)
            node = message.metadata.dst_node_id - NODE_ID_BASE
            if key not in newest or node in newest[key]:
                newest[key] = {}
                groups.append((message, newest[key]))
            newest[key][node] = message
        ids = {}
        for first, by_node in groups:
            # On this thread: to serialise, and to copy, takes as long as the model is large.
            self._stamp(first, "")
            payload = make_payload(self._memory, encode(first))
            number = self._call(self._hub.push(by_node.keys(), payload, first.metadata.ttl))
            for node, message in by_node.items():
                ids[id(message)] = name = message_id(self._run.run_id, number, node)
                self._stamp(message, name)
                stub = Message(metadata=message.metadata, content=RecordDict())
                self._pushed[name] = _Pushed((number, node), stub)
        self.tally.send({ids[id(message)]: _round_of(message) for message in ordered})
        return [ids[id(message)] for message in ordered]

    def _stamp(self, message: Message, name: str) -> None:
        """Enter what Flower's own grids enter, too."""
        message.metadata.__dict__.update(_run_id=self._run.run_id, _src_node_id=SUPERLINK_NODE_ID, _message_id=name)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages that have come, each once. Does not wait."""
        return list(self._pull(list(message_ids), 0.0).values())

    def _pull(self, ids: list[str], timeout_s: float) -> dict[str, Message]:
        """The replies that have come, by the id of what they reply to; waits for the first of them."""
        waiting = {self._pushed[name].address: name for name in ids if name in self._pushed}
        found = self._call(self._hub.collect(waiting.keys(), timeout_s)) if waiting else {}
        replies = {}
        for address in list(found):
            name = waiting[address]
            replies[name] = reply = self._reply(self._pushed.pop(name), found.pop(address))
            if reply.has_error():
                self.tally.count_error(
                    name, NODE_ID_BASE + address[1], _code_name(reply.error.code), reply.error.reason
                )
            else:
                self.tally.count_good(name)
        return replies

    def _reply(self, pushed: _Pushed, answer: Answer) -> Message:
        """The message that a strategy gets. Of a node's reply only content and error count: who sent it, and what it
        replies to, is known here."""
        reply = None
        if answer.payload is None:
            reply = Message(Error(_CODES[answer.kind], answer.failure), reply_to=pushed.stub)
        else:
            try:
                self._pulled_bytes += len(answer.payload)
                came = decode(answer.payload)
                reply = Message(came.content if came.has_content() else came.error, reply_to=pushed.stub)
            except FrameError as error:
                reply = Message(Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, str(error)), reply_to=pushed.stub)
        reply.metadata.__dict__["_message_id"] = f"{pushed.stub.metadata.message_id}-reply"
        return reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and wait for the replies: for all of them, or at most for ``timeout`` seconds. Nodes that are
        gone reply with an error at once. Returned in the order of the messages."""
        ids = list(self.push_messages(messages))
        del messages
        until_s = None if timeout is None else time.monotonic() + timeout
        replies: dict[str, Message] = {}
        pending = list(ids)
        while pending:
            left_s = _POLL_S if until_s is None else min(_POLL_S, until_s - time.monotonic())
            replies |= self._pull(pending, max(0.0, left_s))
            pending = [name for name in pending if name not in replies]
            if left_s <= 0:
                break
        self.tally.expire(pending)
        if pending:  # whoever comes later finds nobody
            self._call(self._hub.withdraw([self._pushed.pop(name).address for name in pending]))
        return [replies[name] for name in ids if name in replies]


def message_id(run_id: int, number: int, node: int) -> str:
    """The id of a message: of one instruction, to one node."""
    return f"{run_id:016x}-{number}-{node}"


def _round_of(message: Message) -> RoundName:
    """Return the type of a message, and which round of its strategy it belongs to."""
    configs = (record for record in message.content.values() if isinstance(record, ConfigRecord))
    number = next((config["server-round"] for config in configs if "server-round" in config), "")
    return message.metadata.message_type, str(message.metadata.group_id or number)


def _code_name(code: int) -> str:
    return next((name for name, value in vars(ErrorCode).items() if value == code and name.isupper()), f"code {code}")


def _check(message: Message) -> None:
    metadata: Metadata = message.metadata
    if metadata.reply_to_message_id or not message.has_content() or not metadata.ttl > 0:
        raise ValueError(
            f"expected a message with content, a time to live and no reply_to_message_id, got {metadata!r}"
        )


__all__ = ["NODE_ID_BASE", "BusGrid", "message_id"]
