"""The actors: a controller and its clients, workers, and the pure decision objects beside them.

The names here are loaded when first used: nodes of a Flower app without torch import from this package, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradbus.actors.aggregation.adaptive import FedAdam
    from gradbus.actors.aggregation.orders import ClientOrder, RoundOrder
    from gradbus.actors.aggregation.robust import CoordinateMedian, Krum, MultiKrum, TrimmedMean
    from gradbus.actors.aggregation.strategies import FedAvg, FedAvgM, Strategy
    from gradbus.actors.data_parallel.elastic import ElasticPlace, ElasticWorker
    from gradbus.actors.data_parallel.evaluation import Evaluation, sum_counts
    from gradbus.actors.data_parallel.report import EpochReport, WorkerSummary
    from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
    from gradbus.actors.data_parallel.worker import Worker
    from gradbus.actors.federated.client.client import Client
    from gradbus.actors.federated.client.client_observer import ClientReport, ClientSummary
    from gradbus.actors.federated.controller.controller import Controller
    from gradbus.actors.federated.controller.report import Progress, RoundReport
    from gradbus.actors.federated.site.site import Site
    from gradbus.actors.federated.task import EvalOutcome, FederatedTask, TrainOutcome
    from gradbus.actors.parameter_server.server import ParameterServer, ServerSummary
    from gradbus.actors.parameter_server.worker import ParameterServerWorker

_WHERE = {
    "Client": "federated.client.client",
    "ClientOrder": "aggregation.orders",
    "ClientReport": "federated.client.client_observer",
    "ClientSummary": "federated.client.client_observer",
    "Controller": "federated.controller.controller",
    "CoordinateMedian": "aggregation.robust",
    "DataParallelTask": "data_parallel.task",
    "ElasticPlace": "data_parallel.elastic",
    "ElasticWorker": "data_parallel.elastic",
    "EpochReport": "data_parallel.report",
    "EvalOutcome": "federated.task",
    "Evaluation": "data_parallel.evaluation",
    "FedAdam": "aggregation.adaptive",
    "FedAvg": "aggregation.strategies",
    "FedAvgM": "aggregation.strategies",
    "FederatedTask": "federated.task",
    "Krum": "aggregation.robust",
    "MultiKrum": "aggregation.robust",
    "ParameterServer": "parameter_server.server",
    "ParameterServerWorker": "parameter_server.worker",
    "Progress": "federated.controller.report",
    "RoundOrder": "aggregation.orders",
    "RoundReport": "federated.controller.report",
    "ServerSummary": "parameter_server.server",
    "ShardCounts": "data_parallel.task",
    "Site": "federated.site.site",
    "Strategy": "aggregation.strategies",
    "TrainOutcome": "federated.task",
    "TrimmedMean": "aggregation.robust",
    "Worker": "data_parallel.worker",
    "WorkerSummary": "data_parallel.report",
    "sum_counts": "data_parallel.evaluation",
}

__all__ = [
    "Client",
    "ClientOrder",
    "ClientReport",
    "ClientSummary",
    "Controller",
    "CoordinateMedian",
    "DataParallelTask",
    "ElasticPlace",
    "ElasticWorker",
    "EpochReport",
    "EvalOutcome",
    "Evaluation",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FederatedTask",
    "Krum",
    "MultiKrum",
    "ParameterServer",
    "ParameterServerWorker",
    "Progress",
    "RoundOrder",
    "RoundReport",
    "ServerSummary",
    "ShardCounts",
    "Site",
    "Strategy",
    "TrainOutcome",
    "TrimmedMean",
    "Worker",
    "WorkerSummary",
    "sum_counts",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"gradbus.actors.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'gradbus.actors' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
