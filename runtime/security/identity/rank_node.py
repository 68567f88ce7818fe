"""DDS participant of a job of ranks that have keys of their own: joining grants the group key of the epoch.

From then on everything is as with a job key: the same cost per frame, shared memory and liveness challenges. All ranks
share the group key, so a rank could impersonate another one; processes that did not join or were removed are kept out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from gradbus.runtime.dds.access_policy import Standing, job_taken
from gradbus.runtime.dds.network import NetworkConfig
from gradbus.runtime.dds.participant import IoThread, Node
from gradbus.runtime.dds.topics import Topic
from gradbus.runtime.errors import ConfigError, GradbusError, JoinRefused
from gradbus.runtime.security.encryption import SessionCipher
from gradbus.runtime.security.foreign_readers import ForeignReaders
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import Ids, ids_text, is_within
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.key import public_text
from gradbus.runtime.security.identity.rank_keys import RankKeys
from gradbus.runtime.security.liveness_challenge import LivenessChallenge
from gradbus.runtime.security.node import SealedNode

REMOVED = "its node was taken off the allow list"


class RankStanding(Standing):
    """Access policy of a rank."""

    role = "worker"

    def __init__(self, party: Admission | JoinClient, keys: RankKeys) -> None:
        self._party = party
        self._keys = keys
        self._listeners: list[Callable[[GradbusError], None]] = []

    @property
    def refusal(self) -> str:
        return self._party.refusal

    @property
    def absence(self) -> str:
        if self._keys.is_in or isinstance(self._party, Admission):
            return ""
        return (
            f"the process that gives the keys of the job, as a rule rank 0, with the key "
            f"{public_text(self._party.pinned)}, has not let this one in: start it, and compare bus.controller_key "
            f"with what 'gradbus keys show' prints there"
        )

    def check_rank(self) -> None:
        """Allow any rank: its number is checked later, by :meth:`check_ids`."""

    def check_ids(self, rank: int) -> None:
        party = self._party
        if isinstance(party, JoinClient) and self._keys.is_in and not is_within(rank, party.ids):
            raise ConfigError(
                f"rank {rank} is not one of the ranks that the allow list gives {party.key.name}: "
                f"{_some(party.ids)}. Give this process another rank, or change the list"
            )

    def check_controller(self) -> None:
        raise ConfigError(_OTHER_BUS)

    check_client = check_controller

    def when_refused(self, notify: Callable[[GradbusError], None]) -> Callable[[], None]:
        self._listeners.append(notify)
        if self.refusal:
            notify(self.error)
        return lambda: self._listeners.remove(notify)

    @property
    def error(self) -> GradbusError:
        """The error of a refused process."""
        return job_taken(self.refusal) if isinstance(self._party, Admission) else JoinRefused(self.refusal, "process")

    def refused(self) -> None:
        """Notify all listeners of the refusal. Runs on the receive thread."""
        for notify in list(self._listeners):
            notify(self.error)


_OTHER_BUS = (
    "this bus is for ranks of a group (Security(role='worker')): a controller or client of a federated run opens "
    "another one"
)


def _some(ids: Ids) -> str:
    text = ids_text(ids)
    return text if len(text) <= 80 else f"{text[:80]}..."


class RankNode(SealedNode):
    """DDS participant that encrypts with the group key of the epoch."""

    def __init__(
        self, *, domain_id: int, partition: str, network: NetworkConfig, fast: bool | None = None,
        party: Admission | JoinClient, keys: RankKeys, start: Callable[[RankNode, IoThread], None],
    ) -> None:  # fmt: skip
        """See ``dds.Node``. ``start`` begins joining once there is a receive thread."""
        seal = SessionCipher(partition, keys, party.session)
        super().__init__(domain_id=domain_id, partition=partition, network=network, fast=fast, seal=seal)
        self.party = party
        party.participant = self.prefix
        self.keys = keys
        self.standing = self._standing = RankStanding(party, keys)
        self._start = start
        self._thread: IoThread | None = None
        self._liveness: LivenessChallenge | None = None

    def start(self, thread: IoThread) -> None:
        """Start the join protocol; challenges are sent again with every new key."""
        self._thread = thread

        def changed() -> None:
            if self._liveness is not None:
                self._liveness.announce_again()
            thread.rematched()

        def removed(sessions: Collection[bytes]) -> None:
            for session in sessions:
                if session not in self.seal.peers.removed:
                    thread.block_writers(self.seal.peers.remove(session), REMOVED)

        self.keys.on_change = changed
        self.party.on_removed = removed
        self._start(self, thread)  # first: the keys come before anything that is encrypted with them
        self._liveness = self.start_liveness_challenge(thread)
        ForeignReaders(self, thread, self.members)

    def refused(self) -> None:
        """Shut the keys and notify the listeners: this process must stop."""
        self.keys.shut()
        self._standing.refused()
        if self._thread is not None:
            self._thread.rematched()

    def plain_writer(self, topic: Topic) -> Any:
        """Return a writer of unencrypted samples."""
        return Node.topic_writer(self, topic)

    def plain_reader(self, topic: Topic) -> Any:
        """Return a reader of unencrypted samples."""
        return Node.topic_reader(self, topic)
