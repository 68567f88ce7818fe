"""The ClientApp."""

from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context

from numpyapp.task import load_data, test, train


class FlowerClient(NumPyClient):
    def __init__(self, data, learning_rate):
        self.points, self.labels = data
        self.learning_rate = learning_rate

    def fit(self, parameters, config):
        weights = train(parameters[0], self.points, self.labels, self.learning_rate)
        return [weights], len(self.labels), {}

    def evaluate(self, parameters, config):
        loss, accuracy = test(parameters[0], self.points, self.labels)
        return loss, len(self.labels), {"accuracy": accuracy}


def client_fn(context: Context):
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    return FlowerClient(load_data(partition_id, num_partitions), context.run_config["learning-rate"]).to_client()


app = ClientApp(client_fn=client_fn)
