"""Buses whose nodes have keys of their own, over DDS: a member that has turned, and what is not for this level."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bus_helpers import membership_of, participant_of
from dds_domains import new_domain
from identities import Identities
from patience import eventually, run

import gradbus
from gradbus.models import NoopTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BarrierTimeout, ConfigError, FrameError, JobInUse, JoinRefused
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity.controller_signatures import check_payload
from gradbus.runtime.security.identity.opening import read_identity
from gradbus.runtime.security.sealed import wire_channel
from gradbus.runtime.security.streams import OutboundStreams
from gradbus.runtime.transport.channels import CHANNELS, Inbox, ToClients, ToController
from gradbus.runtime.transport.sample_layout import FRAME, MODEL
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import Leave, Receipt, RunEnded
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, ModelBlob, TrainCmd

SERVER = Identity(CONTROLLER, 1)
_numbers = count()


@pytest.fixture
def known(tmp_path: Path) -> Identities:
    return Identities(tmp_path, clients=2)


@pytest.fixture
def opens(known: Identities) -> Callable[..., Any]:
    place = {"job": f"known-{os.getpid()}-{next(_numbers)}", "domain": new_domain(), "lease_s": 1.0}

    def connect(name: str, **security: Any) -> Any:
        said = {k: Path(v) if k.endswith("_file") else v for k, v in known.security(name).items()}
        return gradbus.connect(**place, security=Security(**said | security))

    return connect


def raw_writer(bus: Bus, kind: type[Any]) -> Any:
    """What a member does that leaves our program aside: a writer of DDS for bytes that it makes itself."""
    return participant_of(bus).outlet(wire_channel(CHANNELS[kind]))


def group_key(party: Any) -> Any:
    """The key that all members of the job have, from the memory of one of them."""
    return next(iter(party.keys._epochs.values())).key  # noqa: SLF001 - our program shows it to nobody


def matched(writer: Any) -> int:
    """Readers that DDS has found for it."""
    writer.refresh()
    return int(writer.matched)


def test_a_member_can_make_up_neither_commands_nor_words_of_the_controller_nor_updates_of_another(
    opens: Callable[..., Any],
) -> None:
    async def main() -> None:
        async with opens("server") as server, opens("robot-0") as victim, opens("robot-1") as traitor:
            with (
                server.subscribe(ToController, ClientUpdate) as desk,
                victim.subscribe(ToClients, Inbox(1), TrainCmd, ModelBlob) as ears,
            ):
                for bus in (victim, traitor):
                    bus.open_writer(ClientUpdate)
                    await bus.matched(lambda bus=bus: bus.matched_readers(ClientUpdate) > 0, timeout_s=10)
                party, session = (
                    membership_of(traitor).party,
                    membership_of(victim).party.session,
                )
                keys = party.keys
                forger = OutboundStreams(group_key(party), keys.controller)  # as if it were the controller
                body = control.encode(RunEnded(1, True, "says the traitor"))
                ((head, data),) = frames.split(FrameKey(Kind.CONTROL, 0, 0, CONTROLLER, 1, 1), body)
                signed = (1 << 40).to_bytes(8, "little") + bytes(64)  # a number that is still to come, and no signature
                sample = FRAME.prefix(len(head) + len(data)), head, data, signed
                says, reports = raw_writer(traitor, ToClients), raw_writer(traitor, ToController)
                await eventually(lambda: matched(says) >= 1 <= matched(reports))
                for _ in range(50):  # past the counters that the controller has used
                    forger.seal("train/control/clients", sample)
                says.write((), (bytes(forger.seal("train/control/clients", sample)),))
                await eventually(lambda: victim.rejected["signature"] == 1)

                update = FrameKey(Kind.UPDATE, 1, 1, 0, 1, 1)  # of client 0
                await traitor.send_update(update, 10, b"poison")
                await eventually(lambda: server.rejected["identity"] == 1)
                mine = OutboundStreams(keys.outgoing.key, session)
                reports.write((), (bytes(mine.seal("train/control/controller", sample)),))
                await eventually(lambda: server.rejected["unknown sender"] == 1)
                await traitor.publish(Identity(0, 1), Leave("client 0 goes, says the traitor"))
                await eventually(lambda: server.rejected["identity"] == 2)

                await victim.send_update(update, 10, b"update")
                got = await desk.get()
                assert isinstance(got, ClientUpdate)
                assert bytes(got.frame.data) == b"update"
                await server.publish(SERVER, Receipt(0, 1, 1, 1, 1, True, ""))
                await server.publish(SERVER, TrainCmd(1, 0, 1, 0.5, 0))
                heard = [await ears.get() for _ in range(2)]
                assert {type(one) for one in heard} == {Control, TrainCmd}
                assert not ears

    run(main())


def check_model(bus: Bus, blob: Any) -> None:
    """What a client looks at: the signature in the name, then the payload."""
    bus.access_policy.check_model_signature(blob.frame.key, 0, blob.frame.total_bytes)
    check_payload(blob.frame.key, blob.frame.data)


def test_frames_of_a_model_that_a_member_makes_up_do_not_pass_the_check_of_its_signature(
    opens: Callable[..., Any],
) -> None:
    async def main() -> None:
        async with opens("server") as server, opens("robot-0") as victim, opens("robot-1") as traitor:
            with victim.subscribe(ModelBlob) as ears:
                server.open_writer(ModelBlob)
                for bus in (victim, traitor):
                    bus.open_writer(ClientUpdate)
                    await eventually(lambda bus=bus: membership_of(bus).party.keys is not None)
                await server.matched(lambda: server.matched_readers(ModelBlob) > 0, timeout_s=10)
                key = FrameKey(Kind.MODEL, 1, 1, CONTROLLER, 1, 1)
                model = random.randbytes(100_000)
                signed = key._replace(name=server.access_policy.sign_model(key, 0, model))
                await server.send_model(signed, model)
                got = await ears.get()
                assert got.frame.key == signed
                check_model(victim, got)

                party = membership_of(traitor).party
                forger = OutboundStreams(group_key(party), party.keys.controller)
                writer = raw_writer(traitor, ModelBlob)
                await eventually(lambda: matched(writer) >= 1)
                poison = random.randbytes(100_000)
                for _ in range(50):
                    forger.seal("train/model_blob", (b"",))
                for forged in (signed, key, key._replace(round_id=2, name="0" * 200)):
                    ((head, data),) = frames.split(forged, poison)
                    sample = MODEL.prefix(forged.round_id, len(head) + len(data)), head, data
                    writer.write((0,), (bytes(forger.seal("train/model_blob", sample)),))
                    got = await ears.get()  # it has the key: so far it comes
                    with pytest.raises(FrameError, match=r"signature|signed"):
                        check_model(victim, got)

    run(main())


def test_an_observer_hears_what_is_for_all_and_is_not_heard(opens: Callable[..., Any], known: Identities) -> None:
    known.allow(known.new("watcher"), "observer")

    async def main() -> None:
        async with opens("server") as server, opens("watcher", role="observer") as watcher:
            with watcher.subscribe(ToClients) as ears, server.subscribe(ToController) as desk:
                watcher.open_writer(ToController)
                await watcher.matched(lambda: watcher.matched_readers(ToController) > 0, timeout_s=10)
                await watcher.publish(Identity(0, 1), Leave("x"))
                server.open_writer(ToClients)
                await server.matched(lambda: server.matched_readers(ToClients) > 0, timeout_s=10)
                while not ears:  # said until it was heard: nobody tells when a reader is matched on both sides
                    await server.publish(SERVER, RunEnded(1, True, "done"))
                    await asyncio.sleep(0.01)
                heard = await ears.get()
                assert isinstance(heard, Control)
                assert heard.body == RunEnded(1, True, "done")
                assert not len(desk)

    run(main())


def test_a_controller_says_again_that_it_is_there(opens: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.runtime.security.identity.join_transport.BEACON_S", 0.05)

    async def main() -> None:
        async with opens("robot-0") as node, opens("server"):
            party = membership_of(node).party
            times: list[int] = []

            def receive(data: memoryview, source: int, now_s: float, hears: Any = party.receive_beacon) -> Any:
                times.append(source)
                return hears(data, source, now_s)

            party.receive_beacon = receive
            await eventually(lambda: len(times) >= 2)

    run(main())


def test_a_second_controller_that_hears_too_late_who_holds_the_job_ends_at_its_next_word(
    opens: Callable[..., Any],
) -> None:
    async def main() -> None:
        async with opens("server") as first, opens("server") as second:
            await eventually(lambda: second.access_policy.refusal)
            with pytest.raises(JobInUse, match=r"the job is held by the controller .*\. Stop that one first"):
                await second.publish(SERVER, TrainCmd(1, 0, 1, 0.5, 0))
            await first.publish(SERVER, TrainCmd(1, 0, 1, 0.5, 0))

    run(main())


def test_who_is_not_let_in_and_finds_nobody_says_why(opens: Callable[..., Any], known: Identities) -> None:
    known.new("stranger")

    async def main() -> None:
        async with opens("server") as server, opens("stranger", role="observer") as bus:
            await eventually(lambda: bus.access_policy.refusal)
            assert server.rejected["refused"] >= 1
            with bus.subscribe(TrainCmd), pytest.raises(BarrierTimeout, match="stranger is not on the allow list"):
                await bus.matched(lambda: bus.matched_writers(TrainCmd) > 0, timeout_s=0.01)

    run(main())


def test_a_client_whose_id_is_not_on_the_line_of_its_node_ends_with_the_ids_that_are(opens: Callable[..., Any]) -> None:
    async def main() -> None:
        async with opens("server") as server, opens("robot-0") as bus:
            with server.subscribe(ToController):
                client = gradbus.Client(bus, NoopTask(4), client_id=8)
                with pytest.raises(JoinRefused, match=r"robot-0 sends as client 8, and the allow list .* gives it 0$"):
                    await client.run()
            assert server.rejected["identity"] >= 1

    run(main())


def test_a_bus_whose_node_has_a_key_of_its_own_speaks_for_no_several_clients(opens: Callable[..., Any]) -> None:
    async def main() -> None:
        async with opens("robot-0") as bus:
            with pytest.raises(ConfigError, match="no process can speak for several clients"):
                bus.access_policy.check_host()

    run(main())


def test_a_bus_for_a_federated_run_holds_no_ranks(opens: Callable[..., Any]) -> None:
    async def main() -> None:
        async with opens("server") as bus:
            with pytest.raises(
                ConfigError, match=r"opened for a federated run.*takes Security\(\.\.\., role='worker'\)"
            ):
                async with gradbus.join_group(bus, rank=0, world=1):
                    pass

    run(main())


def test_settings_that_do_not_fit_together_are_refused(known: Identities, tmp_path: Path) -> None:
    said = Security(**known.security("server"))
    with pytest.raises(ConfigError, match="needs controller_key"):
        replace(said, controller_key="")
    with pytest.raises(ConfigError, match="are for security 'identity'"):
        replace(said, level="psk")
    with pytest.raises(ConfigError, match="role 'boss': expected one of client, observer, worker"):
        replace(said, role="boss")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"server is the controller.* cannot join as observer.* a key of its own"):
        read_identity(replace(said, role="observer", key_file=Path(str(said.key_file))))
