"""The ClientApp."""

import time
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(msg: Message, context: Context):
    path = Path(context.node_config["dataset-path"])
    time.sleep(msg.content["config"]["sleep-s"])
    lines = len(path.read_text().splitlines())
    return Message(content=RecordDict({"metrics": MetricRecord({"lines": lines})}), reply_to=msg)
