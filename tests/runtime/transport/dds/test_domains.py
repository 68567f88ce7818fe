"""Buses of one process and the DDS participants that they share."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from bus_helpers import topics_of
from cyclonedds.core import DDSException, Policy, Qos
from cyclonedds.domain import DomainParticipant
from cyclonedds.pub import Publisher
from dds_domains import new_domain

import gradbus
from gradbus.runtime.bus import bus as bus_module
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security.sealed import Sealed
from gradbus.runtime.transport.dds import domains, libddsc, native_topics
from gradbus.runtime.transport.dds import participant as dds
from gradbus.runtime.transport.dds.network import build_xml
from gradbus.runtime.wire.messages import Control

DOMAIN = new_domain()
XML = build_xml(NetworkConfig())


def job(name: str) -> str:
    return f"{name}-{os.getpid()}"


def test_jobs_share_a_participant_and_buses_of_one_job_do_not() -> None:
    first, second = (domains.acquire(DOMAIN, XML, job(name)) for name in ("first", "second"))
    again = domains.acquire(DOMAIN, XML, job("first"))
    try:
        assert second is first
        assert again is not first
    finally:
        for participant, name in ((first, "first"), (second, "second"), (again, "first")):
            domains.release(participant, job(name))


def test_no_participant_is_taken_down_before_the_last_bus_of_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_down = []
    delete = domains.delete

    def note(entity: object) -> None:
        taken_down.append(entity)
        delete(entity)

    monkeypatch.setattr(domains, "delete", note)
    first, again = (domains.acquire(DOMAIN, XML, job("first")) for _ in range(2))
    domains.release(first, job("first"))
    assert taken_down == []
    third = domains.acquire(DOMAIN, XML, job("first"))
    assert third is first  # its place is free again
    domains.release(third, job("first"))
    domains.release(again, job("first"))
    assert taken_down == [first.entity, again.entity]
    other = domains.acquire(DOMAIN, XML, job("first"))
    assert other is not first
    domains.release(other, job("first"))


def test_a_domain_that_is_not_in_use_any_more_takes_another_configuration() -> None:
    domains.release(domains.acquire(DOMAIN, XML, job("first")), job("first"))
    longer = build_xml(NetworkConfig(lease_s=5.0))
    participant = domains.acquire(DOMAIN, longer, job("first"))
    try:
        with pytest.raises(ConfigError, match=f"domain {DOMAIN} is already open in this process with other network"):
            domains.acquire(DOMAIN, XML, job("second"))
    finally:
        domains.release(participant, job("first"))


@pytest.mark.parametrize(
    ("module", "name"), [(dds, "Subscriber"), (dds, "_self_test"), (dds, "WaitSet"), (bus_module, "Sender")]
)
def test_a_bus_that_cannot_be_opened_leaves_nothing(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DDSException(DDSException.DDS_RETCODE_OUT_OF_RESOURCES)

    async def open_one() -> None:
        async with gradbus.connect(job=job("first"), domain=DOMAIN):
            pass

    monkeypatch.setattr(module, name, fail)
    with pytest.raises((BusError, DDSException)):
        asyncio.run(open_one())
    assert not domains.own_prefixes(DOMAIN)


def dds_is_out_of_resources(*_: object, **__: object) -> None:
    raise DDSException(DDSException.DDS_RETCODE_OUT_OF_RESOURCES)


def libddsc_fails(*_: object, **__: object) -> None:
    raise OSError("dds_waitset_attach returned -5")


@pytest.mark.parametrize(
    ("owner", "name", "fail", "why"),
    [
        (dds, "GuardCondition", dds_is_out_of_resources, "lack of resources"),
        (dds, "DdsWaitSet", dds_is_out_of_resources, "lack of resources"),
        (dds.WaitSet, "attach", libddsc_fails, "attach returned -5"),
    ],
)
def test_what_dds_does_not_give_a_bus_is_an_error_of_the_bus(
    owner: object, name: str, fail: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_one() -> None:
        async with gradbus.connect(job=job("first"), domain=DOMAIN, fast=True):
            pass

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(BusError, match=f"a wait set: .*{why}"):
        asyncio.run(open_one())
    assert not domains.own_prefixes(DOMAIN)


@pytest.mark.parametrize(
    ("owner", "name", "fail", "why"),
    [
        (dds, "DataWriter", dds_is_out_of_resources, "a writer of topic 'train/control': .*lack of resources"),
        (dds, "DataReader", dds_is_out_of_resources, "a reader of topic 'train/control': .*lack of resources"),
        (native_topics, "CTopic", dds_is_out_of_resources, "topic 'train/control': .*lack of resources"),
        (dds, "ReadCondition", dds_is_out_of_resources, "a reader of topic 'train/control': .*lack of resources"),
        (libddsc, "sertype_of", libddsc_fails, "a writer of topic 'train/control': .*returned -5"),
    ],
)
def test_a_reader_or_writer_that_dds_does_not_give_is_an_error_of_the_bus_and_leaves_no_topic(
    owner: object, name: str, fail: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with gradbus.connect(job=job("first"), domain=DOMAIN) as one:
            opening = one.subscribe if "reader" in why else one.open_writer
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(BusError, match=why):
                    opening(Control)
            assert topics_of(one) == []
            with one.subscribe(Control):  # all is as if nothing had been tried
                one.open_writer(Control)
                assert topics_of(one) == ["train/control"]

    asyncio.run(main())


def test_the_receive_thread_of_a_bus_that_cannot_be_opened_has_ended_before_it_leaves_dds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close, left = dds.Participant.close, list[str]()

    def fail(*_: object) -> None:
        raise BusError("no greeting")

    def note(node: dds.Participant) -> None:
        left.extend(thread.name for thread in threading.enumerate() if thread.name == "gradbus-receive")
        close(node)

    async def open_one() -> None:
        async with gradbus.connect(job=job("first"), domain=DOMAIN):
            pass

    monkeypatch.setattr(Sealed, "start", fail)
    monkeypatch.setattr(dds.Participant, "close", note)
    with pytest.raises(BusError, match="no greeting"):
        asyncio.run(open_one())
    assert left == []


def test_processes_of_one_number_in_other_containers_are_kept_out_of_the_self_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partitions = []
    publisher = dds.Publisher

    def note(participant: DomainParticipant, qos: Qos) -> Publisher:
        partitions.extend(qos[Policy.Partition].partitions)
        return publisher(participant, qos=qos)

    monkeypatch.setattr(dds, "Publisher", note)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    participant = domains.acquire(DOMAIN, XML, job("first"))
    try:
        assert [dds.run_self_test(participant.entity) for _ in range(2)] == [None, None]
    finally:
        domains.release(participant, job("first"))
    assert len(set(partitions)) == 2


CLOSES_LATE = """
import os, threading
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds.participant import Participant
from gradbus.runtime.security.identity.join_transport import JOIN

