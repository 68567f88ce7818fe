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
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from gradbus.runtime import forks
from gradbus.runtime.bus.participant_factory import check_job
from gradbus.runtime.errors import ConfigError
from gradbus.torch.store.link import Address, StoreLink
from gradbus.torch.store.store import DdsStore

_FORM = "dds://DOMAIN/JOB with rank= and world_size= for init_process_group, or dds://0/job1?rank=0&world_size=2"
_MAX_WORLD = 1 << 20

_links: dict[tuple[int, int, str, int], StoreLink] = {}  # by process (a fork does not inherit threads) and address
_lock = forks.new_lock()


def parse(url: str) -> Address:
    """What an address says. Raises ValueError, which says what to write."""
    parts = urlsplit(url)
    if parts.scheme != "dds":
        raise _error(url, f"its scheme is {parts.scheme!r}, expected 'dds'")
    domain = _number(parts.netloc)
    if domain is None:
        raise _error(url, f"the DDS domain is {parts.netloc!r}, expected a number from 0 to 232")
    job = parts.path.removeprefix("/")
    try:
        check_job(job, domain)
    except ConfigError as error:
        raise _error(url, str(error)) from None
    if parts.fragment:
        raise _error(url, f"nothing is known of {'#' + parts.fragment!r}")
    found: dict[str, str] = {}
    for item in filter(None, parts.query.split("&")):
        name, _, text = item.partition("=")
        if name not in ("rank", "world_size") or name in found:
            raise _error(url, f"{item!r} is not expected here, or twice; known are rank and world_size")
        found[name] = text
    world = _number(found.get("world_size"))
    rank = _number(found.get("rank"))
    for name, number in (("rank", rank), ("world_size", world)):
        text = found.get(name, "-1")
        if text == "-1":  # what torch puts there for none
            raise _error(url, f"{name} is missing: give {name}= to init_process_group, or write it in the address")
        if number is None:
            raise _error(url, f"{name} is {text!r}, expected a number")
    assert rank is not None
    assert world is not None
    if not 1 <= world <= _MAX_WORLD:
        raise _error(url, f"world_size is {world}, expected 1 to {_MAX_WORLD}")
    if rank >= world:
        raise _error(url, f"rank is {rank}, expected 0 to {world - 1} with world_size {world}")
    return Address(domain, job, rank, world)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


def _error(url: str, what: str) -> ValueError:
    return ValueError(f"init_method {url!r}: {what}. Write {_FORM}")


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
    store = DdsStore(link, timeout)
    link.handles.add(store)
    return store


def handler(
    url: str, timeout: timedelta = distributed_c10d.default_pg_timeout, **_: object
) -> Iterator[tuple[DdsStore, int, int]]:
    """What torch calls for an address that starts with ``dds://``."""
    address = parse(url)
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
    for _, held in list(distributed_c10d._world.pg_map.values()):
        if _root_of(held) is store:
            closing = weakref.finalize(held, store.close)
            closing.atexit = False  # at exit it is closed anyway, and later
            return


def _root_of(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
