"""A participant that knows the name of a job and not its key: it hears everything, and says again whatever it likes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security.envelope import MAGIC
from gradbus.runtime.security.membership import SESSION_TOPIC
from gradbus.runtime.security.sealed import wire_channel
from gradbus.runtime.transport.channels import CHANNELS, Channel, ToController
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.transport.dds.participant import Participant, Writer
from gradbus.runtime.wire import frames

JOB_TOPICS = (*CHANNELS.values(), SESSION_TOPIC)

_OCTETS_AT = 24  # at the latest
_COUNTER_AT = 16  # in an envelope, little-endian
Heard = tuple[str, bytes]  # the topic's name, the sample


class Outsider:
    """Listens on its own thread. ``echoes``: it says each sample again, as it came, damaged, and as one to come."""

    def __init__(
        self,
        job: str,
        domain: int,
        *,
        topics: Iterable[Channel] = JOB_TOPICS,
        echoes: bool = False,
        lease_s: float = 1.0,
        patience_s: float = 0.2,
    ) -> None:
        """``patience_s``: what no reader takes for so long is left unsaid."""
        self.heard: list[Heard] = []
        self.said = 0
        self._echoes = echoes
        self._patience_s = patience_s
        self._random = random.Random(0)
        network = NetworkConfig(lease_s=lease_s)  # those of one process share it
        self._node = Participant(domain_id=domain, partition=job, network=network, fast=True)
        deaf = [replace(wire_channel(topic), ignore_local=True) for topic in topics]  # to itself
        self._readers = [self._node.inlet(topic) for topic in deaf]
        self.writers: dict[str, Writer] = {
            topic.name: self._node.outlet(replace(topic, retained=False) if topic.keep_last else topic)
            for topic in deaf
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def __enter__(self) -> Outsider:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._node.close()

    def _listen(self) -> None:
        while not self._stop.wait(0.002):
            for reader in self._readers:
                for raw, _ in reader.take(16):
                    heard = (reader.channel.name, bytes(raw))
                    self.heard.append(heard)
                    if self._echoes:
                        self._echo(heard)

    def _echo(self, heard: Heard) -> None:
        name, sample = heard
        damaged = bytearray(sample)  # behind the fields and the length: DDS itself would notice those
        damaged[self._random.randrange(_OCTETS_AT, len(damaged))] ^= 1 << self._random.randrange(8)
        noise = sample[:_OCTETS_AT] + self._random.randbytes(len(sample) - _OCTETS_AT)
        for said in (sample, bytes(damaged), noise, *_ahead(sample)):
            self.say(name, said)

    def say(self, name: str, sample: bytes) -> None:
        """Write any bytes as a sample of a topic."""
        writer = self.writers[name]
        until_s = time.monotonic() + self._patience_s
        handle, sertype = libddsc.handle_of(writer.entity), libddsc.sertype_of(writer.entity)
        while libddsc.write(handle, sertype, (sample,)) == libddsc.RETCODE_TIMEOUT:
            if time.monotonic() > until_s:
                return
        self.said += 1

    def say_all(self, heard: Iterable[Heard]) -> None:
        """Say again what was heard, in the same order."""
        for name, sample in list(heard):
            self.say(name, sample)

    def wait_for_nobody(
        self, name: str = CHANNELS[ToController].name, timeout_s: float = 10.0, *, but: int = 0
    ) -> None:
        """Until DDS knows that those who listened have gone, ``but`` so many."""
        until_s = time.monotonic() + timeout_s
        while self.writers[name].entity.get_publication_matched_status().current_count > but:
            assert time.monotonic() < until_s, "somebody still listens"
            time.sleep(0.005)

    def wait_for_readers(self, readers: int, name: str = CHANNELS[ToController].name, timeout_s: float = 10.0) -> None:
        """Until so many listen to what it says."""
        writer = self.writers[name]
        until_s = time.monotonic() + timeout_s
        while writer.entity.get_publication_matched_status().current_count < readers:
            assert time.monotonic() < until_s, "nobody listens"
            time.sleep(0.005)

    @property
    def in_clear(self) -> list[Heard]:
        """What it could read."""
        # With the version: four bytes alone stand in one of 50,000 envelopes of this size by chance.
        frame = frames.MAGIC + bytes([frames.VERSION])
        return [(name, data) for name, data in self.heard if frame in data or MAGIC not in data[:40]]


def _ahead(sample: bytes) -> list[bytes]:
    """The envelope in a sample, if there is one, with a counter that its receiver has not heard of yet: a damaged one
    with the counter of the true one is a replay, whatever else is wrong with it."""
    at = sample.find(MAGIC)
    if at < 0:
        return []
    later = bytearray(sample)
    later[at + _COUNTER_AT + 1] ^= 0x10
    return [bytes(later)]
