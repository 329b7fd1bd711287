"""Takes an array and sends it back, changed."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One visit without any work."""
    array = message.content["model"]["x"].numpy() * np.float32(1.01)
    return Message(RecordDict({"model": ArrayRecord({"x": Array(array)})}), reply_to=message)
