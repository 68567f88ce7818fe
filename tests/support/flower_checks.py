"""Checks that need flwr, for an environment that has it: ``PYTHON flower_checks.py DOMAIN``. Prints ``ok``."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.run import Run
from typer.testing import CliRunner

import gradbus
from gradbus.actors.flower.apps import ClientAppAnswering, FlowerApp, make_context
from gradbus.actors.flower.grid import NODE_ID_BASE, BusGrid
from gradbus.actors.flower.hub import MessageHub
from gradbus.actors.flower.missing_modules import explain_missing_module, explain_missing_name
from gradbus.actors.flower.node import MessageNode
from gradbus.actors.flower.payload import LARGE_BYTES, decode, encode
from gradbus.actors.flower.protocol import NodePlace
from gradbus.commands.cli.main import app as command_line
from gradbus.runtime.errors import FrameError

APPS = Path(__file__).parents[1] / "flower_apps"
APP = FlowerApp(Path("/nowhere"), "s:app", "c:app", {"lr": 0.1})
PLACES = (NodePlace.of_partition(0, 2), NodePlace.derive_from_name("robot-1"))
CONFIGS = ({"partition-id": 0, "num-partitions": 2}, {"partition-id": 1, "dataset-path": "/data/robot"})


def a_message(content: RecordDict | None = None, node: int = NODE_ID_BASE) -> Message:
    make_context(APP, 5, {}, None)
    return Message(content if content is not None else some_content(), node, "train")


def some_content() -> RecordDict:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(7, 5)), np.zeros(0), np.arange(9, dtype=np.int64)]
    return RecordDict(
        {
            "arrays": ArrayRecord(arrays),
            "config": ConfigRecord({"round": 3, "name": "x", "raw": b"\0\1", "list": [1.5, 2.5]}),
            "more": ArrayRecord([np.ones((2, 2), np.float32)]),
            "metrics": MetricRecord({"loss": 0.25, "counts": [1, 2]}),
        }
    )


def payload() -> None:
    """Messages survive as payloads, and what is altered is refused, never taken apart further."""
    message = a_message()
    whole = b"".join(encode(message))
    found = decode(whole)
    assert found.content == message.content
    assert vars(found.metadata).items() >= {"_run_id": 5, "_message_type": "train", "_dst_node_id": 1000}.items()
    assert decode(b"".join(encode(a_message(RecordDict())))).content == RecordDict()
    generator, refused = random.Random(2), 0
    for _ in range(300):
        altered = bytearray(whole[: generator.choice([len(whole), generator.randrange(len(whole))])])
        for _ in range(generator.randrange(4)):
            if altered:
                altered[generator.randrange(min(len(altered), 200))] = generator.randrange(256)
        try:
            decode(bytes(altered))
        except FrameError:
            refused += 1
    assert refused > 200, refused


def grid() -> None:
    """The grid with two nodes: replies, errors of the app, state, nodes that are not there, time-outs, late pulls."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    app = ClientApp()
    release = threading.Event()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        counts = context.state.get("counts", MetricRecord({"seen": 0}))
        context.state["counts"] = MetricRecord({"seen": counts["seen"] + 1})
        if message.content["config"].get("fail"):
            raise ValueError("no such data")
        if message.content["config"].get("wait"):
            release.wait(20)
        assert context.node_config in CONFIGS
        told = {"seen": context.state["counts"]["seen"], "partition": context.node_config["partition-id"]}
        content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord(told)})
        return Message(content, reply_to=message)

    async def run() -> None:
        place = {"job": f"grid-{os.getpid()}", "domain": int(sys.argv[1])}
        async with (
            gradbus.connect(**place) as bus,
            gradbus.connect(**place) as first,
            gradbus.connect(**place) as second,
        ):
            hub = MessageHub(bus, run_id=5)
            serving = asyncio.create_task(hub.run())
            await hub.started.wait()
            nodes = [
                asyncio.create_task(MessageNode(one, ClientAppAnswering(APP, app, place, config), place=place).run())
                for place, config, one in zip(PLACES, CONFIGS, (first, second), strict=True)
            ]
            over = BusGrid(hub, bus.memory, asyncio.get_running_loop(), Run.create_empty(5))
            await asyncio.to_thread(calls, over, release)
            await hub.end(ok=True, reason="done")
            await asyncio.gather(*nodes)
            serving.cancel()

    asyncio.run(run())