node = Participant(domain_id=DOMAIN, partition=f"late-{os.getpid()}", network=NetworkConfig())
node.inlet(JOIN)

def close():
    threading.main_thread().join()
    node.close()
    print("closed")

threading.Thread(target=close).start()
"""


def test_a_participant_can_be_closed_while_the_interpreter_ends() -> None:
    program = CLOSES_LATE.replace("DOMAIN", str(DOMAIN))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("closed\n", "")


def test_buses_of_one_domain_share_it_whether_or_not_the_names_of_peers_have_addresses_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The settings are the same; what they resolve to has changed between the first bus and the second."""
    found: list[str] = []

    def look_up(name: str, port: None, family: int, kind: int) -> list[Any]:
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 17, "", (found[0], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    xml = build_xml(NetworkConfig(peers=("127.0.0.1", "late.invalid")))
    first = domains.acquire(DOMAIN, xml, job("first"))
    found.append("127.0.0.1")
    second = domains.acquire(DOMAIN, xml, job("second"))
    try:
        assert second is first
        with pytest.raises(ConfigError, match="already open in this process with other network settings"):
            domains.acquire(DOMAIN, build_xml(NetworkConfig(peers=("127.0.0.1", "other.invalid"))), job("third"))
    finally:
        for name in ("first", "second"):
            domains.release(first, job(name))
    assert first.late_peers is not None
    first.late_peers.look()  # of a domain that is closed
