"""Membership of nodes with keys of their own: of the controller, of its clients and observers, and of ranks.

The sender named in a sample is bound to the key that encrypted it: a client's node may send for the clients that the
allow list assigns to it, and for no others. Ranks join in the same way and then share the group key of the epoch. From
then on everything is as with a job key: the same cost per frame, shared memory and liveness challenges. A rank could
impersonate another one; processes that did not join or were removed are kept out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from gradbus.runtime.errors import ConfigError, FrameError, GradbusError, JoinRefused
from gradbus.runtime.security.encryption import SessionCipher
from gradbus.runtime.security.identity import controller_signatures
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import AllowListWatcher, Entry, ids_text, is_within
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.join_transport import JoinTransport
from gradbus.runtime.security.identity.key import public_text
from gradbus.runtime.security.identity.key_epoch import RankKeys
from gradbus.runtime.security.identity.unassigned_clients import UnassignedClients
from gradbus.runtime.security.job_membership import Decrypt, Decrypted, JobMembership
from gradbus.runtime.security.membership import SharedKeyMembership
from gradbus.runtime.security.peers import Release
from gradbus.runtime.security.streams import OutboundEnvelope
from gradbus.runtime.transport import api
from gradbus.runtime.transport.access_policy import NO_RANKS, ClientNode, job_in_use
from gradbus.runtime.transport.api import IoThread, PeerId, Transport
from gradbus.runtime.transport.channels import CHANNELS, Channel, ToController, is_control, is_control_name
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import ClientUpdate, Control, TrainCmd

_COMMANDS = CHANNELS[TrainCmd].name
# train/control: of clients of an earlier protocol, which are refused there.
_CONTROL_OF_MEMBERS = frozenset({CHANNELS[ToController].name, CHANNELS[Control].name})
_FROM_MEMBERS = _CONTROL_OF_MEMBERS | {CHANNELS[ClientUpdate].name}
_NAMES = frozenset(channel.name for channel in CHANNELS.values())
_REMOVED = "its node was taken off the allow list"
_OTHER_BUS = (
    "this bus is for ranks of a group (Security(role='worker')): a controller or client of a federated run opens "
    "another one"
)


class _Opened(NamedTuple):
    """A decrypted sample; ``sender``: the node whose key encrypted it, None: the controller."""

    data: memoryview
    sender: Entry | None = None


class ControllerMembership(JobMembership):
    """Membership of the controller of a federated run, which signs every model."""

    role = "controller"
    signs_models = True
    has_key = True

    def __init__(self, admission: Admission, list_watcher: AllowListWatcher | None = None) -> None:
        self.party = admission
        self._list_watcher = list_watcher
        self._unassigned = UnassignedClients()

    @property
    def refusal(self) -> str:
        return self.party.refusal

    def known(self) -> Collection[PeerId] | None:
        return self.party.peer_ids

    def start(self, below: Transport, sealed: Transport, thread: IoThread) -> None:
        JoinTransport(self.party, below, thread, list_watcher=self._list_watcher)

    def encrypt(self, topic: str, sample: tuple[Any, ...]) -> OutboundEnvelope | None:
        if self.party.refusal:
            raise job_in_use(self.party.refusal)
        if not is_control_name(topic):
            return self.party.seal(topic, sample, None)
        # The last part of a control message is its body, which this process has made.
        to, incarnation = control.addressee(sample[-1])
        if to == frames.UNASSIGNED:  # no node owns that number, and the client's first message has shown its node
            return self.party.seal_for(topic, sample, self._unassigned.node_of(incarnation))
        return self.party.seal(topic, sample, to)

    def decryptor(self, channel: Channel) -> Decrypt:
        def decrypt(octets: Any, /) -> Decrypted | None:
            opened = self.party.open(channel.name, octets, time.monotonic())
            if opened is None:
                return None
            plain, sender = opened
            if channel.name not in _FROM_MEMBERS:
                raise FrameError("identity", f"{sender.name}, a {sender.role}, sends on {channel.name}")
            return _Opened(plain, sender)

        return decrypt

    def accepts(self, channel: Channel, opened: _Opened, sample: Any, source: api.Peer, release: Release) -> bool:
        client_id, sender = frames.sender_of(sample.data), opened.sender
        is_control = channel.name in _CONTROL_OF_MEMBERS
        if client_id == frames.UNASSIGNED and is_control and sender is not None and sender.role == "client":
            self._unassigned.claim(frames.incarnation_of(sample.data), sender.name)
            return True
        if sender is None or not sender.may_be(client_id):
            if sender is not None and is_control:
                self.party.refuse_sender(sender, client_id, time.monotonic())
            name = sender and sender.name
            raise FrameError("identity", f"{name} sends as client {client_id}, which the allow list does not give it")
        return True

    def node_of(self, client_id: int, incarnation: int) -> ClientNode | None:
        allowed = self.party.allowed
        is_unassigned = client_id == frames.UNASSIGNED
        name = self._unassigned.node_of(incarnation) if is_unassigned else allowed.owner_of(client_id)
        entry = allowed.get(name or "")
        return ClientNode(name or "", () if entry is None else entry.ids, lambda one: allowed.get(one) is not None)

    def retain(self, topic: str, samples: int) -> None:
        if topic in _NAMES:  # nothing in an inbox is under a group key
            self.party.rotation.retain(topic, samples)

    def check_channel(self, channel: Channel) -> None:
        if channel.name not in _NAMES and not is_control(channel):
            raise ConfigError(NO_RANKS)

    def sign_model(self, key: FrameKey, flags: int, payload: Any) -> str:
        party = self.party
        epoch = party.group.key.epoch
        return controller_signatures.sign_model(party.job, party.key, party.session, epoch, key, flags, payload)


class ClientMembership(JobMembership):
    """Membership of a client, which checks the signatures of models, or of an observer of any job.

    It knows the transport of the controller alone, and sends nothing to others: slow readers of other clients are
    excluded for a while.
    """

    knows_all = False
    check_channel = ControllerMembership.check_channel

    def __init__(self, client: JoinClient) -> None:
        self.party = client
        self.role = client.role
        self._ranks = SessionCipher(client.ranks, client.session)  # for an observer of ranks
        client.on_removed = self._remove

    def _remove(self, sessions: Collection[bytes]) -> None:
        for session in sessions:
            self._ranks.peers.remove(session)

    @property
    def has_key(self) -> bool:
        return self.party.keys is not None

    @property
    def refusal(self) -> str:
        return self.party.refusal

    def known(self) -> Collection[PeerId] | None:
        known = self.party.controller_peer
        return {known} if known else None

    def start(self, below: Transport, sealed: Transport, thread: IoThread) -> None:
        JoinTransport(self.party, below, thread)

    def encrypt(self, topic: str, sample: tuple[Any, ...]) -> OutboundEnvelope | None:
        if self.party.refusal:
            raise JoinRefused(self.party.refusal)
        return self.party.seal(topic, sample) if topic in _FROM_MEMBERS else None

    def decryptor(self, channel: Channel) -> Decrypt:
        of_ranks = self._ranks.decryptor(channel.name, ignores_own=True)

        def decrypt(octets: Any, /) -> Decrypted | None:
            if self.party.ranks.has_key:  # an observer requires no liveness challenge
                return of_ranks.open(octets)
            plain = self.party.open(channel.name, octets, time.monotonic())
            return None if plain is None else _Opened(plain)

        return decrypt

    def accepts(self, channel: Channel, opened: Decrypted, sample: Any, source: api.Peer, release: Release) -> bool:
        is_named = channel.name != _COMMANDS and not self.party.ranks.has_key
        if is_named and frames.sender_of(sample.data) != frames.CONTROLLER:
            raise FrameError("identity", "the controller sends in the name of another")
        return True

    def check_model_signature(self, key: FrameKey, flags: int, total_bytes: int) -> None:
        keys, party = self.party.keys, self.party
        controller, newest = (b"", 0) if keys is None else (keys.controller, keys.epoch)
        controller_signatures.check_model(party.job, party.pinned, controller, newest, key, flags, total_bytes)


class RankMembership(SharedKeyMembership):
    """Membership of a rank. ``keys`` are those that its party, the key issuer or a client of it, takes in."""

    role = "worker"

    def __init__(
        self, party: Admission | JoinClient, keys: RankKeys, list_watcher: AllowListWatcher | None = None
    ) -> None:
        super().__init__(SessionCipher(keys, party.session))
        self.party = party
        self.keys = keys
        self._list_watcher = list_watcher
        self._listeners: list[Callable[[GradbusError], None]] = []
        self._rematched: Callable[[], None] = lambda: None

    def start(self, below: Transport, sealed: Transport, thread: IoThread) -> None:
        self._rematched = thread.rematched

        def removed(sessions: Collection[bytes]) -> None:
            for session in sessions:
                if session not in self.cipher.peers.removed:
                    thread.block_writers(self.cipher.peers.remove(session), _REMOVED)

        self.keys.on_change = self._on_new_key
        self.party.on_removed = removed
        # First: the keys come before anything that is encrypted with them.
        JoinTransport(self.party, below, thread, list_watcher=self._list_watcher, on_refused=self._on_refused)
        super().start(below, sealed, thread)

    def _on_new_key(self) -> None:
        if self.liveness is not None:
            self.liveness.announce_again()
        self._rematched()

    def _on_refused(self) -> None:
        """Stop encrypting and notify the listeners: this process must stop. Runs on the receive thread."""
        self.keys.shut()
        for notify in list(self._listeners):
            notify(self._error)
        self._rematched()

    @property
    def _error(self) -> GradbusError:
        return job_in_use(self.refusal) if isinstance(self.party, Admission) else JoinRefused(self.refusal, "process")

    @property
    def refusal(self) -> str:
        return self.party.refusal

    @property
    def absence(self) -> str:
        if self.has_key or isinstance(self.party, Admission):
            return ""
        return (
            f"the process that gives the keys of the job, as a rule rank 0, with the key "
            f"{public_text(self.party.pinned)}, has not admitted this one: start it, and compare bus.controller_key "
            f"with what 'gradbus keys show' prints there"
        )

    def when_refused(self, tell: Callable[[GradbusError], None]) -> Callable[[], None]:
        self._listeners.append(tell)
        if self.refusal:
            tell(self._error)
        return lambda: self._listeners.remove(tell)

    def check_rank(self) -> None:
        """Allow any rank: :meth:`check_ids` checks its number later."""

    def check_ids(self, rank: int) -> None:
        party = self.party
        if isinstance(party, JoinClient) and self.has_key and not is_within(rank, party.ids):
            text = ids_text(party.ids)
            raise ConfigError(
                f"rank {rank} is not one of the ranks that the allow list gives {party.key.name}: "
                f"{text if len(text) <= 80 else f'{text[:80]}...'}. Give this process another rank, or change the list"
            )

    def check_controller(self) -> None:
        raise ConfigError(_OTHER_BUS)

    check_client = check_controller
