"""``init_method="dds://domain/job"``: the ranks of a job meet on the data bus, and no TCP port is needed.

    import gradbus.torch  # makes the scheme known to torch

    dist.init_process_group("dds", init_method="dds://0/job1", rank=0, world_size=2)
    dist.init_process_group("gloo", init_method="dds://0/job1?rank=0&world_size=2")

Any backend can meet so. Rank 0 keeps the keys; it may come before the others or after them. How DDS reaches the others
is set by the environment (``GRADBUS_BUS__INTERFACE=eth0`` and so on); the domain and the job are those of the address.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from gradbus.runtime import forks
from gradbus.torch.store.address import Address, parse
from gradbus.torch.store.link import StoreLink
from gradbus.torch.store.store import DdsStore

_links: dict[tuple[int, int, str, int], StoreLink] = {}  # by process (a fork does not inherit threads) and address
_lock = forks.ForkLock()
_of_groups: set[DdsStore] = set()  # handles that init_process_group has made a process group with


def open_store(address: Address, timeout: timedelta) -> DdsStore:
    """A handle on the store of an address, on the connection that this process has, if there is one.

    Raises:
        DistNetworkError: there is no rank 0 in time, or it refuses this rank. ValueError: this process has the address
        open with another world size. ConfigError, BusError: DDS cannot be used as it is set.
    """
    with _lock:
        key = (os.getpid(), address.domain, address.job, address.rank)
        link = _links.get(key)
        if link is None or link.fault:
            link = _links[key] = StoreLink(address)
    if link.address != address:
        raise ValueError(
            f"{address.name} is open in this process with world_size {link.address.world}, now {address.world}"
        )
    link.open(timeout.total_seconds())
    return DdsStore(link, timeout)


def handler(
    url: str, timeout: timedelta = distributed_c10d.default_pg_timeout, **_: object
) -> Iterator[tuple[DdsStore, int, int]]:
    """Called by torch for an address that starts with ``dds://``."""
    address = parse(url)
    close_those_of_destroyed_groups()
    store = open_store(address, timeout)
    try:
        yield store, address.rank, address.world
    finally:  # init_process_group has returned
        close_with_its_group(store)
    raise RuntimeError(f"{address.name}: a store is for one job; start anew for another one")


def close_with_its_group(store: DdsStore) -> None:
    """Close the store when the process groups that were made with it are destroyed, if there are any.

    torch keeps a ``PrefixStore`` for each process group until then. Without one, the handle stays open until the
    process ends: C++ may have it, and would not keep its Python part alive.
    """
    for held, root in _stores_of_groups():
        if root is store:
            _of_groups.add(store)
            closing = weakref.finalize(held, _close, store)
            closing.atexit = False  # at exit it is closed anyway, and later
            return


def close_those_of_destroyed_groups() -> None:
    """Close stores whose process groups are destroyed, and whose Python objects something still holds: a variable of
    the script, or a cycle that the garbage collector has not found yet. A rank that used such a store again would wait
    there for others, which have a new one."""
    in_use = {id(root) for _, root in _stores_of_groups()}
    for store in [store for store in list(_of_groups) if id(store) not in in_use]:
        _close(store)


def _close(store: DdsStore) -> None:
    _of_groups.discard(store)
    store.close()


def _stores_of_groups() -> Iterator[tuple[Store, Store]]:
    """The store that torch holds for each process group, and the one that its prefixes are of."""
    world = distributed_c10d._world  # noqa: SLF001 - torch does not list its process groups in public
    for _, held in list(world.pg_map.values()):
        root: Store = held
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        yield held, root
