"""The actors: a controller and its clients, workers, and the pure decision objects beside them."""

from gradbus.actors.client import Client
from gradbus.actors.controller import Controller
from gradbus.actors.parallel_task import DataParallelTask, ShardCounts
from gradbus.actors.report import ClientSummary, Progress, RoundReport
from gradbus.actors.robust import CoordinateMedian, Krum, MultiKrum, TrimmedMean
from gradbus.actors.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from gradbus.actors.task import EvalOutcome, FederatedTask, TrainOutcome
from gradbus.actors.worker import Worker
from gradbus.actors.worker_report import EpochReport, WorkerSummary

__all__ = [
    "Client",
    "ClientSummary",
    "Controller",
    "CoordinateMedian",
    "DataParallelTask",
    "EpochReport",
    "EvalOutcome",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FederatedTask",
    "Krum",
    "MultiKrum",
    "Progress",
    "RoundReport",
    "ShardCounts",
    "Strategy",
    "TrainOutcome",
    "TrimmedMean",
    "Worker",
    "WorkerSummary",
]
