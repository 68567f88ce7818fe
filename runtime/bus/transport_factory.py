"""What comes before a bus: its name and its security are checked, and its transport is opened off the loop.

This alone knows which transports there are: settings choose one (:attr:`.NetworkConfig.links`), never what is
installed, so that two processes of a job cannot be on different ones unawares. Before one is opened no library of it is
loaded: settings are checked before those seconds, and the doctor runs where a library is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gradbus.runtime.errors import ConfigError, NotReachable
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.logs import get_logger
from gradbus.runtime.needs import import_module
from gradbus.runtime.network.addresses import check_peers
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig, Profile
from gradbus.runtime.security.settings import Level, Security, level_in_force, other_users
from gradbus.runtime.transport.api import Transport
from gradbus.runtime.transport.dds import examination
from gradbus.runtime.transport.dds.network import Reach

if TYPE_CHECKING:
    from gradbus.runtime.security.job_membership import JobMembership
    from gradbus.runtime.transport.api import Reachable
    from gradbus.runtime.transport.examination import Examination, LinkReport, PeerNames

T = TypeVar("T")

_ON_DATAGRAMS, _ON_LINKS = "gradbus.runtime.transport.dds.participant", "gradbus.runtime.transport.zenoh.opening"

# A process may start before the relay that it dials, or the controller that listens, which loads torch first: seconds,
# some tens on a busy machine. Whoever starts a bus on a thread gives it 60 s in all.
FIRST_LINK_S = 30.0
_PAUSE_S = (0.2, 2.0)  # between two attempts: at first, and at most

log = get_logger("bus")

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # * ? [ would be patterns where DDS has partitions


def check_job(job: str, domain: int) -> None:
    """Raises ConfigError: no such name, or no such domain, can be."""
    if not _JOB_NAME.fullmatch(job):
        raise ConfigError(f"job name {job!r}: expected 1 to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit")
    if not 0 <= domain <= 232:
        raise ConfigError(f"domain {domain}: expected 0 to 232")


def transport_module(network: NetworkConfig) -> str:
    """Return the name of the module of a transport, which loads its library."""
    return _ON_DATAGRAMS if network.links is None else _ON_LINKS


def network_config(  # noqa: PLR0913 - arguments of gradbus.connect
    network: Profile | NetworkConfig = "loopback",
    *,
    interface: str | None = None,
    peers: Sequence[str] = (),
    lease_s: float | None = None,
    shared_memory: bool = True,
    connect: Sequence[str] = (),
    listen: Sequence[str] = (),
    tls: bool = True,
    tls_ca: str | Path | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    tls_clients: bool = False,
) -> NetworkConfig:
    """Return what these arguments of :func:`gradbus.connect` say. Raises ConfigError: one of them is wrong."""
    for name, given in (("connect", connect), ("listen", listen)):
        if isinstance(given, str):  # its characters would become a list
            raise ConfigError(f"{name}: expected a list of endpoints, got the text {given!r}. Write [{given!r}]")
    has_links = bool(connect or listen)
    if isinstance(network, NetworkConfig):
        if has_links:  # else the bus would be on DDS, unawares
            raise ConfigError(
                "connect and listen: network is a NetworkConfig, which has all settings. Put them into its links, as "
                "in NetworkConfig(links=gradbus.LinkConfig(connect=[...]))"
            )
        return network
    files = {"ca": tls_ca, "certificate": tls_certificate, "key": tls_key}
    links = (
        LinkConfig(
            connect=tuple(connect),
            listen=tuple(listen),
            tls=tls,
            requires_client_certificate=tls_clients,
            lease_s=lease_s,
            **{name: None if path is None else Path(path) for name, path in files.items()},
        )
        if has_links
        else None
    )
    check_peers(peers)  # one text is no list of them, but its characters would become one
    return NetworkConfig(
        profile=network,
        interface=interface or LOOPBACK,
        peers=tuple(peers),
        lease_s=lease_s,
        shared_memory=shared_memory,
        links=links,
    )


def reach_of(domain: int, network: NetworkConfig) -> Reachable:
    """Return who a bus with these settings will reach.

    Raises:
        ConfigError: there is no such interface, or ``CYCLONEDDS_URI`` holds no document for Cyclone DDS.
    """
    if network.links is not None:
        from gradbus.runtime.transport.zenoh.reach import LinkReach

        return LinkReach(domain=domain, links=network.links)
    return Reach.of(domain, network)


def examination_of(domain: int, network: NetworkConfig) -> Examination:
    """Return what a machine is to be examined for. Raises nothing."""
    return examination.examination_of(domain, network)


def peer_names_of(network: NetworkConfig) -> PeerNames:
    """Return the host names among the peers of a bus. Raises ConfigError, as :func:`reach_of`."""
    return examination.peer_names_of(network)


def check_certificates(network: NetworkConfig) -> None:
    """Check the files that a bus needs for links over TLS, if it has any. Raises ConfigError: one is missing or
    wrong."""
    if network.links is not None and (network.links.ca is not None or network.links.certificate is not None):
        from gradbus.runtime.network import certificates  # loads cryptography

        certificates.check_certificates(network.links)


def examine_links(links: LinkConfig) -> list[LinkReport]:
    """Return what is found at the endpoints of links and in their certificates. Takes some seconds for each endpoint
    where it is not well; not for the event loop. Raises ConfigError: the library of Zenoh is missing."""
    from gradbus.runtime.transport.zenoh import examination as on_links

    return on_links.examine_links(links)


def transport_maker(
    job: str, *, domain: int, network: NetworkConfig, fast: bool | None, security: Level | Security
) -> Callable[[], Transport]:
    """Return what opens the transport of a job, protected as ``security`` says.

    Raises:
        ConfigError: the network is wrong, or reached without protection. What opens it raises it if a key cannot be
            read or made.
    """
    if not isinstance(security, Security):
        security = Security(level=security)
    reach = reach_of(domain, network)
    level = level_in_force(security, reach.is_exposed)
    opener = _opener(job, domain, network, fast)
    if level == "none":
        return partial(_open_unprotected, opener, exposed=reach.is_exposed, attachment=reach.attachment)
    if level == "identity":
        from gradbus.runtime.security.identity.opening import identity_membership

        made = identity_membership(job, security)
        return partial(_open_sealed, opener, lambda: made)
    return partial(_open_sealed, opener, partial(_shared_key_membership, job, level, security.key_file))


def _opener(job: str, domain: int, network: NetworkConfig, fast: bool | None) -> Callable[[], Transport]:
    """Return what opens the transport that the settings choose, without protection. What it returns raises ImportError:
    the library of the transport is missing or broken."""

    def on_datagrams() -> Transport:
        library = import_module(transport_module(network))
        made: Transport = library.Participant(domain_id=domain, partition=job, network=network, fast=fast)
        return made

    def on_links() -> Transport:
        made: Transport = import_module(transport_module(network)).open_on_links(job, domain, network)
        return made

    return on_datagrams if network.links is None else on_links


def _open_sealed(opener: Callable[[], Transport], membership: Callable[[], JobMembership]) -> Transport:
    from gradbus.runtime.security.sealed import Sealed  # loads cryptography

    made = membership()  # first: a key that cannot be read is an error before anything is opened
    return Sealed(opener(), made)


def _shared_key_membership(job: str, level: Level, key_file: Path | None) -> JobMembership:
    """Return the membership with the key of the job, or of the user, which may have to be made."""
    from gradbus.runtime.security.encryption import PskKeys, SessionCipher
    from gradbus.runtime.security.job_key import load_key
    from gradbus.runtime.security.membership import SharedKeyMembership

    return SharedKeyMembership(SessionCipher(PskKeys(job, *load_key(level, key_file))))


def _open_unprotected(opener: Callable[[], Transport], *, exposed: bool, attachment: str) -> Transport:
    """Open a transport without protection. Warn who can read and join in, if that is anybody.

    Args:
        attachment: the network interface, or the endpoints of links.
    """
    opened = opener()
    who = "anybody there" if exposed else "other users of this machine"
    others = [] if exposed else other_users()
    if exposed or others:
        users = {"users": others} if others else {}
        log.warning("not protected", interface=attachment, effect=f"{who} can read and join in", **users)
    return opened


async def open_transport(
    find: Callable[[], Callable[[], Transport]], *, first_link_s: float | None = None
) -> Transport:
    """Open a transport off the loop: keys and files are read, and with the self-test it takes some tens of
    milliseconds. Where nothing answers yet it is tried again, for ``first_link_s`` at most.

    Args:
        find: gives what opens it. Raises what these raise.
        first_link_s: 0: it is tried once. None: :data:`FIRST_LINK_S`.
    """
    participant = await _open_patiently(find, FIRST_LINK_S if first_link_s is None else first_link_s)
    if participant.traits.slow_because is not None:
        log.warning("slow path", reason=participant.traits.slow_because, effect="large messages hold the GIL")
    return participant


async def _open_patiently(find: Callable[[], Callable[[], Transport]], first_link_s: float) -> Transport:
    """Open a transport, as often as it takes. Raises NotReachable: nothing has answered for so long."""
    found: list[Callable[[], Transport]] = []

    def open_it() -> Transport:
        if not found:
            found.append(find())
        return found[0]()

    until_s, pause_s = time.monotonic() + first_link_s, _PAUSE_S[0]
    for attempt in itertools.count(1):
        try:
            return await _opened(open_it)
        except NotReachable as error:
            if time.monotonic() >= until_s:
                tried = f". It was tried for {first_link_s:g} s" if first_link_s else ""
                raise NotReachable(f"{error}{tried}") from None
            if attempt == 2:  # those that are started together need no warning
                log.warning("waiting for a link", timeout_s=first_link_s, reason=str(error))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])
    raise AssertionError("the loop above has no end")


async def _opened(open_it: Callable[[], Transport]) -> Transport:
    """Open a transport on a thread; where that is not wanted any more, close it."""
    opening = asyncio.get_running_loop().run_in_executor(None, open_it)
    try:
        return await _whole(opening)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):  # it is not wanted any more, whatever comes of it
            await _close(opening.result())
        raise


@contextlib.asynccontextmanager
async def closed_on_error(participant: Transport) -> AsyncIterator[None]:
    """Close a participant of which no bus has come: its place among others of this process would stay taken."""
    try:
        yield
    except BaseException:
        await _close(participant)
        raise


async def _close(participant: Transport) -> None:
    await _whole(asyncio.get_running_loop().run_in_executor(None, participant.close))


async def _whole(work: asyncio.Future[T]) -> T:
    """Wait for the end of work on a thread, which takes a bounded time, however often the waiter is cancelled: what it
    opens or closes would be left behind. CancelledError comes after that."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # nobody else asks for it
        raise cancelled
    return work.result()


_lock = threading.Lock()
_users = 0
_before_s = 0.005


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let threads hand over the GIL every 0.5 ms instead of 5 ms while a bus is open in this process.

    With a thread that computes in Python, a 64-byte round trip falls from 6 ms to 0.14 ms. This is the one setting of
    the whole process that a bus changes; the last bus to close puts it back.
    """
    global _users, _before_s
    with _lock:
        if _users == 0:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(0.0005, _before_s))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setswitchinterval(_before_s)
