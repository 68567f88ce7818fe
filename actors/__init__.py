"""The actors: a controller and its clients, workers, and the pure decision objects beside them."""

from gradbus.actors.aggregation.adaptive import FedAdam
from gradbus.actors.aggregation.robust import CoordinateMedian, Krum, MultiKrum, TrimmedMean
from gradbus.actors.aggregation.strategies import FedAvg, FedAvgM, Strategy
from gradbus.actors.data_parallel.elastic import ElasticPlace, ElasticWorker
from gradbus.actors.data_parallel.report import EpochReport, WorkerSummary
from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
from gradbus.actors.data_parallel.worker import Worker
from gradbus.actors.federated.client import Client
from gradbus.actors.federated.controller import Controller
from gradbus.actors.federated.report import ClientSummary, Progress, RoundReport
from gradbus.actors.federated.site import Site
from gradbus.actors.federated.task import EvalOutcome, FederatedTask, TrainOutcome
from gradbus.actors.parameter_server.server import ParameterServer, ServerSummary
from gradbus.actors.parameter_server.worker import ParameterServerWorker

__all__ = [
    "Client",
    "ClientSummary",
    "Controller",
    "CoordinateMedian",
    "DataParallelTask",
    "ElasticPlace",
    "ElasticWorker",
    "EpochReport",
    "EvalOutcome",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FederatedTask",
    "Krum",
    "MultiKrum",
    "ParameterServer",
    "ParameterServerWorker",
    "Progress",
    "RoundReport",
    "ServerSummary",
    "ShardCounts",
    "Site",
    "Strategy",
    "TrainOutcome",
    "TrimmedMean",
    "Worker",
    "WorkerSummary",
]
