"""gradbus: train one model across machines over a DDS data bus.

    import gradbus

    async with gradbus.connect(job="mnist") as bus:
        controller = gradbus.Controller(bus, task, gradbus.FederatedConfig(rounds=10, codec="sq8"))
        async for report in controller.rounds():
            print(report.round_id, report.accuracy, report.bytes_up)

The names here are stable. They are loaded when first used: ``import gradbus`` itself costs nothing and needs no torch.
On an event loop, :func:`gradbus.connect` loads the others on a thread; :func:`gradbus.preload` loads them before.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gradbus.moved import install_finder
from gradbus.runtime.needs import own_version

if TYPE_CHECKING:
    from gradbus import actors, codecs, models, runtime
    from gradbus.actors import (
        Client,
        ClientOrder,
        ClientReport,
        ClientSummary,
        Controller,
        ElasticPlace,
        ElasticWorker,
        Progress,
        RoundOrder,
        RoundReport,
        Strategy,
        Worker,
    )
    from gradbus.actors.federated.client.handover import TrainingRound
    from gradbus.actors.federated.client.script_client import ScriptClient, client
    from gradbus.actors.federated.controller.progress_line import ProgressLine
    from gradbus.actors.virtual.simulation import SimulationOptions, SimulationResult, simulate
    from gradbus.codecs import CodecError, DimMismatchError, NonFiniteError
    from gradbus.connecting import connect
    from gradbus.loading import preload
    from gradbus.runtime.bus.bus import Bus
    from gradbus.runtime.collectives import Group, join_group
    from gradbus.runtime.config.data_parallel import DataParallelConfig
    from gradbus.runtime.config.federated import ClientConfig, FederatedConfig
    from gradbus.runtime.errors import (
        BarrierTimeout,
        BusClosed,
        BusError,
        CallbackFailed,
        CallbackTimeout,
        CheckpointError,
        CollectiveError,
        CollectiveTimeout,
        ConfigError,
        ControllerReplaced,
        ForkedProcess,
        FrameError,
        GradbusError,
        JobInUse,
        JoinDeclined,
        JoinRefused,
        NotReachable,
        OutOfTurn,
        PeerLost,
        ReplicasDiverged,
        RoundTimeout,
        RunAborted,
        RunOver,
        TrainingDiverged,
        TrainingFailed,
        WriteTimeout,
    )
    from gradbus.runtime.logs import log_to
    from gradbus.runtime.network.links import LinkConfig
    from gradbus.runtime.network.network_config import NetworkConfig

_WHERE = {
    "Bus": "gradbus.runtime.bus.bus",
    "Client": "gradbus.actors.federated.client.client",
    "ClientConfig": "gradbus.runtime.config.federated",
    "ClientOrder": "gradbus.actors.aggregation.orders",
    "ClientReport": "gradbus.actors.federated.client.client_observer",
    "ClientSummary": "gradbus.actors.federated.client.client_observer",
    "Controller": "gradbus.actors.federated.controller.controller",
    "FederatedConfig": "gradbus.runtime.config.federated",
    "LinkConfig": "gradbus.runtime.network.links",
    "NetworkConfig": "gradbus.runtime.network.network_config",
    "Progress": "gradbus.actors.federated.controller.report",
    "ProgressLine": "gradbus.actors.federated.controller.progress_line",
    "RoundOrder": "gradbus.actors.aggregation.orders",
    "RoundReport": "gradbus.actors.federated.controller.report",
    "ScriptClient": "gradbus.actors.federated.client.script_client",
    "Strategy": "gradbus.actors.aggregation.strategies",
    "TrainingRound": "gradbus.actors.federated.client.handover",
    "DataParallelConfig": "gradbus.runtime.config.data_parallel",
    "ElasticPlace": "gradbus.actors.data_parallel.elastic",
    "ElasticWorker": "gradbus.actors.data_parallel.elastic",
    "Group": "gradbus.runtime.collectives",
    "Worker": "gradbus.actors.data_parallel.worker",
    "client": "gradbus.actors.federated.client.script_client",
    "connect": "gradbus.connecting",
    "join_group": "gradbus.runtime.collectives",
    "log_to": "gradbus.runtime.logs",
    "preload": "gradbus.loading",
    "simulate": "gradbus.actors.virtual.simulation",
    "SimulationOptions": "gradbus.actors.virtual.simulation",
    "SimulationResult": "gradbus.actors.virtual.simulation",
}
_ERRORS = (
    "BarrierTimeout",
    "BusClosed",
    "BusError",
    "CallbackFailed",
    "CallbackTimeout",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeout",
    "ConfigError",
    "ControllerReplaced",
    "ForkedProcess",
    "FrameError",
    "GradbusError",
    "JobInUse",
    "JoinDeclined",
    "JoinRefused",
    "NotReachable",
    "OutOfTurn",
    "PeerLost",
    "ReplicasDiverged",
    "RoundTimeout",
    "RunAborted",
    "RunOver",
    "TrainingDiverged",
    "TrainingFailed",
    "WriteTimeout",
)
_CODEC_ERRORS = ("CodecError", "DimMismatchError", "NonFiniteError")
_WHERE |= dict.fromkeys(_ERRORS, "gradbus.runtime.errors") | dict.fromkeys(_CODEC_ERRORS, "gradbus.codecs")
# Errors that a program can catch by a class above, or that are of one package: where they are, and what to write.
_ERRORS_ELSEWHERE = {
    "AggregatorLost": "catch gradbus.CollectiveError, or import it from gradbus.runtime.collectives.aggregators",
    "BrokenCopy": "catch gradbus.CollectiveError, or import it from gradbus.actors.data_parallel.joining",
    "CheckpointMismatch": "catch gradbus.CheckpointError, or import it from gradbus.actors.data_parallel.state",
    "DataMissing": "it is gradbus.models.DataMissing, a FileNotFoundError",
    "DownloadFailed": "catch OSError, or import it from gradbus.models.mnist_files",
    "MembersChanged": "it is gradbus.torch.elastic.MembersChanged, which a function of elastic.run lets pass",
    "NoGeneration": "catch gradbus.GradbusError, or import it from gradbus.runtime.collectives.generations",
    "NotAPartialSum": "catch gradbus.CodecError, or import it from gradbus.actors.aggregation.partial_sum",
    "SharedMemoryFault": "catch gradbus.GradbusError, or import it from gradbus.runtime.shm.segment",
    "TrainingStopped": "it is gradbus.models.TrainingStopped, which a training function lets pass",
    "TwoMemberships": "catch gradbus.CollectiveError, or import it from gradbus.runtime.collectives.agreement",
    "UnreadableList": "catch gradbus.ConfigError, or import it from gradbus.runtime.security.identity.allow_list",
    "WaitedInVain": "catch gradbus.BarrierTimeout, or import it from gradbus.runtime.collectives.generations",
    "WrongArgument": "catch gradbus.ConfigError or TypeError, or import it from gradbus.runtime.misuse",
    "WrongKeyword": "catch gradbus.ConfigError or TypeError, or import it from gradbus.runtime.misuse",
}
_PACKAGES = ("actors", "codecs", "models", "runtime")

install_finder()

__version__ = own_version()

__all__ = [
    "BarrierTimeout",
    "Bus",
    "BusClosed",
    "BusError",
    "CallbackFailed",
    "CallbackTimeout",
    "CheckpointError",
    "Client",
    "ClientConfig",
    "ClientOrder",
    "ClientReport",
    "ClientSummary",
    "CodecError",
    "CollectiveError",
    "CollectiveTimeout",
    "ConfigError",
    "Controller",
    "ControllerReplaced",
    "DataParallelConfig",
    "DimMismatchError",
    "ElasticPlace",
    "ElasticWorker",
    "FederatedConfig",
    "ForkedProcess",
    "FrameError",
    "GradbusError",
    "Group",
    "JobInUse",
    "JoinDeclined",
    "JoinRefused",
    "LinkConfig",
    "NetworkConfig",
    "NonFiniteError",
    "NotReachable",
    "OutOfTurn",
    "PeerLost",
    "Progress",
    "ProgressLine",
    "ReplicasDiverged",
    "RoundOrder",
    "RoundReport",
    "RoundTimeout",
    "RunAborted",
    "RunOver",
    "ScriptClient",
    "SimulationOptions",
    "SimulationResult",
    "Strategy",
    "TrainingDiverged",
    "TrainingFailed",
    "TrainingRound",
    "Worker",
    "WriteTimeout",
    "actors",
    "client",
    "codecs",
    "connect",
    "join_group",
    "log_to",
    "models",
    "preload",
    "runtime",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(_load(_WHERE[name]), name)
    if name in _PACKAGES:
        return _load(f"gradbus.{name}")
    if name in _ERRORS_ELSEWHERE:
        raise AttributeError(f"gradbus has no {name!r}: {_ERRORS_ELSEWHERE[name]}")
    raise AttributeError(f"module 'gradbus' has no attribute {name!r}")


def _load(module: str) -> Any:
    """Import it. Raises ImportError: in one line, where a package that it needs is missing or broken."""
    from gradbus.loading import load

    load((module,))
    return sys.modules[module]


def __dir__() -> list[str]:
    return sorted(__all__)
