"""Encryption stands above any transport: here above the network in memory, where each sample that passes is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from bus_helpers import CHIEF, CLIENT, MODEL, UPDATE, Run, payload_from, reads
from patience import eventually

from gradbus.runtime.bus.bus import connect_over
from gradbus.runtime.security.encryption import PskKeys, SessionCipher
from gradbus.runtime.security.envelope import MAGIC
from gradbus.runtime.security.job_key import new_job_key
from gradbus.runtime.security.membership import SharedKeyMembership
from gradbus.runtime.security.peers import CHALLENGE_TOPIC
from gradbus.runtime.security.sealed import Sealed
from gradbus.runtime.transport.channels import CHANNELS, ToController
from gradbus.runtime.transport.dds.idl_types import IDL_TYPES
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, ModelBlob, TrainCmd

PATIENCE_S = 60.0
COMMAND = TrainCmd(3, 600, 2, 0.05, 11)
PAYLOAD = bytes(range(256)) * 1000


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    made = MemoryNetwork(seed=5)
    made.loss, made.resend_s, made.jitter_s = 0.2, 0.005, 0.002
    yield made
    made.close()


KEY = new_job_key()


def opens(network: MemoryNetwork, machine: int) -> Callable[[str], Sealed]:
    def opened(job: str) -> Sealed:
        membership = SharedKeyMembership(SessionCipher(PskKeys(job, KEY)))
        return Sealed(MemoryTransport(network, MemoryNode(f"node-{machine}", machine), job), membership)

    return opened


async def talk(network: MemoryNetwork) -> None:
    """One member sends a sample of each kind, and another one receives it."""
    async with (
        asyncio.timeout(PATIENCE_S),
        connect_over(opens(network, 0), "job") as one,
        connect_over(opens(network, 1), "job") as other,
    ):
        inbox, updates = other.subscribe(TrainCmd, ToController), other.subscribe(ClientUpdate)
        models = other.subscribe(ModelBlob)
        for kind in (TrainCmd, ToController, ClientUpdate, ModelBlob):
            await reads(one, kind)
        await one.publish(CHIEF, COMMAND)
        assert await inbox.get() == COMMAND
        await one.publish(CLIENT, Leave("a word in clear"))
        assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("a word in clear"))
        await one.send_update(UPDATE, 600, PAYLOAD)
        assert await payload_from(updates, UPDATE, len(PAYLOAD)) == PAYLOAD
        await one.send_model(MODEL, PAYLOAD)
        assert await payload_from(models, MODEL, len(PAYLOAD)) == PAYLOAD
        assert not other.rejected


def test_members_talk_over_every_channel_and_nothing_passes_in_clear(run: Run, network: MemoryNetwork) -> None:
    passed: list[tuple[str, Any]] = []
    network.on_delivered = lambda pair, sample: passed.append((pair.reader.channel.name, sample))
    run(lambda: talk(network))
    assert {name for name, _ in passed} >= {"train/train_cmd_sealed", "train/model_blob", CHALLENGE_TOPIC}
    for _, sample in passed:
        *fields, octets = sample
        assert not any(fields)
        assert octets.startswith(MAGIC)
        assert b"a word in clear" not in octets


def test_an_envelope_holds_the_same_bytes_as_a_sample_of_dds(run: Run, network: MemoryNetwork) -> None:
    """A key opens envelopes of any transport; what is in them is read by the types that DDS has."""
    passed: dict[str, bytes] = {}
    network.on_delivered = lambda pair, sample: passed.setdefault(pair.reader.channel.name, sample.data)
    run(lambda: talk(network))
    cipher = SessionCipher(PskKeys("job", KEY))

    def opened(kind: type[Any], wire: str) -> Any:
        decryptor = cipher.decryptor(CHANNELS[kind].name, ignores_own=False)
        return IDL_TYPES[CHANNELS[kind].sample_type].deserialize(decryptor.open(passed[wire]).data)

    command = opened(TrainCmd, "train/train_cmd_sealed")
    assert (command.round_id, command.subset_size, command.epochs, command.lr, command.seed) == (3, 600, 2, 0.05, 11)
    update = opened(ClientUpdate, "train/client_update")
    assert (update.client_id, update.round_id, update.num_samples) == (UPDATE.sender, UPDATE.round_id, 600)
    assert bytes(update.data).endswith(PAYLOAD)
    assert opened(ModelBlob, "train/model_blob").round_id == MODEL.round_id


def test_a_member_with_another_key_does_not_count_and_is_not_heard(run: Run, network: MemoryNetwork) -> None:
    def stranger(job: str) -> Sealed:
        membership = SharedKeyMembership(SessionCipher(PskKeys(job, new_job_key())))
        return Sealed(MemoryTransport(network, MemoryNode("stranger", 2), job), membership)

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect_over(opens(network, 0), "job") as one,
            connect_over(opens(network, 1), "job") as other,
            connect_over(stranger, "job") as third,
        ):
            with one.subscribe(ToController) as inbox, other.subscribe(ToController), third.subscribe(ToController):
                for bus in (one, other, third):
                    bus.open_writer(ToController)
                await reads(one, ToController, 2)  # of itself and of the other member
                await reads(other, ToController, 2)
                await third.publish(CLIENT, Leave("unheard"))
                await other.publish(CLIENT, Leave("heard"))
                heard = await inbox.get()
                assert isinstance(heard, Control)
                assert heard.body == Leave("heard")
                await eventually(lambda: one.rejected["other key"] > 0)
                assert one.matched_readers(ToController) == 2

    run(main)


def test_members_of_a_crowd_that_write_to_each_other_are_known_without_an_announcement_for_each(
    run: Run, network: MemoryNetwork
) -> None:
    clients = 36
    announced: set[bytes] = set()

    def note(pair: Any, sample: Any) -> None:
        if pair.reader.channel.name == CHALLENGE_TOPIC:
            announced.add(bytes(sample[-1]))

    network.loss = 0.0
    network.on_delivered = note

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as open_buses:
            chief = await open_buses.enter_async_context(connect_over(opens(network, 0), "job"))
            chief.open_writer(TrainCmd)
            left = chief.subscribe(ToController)
            crowd = [
                await open_buses.enter_async_context(connect_over(opens(network, 1 + number), "job"))
                for number in range(clients)
            ]
            commands = [bus.subscribe(TrainCmd) for bus in crowd]
            for number, bus in enumerate(crowd):
                await reads(bus, ToController)
                await bus.publish(Identity(number, 1), Leave("well"))
            assert {(await left.get()).sender for _ in range(clients)} == set(range(clients))
            await chief.publish(CHIEF, COMMAND)
            assert [await inbox.get() for inbox in commands] == [COMMAND] * clients

    run(main)
    assert len(announced) < 8 * clients  # without pauses twice as many, and more on a busy machine