def calls(over: BusGrid, release: threading.Event) -> None:
    both = [NODE_ID_BASE + place.number for place in PLACES]
    while list(over.get_node_ids()) != both:
        release.wait(0.02)
    assert [node.node_id for node in over.get_nodes()] == both
    assert over.run.run_id == 5

    def content(**config: Any) -> RecordDict:
        arrays = ArrayRecord([np.arange(30_000, dtype=np.float64)])
        return RecordDict({"arrays": arrays, "config": ConfigRecord(config)})

    same = content(ok=True)
    for seen in (1, 2):  # the state of a node lasts from one message to the next
        sent = [a_message(same, node) for node in reversed(both)]
        replies = list(over.send_and_receive(sent))
        assert [reply.content["metrics"]["partition"] for reply in replies] == [1, 0]
        assert [reply.content["metrics"]["seen"] for reply in replies] == [seen, seen]
        assert [reply.metadata.reply_to_message_id for reply in replies] == [one.metadata.message_id for one in sent]
        assert [reply.metadata.src_node_id for reply in replies] == list(reversed(both))
        assert all(reply.content["arrays"] == same["arrays"] for reply in replies)
    failed, fine, absent = over.send_and_receive(
        [a_message(content(fail=True)), a_message(same, both[1]), a_message(same, NODE_ID_BASE + 7)]
    )
    assert failed.has_error()
    assert failed.error.reason == "ValueError: no such data"
    assert fine.has_content()
    assert absent.error.code == 5, absent.error  # NODE_UNAVAILABLE
    assert over.tally.failure == ""
    assert list(over.send_and_receive([a_message(content(wait=True))], timeout=0.2)) == []
    release.set()
    assert next(iter(over.send_and_receive([a_message(content(fail=True))]))).has_error()
    assert over.tally.failure.startswith("in 1 of 4 rounds of messages no reply was good"), over.tally.failure
    assert "The first: round 4 (train): no reply came within the timeout" in over.tally.failure, over.tally.failure
    assert str(over.tally) == (
        "8 replies, 3 of them errors (2 CLIENT_APP_RAISED_EXCEPTION, 1 NODE_UNAVAILABLE), 1 messages without a reply "
        "in time"
    ), str(over.tally)
    ids = list(over.push_messages([over.create_message(same, "train", both[1], "group")]))
    pulled: list[Message] = []
    while not pulled:
        pulled = list(over.pull_messages(ids))
    assert pulled[0].metadata.group_id == "group"
    assert list(over.pull_messages(ids)) == []
    refusal = ""
    try:
        over.push_messages([Message(same, reply_to=pulled[0])])
    except ValueError as error:
        refusal = str(error)
    assert "no reply_to_message_id" in refusal


def memory() -> None:
    """Large messages are let go of once they are answered, though Flower's record dictionaries refer to themselves and
    few objects are made meanwhile, which would bring the garbage collector."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    arrays = [np.zeros(LARGE_BYTES // 4, np.float32)]
    instruction = b"".join(encode(a_message(RecordDict({"arrays": ArrayRecord(arrays)}))))
    answering = ClientAppAnswering(APP, app, PLACES[0])
    answering.begin(5, {})
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            reply = answering.answer(memoryview(instruction), number)
            assert sum(map(len, reply)) > LARGE_BYTES
            del reply
            assert held() > 0, "else nothing is to be let go of"
            answering.release()
            assert held() == 0, held()
    finally:
        gc.enable()


def held() -> int:
    """Large arrays in this process."""
    return sum(isinstance(one, Array) and len(one.data) >= LARGE_BYTES for one in gc.get_objects())


def refusals() -> None:
    """What is no app, and values for keys that the app does not have, are refused with what was expected."""
    for app, options, said in (
        ("nowhere", [], "expected the folder of a Flower app"),
        (".", [], "is no Flower app"),
        ("numpy-app", ["--run-config", "rounds=5"], "has no key 'rounds' in [tool.flwr.app.config]; it has learning"),
        ("numpy-app", ["--run-config", "5"], "expected keys and values"),
        ("numpy-app", ["--run-config", f"num-server-rounds={1 << 63}"], "num-server-rounds: an integer has at most 64"),
        ("numpy-app", ["--run-config", f"num-server-rounds=0x{'f' * 5000}"], "num-server-rounds: an integer has at"),
    ):
        ended = CliRunner().invoke(command_line, ["flower", "run", str(APPS / app), *options])
        assert ended.exit_code == 2, ended.output
        assert said in " ".join(ended.output.split()), ended.output


def moved_names() -> None:
    """An import that Flower has moved or never had is explained, with the version and the place that have it."""
    asked = ["torch", "flwr[simulation]>=1.8"]
    text = explain_missing_module("flwr.client.typing", asked)
    assert "'flwr.client.typing', and flwr 1.4" in text, text
    assert "flwr 1.31 was the last version with it. This version has that name in flwr.clientapp.typing" in text, text
    assert "pyproject.toml asks for 'flwr[simulation]>=1.8'. gradbus runs apps with flwr <1.43,>=1.41" in text, text
    text = explain_missing_module("flwr.server.driver", [])
    assert "flwr 1.16 was the last version with it. gradbus runs" in text, text
    error = ImportError("cannot import name 'Context' from 'flwr.server' (x.py)", name="flwr.server")
    text = explain_missing_name(error, []) or ""
    assert "imports 'Context' from 'flwr.server'" in text, text
    assert "This version has that name in flwr.app" in text, text
    assert explain_missing_name(ImportError("cannot import name 'x' from 'y'", name="y"), []) is None


if __name__ == "__main__":
    moved_names()
    payload()
    memory()
    refusals()
    grid()
    print("ok")
