"""The ServerApp."""

import numpy as np
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from numpyapp.task import DIM


def weighted_average(metrics):
    examples = sum(number for number, _ in metrics)
    accuracy = sum(number * one["accuracy"] for number, one in metrics) / examples
    print(f"accuracy {accuracy:.6f}", flush=True)
    return {"accuracy": accuracy}


def server_fn(context: Context) -> ServerAppComponents:
    strategy = FedAvg(
        min_available_clients=2,
        initial_parameters=ndarrays_to_parameters([np.zeros(DIM + 1)]),
        evaluate_metrics_aggregation_fn=weighted_average,
    )
    return ServerAppComponents(
        strategy=strategy, config=ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    )


app = ServerApp(server_fn=server_fn)
