"""The same trainings in Flower's simulation, which runs clients as Ray actors: ``python flower_simulation.py JSON``.

It runs in an environment that has ``flwr[simulation]`` beside gradbus, whose data, model and steps it uses: only what
stands around the training differs. Printed is a JSON object in the last line: seconds of each round, from the choice of
its clients to the new model, and a checksum of the last one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from gradbus.models import ClassificationTask, mnist, mnist_mlp


@functools.cache  # once in each process
def task_of(clients: int, batch_size: int) -> ClassificationTask:
    """Return what all clients train. Its data are loaded here, so that no round waits for them."""
    torch.set_num_threads(1)
    task = ClassificationTask(mnist_mlp, mnist, "iid", clients, batch_size=batch_size)
    task.prepare(0, clients)
    return task


@functools.cache
def model_of(clients: int, batch_size: int) -> torch.nn.Module:
    """One for each process, used again and again."""
    return task_of(clients, batch_size).build_model()


def arrays_of(model: torch.nn.Module) -> list[Any]:
    """The weights as Flower sends them."""
    return [tensor.detach().numpy().copy() for tensor in model.state_dict().values()]


def main(spec: Mapping[str, Any]) -> None:
    """Run it. ``spec``: clients, share, rounds, processes, batch_size, lr."""
    # No telemetry: nothing here talks to anybody.
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    clients, batch_size, share = spec["clients"], spec["batch_size"], spec["share"]
    began_s: list[float] = []
    ended_s: list[float] = []
    newest: list[Any] = []

    class Trainer(NumPyClient):  # type: ignore[misc]
        def __init__(self, client_id: int) -> None:
            self._client_id = client_id

        def fit(self, parameters: Any, config: Mapping[str, Any]) -> Any:
            task, model = task_of(clients, batch_size), model_of(clients, batch_size)
            state = model.state_dict()
            with torch.no_grad():
                for tensor, array in zip(state.values(), parameters, strict=True):
                    tensor.copy_(torch.from_numpy(array))
            done = task.train(
                model,
                client_id=self._client_id,
                round_id=int(config["round"]),
                epochs=1,
                lr=spec["lr"],
                seed=0,
                subset_size=0,
                should_stop=lambda: False,
            )
            return arrays_of(model), done.num_samples, {}

    class Timed(FedAvg):  # type: ignore[misc]
        def configure_fit(self, server_round: int, *args: Any, **kwargs: Any) -> Any:
            began_s.append(time.perf_counter())
            return super().configure_fit(server_round, *args, **kwargs)

        def aggregate_fit(self, *args: Any, **kwargs: Any) -> Any:
            found = super().aggregate_fit(*args, **kwargs)
            ended_s.append(time.perf_counter())
            newest[:] = [found[0]]
            return found

    def server(context: Any) -> Any:
        asked = max(1, round(share * clients))
        strategy = Timed(
            fraction_fit=share,
            fraction_evaluate=0.0,
            min_fit_clients=asked,
            min_available_clients=clients,
            initial_parameters=ndarrays_to_parameters(arrays_of(model_of(clients, batch_size))),
            on_fit_config_fn=lambda number: {"round": number},
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=spec["rounds"]))

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=lambda context: Trainer(int(context.node_config["partition-id"])).to_client()),
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": spec["processes"], "num_gpus": 0, "include_dashboard": False},
        },
    )
    arrays = parameters_to_ndarrays(newest[0])
    crc32 = functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), arrays, 0)
    seconds = [end - begin for begin, end in zip(began_s, ended_s, strict=True)]
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "crc32": crc32}) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
