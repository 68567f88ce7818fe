"""The ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearnapp.task import create_model, fit, get_params, load_data, set_params

app = ClientApp()


def prepare(msg: Message, context: Context):
    model = create_model(context.run_config["penalty"], context.run_config["local-epochs"])
    set_params(model, msg.content["arrays"].to_numpy_ndarrays())
    return model, load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(msg: Message, context: Context):
    model, (points, _, labels, _) = prepare(msg, context)
    fit(model, points, labels)
    metrics = MetricRecord(
        {"num-examples": len(labels), "train_loss": float(log_loss(labels, model.predict_proba(points)))}
    )
    return Message(content=RecordDict({"arrays": ArrayRecord(get_params(model)), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model, (_, points, _, labels) = prepare(msg, context)
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": float(model.score(points, labels))})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
