"""Opens the DDS participant of security level ``identity`` from the settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gradbus.runtime.dds.network import NetworkConfig
from gradbus.runtime.dds.participant import IoThread, Node
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import process_name
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import AllowList, AllowListWatcher
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.key import NodeKey, load_node_key, parse_public, public_text
from gradbus.runtime.security.identity.rank_keys import RankKeys
from gradbus.runtime.security.settings import Security


def read_identity(security: Security) -> tuple[NodeKey, bytes, AllowList | None]:
    """Read the key of this node, the controller's public key, and the allow list if this node is the controller.

    Raises:
        ConfigError: a file cannot be read, or says something else.
    """
    key, pinned, file = _read(security)
    return key, pinned, None if file is None else file.allowed


def _read(security: Security) -> tuple[NodeKey, bytes, AllowListWatcher | None]:
    key = load_node_key(security.key_file)
    pinned = parse_public(security.controller_key, "bus.controller_key")
    if security.role == "worker":
        return key, pinned, _list_of_issuer(security, key, pinned)
    if key.public != pinned:
        return key, pinned, None
    if security.role != "client":  # it is what a controller has in its settings as well
        raise ConfigError(
            f"{key.name} is the controller, as its key is bus.controller_key, and cannot join as {security.role}: who "
            f"only looks on, as 'gradbus status' does, needs a key of its own (bus.key_file), on the list as observer"
        )
    if security.allow_file is None:
        raise ConfigError(
            f"{key.name} is the controller, as its key is bus.controller_key, and needs bus.allow_file: the list "
            f"of the nodes that it lets in. 'gradbus keys allow NAME PUBLIC_KEY --list FILE' makes one"
        )
    return key, pinned, AllowListWatcher(security.allow_file)


def _gives(security: Security, key: NodeKey, pinned: bytes) -> bool:
    return key.public == pinned if security.gives_keys is None else security.gives_keys


def _list_of_issuer(security: Security, key: NodeKey, pinned: bytes) -> AllowListWatcher | None:
    """Return the allow list of the key issuer of a job of ranks. Without one it admits holders of its own key."""
    if not _gives(security, key, pinned):
        return None
    if key.public != pinned:
        raise ConfigError(
            f"{key.name} is to give the keys of the job, as rank 0 does, and its key is not bus.controller_key: give "
            f"rank 0 the key_file of which 'gradbus keys show' prints {public_text(pinned)}, or set bus.controller_key "
            f"to {public_text(key.public)} everywhere"
        )
    return None if security.allow_file is None else AllowListWatcher(security.allow_file)


def identity_node(
    job: str, security: Security, *, domain_id: int, network: NetworkConfig, fast: bool | None
) -> Callable[[], Node]:
    """Return a function that opens the participant. Raises ConfigError, as :func:`read_identity`."""
    from gradbus.runtime.security.identity.join_transport import JoinTransport
    from gradbus.runtime.security.identity.node import IdentityNode
    from gradbus.runtime.security.identity.rank_node import RankNode

    key, pinned, list_watcher = _read(security)
    party: Admission | JoinClient
    place: dict[str, Any] = {"domain_id": domain_id, "partition": job, "network": network, "fast": fast}
    if security.role == "worker":
        if _gives(security, key, pinned):
            keys = RankKeys()
            allowed = AllowList() if list_watcher is None else list_watcher.allowed
            party = Admission(job, key, allowed, label=process_name(), ranks=keys)
        else:
            party = JoinClient(job, key, pinned, security.role)
            keys = party.ranks

        def start_rank(node: RankNode, thread: IoThread) -> None:
            JoinTransport(node, thread, list_watcher)

        return partial(RankNode, **place, party=party, keys=keys, start=start_rank)
    if list_watcher is None:
        party = JoinClient(job, key, pinned, security.role)
    else:
        party = Admission(job, key, list_watcher.allowed, label=process_name())

    def start(node: IdentityNode, thread: IoThread) -> None:
        JoinTransport(node, thread, list_watcher)

    return partial(IdentityNode, **place, party=party, start=start)
