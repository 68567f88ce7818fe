"""A process of somebody without the key, as a program: it watches discovery, has a reader of every topic that it sees
written, and takes nothing. Its standard output has a line when it begins, and one for each topic.

Arguments: domain, number of participants.
"""

from __future__ import annotations

import sys
import time

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication
from cyclonedds.core import Policy

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.dds.idl_types import IDL_TYPES
from gradbus.runtime.transport.dds.participant import Participant


def main(domain: int, participants: int) -> None:
    watcher = Participant(domain_id=domain, partition="nobody's", network=NetworkConfig())
    publications = BuiltinDataReader(watcher.entity, BuiltinTopicDcpsPublication)
    types = {kind.__idl__.idl_transformed_typename.replace(".", "::"): name for name, kind in IDL_TYPES.items()}
    nodes: dict[str, list[Participant]] = {}
    seen: set[tuple[str, str]] = set()
    readers = []
    print("watching", flush=True)
    while True:
        for sample in publications.take(N=256):
            partitions = [policy for policy in sample.qos or () if isinstance(policy, Policy.Partition)]
            partition = partitions[0].partitions[0] if partitions else ""
            if sample.type_name not in types or (partition, sample.topic_name) in seen:
                continue
            seen.add((partition, sample.topic_name))
            if partition not in nodes:
                nodes[partition] = [
                    Participant(domain_id=domain, partition=partition, network=NetworkConfig())
                    for _ in range(participants)
                ]
            topic = Channel(
                sample.topic_name, types[sample.type_name], True, False, 4, 0, 0.1, False, lambda sample: sample
            )
            for retained in (True, False):
                try:
                    readers += [node.inlet(_with(topic, retained)) for node in nodes[partition]]
                except Exception as error:  # a writer that retains nothing has no such readers; the other kind matches
                    print(error, file=sys.stderr)
            print(sample.topic_name, flush=True)
        time.sleep(0.01)


def _with(topic: Channel, retained: bool) -> Channel:
    from dataclasses import replace

    return replace(topic, retained=retained)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
