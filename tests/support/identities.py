"""Keys of nodes and the list of those that may take part, in files, and what ``Security`` gets of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradbus.runtime.security.identity.allow_list import (
    AllowList,
    Entry,
    Role,
    load_allow_list,
    with_entry,
    without,
    write_allow_list,
)
from gradbus.runtime.security.identity.key import NodeKey, new_node_key, public_text
from gradbus.runtime.security.job_key import write_secret_file


class Identities:
    """A controller, ``server``, and clients ``robot-N``, each for client id N, that are on its list."""

    def __init__(self, folder: Path, *, clients: int = 2) -> None:
        self._folder = folder
        self.list_file = folder / "allow.list"
        self.keys: dict[str, NodeKey] = {}
        write_allow_list(self.list_file, AllowList())
        self.new("server")
        for number in range(clients):
            self.allow(self.new(f"robot-{number}"), ids=((number, number),))

    def new(self, name: str) -> NodeKey:
        """A node that is not on the list."""
        key = self.keys[name] = new_node_key(name)
        write_secret_file(self._folder / f"{name}.key", key.text)
        return key

    def allow(self, key: NodeKey, role: Role = "client", ids: tuple[tuple[int, int], ...] = ()) -> None:
        """Put it on the list."""
        write_allow_list(
            self.list_file, with_entry(load_allow_list(self.list_file), Entry(key.name, role, key.public, ids))
        )

    def allow_rank(self, name: str, first: int, last: int | None = None) -> None:
        """A new node that may be these ranks."""
        self.allow(self.new(name), "worker", ((first, first if last is None else last),))

    def rank_security(self, name: str, rank: int, **others: Any) -> dict[str, Any]:
        """What ``Security`` gets for a rank on this node."""
        said = {key: Path(text) if key.endswith("_file") else text for key, text in self.security(name).items()}
        return said | {"role": "worker", "gives_keys": rank == 0} | others

    def remove(self, name: str) -> None:
        """Take it off the list."""
        write_allow_list(self.list_file, without(load_allow_list(self.list_file), name))

    def security(self, name: str, *, pinned: str = "server") -> dict[str, Any]:
        """Of this node."""
        return {
            "level": "identity",
            "key_file": str(self._folder / f"{name}.key"),
            "allow_file": str(self.list_file),
            "controller_key": public_text(self.keys[pinned].public),
        }

    def files(self) -> list[str]:
        """All that there are."""
        return sorted(os.listdir(self._folder))
