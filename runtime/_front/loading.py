"""What a program loads before its event loop starts, or on a thread beside it: importing torch takes seconds.

gradbus.preload()
asyncio.run(main())
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradbus.runtime.network.network_config import NetworkConfig

from gradbus.runtime.needs import is_core_alone

_BUS = (
    "gradbus.connecting",
    "gradbus.runtime.bus.bus",
    "gradbus.runtime.security.sealed",
    "gradbus.runtime.security.encryption",
    "gradbus.runtime.security.membership",
    "gradbus.runtime.security.job_key",
)
_ACTORS = (
    "gradbus.actors.federated.client.client",
    "gradbus.actors.federated.controller.controller",
    "gradbus.actors.federated.site.site",
    "gradbus.actors.data_parallel.worker",
    "gradbus.actors.data_parallel.elastic",
    "gradbus.actors.parameter_server.server",
    "gradbus.actors.parameter_server.worker",
    "gradbus.runtime.collectives",
)
# The first optimizer of a process imports torch's compiler, in its first round.
_FIRST_ROUND = ("torch._dynamo",)

_loaded: set[Callable[[], None] | str] = (
    set()
)  # what was loaded to its end: sys.modules has also what is being imported


def preload(*, freeze: bool = True, network: NetworkConfig | None = None) -> None:
    """Load what a bus, its actors and the first optimizer of torch need, which takes seconds.

    With ``gradbus-core`` alone, which has neither actors nor torch, it is what a bus needs.

    Call it before your event loop starts, and after your own imports. Without it ``gradbus.connect`` loads the same on
    a thread; what Python's lock is held for, above all the start of torch's libraries, then delays the loop.

    Args:
        freeze: take all objects that there are out of the walks of Python's garbage collector (:func:`gc.freeze`),
            each of which would delay the loop by 0.1 s and more.
        network: as it will be given to ``gradbus.connect``: it chooses the transport to load. None: DDS.

    Raises:
        ImportError: a package is missing or broken; the text says which, and what to do.
    """
    load_bus()
    load_transport(network)
    load_actors()
    if not is_core_alone():
        load(_FIRST_ROUND)
    if freeze:
        gc.collect()
        gc.freeze()
        atexit.unregister(gc.unfreeze)  # as often as this is called, once is enough
        atexit.register(gc.unfreeze)  # else libraries that count their objects report leaks at the end


def load_bus() -> None:
    """Import what a bus needs, on any transport. Raises ImportError: as :func:`load`."""
    load(_BUS)
    _loaded.add(load_bus)


def load_transport(network: NetworkConfig | None = None) -> None:
    """Import the transport that these settings choose, by default the one on DDS. Raises ImportError: as
    :func:`load`."""
    from gradbus.runtime.bus.transport_factory import network_config, transport_module

    module = transport_module(network or network_config())
    load((module,))
    _loaded.add(module)


def has_transport(network: NetworkConfig) -> bool:
    """Return whether :func:`load_transport` has loaded the transport that these settings choose."""
    from gradbus.runtime.bus.transport_factory import transport_module

    return transport_module(network) in _loaded


def load_actors() -> None:
    """Import what Controller, Client, Worker and their settings need; nothing with ``gradbus-core`` alone, which has no
    actors. Raises ImportError: as :func:`load`."""
    if not is_core_alone():
        load(_ACTORS)
        from gradbus.runtime.choices import load_tables

        load_tables()
    _loaded.add(load_actors)


def load(modules: Sequence[str]) -> None:
    """Import modules. Raises ImportError: in one line, where a package that they need is missing or broken."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            from gradbus.runtime.needs import explain

            if text := explain(error):
                raise ImportError(f"gradbus: {text}") from None
            raise


async def load_on_thread(*parts: Callable[[], None]) -> None:
    """Call :func:`load_bus` and the like on a thread, and wait for them. A caller that is cancelled leaves the thread
    to itself.

    Raises:
        ImportError: as :func:`load`.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="gradbus-load")  # that of the host may be busy
    try:
        for part in parts:
            if part not in _loaded:
                await asyncio.get_running_loop().run_in_executor(executor, part)
    finally:
        executor.shutdown(wait=False)
