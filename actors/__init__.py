"""The actors: a controller and its clients, and the pure decision objects beside them."""

from gradbus.actors.client import Client, ClientSummary
from gradbus.actors.controller import Controller
from gradbus.actors.report import Progress, RoundReport
from gradbus.actors.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from gradbus.actors.task import EvalOutcome, FederatedTask, TrainOutcome

__all__ = [
    "Client",
    "ClientSummary",
    "Controller",
    "EvalOutcome",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FederatedTask",
    "Progress",
    "RoundReport",
    "Strategy",
    "TrainOutcome",
]
