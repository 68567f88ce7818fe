"""Reads the settings of security level ``identity``, and makes the membership of this process from them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import process_name
from gradbus.runtime.security.identity.allow_list import AllowList, AllowListWatcher
from gradbus.runtime.security.identity.key import NodeKey, load_node_key, parse_public, public_text
from gradbus.runtime.security.settings import Security

if TYPE_CHECKING:
    from gradbus.runtime.security.job_membership import JobMembership


def read_identity(security: Security) -> tuple[NodeKey, bytes, AllowList | None]:
    """Read the key of this node, the controller's public key, and the allow list if this node is the controller.

    Raises:
        ConfigError: a file cannot be read, or contradicts the settings.
    """
    key, pinned, watcher = _read(security)
    return key, pinned, None if watcher is None else watcher.allowed


def _read(security: Security) -> tuple[NodeKey, bytes, AllowListWatcher | None]:
    key = load_node_key(security.key_file)
    pinned = parse_public(security.controller_key, "bus.controller_key")
    if not _gives_keys(security, key, pinned):
        return key, pinned, None
    if key.public != pinned:
        raise ConfigError(
            f"{key.name} is to give the keys of the job, as rank 0 does, and its key is not bus.controller_key: give "
            f"rank 0 the key_file of which 'gradbus keys show' prints {public_text(pinned)}, or set bus.controller_key "
            f"to {public_text(key.public)} everywhere"
        )
    if security.role == "observer":
        raise ConfigError(
            f"{key.name} is the controller, as its key is bus.controller_key, and cannot join as {security.role}: who "
            f"only looks on, as 'gradbus status' does, needs a key of its own (bus.key_file), on the list as observer"
        )
    if security.allow_file is not None:
        return key, pinned, AllowListWatcher(security.allow_file)
    if security.role == "worker":  # without a list it admits holders of its own key
        return key, pinned, None
    raise ConfigError(
        f"{key.name} is the controller, as its key is bus.controller_key, and needs bus.allow_file: the list "
        f"of the nodes that it lets in. 'gradbus keys allow NAME PUBLIC_KEY --list FILE' makes one"
    )


def _gives_keys(security: Security, key: NodeKey, pinned: bytes) -> bool:
    """Whether this process is the controller, or the key issuer of a job of ranks."""
    if security.role == "worker" and security.gives_keys is not None:
        return security.gives_keys
    return key.public == pinned


def identity_membership(job: str, security: Security) -> JobMembership:
    """Return the membership of this process. Raises ConfigError, as :func:`read_identity`."""
    from gradbus.runtime.security.identity.admission import Admission
    from gradbus.runtime.security.identity.join_client import JoinClient
    from gradbus.runtime.security.identity.key_epoch import RankKeys
    from gradbus.runtime.security.identity.membership import ClientMembership, ControllerMembership, RankMembership

    key, pinned, watcher = _read(security)
    if not _gives_keys(security, key, pinned):
        client = JoinClient(job, key, pinned, security.role)
        return RankMembership(client, client.ranks) if security.role == "worker" else ClientMembership(client)
    keys = RankKeys(job) if security.role == "worker" else None
    allowed = AllowList() if watcher is None else watcher.allowed
    admission = Admission(job, key, allowed, now_s=time.monotonic(), label=process_name(), ranks=keys)
    return ControllerMembership(admission, watcher) if keys is None else RankMembership(admission, keys, watcher)
