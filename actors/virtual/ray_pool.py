"""Training processes as Ray actors, on all machines of a Ray cluster.

Ray gives places to run and carries objects; rounds, updates and what clients keep are the host's. What all trainings of
a round have in common is put once into Ray's object store, which brings it once to each machine. An actor that dies,
with its process or its machine, is replaced by another one wherever there is room.

Ray unpickles what its processes send each other: whoever reaches a cluster may run code in it. One that is started
here for a run listens at 127.0.0.1 alone and has a token of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.protocol import TRAINING_FAILED
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.channel import Parcel
from gradbus.actors.virtual.client_trainer import MAX_SEALED, TRAIN, PoolSettings, open_state, vector_bytes
from gradbus.actors.virtual.pool import (
    MAX_PROCESSES,
    ClientFailed,
    PoolWork,
    ProcessDied,
    RoundWork,
    TrainingPool,
    TrainingProcess,
    check_prepared,
)
from gradbus.actors.virtual.ray_actor import Question, RayTrainer, as_array
from gradbus.runtime.built_model import build_model
from gradbus.runtime.cores import usable_cores
from gradbus.runtime.errors import CheckpointError, ConfigError, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.needs import how_to_install
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.private_folder import scratch_folder
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.tasks import TaskGroup, single_error

LOCAL = "local"  # in place of an address: a cluster for this run, on this machine
START_S = 120.0  # a process and its imports, on a machine that has not run them before
END_S = 30.0
FILES_PREFIX = "gb-ray-"  # of temporary folders with a cluster's files: short, as sockets lie below them
STORE_BYTES = 512 << 20  # of the object store of a cluster that is started here, beside what models take

log = get_logger("host")


class RayCluster:
    """This process's connection to a cluster.

    Attributes:
        ray: the module. folder: of the files of a cluster that was started here; empty: none was.
    """

    def __init__(self, address: str, cpus: int, model_bytes: int) -> None:
        """Connect, or start one. A connection that this process has already is used, and kept at the end.

        Args:
            address: that of ``ray.init``; ``local``: one is started here, with so many ``cpus``.
            model_bytes: of the model. A round brings up to three times as much to each machine, and as much comes back
                from each process.

        Raises:
            ConfigError: Ray is not installed, or there is no cluster.
        """
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"pool=ray: Ray is not installed here; every machine of the cluster needs it. {how_to_install('ray')}"
            ) from None
        self.ray = ray
        self.folder = ""
        self._files = contextlib.ExitStack()
        self._while_open = contextlib.ExitStack()
        self._is_own = not ray.is_initialized()
        if not self._is_own:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing here tells anybody, unless the user says so
        options: dict[str, Any] = {"address": address, "configure_logging": True, "logging_level": "ERROR"}
        variables: dict[str, str] = {}
        if address == LOCAL:
            self.folder = str(self._files.enter_context(scratch_folder(FILES_PREFIX)))
            options |= {
                "num_cpus": cpus,
                "include_dashboard": False,
                "_temp_dir": self.folder,
                "_node_ip_address": "127.0.0.1",
                "object_store_memory": STORE_BYTES + (3 + cpus) * model_bytes,
            }
            variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray takes an address that others reach
            if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
                variables["RAY_AUTH_TOKEN"] = _token()  # else Ray would keep one in the user's home
        try:
            self._while_open.enter_context(_environment(variables))
            # On this thread, which stays: Ray's servers end with the one that has started them.
            with _loopback_only(ray, address == LOCAL), _own_sigterm():
                ray.init(**options)
        except Exception as error:  # of many kinds, ConnectionError and ValueError among them
            self.close()
            where = "a cluster could not be started here" if address == LOCAL else f"no cluster at {address}"
            raise ConfigError(
                f"pool=ray: {where}: {str(error).strip() or type(error).__name__}. Give the address of one that runs "
                f"(ray start --head), or {LOCAL}"
            ) from None

    def room(self, needs: Mapping[str, float]) -> int:
        """For how many actors with these needs the machines that live have room, whether it is taken or not."""
        found = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                found += min(int(node["Resources"].get(name, 0.0) / need) for name, need in needs.items())
        return found

    def close(self) -> None:
        """Leave the cluster; end it, if it was started here. May block for seconds."""
        if self._is_own:
            self.ray.shutdown()
        self._while_open.close()
        self._files.close()


@functools.cache
def _token() -> str:
    """Return the token of the clusters that this process starts, one after the other: Ray reads it once in a
    process."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """With these variables, which Ray reads whenever it connects. What it sets besides is taken back, too."""
    before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_MODE")}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _loopback_only(ray: Any, wanted: bool) -> Iterator[None]:
    """Ray has read the variable for it when it was imported."""
    # Where a later Ray has none, its token protects what others can reach.
    constants = ray._private.ray_constants  # noqa: SLF001 - the setting has no public name, and is read at import
    before = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    constants.ENABLE_RAY_CLUSTER = before and not wanted
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself in the main thread: whoever has it, keeps it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class RayProcess(TrainingProcess):
    """An actor that trains and evaluates."""

    def __init__(self, pool: RayPool, actor: Any, process: int) -> None:
        self._pool = pool
        self._actor = actor
        self._process = process

    async def _begin(self, work: PoolWork) -> None:
        await self._pool.put(work)

    async def _ask(self, work: PoolWork, do: str, given: Mapping[str, Any]) -> Parcel:
        pool = self._pool
        common = await pool.put(work)

        def submit() -> Any:
            return self._actor.answer.remote(common, pool.question(work, do, given))

        try:
            head, parts = await (await asyncio.to_thread(submit))
        except pool.ray.exceptions.RayError as error:
            log.warning("training process died", process=self._process, end=_reason(error), effect="replaced")
            raise ProcessDied from None
        return Parcel(head, [memoryview(part) for part in parts])

    async def _take(self, work: RoundWork, update: EncodedUpdate, released: Any) -> EncodedUpdate:
        pool = self._pool
        if released:
            await asyncio.to_thread(pool.keep_release, work, update.key.sender, released)
        shares = pool.sealed < MAX_SEALED
        pool.sealed += shares
        update = await asyncio.to_thread(pool.taken_out, update, work, shares)
        pool.sealed -= shares and update.sealed is None
        return update

    def is_read(self, update: EncodedUpdate) -> None:
        self._pool.sealed -= update.sealed is not None

    def stop(self, number: int) -> None:
        """Work up to this number is no longer wanted. Does not wait."""
        self._actor.stop.options(concurrency_group="stop").remote(number)

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._pool.ray.kill(self._actor)


class RayPool(TrainingPool[RayProcess]):
    """Ray actors that train.

    Attributes:
        ray: the module. sealed: updates in shared memory that have no answer yet.
    """

    def __init__(
        self, task: FederatedTask, settings: PoolSettings, *, size: int, address: str = "", gpus: float = 0.0
    ) -> None:
        """Connect to a cluster, and hand it the task.

        Args:
            size: how many actors; 0: as many as the cluster has room for.
            address: of the cluster, as ``ray.init`` has it; empty: that of RAY_ADDRESS, else ``local``.
            gpus: that each actor has for itself; less than 1: a share of one.

        Raises:
            ConfigError: Ray is not installed; there is no cluster, or no room in it; the task cannot be sent.
        """
        super().__init__(size)
        self._settings = settings
        self._memory = PayloadMemory(switched_on=settings.shared_memory)
        self.sealed = 0
        self._needs = {"CPU": float(settings.threads)} | ({"GPU": gpus} if gpus else {})
        address = address or os.environ.get("RAY_ADDRESS", "") or LOCAL
        cores = usable_cores()
        model_bytes = sum(one.nbytes for one in build_model(task).state_dict().values())
        self._cluster = RayCluster(address, (size or cores) * settings.threads, model_bytes)
        self.ray = self._cluster.ray
        try:
            self._check_room()
            self._task = self._put_task(task)
        except BaseException:
            self._cluster.close()
            raise
        self._of = (0, 0)  # the client and the number of clients that the task is prepared for first
        self._put_turn = asyncio.Lock()
        self._put: tuple[int, Any] = (0, None)  # the newest work, and where it is in the object store

    def _check_room(self) -> None:
        room = min(self._cluster.room(self._needs), MAX_PROCESSES)
        if not self.size:
            self.size = room
        needs = " and ".join(f"{need:g} {name}" for name, need in self._needs.items())
        if not 1 <= self.size <= room:
            raise ConfigError(
                f"pool=ray: expected room for {max(1, self.size)} training processes with {needs} each, the cluster "
                f"has room for {room}: ask for fewer (processes), or add machines (ray start --address)"
            )

    def _put_task(self, task: FederatedTask) -> Any:
        try:
            return self.ray.put(task)
        except Exception as error:  # of pickle, and of what the task's own methods for it raise
            raise ConfigError(
                f"pool=ray: the task {type(task).__name__} cannot be sent to other machines: {_reason(error)}. It "
                f"has to be one that pickle can save: without locks, open files and connections"
            ) from None

    async def open(self, client_id: int, num_clients: int) -> None:
        self._of = client_id, num_clients
        try:
            async with TaskGroup() as group:
                started = [group.create_task(self._start()) for _ in range(self.size - len(self._all))]
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        for one in started:
            self._add(one.result())

    async def _start(self) -> RayProcess:
        actor = await asyncio.to_thread(self._new_actor)
        try:
            async with asyncio.timeout(START_S):
                process = await actor.place.remote()
            check_prepared(await actor.prepare.remote(self._task, *self._of))
        except (TimeoutError, self.ray.exceptions.RayError) as error:
            self.ray.kill(actor)
            reason = f"none within {START_S:g} s" if isinstance(error, TimeoutError) else _reason(error)
            raise TrainingFailed(f"no Ray actor can be started: {reason}") from None
        except BaseException:
            self.ray.kill(actor)
            raise
        started = RayProcess(self, actor, process)
        started.stop(self._stopped)  # work that ended before this actor was made
        return started

    def _new_actor(self) -> Any:
        made = self.ray.remote(concurrency_groups={"stop": 1})(RayTrainer).options(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs.get("GPU", 0.0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        return made.remote(replace(self._settings, shared_memory=False))

    async def _replace(self) -> None:
        """As any pool does; where no machine has room for another one, the pool goes on with fewer."""
        self.replaced += 1
        try:
            if await asyncio.to_thread(self._cluster.room, self._needs) <= len(self._all):
                raise TrainingFailed("a machine is gone, and the others have no room")
            self._add(await self._start())
        except TrainingFailed as error:
            if not self._all:
                raise
            self.size -= 1
            log.warning("training process not replaced", reason=str(error), effect=f"{self.size} go on")

    async def put(self, work: PoolWork) -> Any:
        """Return where this work is in the object store; what was there before may go, once nobody uses it."""
        async with self._put_turn:
            if self._put[0] != work.number:
                head, parts = work.parcel
                common = head, [as_array(part) for part in parts]
                self._put = work.number, await asyncio.to_thread(self.ray.put, common)
            return self._put[1]

    def question(self, work: PoolWork, do: str, given: Mapping[str, Any]) -> Question:
        """Return a question for a client, with what it keeps here. Blocks. Raises ClientFailed: that cannot be read."""
        with self._kept(work, given["client_id"]) as store:
            found, released = work.needs(store), store.released(work.round_id) if do == TRAIN else None
            return Question(
                do,
                given,
                work.run_id,
                work.round_id,
                as_array(save(dict(found)) if found else b""),
                as_array(b"" if released is None else vector_bytes(released)),
            )

    def keep_release(self, work: RoundWork, client_id: int, released: Any) -> None:
        """Keep what is about to leave a client with local privacy. Blocks. Raises ClientFailed: it cannot be written,
        so that it may not leave."""
        with self._kept(work, client_id, to_write=True) as store:
            store.release(work.round_id, torch.from_numpy(np.array(released).view(np.float32)))

    @contextlib.contextmanager
    def _kept(self, work: PoolWork, client_id: int, *, to_write: bool = False) -> Iterator[ClientStateStore]:
        try:
            with contextlib.closing(open_state(self._settings.state_dir, client_id, to_write=to_write)) as store:
                store.start_run(work.run_id, work.dim)
                yield store
        except CheckpointError as error:
            raise ClientFailed(str(error), TRAINING_FAILED, str(error)) from None

    def taken_out(self, update: EncodedUpdate, work: RoundWork, shares: bool) -> EncodedUpdate:
        """Return the same update, no longer in the object store: updates may have to wait, and that has little room.
        With ``shares``, for a controller of this machine, it lies where that can read it."""
        here = self._memory.here
        is_near = here and here == work.inputs.welcome.memory
        sealed = self._memory.put(update.payload) if shares and is_near else None
        if sealed is None:
            return replace(update, payload=bytes(update.payload))
        request = replace(update.request, memory=sealed.place)
        return replace(update, payload=sealed.payload, sealed=sealed, request=request)

    def _stop(self, number: int) -> None:
        for one in self._all:
            one.stop(number)

    async def close(self) -> None:
        for one in self._all:
            one.close()
        self._all.clear()
        self._put, self._task = (0, None), None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.to_thread(self._cluster.close)


def _reason(error: BaseException) -> str:
    """In one line; of what an actor has raised, that itself."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {plain_line(str(cause))}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
