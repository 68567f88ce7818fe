"""The ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from torchapp.task import Net, load_data
from torchapp.task import test as test_fn
from torchapp.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition_id = context.node_config["partition-id"]
    data, _ = load_data(partition_id, context.node_config["num-partitions"])
    seed = 100 * msg.content["config"]["server-round"] + partition_id
    config = context.run_config
    loss = train_fn(net, data, config["local-epochs"], config["learning-rate"], config["batch-size"], seed)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    return Message(content=RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss, accuracy = test_fn(net, data)
    metrics = MetricRecord({"eval_loss": loss, "accuracy": accuracy, "num-examples": len(data[1])})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
