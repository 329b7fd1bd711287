"""Pushes an array to each node, and again to whichever has answered.

What it writes to `out` is, for each update, its node, when its message was sent and when its answer was here.
"""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The first answer of each node is not counted: Flower installs the app there."""
    told = context.run_config
    generator = np.random.default_rng(0)
    sent: dict[str, tuple[int, float]] = {}
    found: list[tuple[int, float, float]] = []

    def push(node: int, array: np.ndarray) -> None:
        content = RecordDict({"model": ArrayRecord({"x": Array(array)})})
        (number,) = grid.push_messages([Message(content, node, "train", ttl=600.0)])
        sent[number] = node, time.time()

    def draw() -> np.ndarray:
        return generator.standard_normal(told["size"], np.float32)

    def pull() -> list[tuple[int, np.ndarray]]:
        replies = list(grid.pull_messages(list(sent)))
        answers = []
        for reply in replies:
            if reply.has_error():
                raise SystemExit(f"a node failed: {reply.error}")
            node, begun = sent.pop(reply.metadata.reply_to_message_id)
            array = reply.content["model"]["x"].numpy()
            answers.append((node, array))
            found.append((node, begun, time.time()))
        if not replies:
            time.sleep(told["poll"])
        return answers

    while len(nodes := list(grid.get_node_ids())) < told["nodes"]:
        time.sleep(told["poll"])
    for node in nodes:
        push(node, draw())
    while sent:
        pull()
    found.clear()
    for node in nodes:
        push(node, draw())
    while len(found) < told["updates"]:
        for node, array in pull():
            push(node, array)
    counted = found[:]
    while sent:  # a node that works for a run that is over can upset the next one
        pull()
    part = Path(f"{told['out']}.part")
    part.write_text(json.dumps(counted))
    part.replace(told["out"])
