"""DDS entities: topics, readers and writers with the quality of service that each topic asks for.

Only the files of this folder that tests/test_layers.py lists import ``cyclonedds``.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from cyclonedds.core import (
    DDSException,
    DDSStatus,
    GuardCondition,
    InstanceState,
    Policy,
    Qos,
    ReadCondition,
    SampleState,
    ViewState,
)
from cyclonedds.core import WaitSet as DdsWaitSet
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic as DdsTopic
from cyclonedds.util import duration

from gradbus.runtime import drive, fast_paths, forks
from gradbus.runtime.errors import BusClosed, BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.api import WOKEN, Envelope, IoThread, JobMembers, PeerId, Traits
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.dds import domains, libddsc, native_topics
from gradbus.runtime.transport.dds.discovery import Claim
from gradbus.runtime.transport.dds.exclusion import Exclusion
from gradbus.runtime.transport.dds.foreign_readers import ForeignReaders
from gradbus.runtime.transport.dds.idl_types import IDL_TYPES
from gradbus.runtime.transport.dds.libddsc import MatchedReader
from gradbus.runtime.transport.dds.log_sink import dds_log
from gradbus.runtime.transport.dds.network import Reach, build_xml, leaves_machine
from gradbus.runtime.transport.sample_layout import LAYOUTS, SampleError

MAX_DELETING = 64  # writers at the same time, each on a thread
WRITE_END_S = 5.0  # for the writes that are under way when a writer is deleted; DDS gives up after a topic's block_s
_ANY = InstanceState.Any | SampleState.Any | ViewState.Any

log = get_logger("dds")


class Writer:
    """The :class:`~gradbus.runtime.transport.api.Outlet` of DDS: a writer of one topic, and what the fast path needs to
    know of it.

    Attributes:
        matched: number of readers, and readers: these by handle, as of the last :meth:`refresh`.
    """

    def __init__(
        self,
        channel: Channel,
        entity: Any,
        fast: bool,
        forget: Callable[[Writer], None],
        on_new_readers: Callable[[], None],
    ) -> None:
        """``forget``: called when it is deleted, on any thread. ``on_new_readers``: called by :meth:`refresh`."""
        self.channel = channel
        self.entity = self.changes = entity
        self.idl_type = IDL_TYPES[channel.sample_type]
        self.layout = LAYOUTS[channel.sample_type]
        self._handle = libddsc.handle_of(entity)
        self._sertype = libddsc.sertype_of(entity) if fast else None
        self.matched = 0
        self.readers: Mapping[int, MatchedReader] = {}
        self._awaited_since_s = 0.0
        self._refused_since_s = 0.0
        self._writing: set[int] = set()  # threads that are in a write
        self._write_ended: threading.Event | None = None  # there is one when this is being deleted
        self._forget = forget
        self._on_new_readers = on_new_readers

    def refresh(self) -> bool:
        """Look whether the matched readers changed. Only the receive thread calls this: looking resets the trigger, and
        waits while a write holds the writer."""
        if not self.entity.take_status():
            return False
        self.matched = int(self.entity.get_publication_matched_status().current_count)
        self.readers = libddsc.matched_readers(self.entity, self.readers)
        self._on_new_readers()
        return True

    def receivers(self) -> Collection[PeerId] | None:
        """See :meth:`~gradbus.runtime.transport.api.Outlet.receivers`. None: libddsc lacks the calls."""
        return [one.participant for one in self.readers.values()] if libddsc.tells_readers() else None

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """Write one sample whose last field is the concatenation of ``parts``, or that has no parts at all.

        Returns:
            False if it could not be done within the topic's ``block_s``: a reader's queue is full.

        Raises:
            BusClosed: the writer is deleted. BusError: DDS refuses the sample.
        """
        if self._sertype is not None:
            return self._write_with(libddsc.write, self.layout.parts(fields, parts))
        # The binding wants one contiguous sample: one copy more, and the GIL is held. That is the fallback.
        return self._write_with(
            self._write_by_binding, self.idl_type(*fields, b"".join(parts)) if parts else self.idl_type(*fields)
        )

    def write_made(self, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        """See :meth:`~gradbus.runtime.transport.api.Outlet.write_made`: what is large is made in DDS's own memory."""
        if self._sertype is None or envelope.size <= libddsc.JOINED_BYTES:
            return self.write(fields, (envelope.octets(),))
        head = self.layout.prefix(*fields, envelope.size) + envelope.header
        return self._write_with(libddsc.write_made, head, envelope.size - len(envelope.header), envelope.seal_into)

    def _write_with(self, write: Callable[..., int], *arguments: Any) -> bool:
        """Write with a function of :mod:`.libddsc`, and let :meth:`close` wait for that. The function makes the sample
        with the type of the topic, which is freed with its last writer: DDS would crash.

        No lock is needed: a write is entered before it looks whether the writer is being deleted, and that is noted
        before the deletion looks for writes.
        """
        thread = threading.get_ident()
        try:
            self._writing.add(thread)
            if self._write_ended is not None:
                raise BusClosed(f"topic {self.channel.name!r}: its writer is deleted, as its group or bus is closed")
            return self._is_taken(write(self._handle, self._sertype, *arguments))
        finally:
            self._writing.discard(thread)
            if self._write_ended is not None:
                self._write_ended.set()

    def _write_by_binding(self, _entity: int, _sertype: None, sample: Any) -> int:
        try:
            self.entity.write(sample)
        except DDSException as error:
            return int(error.code)
        return libddsc.RETCODE_OK

    def _is_taken(self, code: int) -> bool:
        if code == libddsc.RETCODE_TIMEOUT:
            self._refused_since_s = self._refused_since_s or time.monotonic()
            return False
        self._refused_since_s = 0.0
        if code < 0:
            raise BusError(f"topic {self.channel.name!r}: DDS write returned {code}")
        return True

    def peers(self) -> set[int]:
        """Return the handles of the matched readers."""
        return libddsc.matched_subscriptions(self.entity)

    @property
    def throttled_s(self) -> float:
        """How long writes have waited for readers, all together."""
        return libddsc.throttled_s(self.entity)

    @property
    def refused_since_s(self) -> float:
        """``time.monotonic()`` of the first write that DDS did not take in time, if it has taken none since; else 0."""
        return self._refused_since_s

    @property
    def awaited_since_s(self) -> float:
        """``time.monotonic()`` of when somebody began to wait until all readers have taken over all; 0: nobody does."""
        return self._awaited_since_s

    @property
    def is_acknowledged(self) -> bool:
        """Whether all matched readers have acknowledged all that was written. Does not wait."""
        return libddsc.wait_for_acks(self.entity, 0.0)

    @property
    def acknowledged_samples(self) -> int:
        """Return 0: DDS says whether all are acknowledged, and not how many."""
        return 0

    def wait_for_acks(self, timeout_s: float) -> bool:
        """Whether all matched readers have taken over what was written, within so long. Blocks, without the GIL."""
        self._awaited_since_s = time.monotonic()
        try:
            return libddsc.wait_for_acks(self.entity, timeout_s)
        finally:
            self._awaited_since_s = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a thread is in a write."""
        return bool(self._writing)

    def close(self) -> None:
        """Take it out of DDS when the writes under way have ended; further ones are refused. If one does not end in
        time, the writer stays, and the log says so."""
        ended = self._write_ended = self._write_ended or threading.Event()
        until_s = time.monotonic() + WRITE_END_S
        while True:
            ended.clear()  # before the look: what ends after it sets it again
            if not self._writing:
                break
            if (
                not ended.wait(until_s - time.monotonic()) and self._writing
            ):  # another deletion may have taken the event
                with contextlib.suppress(Exception):  # it is the host's
                    log.error(
                        "writer not deleted",
                        topic=self.channel.name,
                        reason=f"a write has not ended in {WRITE_END_S:g} s",
                        effect="its DDS participant stays until the process ends",
                    )
                return
        domains.delete(self.entity)
        self._forget(self)


class Reader:
    """The :class:`~gradbus.runtime.transport.api.Inlet` of DDS: a reader of one topic."""

    def __init__(self, channel: Channel, entity: Any, fast: bool, forget: Callable[[Reader], None]) -> None:
        """``forget``: called when it is deleted, on any thread."""
        self.channel = channel
        self.entity = self.changes = entity
        self.idl_type = IDL_TYPES[channel.sample_type]
        self.layout = LAYOUTS[channel.sample_type]
        self.arrivals = ReadCondition(entity, _ANY)
        self._taker = libddsc.Taker(entity, 16) if fast else None
        self.matched = 0  # writers that are matched, as of the last refresh
        self._forget = forget

    def refresh(self) -> bool:
        """Look whether the matched writers changed. Only the receive thread calls this: looking resets the trigger."""
        if not self.entity.take_status():
            return False
        self.matched = int(self.entity.get_subscription_matched_status().current_count)
        return True

    def peers(self) -> set[int]:
        """Return the handles of the matched writers."""
        return libddsc.matched_publications(self.entity)

    def take_disconnected(self) -> frozenset[int]:
        """Return nothing: DDS has no connections, and learns from a lease alone who is gone."""
        return frozenset()

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """Up to ``limit`` samples, not yet looked at, and the handles of their writers.

        A sample is raw bytes on the fast path and, on the other, a typed one or what is wrong with it; :meth:`decode`
        makes them one.
        """
        if self._taker is not None:
            return self._taker.take(limit)
        taken: list[tuple[Any, int]] = []
        for _ in range(limit):  # one by one: the binding parses here, and a bad sample takes its whole batch with it
            try:
                got = self.entity.take(1)
            except SampleError as error:
                taken.append((error, 0))
                continue
            if not got:
                break
            taken += [(one, one.sample_info.publication_handle) for one in got if isinstance(one, self.idl_type)]
        return taken

    def octets(self, raw: Any) -> Any:
        """The octets of a sample, without looking at its other fields. Raises SampleError."""
        return self.layout.octets(raw) if isinstance(raw, memoryview) else self.decode(raw).data

    def close(self) -> None:
        """Take it out of DDS; it must not be used any more."""
        domains.delete(self.entity)
        self._forget(self)

    def decode(self, raw: Any) -> Any:
        """The sample as an object with the fields of its type. Raises SampleError."""
        if isinstance(raw, SampleError):
            raise raw
        return self.layout.decode(raw) if isinstance(raw, memoryview) else raw


E = TypeVar("E", Reader, Writer)


class Participant:
    """The :class:`~gradbus.runtime.transport.api.Transport` of DDS: entities of a job, on a participant that it may
    share. Not thread-safe: one thread makes and closes it."""

    def __init__(self, *, domain_id: int, partition: str, network: NetworkConfig, fast: bool | None = None) -> None:
        """Get a participant.

        Args:
            domain_id: 0 .. 232. partition: the job; participants of different partitions do not see each other's data.
            network: checked and turned into the configuration of the domain.
            fast: use the ctypes path; None: if its self-test passes.

        Raises:
            ConfigError: wrong interface or configuration. BusError: no participant could be made.
        """
        self.lease_s = network.effective_lease_s
        self.access_policy = AccessPolicy()
        fast_paths.keep_memory()
        xml = build_xml(network, domain_id=domain_id, user_document=os.environ.get("CYCLONEDDS_URI"))
        self._lease = domains.acquire(domain_id, xml, partition)
        self._partition = partition
        self.entity = self._lease.entity
        self.own: PeerId = self._lease.prefix
        self.fast = False
        self.topics = domains.Topics(self.entity, self._new_topic)
        self._made: list[Any] = []  # what is to be deleted, with all below it, last things first
        self._endpoints: set[Reader | Writer] = set()
        self._foreign: ForeignReaders | None = None
        self._publisher: Any = None
        self._subscriber: Any = None
        self._is_open = True
        self._made_in = forks.generation
        self.reach = Reach.of(domain_id, network)
        try:
            qos = Qos(Policy.Partition(partitions=[partition]))
            self._publisher = self.keep(Publisher(self.entity, qos=qos))
            self._subscriber = self.keep(Subscriber(self.entity, qos=qos))
            fault = None if fast is False else _self_test(self.entity)
            self.fast = fault is None if fast is None else fast
        except DDSException as error:
            self.close()
            raise BusError(f"DDS in domain {domain_id} does not start: {error.msg or error.code}") from None
        except BaseException:
            self.close()
            raise
        self.traits = Traits(
            leaves_machine=leaves_machine(xml),
            shared_memory=network.shared_memory,
            frees_gil=self.fast,
            slow_because=fault,
            has_default_lease=network.lease_s is None,
        )

    def look_around(self) -> bool:
        """Take note of what discovery has found, and have others find this process. Called once a second."""
        self._lease.discovery.look()
        self._lease.announcer.announce()
        if self._lease.late_peers is not None:
            self._lease.late_peers.look()
        dds_log.tell()
        return True

    def exclusion(self) -> Exclusion:
        """See :func:`.domains.exclusion`."""
        return domains.exclusion(self._lease)

    def own_prefixes(self) -> set[bytes]:
        """Of the participants of this process, which other buses may use."""
        return domains.own_prefixes(self._lease.domain_id)

    def claims(self) -> dict[bytes, Claim]:
        """Return what discovery says of each participant of the domain, by the first 12 bytes of its GUID."""
        self._lease.discovery.look()
        return self._lease.discovery.claims

    @property
    def others(self) -> dict[bytes, str]:
        """See :attr:`.discovery.Discovery.others`."""
        return self._lease.discovery.others

    @property
    def writers(self) -> list[Writer]:
        """Return all that are open now. Any thread may ask."""
        return [one for one in self._endpoints.copy() if isinstance(one, Writer)]

    def start(self, thread: IoThread, members: JobMembers | None = None) -> None:
        """Watch for foreign readers. For the rest DDS has threads of its own."""
        if members is not None:
            self._foreign = ForeignReaders(self, thread, members)

    def _note_new_readers(self) -> None:
        foreign = self._foreign  # another thread may close this
        if foreign is not None:
            foreign.note_new_readers()

    def waiter(self) -> WaitSet:
        """See :meth:`.transport.api.Transport.waiter`. What waits is deleted with this."""
        return WaitSet(self)

    def close_endpoints(self, inlets: Sequence[Reader], outlets: Sequence[Writer]) -> None:
        """See :func:`delete_together`. Foreign readers that are late are excluded before outlets wait for them."""
        delete_together(inlets, [])
        self._delete_writers(outlets)

    def _delete_writers(self, writers: Sequence[Writer]) -> None:
        foreign = self._foreign
        if foreign is not None:
            foreign.exclude_late(writers)
        delete_together([], writers)

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> Writer:
        """A writer. ``retained_samples``: how many of the newest a retained topic keeps for late readers.

        Raises:
            BusError: there is none, and nothing is left of what was made for it.
        """
        policies = [
            Policy.Reliability.Reliable(duration(seconds=channel.block_s)),
            Policy.History.KeepLast(1) if channel.keep_last else Policy.History.KeepAll,
        ]
        if channel.retained:
            policies.append(
                Policy.DurabilityService(
                    cleanup_delay=0,
                    history=Policy.History.KeepLast(max(1, retained_samples)),  # DDS has no retained topic without
                    max_samples=-1,
                    max_instances=-1,
                    max_samples_per_instance=-1,
                )
            )

        def make(dds_topic: Any, qos: Qos) -> Writer:
            entity = DataWriter(self._publisher, dds_topic, qos=qos)
            return _wrapped(
                entity,
                DDSStatus.PublicationMatched,
                partial(Writer, channel, entity, self.fast, self._forget, self._note_new_readers),
            )

        return self._made_endpoint("writer", channel, policies, make)

    def inlet(self, channel: Channel) -> Reader:
        """A reader; DDS starts to fill it at once. Raises as :meth:`outlet`."""
        reliable = Policy.Reliability.Reliable(duration(seconds=channel.block_s))
        policies = [reliable if channel.reliable else Policy.Reliability.BestEffort, _reader_history(channel)]
        if channel.reader_samples:
            policies.append(
                Policy.ResourceLimits(max_samples=channel.reader_samples, max_instances=-1, max_samples_per_instance=-1)
            )

        def make(dds_topic: Any, qos: Qos) -> Reader:
            entity = DataReader(self._subscriber, dds_topic, qos=qos)
            return _wrapped(
                entity, DDSStatus.SubscriptionMatched, partial(Reader, channel, entity, self.fast, self._forget)
            )

        return self._made_endpoint("reader", channel, policies, make)

    def _made_endpoint(self, what: str, channel: Channel, policies: list[Any], make: Callable[[Any, Qos], E]) -> E:
        policies.append(Policy.Durability.TransientLocal if channel.retained else Policy.Durability.Volatile)
        if channel.ignore_local:
            policies.append(Policy.IgnoreLocal.Participant)
        with domains.made_by_dds(f"a {what} of topic {channel.name!r}"), contextlib.ExitStack() as undo:
            dds_topic = self.topics.enter(channel.name, IDL_TYPES[channel.sample_type])
            undo.callback(self.topics.leave, channel.name)
            endpoint = make(dds_topic, Qos(*policies))
            undo.pop_all()
        self._endpoints.add(endpoint)
        return endpoint

    def _forget(self, endpoint: Reader | Writer) -> None:
        """On any thread, and on several at once."""
        try:
            self._endpoints.remove(endpoint)
        except KeyError:  # another thread has deleted it, too
            return
        self.topics.leave(endpoint.channel.name)

    def _new_topic(self, participant: Any, name: str, idl_type: Any) -> Any:
        return (native_topics.CTopic if self.fast else DdsTopic)(participant, name, idl_type)

    def keep(self, entity: Any) -> Any:
        """Have an entity deleted when this is closed, and before what was there already."""
        self._made.append(entity)
        return entity

    def close(self) -> None:
        """Delete everything, but for what a write that does not end is using. May take a moment; not for the event
        loop."""
        if not self._is_open or self._made_in != forks.generation:
            return
        self._is_open = False
        for entity in reversed(self._made):
            if entity is self._subscriber:
                delete_together([one for one in self._endpoints.copy() if isinstance(one, Reader)], [])
            if entity is self._publisher:
                self._delete_writers(self.writers)
                if self.writers:
                    return  # a thread is in a write: what it uses must stay
            domains.delete(entity)
        self._made.clear()
        self._foreign = None  # which holds this
        self.topics.close()  # after their readers and writers
        domains.release(self._lease, self._partition)


def _wrapped(entity: Any, status: int, wrap: Callable[[], E]) -> E:
    """The reader or writer around an entity of DDS, which is deleted if it cannot be made."""
    try:
        entity.set_status_mask(status)
        return wrap()
    except BaseException:
        domains.delete(entity)
        raise


def delete_together(readers: Sequence[Reader], writers: Sequence[Writer]) -> None:
    """Delete readers and then writers in about a second. DDS takes so long for each writer that has samples which a
    reader did not acknowledge, so those are deleted at the same time, and those that wait for a write.

    DDS's receive thread waits where a reader is full until that reader is gone, and every deletion waits for that
    thread. One after the other, the first reader would wait for the last for ever.
    """
    _delete_at_once(readers)
    late = []
    for writer in writers:
        if not writer.is_writing and writer.wait_for_acks(0.0):
            writer.close()
        else:
            late.append(writer)
    for start in range(0, len(late), MAX_DELETING):
        _delete_at_once(late[start : start + MAX_DELETING])


def _delete_at_once(endpoints: Sequence[Reader | Writer]) -> None:
    """Delete readers or writers, each on a thread of its own. No executor does it: that refuses work while the
    interpreter ends, which is when some programs close their last bus."""
    for deletion in [drive.later(one.close, name="gradbus-delete") for one in endpoints]:
        deletion.join()


class WaitSet:
    """The :class:`~gradbus.runtime.transport.api.Waiter` of DDS. Entities have numbers here, which the binding's wait
    set does not offer."""

    def __init__(self, participant: Participant) -> None:
        """Raises BusError: DDS does not give what it takes."""
        self._made_in = forks.generation
        self._triggered = (ct.c_ssize_t * 64)()
        self._attached = 0
        with domains.made_by_dds("a wait set"):
            self._guard = participant.keep(GuardCondition(participant.entity))
            self._handle = libddsc.handle_of(participant.keep(DdsWaitSet(participant.entity)))
            self.attach(self._guard, WOKEN)

    def attach(self, entity: Any, number: int) -> None:
        """Wait for an entity, too; ``number`` (1 or more) stands for it."""
        code = libddsc.waitset_attach(self._handle, libddsc.handle_of(entity), number)
        if code < 0:
            raise OSError(f"dds_waitset_attach returned {code}")
        self._attached += 1

    def detach(self, entity: Any) -> None:
        """Wait for it no more."""
        if libddsc.waitset_detach(self._handle, libddsc.handle_of(entity)) >= 0:
            self._attached -= 1

    def wait(self, timeout_s: float) -> list[int]:
        """Numbers of those that something happened to; none when the time is over. The GIL is free while it waits."""
        if self._attached > len(self._triggered):
            self._triggered = (ct.c_ssize_t * (2 * self._attached))()
        room = len(self._triggered)
        nanoseconds = int(timeout_s * 1e9) if timeout_s > 0 else 0
        count = libddsc.waitset_wait(self._handle, self._triggered, room, nanoseconds)
        if count < 0:
            raise OSError(f"dds_waitset_wait returned {count}")
        numbers = self._triggered[: min(count, room)] if count else []
        if WOKEN in numbers:
            self._guard.take()
        return numbers

    def wake(self) -> None:
        """Make the wait return. In a child by fork nobody waits."""
        if self._made_in == forks.generation:
            self._guard.set(True)


_fast_path: list[str | None] = []  # the verdict of the self-test, once per process
_self_test_lock = forks.ForkLock()


def _reader_history(channel: Channel) -> Any:
    if channel.keep_last or channel.overwrites:
        return Policy.History.KeepLast(1 if channel.keep_last else channel.reader_samples)
    return Policy.History.KeepAll


def _self_test(participant: Any) -> str | None:
    with _self_test_lock:
        if not _fast_path:
            _fast_path.append(run_self_test(participant))
        return _fast_path[0]


def run_self_test(participant: Any) -> str | None:
    """Through two endpoints of the participant itself, in a partition of their own. A participant made for the test and
    taken down again would do what :mod:`.domains` tells of."""
    partition = f"gradbus-self-test-{os.urandom(8).hex()}"  # processes in containers may all have the number 1
    made: list[Any] = []
    try:
        qos = Qos(Policy.Partition(partitions=[partition]))
        reliable = Qos(Policy.Reliability.Reliable(duration(seconds=0.1)), Policy.History.KeepAll)
        topics: dict[str, Any] = {}
        for name, idl_type in IDL_TYPES.items():
            topics[name] = native_topics.CTopic(participant, f"train/self_test/{name}", idl_type)
            made.append(topics[name])
        subscriber, publisher = Subscriber(participant, qos=qos), Publisher(participant, qos=qos)
        made += [subscriber, publisher]
        reader = DataReader(subscriber, topics["Frame"], qos=reliable)
        writer = DataWriter(publisher, topics["Frame"], qos=reliable)
        waitset = DdsWaitSet(participant)
        made.append(waitset)
        waitset.attach(ReadCondition(reader, _ANY))
        return libddsc.self_test(reader, writer, lambda: bool(waitset.wait(duration(seconds=1))))
    except (OSError, DDSException) as error:
        return str(error)
    finally:
        for entity in reversed(made):  # a subscriber or publisher takes what is below it along
            domains.delete(entity)
