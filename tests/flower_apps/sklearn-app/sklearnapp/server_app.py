"""The ServerApp."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from sklearnapp.task import create_model, get_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = create_model(context.run_config["penalty"], context.run_config["local-epochs"])
    result = FedAvg(fraction_train=1.0, fraction_evaluate=1.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(get_params(model)),
        num_rounds=context.run_config["num-server-rounds"],
    )
    for _, metrics in sorted(result.evaluate_metrics_clientapp.items()):
        print(f"accuracy {metrics['accuracy']:.6f}", flush=True)
