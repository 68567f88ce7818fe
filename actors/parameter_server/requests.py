"""Requests of a worker to its parameter servers, and how long their answers may take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.actors.parameter_server.agreement import Roles
from gradbus.actors.parameter_server.assignment import assign
from gradbus.actors.parameter_server.clocks import Kind
from gradbus.actors.parameter_server.messages import (
    REPLY,
    REQUEST,
    Flag,
    Message,
    decode,
    encode,
    largest,
    meta_of,
)
from gradbus.actors.parameter_server.shard import state_bytes_of
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.profiling.profile import Profile

GRACE_S = 5.0  # for the servers to find out first which worker is silent


class ServerRequests:
    """Asks the servers of a run for one worker, one request after the other.

    Attributes:
        pieces: of the model, by server. wait_s: seconds that this worker has waited for answers.
    """

    def __init__(
        self,
        network: Group,
        roles: Roles,
        config: DataParallelConfig,
        settings: ParameterServerSettings,
        training: ShardTraining,
        compute: ComputeThread,
        profile: Profile,
    ) -> None:
        """``training``: for the model, on the thread ``compute``. ``profile``: gets the waits."""
        self.pieces = assign(training.trained, roles.servers, settings.cut_bytes)
        self.wait_s = 0.0
        held = max(sum(piece.nbytes for piece in own) for own in self.pieces)
        self._max_bytes = largest(held, state_bytes_of(training.model))
        self._network = network
        self._roles = roles
        self._config = config
        self._settings = settings
        self._compute = compute
        self._profile = profile
        self._met_at = 0  # the step at which all stood together last

    async def ask(
        self,
        kind: Kind,
        position: Position,
        *,
        meta: Any = None,
        state: Mapping[str, Tensor] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        flags: Flag = Flag.NONE,
    ) -> list[Message]:
        """Ask all servers, or server 0 for what is not about weights. Returns their replies, in order.

        Args:
            position: of this worker.
            meta, state: for server 0 alone. tensors: weights or gradients, by name; each server gets its pieces.
        """
        network, roles, timeouts = self._network, self._roles, self._config.timeouts
        servers = range(1) if kind == "meet" else range(roles.servers)
        clock, epoch = position.step, position.epoch
        flat = {} if tensors is None else await self._compute.run(_flat, tensors)
        requests = [
            await self._compute.run(
                encode,
                Message(kind, clock, flags, epoch, meta=None if server else meta, state={} if server else state or {}),
                [] if tensors is None else [piece.of(flat[piece.tensor]) for piece in self.pieces[server]],
            )
            for server in servers
        ]
        is_meeting = kind != "push" or Flag.MEETS in flags
        limit_s = self._answer_limit_s(kind, clock, is_meeting)
        handles: list[CollectiveHandle[Any]] = []
        started_s = time.perf_counter()
        try:
            for server, request in zip(servers, requests, strict=True):
                rank = roles.workers + server
                handles.append(network.send(REQUEST, request, to=rank, timeout_s=timeouts.collective_s))
                handles.append(network.recv(REPLY, source=rank, timeout_s=limit_s, max_bytes=self._max_bytes))
            # A server that has dropped this worker takes no request any more, but has answered.
            found = [await self._reply(server, handle) for server, handle in zip(servers, handles[1::2], strict=True)]
            for handle in handles[::2]:
                await handle
        finally:
            for handle in handles:
                if not handle.done():
                    handle.cancel()
        self.wait_s += time.perf_counter() - started_s
        self._profile.add_span("wait", started_s, time.perf_counter())
        for server, reply in zip(servers, found, strict=True):
            if reply.kind != kind:
                raise CollectiveError(f"server {server} answered {kind} with {reply.kind}")
        if is_meeting:
            self._met_at = clock + (kind == "push")
        return found

    def _answer_limit_s(self, kind: Kind, clock: int, is_meeting: bool) -> float:
        """How long a server may take to answer: as long as it waits for what the slowest worker has to send before.

        A server waits ``collective_s`` for a request, after a meeting as long as a checkpoint may take, for the first
        one ``join_s``, and again ``collective_s`` until its answer is taken. A worker that is silent for longer is
        dropped, and then the answer comes. So this deadline is for servers that are alive, but do not answer; of one
        that dies the group tells.
        """
        collective_s = self._config.timeouts.collective_s
        longest_s = max(collective_s, self._config.checkpoint.timeout_s)
        if kind == "start":
            return max(longest_s, self._config.timeouts.join_s) + GRACE_S
        if kind != "push":
            return longest_s + GRACE_S
        since = clock - self._met_at
        behind = min(since, self._settings.staleness) if self._settings.mode == "asynchronous" else 0
        awaited = behind + 1 if is_meeting else 1  # before, it may go on as soon as the slowest one has pushed once
        has_begun = not is_meeting and since > behind  # each has pushed since the meeting
        return (collective_s if has_begun else longest_s) + 2 * collective_s * (awaited - 1) + GRACE_S

    async def _reply(self, server: int, handle: CollectiveHandle[Any]) -> Message:
        """The reply of a server. Raises CollectiveError: it goes on without this worker."""
        reply = await self._compute.run(decode, await handle)
        if Flag.DROPPED in reply.flags:
            raise CollectiveError(
                f"server {server} has dropped this worker: {meta_of(reply, 'why', str)}. What it has learnt since is "
                f"lost, and the others go on without it. Is it too slow for parallel.timeouts.collective_s "
                f"({self._config.timeouts.collective_s:g}), or was it stopped? It can take part in the next start"
            )
        return reply


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views, or of what is not contiguous one copy each, of which parts are views."""
    return {name: tensor.reshape(-1) for name, tensor in tensors.items()}
