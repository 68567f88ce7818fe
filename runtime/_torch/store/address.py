"""Addresses of stores: ``dds://DOMAIN/JOB``, with rank and world size as torch adds them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from urllib.parse import urlsplit

from gradbus.runtime.bus.transport_factory import check_job

_FORM = "dds://DOMAIN/JOB with rank= and world_size= for init_process_group, or dds://0/job1?rank=0&world_size=2"
_MAX_WORLD = 1 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """A store, and the rank of this process in it."""

    domain: int
    job: str
    rank: int
    world: int

    @property
    def name(self) -> str:
        """For people."""
        return f"dds://{self.domain}/{self.job}"

    @property
    def number(self) -> str:
        """Return that of the bus that its processes share: see :func:`~gradbus.runtime.bus.background.numbered_job`."""
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()


def parse(url: str) -> Address:
    """The address in a URL. Raises ValueError, with the form that is expected."""
    try:
        return _parse(url)
    except ValueError as error:  # a ConfigError is one, too
        raise ValueError(f"init_method {url!r}: {error}. Write {_FORM}") from None


def _parse(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme != "dds":
        raise ValueError(f"its scheme is {parts.scheme!r}, expected 'dds'")
    if not _is_number(parts.netloc):
        raise ValueError(f"the DDS domain is {parts.netloc!r}, expected a number from 0 to 232")
    domain, job = int(parts.netloc), parts.path.removeprefix("/")
    check_job(job, domain)
    if parts.fragment:
        raise ValueError(f"nothing is known of {'#' + parts.fragment!r}")
    given: dict[str, str] = {}
    for item in filter(None, parts.query.split("&")):
        name, _, text = item.partition("=")
        if name not in ("rank", "world_size") or name in given:
            raise ValueError(f"{item!r} is not expected here, or twice; known are rank and world_size")
        given[name] = text
    rank, world = (_required(given, name) for name in ("rank", "world_size"))
    if not 1 <= world <= _MAX_WORLD:
        raise ValueError(f"world_size is {world}, expected 1 to {_MAX_WORLD}")
    if rank >= world:
        raise ValueError(f"rank is {rank}, expected 0 to {world - 1} with world_size {world}")
    return Address(domain, job, rank, world)


def _required(given: dict[str, str], name: str) -> int:
    text = given.get(name, "-1")
    if text == "-1":  # what torch puts there for none
        raise ValueError(f"{name} is missing: give {name}= to init_process_group, or write it in the address")
    if not _is_number(text):
        raise ValueError(f"{name} is {text!r}, expected a number")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
