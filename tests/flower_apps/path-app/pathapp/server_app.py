"""The ServerApp."""

import time
from logging import INFO

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    while len(nodes := list(grid.get_node_ids())) < context.run_config["num-nodes"]:
        time.sleep(0.1)

    def messages(sleep_s: float) -> list[Message]:
        content = RecordDict({"config": ConfigRecord({"sleep-s": sleep_s})})
        return [Message(content, node, MessageType.QUERY) for node in nodes]

    for _ in range(context.run_config["num-rounds"]):
        replies = list(grid.send_and_receive(messages(0.0)))
        log(INFO, "%s replies", len(replies))
        good = [reply.content["metrics"]["lines"] for reply in replies if reply.has_content()]
        print(f"lines {sum(good)} of {len(good)} nodes", flush=True)
    if context.run_config["push-at-the-end"]:
        grid.push_messages(messages(300.0))
        time.sleep(1.0)
