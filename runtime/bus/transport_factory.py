"""What comes before a bus: its name and its security are checked, and its transport is opened off the loop.

This alone knows which transport that is. Before one is opened no library of it is loaded: settings are checked before
those seconds, and the doctor runs where a library is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.logs import get_logger
from gradbus.runtime.needs import import_module
from gradbus.runtime.network.network_config import NetworkConfig, Profile
from gradbus.runtime.network.peers import check_peers
from gradbus.runtime.security.settings import Level, Security, level_in_force, other_users
from gradbus.runtime.transport.api import Transport
from gradbus.runtime.transport.dds import examination
from gradbus.runtime.transport.dds.missing_peers import Reach

if TYPE_CHECKING:
    from gradbus.runtime.security.job_membership import JobMembership
    from gradbus.runtime.transport.api import Reachable
    from gradbus.runtime.transport.examination import Examination, PeerNames

T = TypeVar("T")

TRANSPORT = "gradbus.runtime.transport.dds.participant"
"""The module of the transport, which loads its library."""

log = get_logger("bus")

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # * ? [ would be patterns where DDS has partitions


def check_job(job: str, domain: int) -> None:
    """Raises ConfigError: no such name, or no such domain, can be."""
    if not _JOB_NAME.fullmatch(job):
        raise ConfigError(f"job name {job!r}: expected 1 to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit")
    if not 0 <= domain <= 232:
        raise ConfigError(f"domain {domain}: expected 0 to 232")


def network_config(
    network: Profile | NetworkConfig = "loopback",
    *,
    interface: str | None = None,
    peers: Sequence[str] = (),
    lease_s: float | None = None,
    shared_memory: bool = True,
) -> NetworkConfig:
    """Return what these arguments of :func:`gradbus.connect` say. Raises ConfigError: one of them is wrong."""
    if isinstance(network, NetworkConfig):
        return network
    check_peers(peers)  # one text is no list of them, but its characters would become one
    return NetworkConfig(
        profile=network,
        interface=interface or LOOPBACK,
        peers=tuple(peers),
        lease_s=lease_s,
        shared_memory=shared_memory,
    )


def reach_of(domain: int, network: NetworkConfig) -> Reachable:
    """Return who a bus with these settings will reach.

    Raises:
        ConfigError: there is no such interface, or ``CYCLONEDDS_URI`` holds no document for Cyclone DDS.
    """
    return Reach.of(domain, network)


def examination_of(domain: int, network: NetworkConfig) -> Examination:
    """Return what a machine is to be examined for. Raises nothing."""
    return examination.examination_of(domain, network)


def peer_names_of(network: NetworkConfig) -> PeerNames:
    """Return the host names among the peers of a bus. Raises ConfigError, as :func:`reach_of`."""
    return examination.peer_names_of(network)


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
    exposed = reach_of(domain, network).is_exposed
    level = level_in_force(security, exposed)
    place: dict[str, Any] = {"domain_id": domain, "partition": job, "network": network, "fast": fast}
    if level == "none":
        return partial(_open_unprotected, exposed=exposed, **place)
    if level == "identity":
        from gradbus.runtime.security.identity.opening import identity_membership

        made = identity_membership(job, security)
        return partial(_open_sealed, lambda: made, **place)
    return partial(_open_sealed, partial(_shared_key_membership, job, level, security.key_file), **place)


def _opened(**place: Any) -> Transport:
    """Raises ImportError: the library of the transport is missing or broken."""
    transport: Transport = import_module(TRANSPORT).Participant(**place)
    return transport


def _open_sealed(membership: Callable[[], JobMembership], **place: Any) -> Transport:
    from gradbus.runtime.security.sealed import Sealed  # loads cryptography

    made = membership()  # first: a key that cannot be read is an error before anything is opened
    return Sealed(_opened(**place), made)


def _shared_key_membership(job: str, level: Level, key_file: Path | None) -> JobMembership:
    """Return the membership with the key of the job, or of the user, which may have to be made."""
    from gradbus.runtime.security.encryption import PskKeys, SessionCipher
    from gradbus.runtime.security.membership import SharedKeyMembership
    from gradbus.runtime.security.user_key import load_key

    return SharedKeyMembership(SessionCipher(PskKeys(job, *load_key(level, key_file))))


def _open_unprotected(*, exposed: bool, network: NetworkConfig, **place: Any) -> Transport:
    """Without protection. Says who can read and join in, if that is anybody."""
    who = "anybody there" if exposed else "other users of this machine"
    others = [] if exposed else other_users()
    if exposed or others:
        users = {"users": others} if others else {}
        log.warning("not protected", interface=network.interface, effect=f"{who} can read and join in", **users)
    return _opened(network=network, **place)


async def open_transport(find: Callable[[], Callable[[], Transport]]) -> Transport:
    """Open a transport off the loop: keys and files are read, and with the self-test it takes some tens of
    milliseconds. ``find``: gives what opens it. Raises what these raise."""
    opening = asyncio.get_running_loop().run_in_executor(None, lambda: find()())
    try:
        participant = await _whole(opening)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):  # it is not wanted any more, whatever comes of it
            await _close(opening.result())
        raise
    if participant.traits.slow_because is not None:
        log.warning("slow path", reason=participant.traits.slow_because, effect="large messages hold the GIL")
    return participant


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
